"""The directory of steps: lists them, finds the latest, publishes new ones, and removes old or incomplete ones.

step-12/                    a committed step: never written to again
latest                      "step-12 <check>"
step-13.tmp-<id>/           being written; removed if that fails, else by the next save
step-12.old-<id>/           the step-12 that a new step-12 replaces; valid until the new one has its name
.trash-step-3-<id>/         being removed
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from zeroshard.checkpoint import files
from zeroshard.checkpoint.index import digest_of
from zeroshard.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, CheckpointError, unpacked
from zeroshard.errors import InvalidValue
from zeroshard.io.tensor_file import read_whole

LATEST = "latest"
ON_SHARED_FILES = "checkpoints need a folder on a file system that all machines share"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,14})(?:\.old-[0-9a-f]+)?")
_LEFT_OVER = re.compile(r"step-[0-9]+\.tmp-[0-9a-f]+|\.trash-.+|\.latest\.tmp-[0-9a-f]+")


def new_id() -> str:
    return secrets.token_hex(4)


def step_name(step: int) -> str:
    return f"step-{step}"


def expect_step(step: object) -> None:
    """Raises:
    ValueError: not a valid step number."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**15:
        raise InvalidValue(f"step must be an integer from 0, found {step!r}")


def temporary_name(step: int, unique: str) -> str:
    return f"{step_name(step)}.tmp-{unique}"


def step_of(name: str) -> int | None:
    """The step whose folder has that name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps(directory: Path | str) -> dict[int, Path]:
    """Committed steps, in order -> their folders. Empty if the directory does not exist."""
    found: dict[int, Path] = {}
    for name in sorted(_names(Path(directory)), reverse=True):  # "step-3" comes last and wins over "step-3.old-..."
        step = step_of(name)
        if step is not None and (Path(directory) / name / MANIFEST_NAME).is_file():
            found[step] = Path(directory) / name
    return dict(sorted(found.items()))


def without_manifest(directory: Path | str) -> dict[int, Path]:
    """Steps whose folder step-N lacks the manifest, in order -> their folders."""
    paths = (Path(directory) / name for name in _names(Path(directory)))
    found = {step: path for path in paths if (step := step_of(path.name)) is not None and _lacks_manifest(path)}
    return dict(sorted(found.items()))


def _lacks_manifest(folder: Path) -> bool:
    return ".old-" not in folder.name and folder.is_dir() and not (folder / MANIFEST_NAME).is_file()


def is_step(folder: Path) -> bool:
    """Whether it is the folder of a step, under any name. Others may have a manifest.json, too."""
    named = step_of(folder.absolute().name) is not None
    return (folder / MANIFEST_NAME).is_file() and (named or any(folder.glob("rank-*.safetensors")))


def _is_foreign(path: Path) -> bool:
    """Whether something with the name of a step is not one: it has files, and neither a rank's nor our manifest."""
    if path.is_symlink() or not path.is_dir():
        return os.path.lexists(path)
    return bool(_names(path)) and not any(path.glob("rank-*.safetensors")) and not _has_good_manifest(path)


def expect_no_other(directory: Path, step: int) -> None:
    """Called before a save, which replaces the folder of the step as a whole.

    Raises:
        CheckpointError: what has its name is no step.
    """
    path = directory / step_name(step)
    if _is_foreign(path):
        raise CheckpointError(
            f"{path} is no step of a checkpoint, and saving step {step} would remove it: rename it, or save in another "
            "directory"
        )


def find(directory: Path, step: int | None) -> Path:
    """The folder of that step; None: of the latest step (the one that the file `latest` names; the highest, if that one
    has no folder). If `directory` is itself the folder of a step: `directory`.

    Raises:
        CheckpointError: there is no such step (the message lists the existing ones); `latest` is damaged, or names a
            step that has no manifest.
    """
    if (directory / MANIFEST_NAME).is_file():  # the folder of a step
        if step not in (None, step_of(directory.name)):
            raise CheckpointError(f"{directory} is one step already: pass {directory.parent}, or leave out step={step}")
        return directory
    known = steps(directory)
    if not known:
        raise CheckpointError(f"{directory} {_why_none(directory)}")
    chosen = latest(directory) if step is None else step
    if chosen not in known and step is None:
        expect_manifest_of_latest(directory, chosen, known)
        chosen = max(known)
    if chosen not in known:
        why = " (its folder has no manifest.json)" if (directory / step_name(chosen or 0)).is_dir() else ""
        raise CheckpointError(f"{directory} holds no step {chosen}{why}; it has the steps {sorted(known)}")
    assert chosen is not None
    return known[chosen]


def expect_manifest_of_latest(directory: Path, named: int | None, known: dict[int, Path]) -> None:
    """`named`: the step that `latest` names. An older step must not be taken for it without a word.

    Raises:
        CheckpointError: its folder has no manifest.
    """
    if named is not None and named not in known and _lacks_manifest(directory / step_name(named)):
        others = f"name an earlier step: it has the steps {list(known)}" if known else "there is no other step"
        raise CheckpointError(
            f"{directory / LATEST} names {step_name(named)}, which has no {MANIFEST_NAME} and cannot be read; {others}"
        )


def expect_shared(path: Path, how: str) -> None:
    """Called on every rank with a path that exists on rank 0. `how`: what rank 0 has done with it, for the message.

    Raises:
        CheckpointError: this rank's host does not have it.
    """
    if not path.exists():
        raise CheckpointError(
            f"{path}, which rank 0 has {how}, does not exist on {socket.gethostname()}: {ON_SHARED_FILES}"
        )


def _why_none(directory: Path) -> str:
    """The reason why no checkpoint is found there, for the error message."""
    if directory.is_file():
        return (
            "is a file, and a checkpoint is a folder: for a file of torch.save call "
            "handle.load_full_state_dict(torch.load(file))"
        )
    if not directory.exists():
        return "holds no checkpoint: there is no such folder"
    begun = [name for name in sorted(_names(directory)) if step_of(name) is not None]
    if begun:
        return f"holds no checkpoint: {begun[-1]} has no {MANIFEST_NAME}, without which it cannot be read"
    if step_of(directory.name) is not None:
        return f"holds no checkpoint: it has no {MANIFEST_NAME}, without which it cannot be read"
    return "holds no checkpoint (no folder step-N)"


def latest(directory: Path) -> int | None:
    """The step that the file `latest` names; None if there is no such file.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = directory / LATEST
    try:
        file = files.open_plain(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    try:
        data = os.read(file, 200)
    finally:
        os.close(file)
    match = re.fullmatch(rb"(step-([0-9]{1,15})) ([0-9a-f]{32})\n", data)
    if not match or digest_of(match[1]).encode() != match[3]:
        raise CheckpointError(f"{path} is damaged; remove it, or name one of the steps {list(steps(directory))}")
    return int(match[2])


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


Found = tuple[int, ...] | None
"""Tells the folder of a step apart from any other one of that name; None: there is none."""


def found(directory: Path, step: int) -> Found:
    """The folder that has the name of the step now."""
    return identity(directory / step_name(step))


def identity(folder: Path | int) -> Found:
    """See `Found`. `folder`: a path, or a descriptor."""
    try:
        of_folder = os.stat(folder)
        # The time as well, as the number of a folder that was removed may be used again.
        manifest = os.stat(MANIFEST_NAME, dir_fd=folder) if isinstance(folder, int) else os.stat(folder / MANIFEST_NAME)
    except FileNotFoundError:
        return None
    return of_folder.st_dev, of_folder.st_ino, manifest.st_ino, manifest.st_mtime_ns


def publish(temporary: Path, step: int, unique: str, replaces: Found) -> None:
    """Rename a complete temporary folder to its final name. An existing step of that name is moved aside first, and
    removed by `sweep` later. The caller must sync the directory.

    Args:
        replaces: what `found` returned when the save began.

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
            if isinstance(error, FileNotFoundError) and ours is not None and identity(final) == ours:
                return  # a network file system that has renamed it, lost its answer, and tried again
            if final.exists():
                raise CheckpointError(_saved_by_another(final)) from error
            if aside.exists():
                files.rename(aside, final)
            raise
    finally:
        if lock is not None:
            os.close(lock)


def _locked_to_replace(final: Path, replaces: Found) -> int | None:
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
    is_ours = lock is not None and identity(lock) == replaces and identity(final) == replaces
    if not is_ours:
        if lock is not None:
            os.close(lock)
        raise CheckpointError(_saved_by_another(final))
    return lock


def _saved_by_another(final: Path) -> str:
    return (
        f"another process has saved {final} since this save began, and that one stays: each run needs a directory of "
        "its own"
    )


def sweep(directory: Path) -> None:
    """Remove what interrupted saves and removals have left. A step that was moved aside and not replaced gets its name
    back. Folders that are locked by a running save are not touched. Other processes may do the same."""
    known = steps(directory)
    for name in _names(directory):
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
            os.close(lock)


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
        raise CheckpointError(f"{directory} {_why_none(directory)}")
    known = steps(directory)
    kept = {*_newest(known, keep_last), latest(directory)}
    old = [step for step in known if step not in kept and (keep_every is None or step % keep_every)]
    return [step for step in old if not _is_foreign(known[step])]


def _newest(known: dict[int, Path], number: int) -> list[int]:
    """The newest steps, back to the one that makes `number` whose manifest can be read. So damaged steps do not push
    out good ones. Older manifests are not read."""
    found: list[int] = []
    for step in reversed(known):
        if number == 0:
            break
        found.append(step)
        number -= _has_good_manifest(known[step], step)
    return found


def _has_good_manifest(folder: Path, step: int | None = None) -> bool:
    """Whether the manifest has its digest, and is that of `step` (None: of any). The files are not read."""
    if folder.is_symlink():  # `Reader` refuses it
        return False
    try:
        found = unpacked(read_whole(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES)).get("step")
        return step is None or bool(found == step)
    except (OSError, CheckpointError):
        return False


def _remove(folder: Path) -> None:
    """Remove a folder; rename it first, so that a partly removed folder does not look like a checkpoint."""
    trash = folder
    if not folder.name.startswith(".trash-"):
        trash = folder.parent / f".trash-{folder.name}-{new_id()}"
        files.rename(folder, trash)
        files.sync_folder(folder.parent)
    files.remove_folder(trash)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
