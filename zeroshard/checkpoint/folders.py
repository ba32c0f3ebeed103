"""The folder that holds the steps: which ones there are, which is the latest, what is kept, what is left over.

step-12/                    a committed step: never written to again
latest                      "step-12 <check>"
step-13.tmp-<id>/           being written; removed when that fails, or by the next save
step-12.old-<id>/           the step-12 that a new step-12 replaces; valid until that one is in place
.trash-step-3-<id>/         being removed
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from zeroshard.checkpoint import files
from zeroshard.checkpoint.manifest import MANIFEST_NAME, CheckpointError, digest_of
from zeroshard.errors import InvalidValue

LATEST = "latest"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,14})(?:\.old-[0-9a-f]+)?")
_LEFT_OVER = re.compile(r"step-[0-9]+\.tmp-[0-9a-f]+|\.trash-.+|\.latest\.tmp-[0-9a-f]+")


def new_id() -> str:
    return secrets.token_hex(4)


def step_name(step: int) -> str:
    return f"step-{step}"


def expect_step(step: object) -> None:
    """Raises:
    ValueError: no number that a step can have."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**15:
        raise InvalidValue(f"step must be an integer from 0, found {step!r}")


def temporary_name(step: int, unique: str) -> str:
    return f"{step_name(step)}.tmp-{unique}"


def step_of(name: str) -> int | None:
    """The step whose folder has that name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps(directory: Path | str) -> dict[int, Path]:
    """Committed steps, in order, and where each lies. A directory that does not exist holds none."""
    found: dict[int, Path] = {}
    for name in sorted(_names(Path(directory)), reverse=True):  # "step-3" comes last and wins over "step-3.old-..."
        step = step_of(name)
        if step is not None and (Path(directory) / name / MANIFEST_NAME).is_file():
            found[step] = Path(directory) / name
    return dict(sorted(found.items()))


def find(directory: Path, step: int | None) -> Path:
    """The folder of that step; of the latest one for None: what `latest` names, else the highest. The directory itself,
    where that is the folder of a step.

    Raises:
        CheckpointError: no such step, with those that there are; a damaged `latest`.
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
        chosen = max(known)
    if chosen not in known:
        why = " (its folder has no manifest.json)" if (directory / step_name(chosen or 0)).is_dir() else ""
        raise CheckpointError(f"{directory} holds no step {chosen}{why}; it has the steps {sorted(known)}")
    assert chosen is not None
    return known[chosen]


def _why_none(directory: Path) -> str:
    """Why no checkpoint is found there."""
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
    """The step that was saved last, or None where nothing says so.

    Raises:
        CheckpointError: a damaged file.
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
        files.write_new(temporary, f"{name} {digest_of(name.encode())}\n".encode())
        files.replace(temporary, directory / LATEST)
    except BaseException:
        with suppress(OSError):
            files.remove_file(temporary)
        raise
    files.sync_folder(directory)


def publish(temporary: Path, step: int, unique: str) -> None:
    """Give a complete folder its name. A step of that name is moved aside first, and removed by `sweep`. The caller
    syncs the directory."""
    directory = temporary.parent
    final = directory / step_name(step)
    aside = directory / f"{step_name(step)}.old-{unique}"
    files.sync_folder(temporary)
    lock = files.lock_folder(final) if final.exists() else None  # a sweep between the two renames leaves it alone
    try:
        if final.exists():
            # Two renames, as rename(2) does not replace a folder that is not empty. Between them `.old-` counts as the
            # step.
            files.rename(final, aside)
        try:
            files.rename(temporary, final)
        except BaseException:
            if aside.exists():
                files.rename(aside, final)
            raise
    finally:
        if lock is not None:
            os.close(lock)


def sweep(directory: Path) -> None:
    """Remove what dead saves and removals have left, and give a step that was moved aside its name back where nothing
    has replaced it. Folders that a living save holds stay."""
    known = steps(directory)
    for name in _names(directory):
        path = directory / name
        aside = step_of(name) is not None and ".old-" in name
        if path.is_symlink() or not (_LEFT_OVER.fullmatch(name) or aside):
            continue
        if not path.is_dir():
            files.remove_file(path)
        elif (lock := files.lock_folder(path)) is not None:
            try:
                if aside and path in known.values():
                    files.rename(path, directory / name.partition(".")[0])
                    files.sync_folder(directory)
                else:
                    _remove(path)
            finally:
                os.close(lock)


def prune(directory: Path | str, *, keep_last: int = 1, keep_every: int | None = None) -> list[int]:
    """Remove old steps, and whatever dead saves have left over. Not collective: one rank calls it.

    Args:
        keep_last: how many of the newest stay. What `latest` names stays as well.
        keep_every: steps that are multiples of it stay, too.

    Returns:
        The steps that are gone.

    Raises:
        ValueError: a number below 1.
    """
    directory = Path(directory)
    to_prune(directory, keep_last=keep_last, keep_every=keep_every)
    sweep(directory)
    gone, known = to_prune(directory, keep_last=keep_last, keep_every=keep_every), steps(directory)
    for step in gone:
        _remove(known[step])
    return gone


def to_prune(directory: Path | str, *, keep_last: int = 1, keep_every: int | None = None) -> list[int]:
    """The steps that `prune` would remove."""
    if keep_last < 1 or (keep_every is not None and keep_every < 1):
        raise InvalidValue(f"keep_last and keep_every must be at least 1, found {keep_last} and {keep_every}")
    known = steps(directory)
    kept = {*list(known)[-keep_last:], latest(Path(directory))}
    return [step for step in known if step not in kept and (keep_every is None or step % keep_every)]


def _remove(folder: Path) -> None:
    """Under another name first: what is half gone must not look like a checkpoint."""
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
