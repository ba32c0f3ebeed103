"""Removes old steps, and what interrupted saves and removals have left."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


_IN_USE_SECONDS = 3600.0
"""Where a file system has no locks, a save whose folder has changed since then may be in progress."""


def sweep(directory: Path) -> None:
    """Remove what interrupted saves and removals have left. A step that was moved aside and not replaced gets its name
    back. Folders that are locked by a running save are not touched, and what another user has left may have to stay.
    Other processes may do the same."""
    for name in names_in(directory):
        path = directory / name
        is_left = bool(_LEFT_OVER.fullmatch(name)) or (step_of(name) is not None and ".old-" in name)
        if is_left and not path.is_symlink():
            # Another process has removed or renamed it in the meantime, or it is another user's.
            with suppress(FileNotFoundError, PermissionError):
                _sweep_one(path)


def _sweep_one(path: Path) -> None:
    if not path.is_dir():
        files.remove_file(path)
    elif (lock := files.lock_folder(path)) is not None:
        try:
            # Looked up under the lock: whoever replaces a step holds it until the new one has the name.
            step = step_of(path.name)
            stands_in = step is not None and steps(path.parent).get(step) == path
            may_be_in_use = stands_in or (path.name.startswith("step-") and ".tmp-" in path.name)
            if may_be_in_use and not files.has_locks(lock) and files.seconds_since_change(path) < _IN_USE_SECONDS:
                return
            if stands_in:
                with _until_later():  # there is a folder of that name without a manifest
                    files.rename(path, path.with_name(path.name.partition(".old-")[0]))
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
    # Over NFS, files that a reader on this host has open keep a name (.nfs...) until it closes them.
    with _until_later():
        files.remove_folder(trash)


@contextmanager
def _until_later() -> Iterator[None]:
    """A folder that is not empty, or is in use, is left to the next sweep."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise
