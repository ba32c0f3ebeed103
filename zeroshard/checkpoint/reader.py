"""Reads a committed step: any interval of any tensor. Every block is checked against its digest, and of the indices
only those of the files that are read are read."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from zeroshard.checkpoint import files
from zeroshard.checkpoint.folders import identity, step_of, steps
from zeroshard.checkpoint.index import BLOCK_BYTES, Chunk, Index, digest_of
from zeroshard.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    CheckpointError,
    Manifest,
    TensorEntry,
    digest_in,
)
from zeroshard.io.checked import checking, reading, refuse
from zeroshard.io.tensor_file import OpenFiles, bytes_of, read_whole
from zeroshard.layout.interval import Interval


class Reader(OpenFiles):
    """An open step folder. Use it in a `with` statement.

    Attributes:
        manifest: decoded and checked.
        digest: the manifest's own digest.
        num_bytes: how many bytes of files (without the manifest and the indices) have been read.

    Raises (in all methods):
        CheckpointError: names a file that is missing, damaged, of another size, or not a plain file.
    """

    def __init__(self, folder: Path | str) -> None:
        super().__init__()
        self.folder = folder = Path(folder)
        self.num_bytes = 0
        self._indices: dict[int, Index] = {}
        self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        self._held: tuple[int, int] | None = None  # file and offset of the block in `_block`
        self._checked: dict[tuple[int, int], int] = {}  # file and offset -> a quick sum of each block that was verified
        with checking(folder / MANIFEST_NAME):
            self._identity = identity(folder)
            if folder.is_symlink():
                raise OSError("it is a link")
            try:
                data = read_whole(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES)
            except FileNotFoundError:
                if known := steps(folder):
                    newest = known[max(known)]
                    refuse(f"does not exist: this is no step, but the directory of the steps {[*known]}: name {newest}")
                refuse("does not exist, and the step cannot be read without it: copy the step again, or use another")
            self.manifest = Manifest.decode(data)
            self.digest = digest_in(data)
            if step_of(folder.name) not in (None, self.manifest.step):
                refuse(f"is that of step {self.manifest.step}, in the folder of another")
        self._written = self.manifest  # `manifest` may get other names of tensors

    def entry(self, name: str) -> TensorEntry:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        return self.manifest.tensors[name]

    def read(self, name: str, interval: Interval, receive: Callable[[Interval, Tensor], None]) -> None:
        """Read elements `interval` of a flattened tensor. `receive` is called with consecutive parts of it and their
        values [numel], which are valid only during the call. Only blocks that contain these elements are read."""
        entry = self.entry(name)
        for number, chunk in self.chunks(entry, interval):
            self._read_chunk(number, chunk, entry.dtype, chunk.interval & interval, receive)

    def chunks(self, entry: TensorEntry, wanted: Interval | None = None) -> Iterator[tuple[int, Chunk]]:
        """The chunks of a tensor in order, each with the number of its file: all, or those that intersect `wanted`."""
        wanted = Interval(0, entry.numel) if wanted is None else wanted
        for number, part in entry.parts(wanted):
            chunks, inside = self._index(number).chunks[entry.stored], part & wanted
            first = bisect_right(chunks, inside.start, key=lambda chunk: chunk.interval.stop)
            for chunk in chunks[first:]:
                if chunk.interval.start >= inside.stop:
                    break
                yield number, chunk

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, in its shape."""
        entry = self.entry(name)
        flat = torch.empty(entry.numel, dtype=entry.dtype, device="cpu")
        self.read_into(name, Interval(0, entry.numel), flat)
        return flat.view(entry.shape)

    def read_into(self, name: str, interval: Interval, out: Tensor) -> None:
        """Read elements `interval` of a flattened tensor into `out`, [interval.numel], on any device."""

        def copy(part: Interval, values: Tensor) -> None:
            out[part.relative_to(interval.start).slice] = values.to(out.device)

        self.read(name, interval, copy)

    def check_everything(self) -> None:
        """Check every byte of every file against its digest. The error names all damaged files."""
        problems = []
        for number in range(len(self._written.files)):
            try:
                self._check_file(number)
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError("; ".join(problems))

    def _check_file(self, number: int) -> None:
        index = self._index(number)
        self._file(number)
        chunks = [(chunk, self._written.tensors[name].dtype) for name, of in index.chunks.items() for chunk in of]
        for chunk, dtype in sorted(chunks, key=lambda pair: pair[0].offset):
            self._read_chunk(number, chunk, dtype, chunk.interval, lambda part, values: None)
        self._indices.pop(number, None)

    def _read_chunk(
        self,
        number: int,
        chunk: Chunk,
        dtype: torch.dtype,
        wanted: Interval,
        receive: Callable[[Interval, Tensor], None],
    ) -> None:
        step = BLOCK_BYTES // dtype.itemsize
        first = (wanted.start - chunk.interval.start) // step
        for index in range(first, -(-chunk.interval.numel // step)):
            start = chunk.interval.start + index * step
            block = Interval(start, min(start + step, chunk.interval.stop))
            part = block & wanted
            if not part:
                return
            num_bytes = block.numel * dtype.itemsize
            self._hold(number, chunk.offset + index * BLOCK_BYTES, num_bytes, chunk.digest(index))
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
        index, entry = self._index(number), self._written.files[number]

        def check(file: int) -> None:
            size = os.fstat(file).st_size
            if size != entry.num_bytes:
                refuse(f"has {size} bytes, expected {entry.num_bytes}")
            header = bytearray(index.header_bytes)
            files.fill(file, memoryview(header), 0)
            if digest_of(header) != index.digest:
                refuse("is damaged, or of another checkpoint: its header has another digest")

        path = self.folder / entry.name
        with self._checking(path):
            return self.opened(path, check)

    @contextmanager
    def _checking(self, path: Path) -> Iterator[None]:
        try:
            with checking(path):
                yield
        except CheckpointError as error:
            with suppress(OSError):
                if identity(self.folder) != self._identity:
                    raise CheckpointError(replaced(self.folder)) from error
            raise

    def _index(self, number: int) -> Index:
        """The index of a file, which has been checked."""
        if number not in self._indices:
            entry = self._written.files[number]
            path = self.folder / entry.index_name
            with self._checking(path):
                data = read_whole(path, MAX_MANIFEST_BYTES)
                if len(data) != entry.index_bytes or digest_of(data) != entry.index_digest:
                    refuse("is damaged, or of another checkpoint: the manifest has another digest of it")
                index = Index.decode(data, self._written.tensors)
                self._written.expect_fits(number, index)
                self._indices[number] = index
        return self._indices[number]


def replaced(folder: Path) -> str:
    """The message where the folder of a step is not the one that has been found there."""
    return f"{folder} has been replaced or removed by another process while it was read"


def _sum_of(block: Tensor) -> int:
    """A checksum for the second reading, ten times as fast as a digest."""
    words = block.numel() // 8 * 8
    return int(block[:words].view(torch.int64).sum()) + int(block[words:].sum())
