"""Writes the files of a step into a temporary folder and commits it by a rename; on an error, removes the folder.

    every rank   write the own file and its index, fsync them, report their sizes, the index's digest, and the own parts
    rank 0       gather the reports -> manifest.json, last, fsync -> fsync the folder -> rename it to step-N
                 -> fsync the parent -> replace `latest` -> tell the others

If anything fails on any rank before the rename, the folder is removed and every rank raises the same error.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import files, folders, pruning, publishing
from zeroshard.checkpoint.index import DIGEST_LENGTH
from zeroshard.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    FileEntry,
    Manifest,
    Run,
    decode_file,
    decode_tensor,
    encode_file,
    encode_run,
    encode_tensor,
    expect_readable,
    joined,
)
from zeroshard.checkpoint.meeting import Meeting, Stopped
from zeroshard.checkpoint.writer import FilePlan, write_with_index
from zeroshard.comm.ranges import phase
from zeroshard.comm.together import in_words
from zeroshard.io import refused
from zeroshard.io.checked import NotWritten
from zeroshard.version import VERSION

Sizes = tuple[int, int, int]
"""Bytes of a rank's file, of its index, and of its part of the manifest (by itself; the whole is smaller than the sum).
They are known before anything is written."""

Part = dict[str, Any]
"""{"files": [[rank, entry], ...], "tensors": {name: entry}}, with entries as in the manifest."""


@dataclass(frozen=True)
class Opened:
    """The temporary folder of a step: the lock on it, and the folder that had the name of the step at that time."""

    lock: files.Lock
    replaces: folders.Identity


@dataclass(frozen=True)
class Job:
    """The part of one rank in a save, after its values are fixed. `base`: the manifest without files and tensors.
    `opened`: on rank 0."""

    folder: Path
    plan: FilePlan
    base: Manifest
    meeting: Meeting
    opened: Opened | None

    def run(self) -> None:
        """Write the file, report to rank 0, and wait for its verdict (rank 0: commit).

        Raises:
            CheckpointError: with the same text on every rank.
        """
        failure: BaseException | None = None
        try:
            folders.expect_shared(self.folder, self.meeting.first, "made")
            file = file_name(self.meeting.rank)
            with refused.naming(self.folder / file):  # a full disk or quota may be told by a write, or by fsync
                entry = write_with_index(self.folder / file, self.plan, self.meeting.beat)
            self.meeting.report(part_of(self.plan, entry, self.meeting.rank))
        except Stopped:
            self.meeting.report()
        except BaseException as error:
            failure = error
            self.meeting.report(error=in_words(error))
        try:
            verdict, on_commit = self._conclude() if self.meeting.rank == 0 else (self.meeting.verdict(), None)
        finally:
            if self.opened is not None:
                files.unlock(self.opened.lock)
        if failure is not None and not isinstance(failure, Exception):
            raise failure  # KeyboardInterrupt: only now, after the other ranks have been told
        cause = failure or on_commit
        if verdict:
            raise (NotWritten if isinstance(cause, OSError) else CheckpointError)(verdict) from cause

    @phase("save: commit")
    def _conclude(self) -> tuple[str, Exception | None]:
        """On rank 0: commit, or remove everything. Returns the error in words ("" for none), which it also announces to
        the other ranks, and the error."""
        step, verdict = self.base.step, ""
        failure: Exception | None = None
        ours: folders.Identity = None
        try:
            manifest = merged(self.base, self.meeting.gather())
            data = manifest.encode()
            expect_readable(len(data))
            # The last file to be written: a folder without a manifest is not a checkpoint, so a crash before this line
            # leaves nothing that could be loaded. `publish` then gives the folder its name, which commits it.
            with refused.naming(self.folder / MANIFEST_NAME):
                files.write_new(self.folder / MANIFEST_NAME, data)
            ours = folders.identity(self.folder)
            self.meeting.beat()
            assert self.opened is not None, "rank 0"
            publishing.publish(self.folder, step, self.base.id, self.opened.replaces)
        except BaseException as error:
            # Before `discard`: a rank that still writes would create files in the folder while it is removed.
            self.meeting.let_stop()
            if ours is not None and folders.identity(self.folder.with_name(folders.step_name(step))) == ours:
                verdict = in_place(step, self.meeting.first, error)  # an interrupt that came behind the rename
            else:
                verdict = f"step {step} was not saved: {in_words(error)}{discard(self.folder)}"
            self.meeting.announce(verdict)
            if not isinstance(error, Exception):
                raise
            return verdict, error
        try:
            # The rename is durable only after the parent folder is synced (fsync(2)), and `latest` must not name a step
            # whose rename a power failure undoes. From here on an error undoes nothing: the step is committed.
            files.sync_folder(self.folder.parent)
            publishing.set_latest(self.folder.parent, step, self.base.id)
            pruning.sweep(self.folder.parent)
        except BaseException as error:
            verdict = in_place(step, self.meeting.first, error)
            if not isinstance(error, Exception):
                raise
            failure = error
        finally:
            self.meeting.announce(verdict)
        return verdict, failure


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def file_metadata(step: int, unique: str, rank: int) -> dict[str, str]:
    """The metadata of a rank's file. Different for every file, so that swapped files are found."""
    return {"format": "pt", "zeroshard": f"step {step}, {unique}, {file_name(rank)}"}


def in_place(step: int, rank: int, error: BaseException) -> str:
    """The verdict where an error came behind the rename, which commits a step. `rank`: its number in the job."""
    return f"step {step} is in place, but rank {rank} failed in what follows (sync, latest, sweep): {in_words(error)}"


def discard(folder: Path) -> str:
    """Remove a folder that is not committed. Returns an addition to the error message if that fails."""
    try:
        files.remove_folder(folder)
    except OSError as error:
        return f" (and {folder} could not be removed: {error}; the next save does)"
    return ""


def open_folder(directory: Path, base: Manifest, sizes: Sequence[Sizes]) -> Opened:
    """Make a new temporary folder for a step. Called on rank 0.

    Args:
        sizes: for each rank: bytes of its file, of its index, and of its part of the manifest.

    Raises:
        NotWritten: there is not enough space, or a file in the place of a folder; the message says which.
        CheckpointError: something else has the name of the step.
    """
    publishing.expect_no_other(directory, base.step)
    try:
        files.make_folders(directory)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise NotWritten(refused.in_words(error)) from error
    pruning.sweep(directory)
    of_files = [size for num_bytes, index_bytes, _ in sizes for size in (num_bytes, index_bytes)]
    of_files.append(len(base.encode()) + sum(part for *_, part in sizes))
    free, needed = files.free_bytes(directory), sum(files.bytes_on_disk(directory, size) for size in of_files)
    if free is not None and needed > free:
        raise NotWritten(f"{directory} has {free} bytes free, step {base.step} needs {needed}")
    replaces, folder = folders.identity(directory / folders.step_name(base.step)), temporary_folder(directory, base)
    while (lock := _made_and_locked(folder)) is None:
        time.sleep(0.01)  # the other process still has it
    return Opened(lock, replaces)


def _made_and_locked(folder: Path) -> files.Lock | None:
    """Make the folder, and return the lock on it; None if another process, which sweeps, has taken it for a left-over
    before it was locked, and removes it."""
    with suppress(FileExistsError):
        files.make_folder(folder)
    try:
        lock = files.lock_folder(folder)
        if lock is not None and not (folder.exists() and os.path.samestat(os.fstat(lock.file), os.stat(folder))):
            files.unlock(lock)
            return None
        return lock
    except FileNotFoundError:
        return None
    except BaseException:
        with suppress(OSError):
            files.remove_folder(folder)
        raise


def temporary_folder(directory: Path, base: Manifest) -> Path:
    return directory / folders.temporary_name(base.step, base.id)


def least_size(base: Manifest, sizes: Iterable[Sizes]) -> int:
    """A lower bound for the bytes of the manifest: all of it but the tensors."""
    entries = (entry_of(rank, num_bytes, index_bytes) for rank, (num_bytes, index_bytes, _) in enumerate(sizes))
    return len(replace(base, files=tuple(entries)).encode())


def sizes_of(plan: FilePlan, rank: int) -> Sizes:
    """See `Sizes`.

    Raises:
        CheckpointError: no reader would take the index.
    """
    index_bytes = plan.index_bytes
    expect_readable(index_bytes, f"the index of {file_name(rank)} would have")
    entry = entry_of(rank, plan.num_bytes, index_bytes)
    part = Manifest(0, "", (entry,), plan.entries(rank), {}, {})
    return plan.num_bytes, index_bytes, len(part.encode())


def entry_of(rank: int, num_bytes: int, index_bytes: int) -> FileEntry:
    """An entry as long as that of the file will be: all digests have one length."""
    return FileEntry(file_name(rank), num_bytes, index_bytes, "0" * DIGEST_LENGTH)


def part_of(plan: FilePlan, entry: FileEntry, rank: int) -> Part:
    """What a rank reports for the manifest, and `combined` makes of several."""
    tensors = {name: encode_tensor(tensor) for name, tensor in plan.entries(rank).items()}
    return {"files": [[rank, encode_file(entry)]], "tensors": tensors}


def combined(parts: Iterable[Part]) -> Part:
    """The parts of several ranks as one. Runs that follow each other become one, so that it hardly grows with the
    number of ranks.

    Raises:
        CheckpointError: the ranks disagree on a tensor.
    """
    of_all: list[Any] = []
    tensors: dict[str, Any] = {}
    for part in parts:
        of_all += part["files"]
        for name, entry in part["tensors"].items():
            known = tensors.setdefault(name, {**entry, "runs": []})
            if (known["shape"], known["dtype"]) != (entry["shape"], entry["dtype"]):
                raise CheckpointError(f"the ranks disagree on the shape or dtype of {name}")
            known["runs"] += entry["runs"]
    for entry in tensors.values():
        entry["runs"] = [encode_run(run) for run in joined(Run(*run) for run in entry["runs"])]
    return {"files": sorted(of_all), "tensors": tensors}


def merged(base: Manifest, parts: Iterable[Part]) -> Manifest:
    """The manifest, made of the parts of all ranks, and checked as a reader checks it.

    Raises:
        CheckpointError: the parts do not fit together: an element is stored twice, or is missing.
    """
    whole = combined(parts)
    entries = tuple(decode_file(entry) for _, entry in whole["files"])
    tensors = {name: decode_tensor(name, whole["tensors"][name], len(entries)) for name in sorted(whole["tensors"])}
    return replace(base, files=entries, tensors=tensors)


def versions() -> dict[str, str]:
    """Versions of the software that writes the checkpoint, for people to read."""
    return {"zeroshard": VERSION, "torch": torch.__version__, "python": platform.python_version()}
