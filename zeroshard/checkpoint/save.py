"""`save`: a committed step on disk, or the same error on every rank; now, or while training goes on."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import files, folders
from zeroshard.checkpoint.commit import Job, describe, discard, file_name, open_folder, size_of_part, versions
from zeroshard.checkpoint.items import (
    Bag,
    Extra,
    Optimizers,
    as_list,
    blob,
    model_items,
    names_of,
    optimizer_items,
    optimizer_values,
    random_state,
    whole,
)
from zeroshard.checkpoint.manifest import CheckpointError, Manifest
from zeroshard.checkpoint.meeting import Meeting
from zeroshard.checkpoint.writer import FilePlan, Item
from zeroshard.shard import Handle


class Saving:
    """A save that goes on (or is done). `step`: which."""

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        self.step = step
        self._work = work
        self._error: BaseException | None = None
        self._seen = False
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until the step is committed.

        Raises:
            CheckpointError: it is not; the same on every rank.
        """
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self._at_exit)
        self._seen = True
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """As `wait`; an error is raised only if no `wait` has raised it."""
        if not self._seen:
            self.wait()

    def start(self, *, background: bool) -> None:
        if background:
            # Not a daemon: the interpreter does not exit before it is done.
            self._thread = threading.Thread(target=self._run, name=f"zeroshard save {self.step}", daemon=False)
            atexit.register(self._at_exit)
            self._thread.start()
        else:
            self._work()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._work = _nothing  # lets go of the copies

    def _at_exit(self) -> None:
        """Nobody has asked how it went: a failure ends the process with a status that says so."""
        if self._error is not None:
            with suppress(Exception):
                print(f"zeroshard: a save in the background failed: {self._error}", file=sys.stderr)
                sys.stdout.flush(), sys.stderr.flush()
            os._exit(1)


@torch.no_grad()
def save(
    directory: Path | str,
    handle: Handle,
    optimizer: Optimizers = None,
    *,
    step: int,
    extra: Extra = None,
    background: bool = False,
) -> Saving:
    """Write `directory/step-N`. Collective, between a step and the next backward.

    Each rank writes what it holds; nothing is gathered. A step of that number that is there already is replaced when
    the new one is complete.

    Args:
        directory: the same for all ranks, on a file system that all of them see.
        optimizer: a ShardedOptimizer, several of them, or None for the weights alone.
        extra: name -> object with `state_dict()` and `load_state_dict()`: schedulers, loss scalers of your own, the
            position in the data. Values are what `values.py` lists. Where ranks have different ones, each is kept.
        background: copy the values, return, and write while training goes on. At most one such save is under way: the
            next `save`, `load` or `handle.close()` waits for it, and raises its error.

    Returns:
        Something to `wait()` for; done already, unless in the background.

    Raises:
        CheckpointError: on every rank, with the first rank's reason: nothing has been saved, nothing is left over, the
            steps that were there are there.
        ValueError: on every rank: what cannot be stored.
        RuntimeError: gradients are waiting for a step.
    """
    directory = Path(directory).absolute()
    handle.check_open("save")
    handle.finish_background()
    collectives = handle.collectives
    rank = collectives.mesh.world.rank
    values: dict[str, Any] = {}
    items: list[Item] = []
    bags = [Bag("", None, ""), Bag("", None, "")]

    def collect() -> list[Any]:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**15:
            raise ValueError(f"step must be an integer from 0, found {step!r}")
        handle.expect_no_gradients("save")
        optimizers, names = as_list(optimizer), names_of(handle)
        if any(one.handle is not handle for one in optimizers):
            raise ValueError("the optimizer belongs to another handle")
        if optimizers and len(handle.owners()) > len(optimizers):
            raise ValueError("this model has several optimizers: pass all of them in a list (or none)")
        values["optimizers"] = [optimizer_values(one, names) for one in optimizers]
        items.extend(model_items(handle))
        items.extend(item for one in optimizers for item in optimizer_items(one))
        states = {name: stateful.state_dict() for name, stateful in (extra or {}).items()}
        bags[:] = [
            Bag("extra" if rank == 0 else f"rank/{rank}/extra", states, "extra"),
            Bag(f"rank/{rank}/buffers", handle.unsharded_state(), "the model's buffers"),
        ]
        return [step, folders.new_id(), *(bag.digest() for bag in bags)]

    # 1. Everybody can, and wants the same step. Who has values of their own beside the sharded ones?
    found = together(handle, "save", collect, (ValueError, RuntimeError))
    steps = [of_rank[0] for of_rank in found]
    if len(set(steps)) > 1:
        raise ValueError(f"the ranks save different steps: {steps}")
    unique, same = found[0][1], [found[rank][2 + i] == found[0][2 + i] for i in range(2)]

    # 2. Everybody knows, to the byte, what it will write.
    file = FilePlan((), b"", ())

    def plan() -> list[int]:
        nonlocal file
        items.extend(_unsharded(handle, rank, bags, same))
        metadata = {"format": "pt", "zeroshard": f"step {step}, {unique}, {file_name(rank)}"}
        file = FilePlan.of(items, rank, metadata)
        return [file.num_bytes, size_of_part(file, rank)]

    sizes = together(handle, "save", plan, (ValueError,))
    values |= {"extra": bags[0].values, "world_size": collectives.mesh.world.size}
    base = Manifest(step, unique, (), {}, values, versions())
    folder, lock = directory / f"{folders.step_name(step)}.tmp-{unique}", None

    # 3. There is room; and, for the background, a copy.
    def prepare() -> None:
        nonlocal file, lock
        if background:
            file = replace(file, items=tuple(item.copied() for item in file.items))
        if rank == 0:
            existing = next(path for path in (directory, *directory.parents) if path.exists())
            on_disk = sum(files.bytes_on_disk(existing, num_bytes) for num_bytes, _ in sizes)
            on_disk += files.bytes_on_disk(existing, len(base.encode()) + sum(part for _, part in sizes))
            _, lock = open_folder(directory, step, unique, on_disk)

    try:
        together(handle, "save", prepare)
    except BaseException:
        if lock is not None:
            discard(folder)
            os.close(lock)
        raise

    # 4. Write and commit: through files and the store alone.
    saving = Saving(step, Job(folder, file, base, Meeting(collectives, unique), lock).run)
    saving.start(background=background)
    if background:
        handle.background = saving
    return saving


def together(handle: Handle, what: str, work: Callable[[], Any], kinds: tuple[type[Exception], ...] = ()) -> list[Any]:
    """What `work` gives on every rank (JSON-able). If it raises on one, all raise a CheckpointError, or the same where
    it is one of `kinds`. Collective."""
    problem, result = None, None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        problem, failure = [type(error).__name__, describe(error)], error
    results = handle.collectives.exchange_objects([problem, result])
    failed = [(rank, of_rank[0]) for rank, of_rank in enumerate(results) if of_rank[0]]
    if failed:
        rank, (kind, text) = failed[0]
        where = "" if len(failed) == len(results) and all(of[1] == text for _, of in failed) else f" (on rank {rank})"
        raise {one.__name__: one for one in kinds}.get(kind, CheckpointError)(f"{what}{where}: {text}") from failure
    return [result for _, result in results]


def _unsharded(handle: Handle, rank: int, bags: list[Bag], same: list[bool]) -> Iterator[Item]:
    """Rank 0's buffers and `extra`; of the others what differs from these; everybody's random numbers."""
    extra, buffers = bags
    own: dict[str, Any] = {}
    if rank == 0:
        yield from extra.items()
        for name, value in handle.unsharded_state().items():
            yield whole(f"model/{name}", value)
    else:
        for key, bag, is_same in (("extra", extra, same[0]), ("buffers", buffers, same[1])):
            if not is_same:
                yield from bag.items()
                own[key] = bag.values
    bag = Bag(f"rank/{rank}/random", random_state(), "random numbers")
    yield from bag.items()
    yield blob(f"rank/{rank}/state", {"random": bag.values, **own})


def _nothing() -> None:
    """What is left to do."""
