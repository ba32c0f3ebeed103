"""`load` restores a committed step under any plan, number of ranks and format of main; `verify` checks every byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import folders
from zeroshard.checkpoint.compatibility import Compatibility, compare, pairs_of, under_names_here
from zeroshard.checkpoint.contents import Extra, Optimizers, as_list, expect_of_engine, expect_stateful
from zeroshard.checkpoint.manifest import CheckpointError, Manifest
from zeroshard.checkpoint.meeting import Meeting, Stopped
from zeroshard.checkpoint.reader import Reader, replaced
from zeroshard.checkpoint.restore import preflight, restore_optimizer, restore_rest, restore_weights
from zeroshard.checkpoint.save import on_all_ranks, work_on_all_ranks
from zeroshard.comm.ranges import phase
from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.full_model.unsharded import expect_none_written
from zeroshard.handle import Handle
from zeroshard.io.logger import tell
from zeroshard.model.inference import outside_inference
from zeroshard.model.right_call import expect_handle
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.ranks.groups import expect_there
from zeroshard.runtime.engine import Engine


@dataclass(frozen=True)
class Loaded:
    """The result of `load`.

    Attributes:
        step: the step that was loaded.
        path: its folder.
        missing: names that the checkpoint lacks: their values have not been changed. Empty if `strict`.
        unexpected: names that only the checkpoint has: not used. Empty if `strict`.
        bytes_read: by this rank in the second reading (the first one only checks).
    """

    step: int
    path: Path
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int


@phase("load")
@outside_inference
@torch.no_grad()
def load(
    directory: Path | str,
    handle: Handle,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    extra: Extra = None,
    strict: bool = True,
    allow_rounding: bool = False,
) -> Loaded:
    """Load the state of `directory/step-N`. Collective; call it between a step and the next backward.

    Each rank reads only the blocks (1 MiB each) that contain its own intervals, and checks the digest of every block
    before anything is changed. The random state is that of the same rank at the time of the save, if there was such a
    rank.

    Args:
        directory: that of `save`, or the folder of a step in it.
        handle: of the model.
        optimizer: the optimizers that were given to `save`, in the same order; None: do not load any.
        step: which step; None: the latest.
        extra: the objects that were given to `save`; None: do not load any.
        strict: True: raise if names or optimizer classes differ, before anything is changed. False: load what fits.
        allow_rounding: True: values may be rounded to a narrower dtype (fp32 main to bf16 weights that are main).

    Raises:
        CheckpointError: on every rank, before anything is changed: there is no such step; names, shapes or dtypes do
            not fit; a file (named in the message) is damaged. Where the message says that values have been replaced
            already, a file could not be read a second time, or `load_state_dict` of an object in `extra` has raised.
        TypeError: `handle` is not a handle; `optimizer` is not a ShardedOptimizer.
        ValueError: on every rank: an object in `extra` has no `state_dict` and `load_state_dict`.
        RuntimeError: gradients are waiting for a step.
    """
    expect_handle(handle, "zeroshard.load(directory, handle, optimizer)")
    engine, optimizers = handle.engine, as_list(optimizer)
    expect_there(engine.check_open("load").collectives.mesh.world.group, "load")
    engine.expect_known_parameters(also_added=False)
    engine.unfreeze()
    loading = _Load(engine, optimizers, extra, Path(directory).absolute())
    folder, unique, found_there = loading.find(step)
    with loading.opened(folder, found_there, strict=strict, allow_rounding=allow_rounding) as (reader, found):
        loading.restore_sharded(reader, Meeting(engine.collectives, unique))
        loading.restore_the_rest(reader)
        unused = tuple(found.missing), tuple(found.unexpected)
        tell(engine.collectives.mesh.world.rank, "step %d is loaded from %s", reader.manifest.step, reader.folder)
        return Loaded(reader.manifest.step, reader.folder, *unused, reader.num_bytes)


@dataclass(frozen=True)
class _Load:
    """The phases of a load, in order. All are collective. Nothing is changed before the second reading."""

    engine: Engine
    optimizers: list[ShardedOptimizer]
    extra: Extra
    directory: Path

    def find(self, step: int | None) -> tuple[Path, str, list[int] | None]:
        """The folder, which rank 0 has chosen; a new id for the meeting; and which folder that is on rank 0
        (`folders.identity`)."""
        _, ((name, unique, found_there), *_) = on_all_ranks(
            self.engine, "load", partial(self._find, step), (InvalidState, InvalidValue)
        )
        return self.directory / name, unique, found_there

    @phase("load: find")
    def _find(self, step: int | None) -> tuple[None, list[Any]]:
        self.engine.finish_background()  # here, as some ranks may have been told of its error, by a `wait`
        self.engine.expect_no_gradients("load")
        expect_none_written(self.engine.units, "a load")
        expect_stateful(self.extra)
        expect_of_engine(self.optimizers, self.engine)
        if self.engine.collectives.mesh.world.rank:
            return None, ["", folders.new_id(), None]
        folder = folders.find(self.directory, step)
        return None, [os.path.relpath(folder, self.directory), folders.new_id(), folders.identity(folder)]

    @contextmanager
    def opened(
        self, folder: Path, found_there: list[int] | None, *, strict: bool, allow_rounding: bool
    ) -> Iterator[tuple[Reader, Compatibility]]:
        """Open the step on all ranks and compare it with the model. Raises if ranks see different steps, or if it does
        not fit."""
        with ExitStack() as stack:

            @phase("load: compare")
            def compare_here() -> tuple[tuple[Reader, Compatibility], str]:
                folders.expect_shared(folder, self.engine.collectives.mesh.world.first, "found")
                reader = stack.enter_context(Reader(folder))
                reader.manifest = under_names_here(reader, self.engine)
                found = compare(reader.manifest, self.engine, self.optimizers, self.extra, allow_rounding)
                found.expect(str(folder), strict=strict)
                return (reader, found), reader.manifest.id

            try:
                opened, ids = on_all_ranks(self.engine, "load", compare_here)
            except CheckpointError as error:
                self._expect_still_there(folder, found_there, error)
                raise
            if len(set(ids)) > 1:
                raise CheckpointError(
                    f"load: the ranks see different folders under the name {folder}: {folders.ON_SHARED_FILES}"
                )
            yield opened

    def _expect_still_there(self, folder: Path, found_there: list[int] | None, error: CheckpointError) -> None:
        """Called on all ranks, after `error` has been raised on all of them. Raises if another process is the cause."""

        def look_again() -> None:
            if self.engine.collectives.mesh.world.rank == 0 and found_there != [*(folders.identity(folder) or ())]:
                raise CheckpointError(replaced(folder)) from error

        work_on_all_ranks(self.engine, "load", look_again)

    def restore_sharded(self, reader: Reader, meeting: Meeting) -> None:
        """Restore main and optimizer state: every rank reads its part twice, first to find damage before anything is
        changed, then to set the values. A rank that fails stops the others. Then weights that rest in full are
        gathered."""
        pairs = pairs_of(reader.manifest, self.optimizers)

        @phase("load: restore")
        def restore() -> None:
            reader.num_bytes = 0
            restore_weights(reader, self.engine, meeting)
            for one, saved in pairs:
                restore_optimizer(reader, one, saved, meeting)

        def on_all(work: Callable[[], None]) -> None:
            work_on_all_ranks(self.engine, "load", partial(_unless_stopped, meeting, work))

        try:
            on_all(partial(preflight, reader, self.engine, pairs, meeting))
            with _changing():
                on_all(restore)
        finally:
            meeting.forget()
        for unit in self.engine.units:
            self.engine.gatherer.updated(unit)
        self.engine.gatherer.settle()

    def restore_the_rest(self, reader: Reader) -> None:
        """Restore values that are not sharded."""

        @phase("load: restore what is whole")
        def restore_what_is_whole() -> None:
            restore_rest(reader, self.engine, pairs_of(reader.manifest, self.optimizers), self.extra)

        with _changing():
            work_on_all_ranks(self.engine, "load", restore_what_is_whole)


@contextmanager
def _changing() -> Iterator[None]:
    """Inside, values are replaced: an error says so."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Some values have been replaced already: load a step before you train"
        ) from error


def _unless_stopped(meeting: Meeting, work: Callable[[], None]) -> None:
    """Run `work`. If it fails, stop the other ranks; if another rank has failed, return early."""
    try:
        work()
    except Stopped:
        pass
    except BaseException:
        meeting.stop()
        raise


def newest_good(directory: Path | str) -> tuple[Manifest | None, list[str]]:
    """The newest step of which every byte can be verified: the latest, else an earlier one, else a later one (from a
    previous run). Returns its manifest (None: there is none) and the problems of the steps that were rejected. Not
    collective; needs no model."""
    directory, problems = Path(directory), []
    known = folders.without_manifest(directory) | folders.steps(directory)
    latest = max(known, default=0)
    try:
        named = folders.latest(directory)
        if named in known:
            latest = named  # as `folders.find` chooses
    except CheckpointError as error:
        problems.append(str(error))
    for step in sorted(known, key=lambda step: (step > latest, -step)):
        try:
            return verify(known[step]), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


@phase("verify")
def verify(path: Path | str) -> Manifest:
    """Check every byte of a step folder (`.../step-12`) against its digests. Not collective; needs no model.

    Raises:
        CheckpointError: lists all damaged files.
    """
    with Reader(Path(path)) as reader:
        reader.check_everything()
        return reader.manifest
