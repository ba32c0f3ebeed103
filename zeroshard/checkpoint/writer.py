"""Writes one rank's safetensors file and its index: planned to the byte, then written block by block, with digests.

    | length of the header, 8 bytes | header: JSON, padded with spaces | chunk | chunk | chunk | ...

The format is https://github.com/huggingface/safetensors. That library can read the file: each chunk is a flat tensor
named `<tensor>[<start>:<stop>]`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from zeroshard.checkpoint import files
from zeroshard.checkpoint.index import BLOCK_BYTES, DIGEST_LENGTH, Chunk, Index, digest_of, num_blocks
from zeroshard.checkpoint.manifest import FileEntry, Run, TensorEntry
from zeroshard.comm.ranges import phase
from zeroshard.errors import InvalidValue
from zeroshard.io.tensor_file import DTYPE_NAMES, MAX_HEADER_BYTES, bytes_of
from zeroshard.layout.interval import Interval, round_up

SYNC_BYTES = 256 << 20
"""Bytes between two fsyncs, so that no single fsync takes so long that the rank seems to have stopped."""


@dataclass(frozen=True)
class Item:
    """Elements `interval` of the flattened tensor `name`, which this rank writes.

    Attributes:
        shape: of the whole tensor.
        read: interval inside `interval` -> its current values, [numel], on any device; valid until the next call.

    Raises:
        ValueError: safetensors files do not have this dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    interval: Interval
    read: Callable[[Interval], Tensor]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NAMES:
            raise InvalidValue(f"{self.name} has the dtype {self.dtype}, which safetensors files do not have")

    @property
    def num_bytes(self) -> int:
        return self.interval.numel * self.dtype.itemsize

    def blocks(self, part: Interval | None = None) -> Iterable[Interval]:
        """The interval, or a part of it, in steps of BLOCK_BYTES."""
        step, part = BLOCK_BYTES // self.dtype.itemsize, self.interval if part is None else part
        for start in range(part.start, part.stop, step):
            yield Interval(start, min(start + step, part.stop))

    def copied(self) -> Item:
        """The same item with a copy of the current values, on the CPU."""
        values = torch.empty(self.interval.numel, dtype=self.dtype, device="cpu")
        origin = self.interval.start
        for block in self.blocks():
            values[block.relative_to(origin).slice].copy_(self.read(block))
        return replace(self, read=lambda block: values[block.relative_to(origin).slice])


@dataclass(frozen=True)
class FilePlan:
    """The plan of a file. `header`: including the eight bytes of its length."""

    items: tuple[Item, ...]
    header: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(item.num_bytes for item in self.items)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index. They are known before anything is written, as all digests have one length."""
        one = "0" * DIGEST_LENGTH
        return len(self.index(one, (one * num_blocks(item.num_bytes) for item in self.items)).encode())

    @classmethod
    def of(cls, items: Iterable[Item], metadata: dict[str, str], *, whole: bool = False) -> FilePlan:
        """Plan a file of these items. Empty items are not in the file, only in the manifest. `whole`: items are whole
        tensors, and the file lists all of them by their own names and shapes."""
        # Wide dtypes first: safetensors does not require alignment, but this keeps every tensor aligned for readers
        # that map the file.
        ordered = tuple(sorted(items, key=lambda item: -item.dtype.itemsize))
        header: dict[str, object] = {"__metadata__": metadata}
        end = 0
        for item in ordered:
            if item.interval or whole:
                header[item.name if whole else f"{item.name}[{item.interval.start}:{item.interval.stop}]"] = {
                    "dtype": DTYPE_NAMES[item.dtype],
                    "shape": item.shape if whole else [item.interval.numel],
                    "data_offsets": [end, end + item.num_bytes],
                }
                end += item.num_bytes
        text = json.dumps(header).encode()
        text = text.ljust(round_up(len(text), 8))
        if len(text) > MAX_HEADER_BYTES:
            raise InvalidValue(
                f"a file of {len(ordered)} tensors would have a header of {len(text)} bytes, and safetensors files "
                f"{MAX_HEADER_BYTES} at most: save on more ranks, or fewer tensors"
            )
        return cls(ordered, struct.pack("<Q", len(text)) + text)

    def index(self, header_digest: str, digests: Iterable[str]) -> Index:
        """The index. `digests`: those of the blocks of each item, in one text."""
        chunks: dict[str, list[Chunk]] = {}
        offset = len(self.header)
        for item, of_item in zip(self.items, digests, strict=True):
            if item.interval:
                chunks.setdefault(item.name, []).append(Chunk(offset, item.interval, of_item))
            offset += item.num_bytes
        in_order = {name: tuple(sorted(of, key=lambda chunk: chunk.interval.start)) for name, of in chunks.items()}
        return Index(len(self.header), header_digest, in_order)

    def entries(self, file: int) -> dict[str, TensorEntry]:
        """What the manifest says of the file, whose number is `file`: its part of each tensor."""
        entries: dict[str, TensorEntry] = {}
        for item in self.items:
            entries.setdefault(item.name, TensorEntry(item.name, item.shape, item.dtype, ()))
        for name, part in self.index("", [""] * len(self.items)).parts():
            runs = (*entries[name].runs, Run(file, part.start, part.numel))
            entries[name] = replace(entries[name], runs=runs)
        return entries


@phase("save: write")
def write_file(path: Path, plan: FilePlan, tick: Callable[[], None]) -> list[str]:
    """Write and sync a file. Returns for each item the digests of its blocks, in one text. `tick`: called between
    blocks; may raise."""
    digests = []
    file = files.create(path)
    try:
        files.write_all(file, plan.header)
        unsynced = 0
        for item in plan.items:
            of_item = []
            for block in item.blocks():
                values = item.read(block).cpu().contiguous()
                data = bytes_of(values)
                of_item.append(digest_of(data))
                files.write_all(file, data)
                unsynced += len(data)
                if unsynced >= SYNC_BYTES:
                    files.sync(file)
                    unsynced = 0
                tick()
            digests.append("".join(of_item))
        files.sync(file)
    finally:
        files.close(file)
    return digests


def write_with_index(path: Path, plan: FilePlan, tick: Callable[[], None]) -> FileEntry:
    """Write and sync a file and its index. See `write_file`."""
    digests = write_file(path, plan, tick)
    index = plan.index(digest_of(plan.header), digests).encode()
    entry = FileEntry(path.name, plan.num_bytes, len(index), digest_of(index))
    files.write_new(path.with_name(entry.index_name), index)
    return entry
