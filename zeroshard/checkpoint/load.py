"""`load`: a committed step into any plan, on any number of ranks, in any format of main; `verify`: every byte of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from zeroshard.checkpoint import folders
from zeroshard.checkpoint.compatibility import Compatibility, compare, pairs_of, under_names_here
from zeroshard.checkpoint.contents import Extra, Optimizers, as_list, expect_stateful
from zeroshard.checkpoint.manifest import CheckpointError, Manifest
from zeroshard.checkpoint.meeting import Meeting, Stopped
from zeroshard.checkpoint.reader import Reader
from zeroshard.checkpoint.restore import preflight, restore_optimizer, restore_rest, restore_weights
from zeroshard.checkpoint.save import on_all_ranks
from zeroshard.comm.profiling import phase
from zeroshard.handle import Handle
from zeroshard.model.right_call import expect_handle


@dataclass(frozen=True)
class Loaded:
    """What a load did. `missing`: not in the checkpoint, and as before; `unexpected`: in it, and not used; both empty
    when strict. `bytes_read`: by this rank (once to check them, and once again)."""

    step: int
    path: Path
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int


@phase("load")
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
    """Load the state of `directory/step-N`. Collective, between a step and the next backward.

    Each rank reads the blocks that hold its own intervals, a block (1 MiB) at a time, and checks the digest of each
    before anything is changed. Random numbers are those of the same rank at the time of the save, where there was
    such a rank.

    Args:
        optimizer: those that were given to `save`, in that order; None leaves optimizers as they are.
        directory: that of `save`, or the folder of a step in it.
        step: None for the latest.
        extra: the objects that were given to `save`; None leaves them as they are.
        strict: raise where names or optimizer classes differ (nothing has been changed then); else load what fits.
        allow_rounding: values may be rounded to a narrower dtype (fp32 main to bf16 weights that are their own main).

    Raises:
        CheckpointError: on every rank: no such step; names, shapes or dtypes that do not fit (nothing has been
            changed); a damaged file, with its name (nothing has been changed).
        TypeError: the model in place of its handle; an optimizer that is none of ours.
        ValueError: on every rank: something in `extra` without `state_dict` and `load_state_dict`.
        RuntimeError: gradients are waiting for a step.
    """
    expect_handle(handle, "zeroshard.load(directory, handle, optimizer)")
    engine = handle.engine
    optimizers = as_list(optimizer)
    engine.check_open("load")
    engine.finish_background()
    engine.unfreeze()
    directory = Path(directory).absolute()
    with ExitStack() as stack:
        # 1. One step, one manifest; whatever does not fit is found before anything is changed.
        @phase("load: find")
        def find() -> tuple[None, list[str]]:
            engine.expect_no_gradients("load")
            expect_stateful(extra)
            first = engine.collectives.mesh.world.rank == 0
            return None, [os.path.relpath(folders.find(directory, step), directory) if first else "", folders.new_id()]

        @phase("load: compare")
        def check() -> tuple[tuple[Reader, Compatibility], str]:
            reader = stack.enter_context(Reader(directory / name))
            reader.manifest = under_names_here(reader.manifest, engine)
            found = compare(reader.manifest, engine, optimizers, extra, allow_rounding)
            found.expect(str(directory / name), strict=strict)
            return (reader, found), reader.manifest.id

        _, ((name, unique), *_) = on_all_ranks(engine, "load", find, (RuntimeError, ValueError))
        (reader, found), ids = on_all_ranks(engine, "load", check)
        if len(set(ids)) > 1:
            raise CheckpointError(f"load: the ranks see different folders under the name {directory / name}")
        pairs = pairs_of(reader.manifest, optimizers)

        # 2. Every rank reads what it needs: once to find any damage before anything is changed, and once to keep it.
        # A failure lets the others stop.
        meeting = Meeting(engine.collectives, unique)

        @phase("load: restore")
        def restore() -> None:
            reader.num_bytes = 0
            restore_weights(reader, engine, meeting)
            for one, saved in pairs:
                restore_optimizer(reader, one, saved, meeting)

        try:
            for work in (partial(preflight, reader, engine, pairs, meeting), restore):
                on_all_ranks(engine, "load", partial(_unless_stopped, meeting, work))
        finally:
            if meeting.rank == 0:
                meeting.forget()

        # 3. Weights follow main; then what is not sharded.
        for unit in engine.units:
            engine.gatherer.updated(unit)
        engine.gatherer.settle()

        @phase("load: restore what is whole")
        def restore_what_is_whole() -> tuple[None, None]:
            restore_rest(reader, engine, pairs, extra)
            return None, None

        on_all_ranks(engine, "load", restore_what_is_whole)
        unused = tuple(found.missing), tuple(found.unexpected)
        return Loaded(reader.manifest.step, reader.folder, *unused, reader.num_bytes)


def _unless_stopped(meeting: Meeting, work: Callable[[], None]) -> tuple[None, None]:
    """If it fails, the other ranks stop; if another rank has failed, this one stops."""
    try:
        work()
    except Stopped:
        pass
    except BaseException:
        meeting.stop()
        raise
    return None, None


def newest_good(directory: Path | str) -> tuple[Manifest | None, list[str]]:
    """The newest step that is whole, every byte of it verified: the latest, else those below it, else those above (of
    an earlier try). With what is wrong with each that was passed over. Not collective; needs no model."""
    directory, problems = Path(directory), []
    known = folders.steps(directory)
    latest = max(known, default=0)
    try:
        named = folders.latest(directory)
        latest = named if named in known and named is not None else latest  # as `folders.find` chooses
    except CheckpointError as error:
        problems.append(str(error))
    for step in sorted(known, key=lambda step: (step > latest, -step)):
        try:
            return verify(known[step]), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def verify(path: Path | str) -> Manifest:
    """Check every byte of a step folder (`.../step-12`) against its digests. Not collective; needs no model.

    Raises:
        CheckpointError: what is damaged, in which files.
    """
    with Reader(Path(path)) as reader:
        reader.check_everything()
        return reader.manifest
