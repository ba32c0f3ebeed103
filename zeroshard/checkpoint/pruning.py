"""Removes old steps, and what interrupted saves and removals have left."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from zeroshard.checkpoint import files
from zeroshard.checkpoint.folders import (
    has_good_manifest,
    is_foreign,
    latest,
    names_in,
    new_id,
    step_of,
    steps,
    why_none,
)
from zeroshard.checkpoint.manifest import CheckpointError
from zeroshard.errors import InvalidValue

_LEFT_OVER = re.compile(r"step-[0-9]+\.tmp-[0-9a-f]+|\.trash-.+|\.latest\.tmp-[0-9a-f]+")


def sweep(directory: Path) -> None:
    """Remove what interrupted saves and removals have left. A step that was moved aside and not replaced gets its name
    back. Folders that are locked by a running save are not touched. Other processes may do the same."""
    known = steps(directory)
    for name in names_in(directory):
        path = directory / name
        is_left = bool(_LEFT_OVER.fullmatch(name)) or (step_of(name) is not None and ".old-" in name)
        if is_left and not path.is_symlink():
            with suppress(FileNotFoundError):  # another process has removed or renamed it in the meantime
                _sweep_one(path, directory / name.partition(".")[0] if path in known.values() else None)


def _sweep_one(path: Path, step: Path | None) -> None:
    """`step`: the name that a folder gets back; None: remove it."""
    if not path.is_dir():
        files.remove_file(path)
    elif (lock := files.lock_folder(path)) is not None:
        try:
            if step is not None:
                files.rename(path, step)
                files.sync_folder(path.parent)
            else:
                _remove(path)
        finally:
            files.unlock(lock)


def prune(directory: Path | str, *, keep_last: int = 1, keep_every: int | None = None) -> list[int]:
    """Remove old steps, and what interrupted saves have left. Not collective: call it on one rank.

    Args:
        keep_last: how many of the newest steps to keep. Steps whose manifest is damaged do not count, and stay. The
            step that `latest` names is kept, too.
        keep_every: also keep steps that are multiples of this number.

    Returns:
        The steps that were removed.

    Raises:
        ValueError: one of the numbers is below 1.
        CheckpointError: there is no such folder, or `latest` is damaged.
    """
    directory = Path(directory)
    to_prune(directory, keep_last=keep_last, keep_every=keep_every)
    sweep(directory)
    gone, known = to_prune(directory, keep_last=keep_last, keep_every=keep_every), steps(directory)
    for step in gone:
        with suppress(FileNotFoundError, KeyError):  # another process has removed it in the meantime
            _remove(known[step])
    return gone


def to_prune(directory: Path | str, *, keep_last: int = 1, keep_every: int | None = None) -> list[int]:
    """The steps that `prune` would remove. Raises as `prune` does."""
    if keep_last < 1 or (keep_every is not None and keep_every < 1):
        raise InvalidValue(f"keep_last and keep_every must be at least 1, found {keep_last} and {keep_every}")
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} {why_none(directory)}")
    known = steps(directory)
    kept = {*_newest(known, keep_last), latest(directory)}
    old = [step for step in known if step not in kept and (keep_every is None or step % keep_every)]
    return [step for step in old if not is_foreign(known[step])]


def _newest(known: dict[int, Path], number: int) -> list[int]:
    """The newest steps, back to the one that makes `number` whose manifest can be read. So damaged steps do not push
    out good ones. Older manifests are not read."""
    found: list[int] = []
    for step in reversed(known):
        if number == 0:
            break
        found.append(step)
        number -= has_good_manifest(known[step], step)
    return found


def _remove(folder: Path) -> None:
    """Remove a folder; rename it first, so that a partly removed folder does not look like a checkpoint."""
    trash = folder
    if not folder.name.startswith(".trash-"):
        trash = folder.parent / f".trash-{folder.name}-{new_id()}"
        files.rename(folder, trash)
        files.sync_folder(folder.parent)
    files.remove_folder(trash)
