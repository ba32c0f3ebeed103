"""Gives a step that is complete its name, and makes it the latest."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from zeroshard.checkpoint import files
from zeroshard.checkpoint.folders import LATEST, Identity, identity, is_foreign, step_name
from zeroshard.checkpoint.index import digest_of
from zeroshard.checkpoint.manifest import CheckpointError


def expect_no_other(directory: Path, step: int) -> None:
    """Called before a save, which replaces the folder of the step as a whole.

    Raises:
        CheckpointError: what has its name is no step.
    """
    path = directory / step_name(step)
    if is_foreign(path):
        raise CheckpointError(
            f"{path} is no step of a checkpoint, and saving step {step} would remove it: rename it, or save in another "
            "directory"
        )


def publish(temporary: Path, step: int, unique: str, replaces: Identity) -> None:
    """Rename a complete temporary folder to its final name. An existing step of that name is moved aside first, and
    removed by `sweep` later. The caller must sync the directory.

    Args:
        replaces: the folder that had the name when the save began.

    Raises:
        CheckpointError: another process has saved that step since, or does so now.
    """
    directory = temporary.parent
    final = directory / step_name(step)
    aside = directory / f"{step_name(step)}.old-{unique}"
    # The entries of the folder must be on disk before it gets its final name: otherwise a step could lack files after a
    # power failure.
    files.sync_folder(temporary)
    ours = identity(temporary)
    lock = _locked_to_replace(final, replaces)
    try:
        if lock is not None:
            # Two renames, as rename(2) does not replace a folder that is not empty. After a crash between them, the
            # `.old-` folder counts as the step (`steps`), and `sweep` gives it its name back.
            with suppress(FileNotFoundError):  # another process has pruned it
                files.rename(final, aside)
        try:
            files.rename(temporary, final)
        except BaseException as error:
            if ours is not None and identity(final) == ours:
                if isinstance(error, FileNotFoundError):
                    return  # a network file system that has renamed it, lost its answer, and tried again
                raise  # an interrupt
            if final.exists():
                raise CheckpointError(_saved_by_another(final)) from error
            if aside.exists():
                files.rename(aside, final)
            raise
    finally:
        if lock is not None:
            files.unlock(lock)


def _locked_to_replace(final: Path, replaces: Identity) -> files.Lock | None:
    """The lock on the folder of the step that is there already; None: there is none. Locked, so that no other process
    replaces it as well, nor removes it between the two renames.

    Raises:
        CheckpointError: as `publish`.
    """
    try:
        lock = files.lock_folder(final)
    except FileNotFoundError:
        return None
    # Whoever has the lock has just given this name to a folder, or is about to do so. Whoever had it may have renamed
    # the folder before it was locked here.
    is_ours = False
    try:
        is_ours = lock is not None and identity(lock.file) == replaces and identity(final) == replaces
    finally:
        if lock is not None and not is_ours:
            files.unlock(lock)
    if not is_ours:
        raise CheckpointError(_saved_by_another(final))
    return lock


def _saved_by_another(final: Path) -> str:
    return (
        f"another process has saved {final} since this save began, and that one stays: each run needs a directory of "
        "its own"
    )


def set_latest(directory: Path, step: int, unique: str) -> None:
    temporary = directory / f".{LATEST}.tmp-{unique}"
    name = step_name(step)
    try:
        # A new file and a rename, so that no reader, and no crash, finds a file that is half written.
        while True:
            files.write_new(temporary, f"{name} {digest_of(name.encode())}\n".encode())
            with suppress(FileNotFoundError):  # the sweep of another process has taken it for a left-over
                files.replace(temporary, directory / LATEST)
                break
    except BaseException:
        with suppress(OSError):
            files.remove_file(temporary)
        raise
    files.sync_folder(directory)
