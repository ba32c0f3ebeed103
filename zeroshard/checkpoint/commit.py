"""Writes the files of a step into a temporary folder and commits it by a rename; on an error, removes the folder.

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
    """The part of one rank in a save, after its values are fixed. `base`: the manifest without files and tensors.
    `lock`: rank 0's lock on the folder."""

    folder: Path
    plan: FilePlan
    base: Manifest
    meeting: Meeting
    lock: int | None

    def run(self) -> None:
        """Write the file, report to rank 0, and wait for its verdict (rank 0: commit).

        Raises:
            CheckpointError: with the same text on every rank.
        """
        failure: BaseException | None = None
        try:
            folders.expect_shared(self.folder, "made")
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
            raise failure  # KeyboardInterrupt: only now, after the other ranks have been told
        if verdict:
            raise CheckpointError(verdict) from failure

    @phase("save: commit")
    def _conclude(self) -> str:
        """On rank 0: commit, or remove everything. Returns the error in words ("" for none), which it also announces to
        the other ranks."""
        step, verdict = self.base.step, ""
        try:
            manifest = merged(self.base, self.meeting.gather())
            data = manifest.encode()
            expect_readable(len(data))
            # The last file to be written: a folder without a manifest is not a checkpoint, so a crash before this line
            # leaves nothing that could be loaded.
            files.write_new(self.folder / MANIFEST_NAME, data)
            self.meeting.beat()
            folders.publish(self.folder, step, self.base.id)
        except BaseException as error:
            # Before `discard`: a rank that still writes would create files in the folder while it is removed.
            self.meeting.let_stop()
            verdict = f"step {step} was not saved: {in_words(error)}{discard(self.folder)}"
            self.meeting.announce(verdict)
            if not isinstance(error, Exception):
                raise
            return verdict
        try:
            # The rename is durable only after the parent folder is synced (fsync(2)), and `latest` must not name a step
            # whose rename a power failure undoes. From here on an error undoes nothing: the step is committed.
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
    """The metadata of a rank's file. Different for every file, so that swapped files are found."""
    return {"format": "pt", "zeroshard": f"step {step}, {unique}, {file_name(rank)}"}


def discard(folder: Path) -> str:
    """Remove a folder that is not committed. Returns an addition to the error message if that fails."""
    try:
        files.remove_folder(folder)
    except OSError as error:
        return f" (and {folder} could not be removed: {error}; the next save does)"
    return ""


def open_folder(directory: Path, base: Manifest, sizes: Sequence[Sequence[int]]) -> int | None:
    """Make a new temporary folder for a step, and return the lock on it. Called on rank 0.

    Args:
        sizes: for each rank: bytes of its file, and of its part of the manifest.

    Raises:
        CheckpointError: there is not enough space; the message has the exact numbers.
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
    """A lower bound for the bytes of the manifest: one quoted digest and a comma for each block of the files."""
    return len(base.encode()) + 36 * sum(size // BLOCK_BYTES for size in file_sizes)


def size_of_part(plan: FilePlan, file: int) -> int:
    """Bytes of this rank's part of the manifest. Known before anything is written, as all digests have one length."""
    entry = FileEntry(file_name(file), plan.num_bytes, len(plan.header), "0" * 32)
    return len(Manifest(0, "", (entry,), plan.entries(["0" * 32] * plan.num_digests), {}, {}).encode())


def merged(base: Manifest, parts: Iterable[Any]) -> Manifest:
    """The manifest, merged from the parts of all ranks, and checked as a reader checks it.

    Raises:
        CheckpointError: the parts do not fit together: an element is stored twice, or is missing.
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
    """Versions of the software that writes the checkpoint, for people to read."""
    try:
        own = metadata.version("zeroshard")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        own = "unknown"
    return {"zeroshard": own, "torch": torch.__version__, "python": platform.python_version()}


def _part(plan: FilePlan, entry: FileEntry, digests: list[str]) -> list[Any]:
    return [asdict(entry), {name: encode_tensor(tensor) for name, tensor in plan.entries(digests).items()}]
