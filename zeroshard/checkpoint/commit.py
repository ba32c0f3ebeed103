"""From files in a temporary folder to a committed step, or to nothing: what each rank does once its values are fixed.

    every rank   write the own file, fsync it, report its entry and digests
    rank 0       gather the reports -> manifest.json, last, fsync -> fsync the folder -> rename it to step-N
                 -> fsync the parent -> replace `latest` -> tell the others

If anything fails on any rank before the rename, the folder is removed and every rank raises the same error.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import files, folders
from zeroshard.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    CheckpointError,
    FileEntry,
    Manifest,
    decode_tensor,
    encode_tensor,
    expect_readable,
)
from zeroshard.checkpoint.meeting import Meeting, Stopped
from zeroshard.checkpoint.writer import FilePlan, write_file
from zeroshard.comm.profiling import phase
from zeroshard.comm.together import in_words


@dataclass(frozen=True)
class Job:
    """One save, as one rank sees it. `base`: the manifest without files and tensors; `lock`: rank 0's."""

    folder: Path
    plan: FilePlan
    base: Manifest
    meeting: Meeting
    lock: int | None

    def run(self) -> None:
        """Write, report, conclude.

        Raises:
            CheckpointError: the same on every rank.
        """
        failure: BaseException | None = None
        try:
            file = file_name(self.meeting.rank)
            entry, digests = write_file(self.folder / file, self.plan, self.meeting.beat)
            self.meeting.report(_part(self.plan, entry, digests))
        except Stopped:
            self.meeting.report()
        except BaseException as error:
            failure = error
            self.meeting.report(error=in_words(error))
        try:
            verdict = self._conclude() if self.meeting.rank == 0 else self.meeting.verdict()
        finally:
            if self.lock is not None:
                os.close(self.lock)
        if failure is not None and not isinstance(failure, Exception):
            raise failure  # Ctrl-C, now that the others know
        if verdict:
            raise CheckpointError(verdict) from failure

    @phase("save: commit")
    def _conclude(self) -> str:
        """Rank 0: commit, or remove everything. Returns, and tells the others, what went wrong."""
        step, verdict = self.base.step, ""
        try:
            manifest = merged(self.base, self.meeting.gather())
            data = manifest.encode()
            expect_readable(len(data))
            # Last of all files: a folder without a manifest is no checkpoint, whatever else has reached the disk.
            files.write_new(self.folder / MANIFEST_NAME, data)
            self.meeting.beat()
            folders.publish(self.folder, step, self.base.id)
        except BaseException as error:
            # A rank that still writes would create files in a folder that is being removed.
            self.meeting.let_stop()
            verdict = f"step {step} was not saved: {in_words(error)}{discard(self.folder)}"
            self.meeting.announce(verdict)
            if not isinstance(error, Exception):
                raise
            return verdict
        try:
            # The rename is on the disk only when the folder above is synced (fsync(2)); `latest` must not name a step
            # that a power failure takes back. From here on nothing is undone: the step is complete.
            files.sync_folder(self.folder.parent)
            folders.set_latest(self.folder.parent, step, self.base.id)
            folders.sweep(self.folder.parent)
        except BaseException as error:
            verdict = f"step {step} is in place, but what follows failed (sync, latest, sweep): {in_words(error)}"
            if not isinstance(error, Exception):
                raise
        finally:
            self.meeting.announce(verdict)
        return verdict


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def file_metadata(step: int, unique: str, rank: int) -> dict[str, str]:
    """Of the file of that rank: no two files have the same."""
    return {"format": "pt", "zeroshard": f"step {step}, {unique}, {file_name(rank)}"}


def discard(folder: Path) -> str:
    """Remove a folder that is not to be committed; returns what has to be said about it."""
    try:
        files.remove_folder(folder)
    except OSError as error:
        return f" (and {folder} could not be removed: {error}; the next save does)"
    return ""


def open_folder(directory: Path, base: Manifest, sizes: Sequence[Sequence[int]]) -> int | None:
    """A new temporary folder for a step; returns the lock on it. Rank 0.

    Args:
        sizes: of each rank: bytes of its file, and of its part of the manifest.

    Raises:
        CheckpointError: not enough space, with the exact numbers.
    """
    files.make_folders(directory)
    folders.sweep(directory)
    of_files = [*(num_bytes for num_bytes, _ in sizes), len(base.encode()) + sum(part for _, part in sizes)]
    free, needed = files.free_bytes(directory), sum(files.bytes_on_disk(directory, size) for size in of_files)
    if needed > free:
        raise CheckpointError(f"{directory} has {free} bytes free, step {base.step} needs {needed}")
    folder = temporary_folder(directory, base)
    files.make_folder(folder)
    try:
        return files.lock_folder(folder)
    except BaseException:
        with suppress(OSError):
            files.remove_folder(folder)
        raise


def temporary_folder(directory: Path, base: Manifest) -> Path:
    return directory / folders.temporary_name(base.step, base.id)


def least_size(base: Manifest, file_sizes: Iterable[int]) -> int:
    """Bytes of the manifest at least: a digest, in quotes and with a comma, for each block of the files."""
    return len(base.encode()) + 36 * sum(size // BLOCK_BYTES for size in file_sizes)


def size_of_part(plan: FilePlan, file: int) -> int:
    """Bytes of this rank's part of the manifest: digests have one length, so it is known before anything is written."""
    entry = FileEntry(file_name(file), plan.num_bytes, len(plan.header), "0" * 32)
    return len(Manifest(0, "", (entry,), plan.entries(["0" * 32] * plan.num_digests), {}, {}).encode())


def merged(base: Manifest, parts: Iterable[Any]) -> Manifest:
    """One manifest of all ranks' parts, checked as a reader will check it.

    Raises:
        CheckpointError: parts that do not fit together: an element twice, or missing.
    """
    entries: list[FileEntry] = []
    tensors: dict[str, Any] = {}
    for file, of_rank in parts:
        entries.append(FileEntry(**file))
        for name, entry in of_rank.items():
            known = tensors.setdefault(name, {**entry, "chunks": []})
            if (known["shape"], known["dtype"]) != (entry["shape"], entry["dtype"]):
                raise CheckpointError(f"the ranks disagree on the shape or dtype of {name}")
            known["chunks"] += entry["chunks"]
    for entry in tensors.values():
        entry["chunks"].sort(key=lambda chunk: chunk[2])
    whole = {name: decode_tensor(name, tensors[name]) for name in sorted(tensors)}
    return replace(base, files=tuple(entries), tensors=whole)


def versions() -> dict[str, str]:
    """Of what wrote it: for people to read."""
    try:
        own = metadata.version("zeroshard")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        own = "unknown"
    return {"zeroshard": own, "torch": torch.__version__, "python": platform.python_version()}


def _part(plan: FilePlan, entry: FileEntry, digests: list[str]) -> list[Any]:
    return [asdict(entry), {name: encode_tensor(tensor) for name, tensor in plan.entries(digests).items()}]
