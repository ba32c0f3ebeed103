"""The directory of steps: what is in it, and which step is the latest. Nothing here changes it.

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
from pathlib import Path

from zeroshard.checkpoint.index import digest_of
from zeroshard.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, CheckpointError, unpacked
from zeroshard.errors import InvalidValue
from zeroshard.io.checked import checking
from zeroshard.io.tensor_file import read_whole

LATEST = "latest"
_LARGEST_LATEST = 1 << 20
ON_SHARED_FILES = "checkpoints need a folder on a file system that all machines share"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,14})(?:\.old-[0-9a-f]+)?")


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
    for name in sorted(names_in(Path(directory)), reverse=True):  # "step-3" comes last and wins over "step-3.old-..."
        step = step_of(name)
        if step is not None and (Path(directory) / name / MANIFEST_NAME).is_file():
            found[step] = Path(directory) / name
    return dict(sorted(found.items()))


def without_manifest(directory: Path | str) -> dict[int, Path]:
    """Steps whose folder step-N lacks the manifest, in order -> their folders."""
    paths = (Path(directory) / name for name in names_in(Path(directory)))
    found = {step: path for path in paths if (step := step_of(path.name)) is not None and _lacks_manifest(path)}
    return dict(sorted(found.items()))


def _lacks_manifest(folder: Path) -> bool:
    return ".old-" not in folder.name and folder.is_dir() and not (folder / MANIFEST_NAME).is_file()


def is_step(folder: Path) -> bool:
    """Whether it is the folder of a step, under any name. Others may have a manifest.json, too."""
    named = step_of(folder.absolute().name) is not None
    return (folder / MANIFEST_NAME).is_file() and (named or any(folder.glob("rank-*.safetensors")))


def is_foreign(path: Path) -> bool:
    """Whether something with the name of a step is not one: it has files, and neither a rank's nor our manifest."""
    if path.is_symlink() or not path.is_dir():
        return os.path.lexists(path)
    return bool(names_in(path)) and not any(path.glob("rank-*.safetensors")) and not has_good_manifest(path)


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
        raise CheckpointError(f"{directory} {why_none(directory)}")
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


def expect_shared(path: Path, first: int, how: str) -> None:
    """Called on every rank with a path that exists on the first one. `first`: that rank's number in the job, and `how`:
    what it has done with the path, for the message.

    Raises:
        CheckpointError: this rank's host does not have it.
    """
    if not path.exists():
        raise CheckpointError(
            f"{path}, which rank {first} has {how}, does not exist on {socket.gethostname()}: {ON_SHARED_FILES}"
        )


def why_none(directory: Path) -> str:
    """The reason why no checkpoint is found there, for the error message."""
    if directory.is_file():
        return (
            "is a file, and a checkpoint is a folder: for a file of torch.save call "
            "handle.load_full_state_dict(torch.load(file))"
        )
    if not directory.exists():
        return "holds no checkpoint: there is no such folder"
    begun = [name for name in sorted(names_in(directory)) if step_of(name) is not None]
    if begun:
        return f"holds no checkpoint: {begun[-1]} has no {MANIFEST_NAME}, without which it cannot be read"
    if step_of(directory.name) is not None:
        return f"holds no checkpoint: it has no {MANIFEST_NAME}, without which it cannot be read"
    return "holds no checkpoint (no folder step-N)"


def latest(directory: Path) -> int | None:
    """The step that the file `latest` names; None if there is no such file.

    Raises:
        CheckpointError: the file is damaged, or cannot be read.
    """
    path = directory / LATEST
    with checking(path):
        try:
            data = read_whole(path, _LARGEST_LATEST)
        except FileNotFoundError:
            return None
    match = re.fullmatch(rb"(step-([0-9]{1,15})) ([0-9a-f]{32})\n", data)
    if not match or digest_of(match[1]).encode() != match[3]:
        raise CheckpointError(f"{path} is damaged; remove it, or name one of the steps {list(steps(directory))}")
    return int(match[2])


Identity = tuple[int, ...] | None
"""Tells the folder of a step apart from any other one of that name; None: there is none."""


def identity(folder: Path | int) -> Identity:
    """See `Identity`. `folder`: a path, or a descriptor."""
    try:
        of_folder = os.stat(folder)
        # The time as well, as the number of a folder that was removed may be used again.
        manifest = os.stat(MANIFEST_NAME, dir_fd=folder) if isinstance(folder, int) else os.stat(folder / MANIFEST_NAME)
    except FileNotFoundError:
        return None
    return of_folder.st_dev, of_folder.st_ino, manifest.st_ino, manifest.st_mtime_ns


def has_good_manifest(folder: Path, step: int | None = None) -> bool:
    """Whether the manifest has its digest, and is that of `step` (None: of any). The files are not read."""
    if folder.is_symlink():  # `Reader` refuses it
        return False
    try:
        found = unpacked(read_whole(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES)).get("step")
        return step is None or bool(found == step)
    except (OSError, CheckpointError):
        return False


def names_in(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
