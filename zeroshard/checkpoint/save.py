"""`save` writes a committed step, or raises the same error on every rank; at once, or while training goes on."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeroshard.checkpoint import folders
from zeroshard.checkpoint.commit import (
    Job,
    Opened,
    Sizes,
    combined,
    file_metadata,
    least_size,
    open_folder,
    sizes_of,
    temporary_folder,
    versions,
)
from zeroshard.checkpoint.contents import (
    Extra,
    Optimizers,
    Stateful,
    as_list,
    asking,
    expect_of_engine,
    expect_stateful,
    model_items,
    optimizer_items,
    optimizer_values,
)
from zeroshard.checkpoint.manifest import CheckpointError, Manifest, expect_readable
from zeroshard.checkpoint.meeting import Meeting
from zeroshard.checkpoint.rank_state import EncodedState, blob, random_state, whole
from zeroshard.checkpoint.saved_state import names_of
from zeroshard.checkpoint.writer import FilePlan, Item
from zeroshard.comm.ranges import phase
from zeroshard.comm.together import tell_together, together
from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.failures.whereabouts import SAVES
from zeroshard.full_model.unsharded import expect_none_written
from zeroshard.handle import Handle
from zeroshard.io.logger import LOGGER, tell
from zeroshard.io.values import encode
from zeroshard.model.right_call import expect_handle
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.ranks.groups import expect_there
from zeroshard.runtime.engine import Engine

T = TypeVar("T")
INTERRUPTED_SECONDS = 5.0
"""At most so long a process that ends waits for a save that was interrupted."""


class Saving:
    """A save in progress, or done. `step`: its number."""

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        self.step = step
        self._work = work
        self._error: BaseException | None = None
        self._seen = False
        self._thread: threading.Thread | None = None
        self._at_end: multiprocessing.util.Finalize | None = None

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the step is committed.

        Raises:
            CheckpointError: the save has failed; with the same text on every rank.
        """
        if self._thread is not None:
            if self._thread.ident is not None:  # it could be started
                self._thread.join()
            atexit.unregister(self._at_exit)
            if self._at_end is not None:
                self._at_end.cancel()
        self._seen = True
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Like `wait`, but raises an error only if no `wait` has raised it before."""
        if not self._seen:
            self.wait()

    def start(self, *, background: bool) -> None:
        if background:
            # Not a daemon: the interpreter must not exit before the save is done.
            self._thread = threading.Thread(target=self._run, name=f"{SAVES} {self.step}", daemon=False)
            atexit.register(self._at_exit)
            if _is_forked_by_multiprocessing():  # it calls no `atexit`, but this, behind all else that is to be done
                self._at_end = multiprocessing.util.Finalize(None, self._at_end_of_target, exitpriority=-1000)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads (a limit), or the interpreter ends
                # The other ranks wait for this one already, and could not tell why it does not come.
                LOGGER.warning("save returns when step %d is saved, not before: %s", self.step, error)
                self._run()
        else:
            work, self._work = self._work, _nothing  # who keeps this object keeps no values
            work()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
            # The frames of the traceback refer to the copies of the values, which would stay until the next save.
            for one in (error, error.__cause__):
                traceback.clear_frames(one.__traceback__ if one is not None else None)
        self._work = _nothing  # frees the copies of the values

    def _at_end_of_target(self) -> None:
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._at_exit(_end_forked_with)

    def _at_exit(self, end_with: Callable[[int], None] | None = None) -> None:
        """At exit without a `wait`: if the save has failed, end the process with an exit status of 1."""
        if not self.done:  # after a Control-C at the end of the program the interpreter has not waited for the thread
            self._interrupt()
        if self._error is not None or not self.done:
            error = None if isinstance(self._error, KeyboardInterrupt) else self._error
            why = error or f"step {self.step} was not saved: it was interrupted"
            with suppress(Exception):
                print(f"zeroshard: a save in the background failed: {why}", file=sys.stderr)
                sys.stdout.flush(), sys.stderr.flush()
            if not self.done:  # the interpreter cannot end as usual: the thread, in a call of the system, still uses it
                os._exit(1)
            (end_with or _end_with)(1)

    def _interrupt(self) -> None:
        """Raise a KeyboardInterrupt in the thread, as in a save that is not in the background: the other ranks are
        told, and the files of the step are removed."""
        assert self._thread is not None and self._thread.ident is not None
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(self._thread.ident), ctypes.py_object(KeyboardInterrupt))
        self._thread.join(INTERRUPTED_SECONDS)


@phase("save")
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
    """Write `directory/step-N`. Collective; call it between a step and the next backward.

    Each rank writes what it holds; nothing is gathered. An existing step of that number is replaced when the new one is
    complete.

    Args:
        directory: the same for all ranks, on a file system that all ranks share.
        handle: of the model.
        optimizer: a ShardedOptimizer, a list of them, or None for the weights alone.
        step: the number of the step.
        extra: name -> object with `state_dict()` and `load_state_dict()`: schedulers, your own loss scalers, the
            position in the data. `io/values.py` lists the values that may be in a state dict. If ranks have different
            values, each rank's are stored.
        background: True: copy the values, return, and write while training goes on. There is at most one such save: the
            next `save`, `load` or `handle.close()` waits for it, and raises its error.

    Returns:
        An object to `wait()` for; done already, unless `background`.

    Raises:
        CheckpointError: on every rank, with the first failed rank's reason. Nothing has been saved, no files are left
            behind, and existing steps have not been changed.
        ValueError: on every rank: a value cannot be stored.
        TypeError: `handle` is not a handle; `optimizer` is not a ShardedOptimizer.
        RuntimeError: gradients are waiting for a step.
    """
    expect_handle(handle, "zeroshard.save(directory, handle, optimizer, step=...)")
    engine, optimizers = handle.engine, as_list(optimizer)
    expect_there(engine.check_open("save").collectives.mesh.world.group, "save")
    engine.expect_known_parameters(also_added=False)
    job = _Save(engine, optimizers, extra, Path(directory).absolute(), step).prepare(copy=background)
    saving = Saving(step, job.run)
    if background:
        engine.background = saving  # before it begins: an interrupt may end this call at any time from then on
    saving.start(background=background)
    rank, how = engine.collectives.mesh.world.rank, "is being saved" if background else "is saved"
    tell(rank, "step %d %s in %s", step, how, directory)
    return saving


def on_all_ranks(
    engine: Engine, what: str, work: Callable[[], tuple[T, Any]], kinds: tuple[type[Exception], ...] = ()
) -> tuple[T, list[Any]]:
    """Run `work` on every rank; see `comm/together.py:tell_together`. An error becomes a CheckpointError on all ranks,
    unless it is one of `kinds`. Collective."""
    return tell_together(engine.collectives, what, work, errors=(CheckpointError, *kinds), patient=True)


def work_on_all_ranks(engine: Engine, what: str, work: Callable[[], T]) -> T:
    """Like `on_all_ranks`, without exchanging values, so that the exchange does not grow with the number of ranks."""
    return together(engine.collectives, what, work, errors=(CheckpointError,), patient=True)


@dataclass(frozen=True)
class _Own:
    """The values that this rank may have to save."""

    values: dict[str, Any]
    items: list[Item]
    extra: EncodedState
    buffers: EncodedState


@dataclass(frozen=True)
class _Save:
    """The collective part of a save: everything until the values are fixed."""

    engine: Engine
    optimizers: list[ShardedOptimizer]
    extra: Extra
    directory: Path
    step: int

    def prepare(self, *, copy: bool) -> Job:
        """Prepare the save, and return the rest of it: writing and committing, which use only files and the store.
        Collective.

        Args:
            copy: True: copy all values now, as training will change them.
        """
        world = self.engine.collectives.mesh.world
        # 1. All ranks can save, and save the same step. Which ranks have unsharded values that differ from rank 0's?
        own, found = on_all_ranks(self.engine, "save", self._collect, (InvalidValue, InvalidState))
        if len({of_rank[0] for of_rank in found}) > 1:
            raise InvalidValue(f"the ranks save different steps: {[of_rank[0] for of_rank in found]}")
        unique = found[0][1]
        compared = found if world.rank == 0 else [found[world.rank]]
        same = [all(of_rank[2 + kind] == found[0][2 + kind] for of_rank in compared) for kind in range(2)]
        # 2. Every rank plans its file, to the byte.
        file, sizes = on_all_ranks(self.engine, "save", partial(self._plan, own, same, unique, copy), (InvalidValue,))
        values = {**own.values, "extra": own.extra.values, "world_size": world.size}
        base = Manifest(self.step, unique, (), {}, values, versions())
        # 3. Rank 0 checks the free space, and makes the folder.
        opened = work_on_all_ranks(self.engine, "save", partial(self._make_folder, base, sizes))
        # Nothing in the job may be a collective: in the background it runs on a thread beside training, and ranks would
        # issue the collectives of the two threads in different orders. Ranks meet in the store instead.
        meeting = Meeting(self.engine.collectives, unique, combined)
        return Job(temporary_folder(self.directory, base), file, base, meeting, opened)

    @phase("save: collect")
    def _collect(self) -> tuple[_Own, list[Any]]:
        """This rank's values; and for the exchange: the step, a new id, and digests of values that may differ between
        ranks."""
        self.engine.finish_background()  # here, as some ranks may have been told of its error, by a `wait`
        folders.expect_step(self.step)
        self.engine.expect_no_gradients("save")
        expect_none_written(self.engine.units, "a save")
        expect_stateful(self.extra)
        names, rank = names_of(self.engine), self.engine.collectives.mesh.world.rank
        expect_of_engine(self.optimizers, self.engine)
        if self.optimizers and len(self.engine.claims.owners()) > len(self.optimizers):
            raise InvalidValue("this model has several optimizers: pass all of them in a list (or none)")
        states = {name: _state_of(name, stateful) for name, stateful in (self.extra or {}).items()}
        found = [optimizer_values(one, names, f"group/{number}") for number, one in enumerate(self.optimizers)]
        items = [*model_items(self.engine), *chain.from_iterable(map(optimizer_items, self.optimizers))]
        own = _Own(
            values={"optimizers": [values for values, _ in found], "tied": self.engine.tied()},
            items=[*items, *(item for _, of_groups in found if rank == 0 for item in of_groups)],
            extra=EncodedState(f"rank/{rank}/extra" if rank else "extra", states, "extra"),
            buffers=EncodedState(f"rank/{rank}/buffers", self.engine.unsharded_state(), "the model's buffers"),
        )
        return own, [self.step, folders.new_id(), own.extra.digest(), own.buffers.digest()]

    @phase("save: plan")
    def _plan(self, own: _Own, same: list[bool], unique: str, copy: bool) -> tuple[FilePlan, Sizes]:
        """The plan of this rank's file; and for the exchange: its sizes. `same`: whether `extra`, and whether the
        buffers, equal rank 0's; on rank 0, whether those of all ranks do."""
        rank = self.engine.collectives.mesh.world.rank
        items = [*own.items, *self._unsharded(rank, own, same)]
        metadata = file_metadata(self.step, unique, rank)
        plan = FilePlan.of((item.copied() for item in items) if copy else items, metadata)
        return plan, sizes_of(plan, rank)

    def _unsharded(self, rank: int, own: _Own, same: list[bool]) -> Iterator[Item]:
        """`extra` and buffers, on rank 0 and on ranks where they differ from rank 0's; and the rank's random state."""
        alone: dict[str, Any] = {}
        if rank == 0:
            yield from own.extra.items()
            buffers = {f"model/{name}": value for name, value in self.engine.unsharded_state().items()}
            yield from starmap(whole, buffers.items())
            if not same[1]:  # ranks whose ignored parameters have other names tell rank 0's by these
                names = iter(buffers)
                alone["buffers"] = encode(self.engine.unsharded_state(), lambda _: next(names), "the model's buffers")
        else:
            for key, encoded, is_same in (("extra", own.extra, same[0]), ("buffers", own.buffers, same[1])):
                if not is_same:
                    yield from encoded.items()
                    alone[key] = encoded.values
        random = EncodedState(f"rank/{rank}/random", random_state(), "random numbers")
        yield from random.items()
        yield blob(f"rank/{rank}/state", {"random": random.values, **alone})

    def _make_folder(self, base: Manifest, sizes: list[Sizes]) -> Opened | None:
        expect_readable(least_size(base, sizes), "the manifest would have at least")
        is_first = self.engine.collectives.mesh.world.rank == 0
        return open_folder(self.directory, base, sizes) if is_first else None


def _state_of(name: str, stateful: Stateful) -> Any:
    with asking(f"state_dict() of extra {name!r}"):
        return stateful.state_dict()


def _end_with(status: int) -> None:
    """Called in an atexit handler: the process ends as it would, but with that exit status. What the program has yet to
    do is done: its other handlers, and the files that are still open are written."""
    # sys.exit is ignored in an atexit handler. So the C library is told to call _exit after the interpreter.
    try:
        library = ctypes.CDLL(None)
        leave, last = library._exit, library.__cxa_atexit
        last.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        is_told = last(ctypes.cast(leave, ctypes.c_void_p), status, None) == 0
    except (OSError, AttributeError):
        is_told = False
    if not is_told:
        os._exit(status)


def _is_forked_by_multiprocessing() -> bool:
    """Whether this process ends by os._exit when the function that multiprocessing has called in it is over."""
    method = getattr(multiprocessing.current_process(), "_start_method", None) or multiprocessing.get_start_method()
    return multiprocessing.parent_process() is not None and method != "spawn"


def _end_forked_with(status: int) -> None:
    if isinstance(sys.exc_info()[1], (SystemExit, type(None))):  # else multiprocessing has yet to print that error
        os._exit(status)


def _nothing() -> None:
    """Replaces the work of a save that is done."""
