"""Reads a committed step: the manifest, and any interval of any tensor; every block is checked against its digest."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from zeroshard.checkpoint import files
from zeroshard.checkpoint.folders import step_of
from zeroshard.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    CheckpointError,
    Chunk,
    Manifest,
    TensorEntry,
    digest_in,
    digest_of,
)
from zeroshard.io.checked import checking, reading, refuse
from zeroshard.io.tensor_file import bytes_of, read_whole
from zeroshard.layout.interval import Interval


class Reader:
    """An open step folder; files are opened when they are first needed. Use it in a `with` statement.

    Attributes:
        manifest: decoded and checked.
        digest: the manifest's own digest.
        num_bytes: how many bytes of files (without the manifest) have been read.

    Raises (in all methods):
        CheckpointError: names a file that is missing, damaged, of another size, or not a plain file.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder = Path(folder)
        self.num_bytes = 0
        self._open: dict[int, int] = {}
        self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        self._held: tuple[int, int] | None = None  # file and offset of the block in `_block`
        self._checked: dict[tuple[int, int], int] = {}  # file and offset -> a quick sum of each block that was verified
        with checking(folder / MANIFEST_NAME):
            if folder.is_symlink():
                raise OSError("it is a link")
            data = read_whole(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES)
            self.manifest = Manifest.decode(data)
            self.digest = digest_in(data)
            if step_of(folder.name) not in (None, self.manifest.step):
                refuse(f"is that of step {self.manifest.step}, in the folder of another")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def entry(self, name: str) -> TensorEntry:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        return self.manifest.tensors[name]

    def read(self, name: str, interval: Interval, receive: Callable[[Interval, Tensor], None]) -> None:
        """Read elements `interval` of a flattened tensor. `receive` is called with consecutive parts of it and their
        values [numel], which are valid only during the call. Only blocks that contain these elements are read."""
        entry = self.entry(name)
        first = bisect_right(entry.chunks, interval.start, key=lambda chunk: chunk.interval.stop)
        for chunk in entry.chunks[first:]:
            if chunk.interval.start >= interval.stop:
                return
            self._read_chunk(chunk, entry.dtype, chunk.interval & interval, receive)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, in its shape."""
        entry = self.entry(name)
        flat = torch.empty(entry.numel, dtype=entry.dtype)
        self.read_into(name, Interval(0, entry.numel), flat)
        return flat.view(entry.shape)

    def read_into(self, name: str, interval: Interval, out: Tensor) -> None:
        """Read elements `interval` of a flattened tensor into `out`, [interval.numel], on any device."""

        def copy(part: Interval, values: Tensor) -> None:
            out[part.relative_to(interval.start).slice] = values.to(out.device)

        self.read(name, interval, copy)

    def check_everything(self) -> None:
        """Check every byte of every file against its digest. The error names all damaged files."""
        problems: dict[int, str] = {}
        chunks = [(chunk, entry.dtype) for entry in self.manifest.tensors.values() for chunk in entry.chunks]
        for number in range(len(self.manifest.files)):
            try:
                self._file(number)
            except CheckpointError as error:
                problems[number] = str(error)
        for chunk, dtype in sorted(chunks, key=lambda pair: (pair[0].file, pair[0].offset)):
            if chunk.file not in problems:
                try:
                    self._read_chunk(chunk, dtype, chunk.interval, lambda part, values: None)
                except CheckpointError as error:
                    problems[chunk.file] = str(error)
        if problems:
            raise CheckpointError("; ".join(problems.values()))

    def _read_chunk(
        self, chunk: Chunk, dtype: torch.dtype, wanted: Interval, receive: Callable[[Interval, Tensor], None]
    ) -> None:
        step = BLOCK_BYTES // dtype.itemsize
        first = (wanted.start - chunk.interval.start) // step
        for index in range(first, len(chunk.digests)):
            start = chunk.interval.start + index * step
            block = Interval(start, min(start + step, chunk.interval.stop))
            part = block & wanted
            if not part:
                return
            num_bytes = block.numel * dtype.itemsize
            self._hold(chunk.file, chunk.offset + index * BLOCK_BYTES, num_bytes, chunk.digests[index])
            receive(part, self._block[:num_bytes].view(dtype)[part.relative_to(block.start).slice])

    def _hold(self, number: int, offset: int, num_bytes: int, digest: str) -> None:
        """Read a block into `_block`, and check it. The last block is kept, as neighbouring intervals often share
        one."""
        if self._held == (number, offset):
            return
        # Before the read: if it fails, the block is partly overwritten.
        self._held = None
        file = self._file(number)
        place = bytes_of(self._block[:num_bytes])
        name = self.folder / self.manifest.files[number].name
        with reading(name):
            files.fill(file, place, offset)
        self.num_bytes += num_bytes
        quick = _sum_of(self._block[:num_bytes])
        # A load reads a block twice. In the second reading, the sum of the verified block is compared instead of the
        # digest: it finds a file that was replaced in between, at a tenth of the cost.
        if self._checked.get((number, offset)) != quick:
            if digest_of(place) != digest:
                at = f"bytes {offset} to {offset + num_bytes}"
                raise CheckpointError(f"{name} is damaged: {at} do not have their digest")
            self._checked[number, offset] = quick
        self._held = number, offset

    def _file(self, number: int) -> int:
        """A descriptor of the file, whose size and header have been checked."""
        if number not in self._open:
            entry = self.manifest.files[number]
            path = self.folder / entry.name
            with checking(path):
                file = files.open_plain(path)
                self._open[number] = file
                size = os.fstat(file).st_size
                if size != entry.num_bytes:
                    refuse(f"has {size} bytes, expected {entry.num_bytes}")
                header = bytearray(entry.header_bytes)
                files.fill(file, memoryview(header), 0)
                if digest_of(header) != entry.digest:
                    refuse("is damaged, or of another checkpoint: its header has another digest")
        return self._open[number]


def _sum_of(block: Tensor) -> int:
    """A checksum for the second reading, ten times as fast as a digest."""
    words = block.numel() // 8 * 8
    return int(block[:words].view(torch.int64).sum()) + int(block[words:].sum())
