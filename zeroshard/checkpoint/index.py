"""The index of one file of a checkpoint: which intervals of which tensors lie where in it, with their digests.

    {"header_bytes": ..., "digest": "<of the header>",
     "tensors": {"model/embed.weight": [[offset, start, stop, "<digests>"], ...], ...}}

A chunk is an interval of a flattened tensor: elements [start, stop), at byte `offset` of the file, with one digest for
each BLOCK_BYTES. The chunks of a tensor are in order and do not overlap. Every byte of the file belongs to its header
or to one chunk, so the digests cover everything. The manifest has the digest of the index.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from zeroshard.io.checked import MAX_NUMEL, integer, parse_json, refuse, short, typed
from zeroshard.io.tensor_file import MAX_HEADER_BYTES
from zeroshard.layout.interval import Interval

BLOCK_BYTES = 1 << 20
DIGEST_LENGTH = 32
_DIGESTS = re.compile(rf"(?:[0-9a-f]{{{DIGEST_LENGTH}}})*")


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """The first 128 bits of SHA-256, as 32 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:DIGEST_LENGTH]


def expect_digests(text: Any, count: int, what: str) -> str:
    """`count` digests, one after the other.

    Raises:
        CheckpointError: it is another text.
    """
    if len(typed(text, str, what)) != count * DIGEST_LENGTH or not _DIGESTS.fullmatch(text):
        refuse(f"{what} must be {count} digests of {DIGEST_LENGTH} hexadecimal digits, found {short(text)}")
    return str(text)


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements `interval` of a flattened tensor, from byte `offset` of the file. `digests`: of its blocks, one after
    the other in one text, as a large file has millions."""

    offset: int
    interval: Interval
    digests: str

    def digest(self, block: int) -> str:
        return self.digests[block * DIGEST_LENGTH : (block + 1) * DIGEST_LENGTH]


class Typed(Protocol):
    """What an index needs to know of a tensor."""

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class Index:
    """See the module's note. `header_bytes`: including the eight bytes of the header's length. `digest`: of the
    header."""

    header_bytes: int
    digest: str
    chunks: dict[str, tuple[Chunk, ...]]

    def encode(self) -> bytes:
        tensors = {
            name: [[c.offset, c.interval.start, c.interval.stop, c.digests] for c in chunks]
            for name, chunks in self.chunks.items()
        }
        body = {"header_bytes": self.header_bytes, "digest": self.digest, "tensors": tensors}
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, tensors: Mapping[str, Typed]) -> Index:
        """
        Args:
            tensors: those of the manifest.

        Raises:
            CheckpointError: the bytes cannot be the result of `encode`.
        """
        body = typed(parse_json(data), dict, "the index")
        chunks = {}
        for name, items in typed(body.get("tensors"), dict, "tensors").items():
            if name not in tensors:
                refuse(f"has the tensor {short(name)}, which the manifest does not have")
            chunks[name] = tuple(
                decoded_chunk(name, tensors[name].dtype, item) for item in typed(items, list, "chunks")
            )
        header_bytes = integer(body.get("header_bytes"), "header_bytes", MAX_HEADER_BYTES)
        return cls(header_bytes, expect_digests(body.get("digest"), 1, "the header's digest"), chunks)

    def parts(self) -> Iterator[tuple[str, Interval]]:
        """The intervals of each tensor in this file; chunks that touch are one.

        Raises:
            CheckpointError: chunks of a tensor overlap, or are not in order.
        """
        for name, chunks in self.chunks.items():
            part = Interval(0, 0)
            for chunk in chunks:
                if chunk.interval.start < part.stop:
                    refuse(f"has chunks of {short(name)} that overlap, or are not in order")
                if chunk.interval.start > part.stop and part:
                    yield name, part
                    part = chunk.interval
                else:
                    part = Interval(part.start if part else chunk.interval.start, chunk.interval.stop)
            yield name, part

    def expect_covers(self, num_bytes: int, tensors: Mapping[str, Typed]) -> None:
        """Check that header and chunks cover a file of `num_bytes` without gaps and overlaps.

        Raises:
            CheckpointError: they do not.
        """
        if self.header_bytes < 8:
            refuse(f"a file cannot have a header of {self.header_bytes} bytes")
        places = [(0, self.header_bytes)]
        for name, chunks in self.chunks.items():
            itemsize = tensors[name].dtype.itemsize
            places += [(chunk.offset, chunk.offset + chunk.interval.numel * itemsize) for chunk in chunks]
        places.sort()
        if places[-1][1] != num_bytes or any(a[1] != b[0] for a, b in pairwise(places)):
            refuse(f"has chunks that overlap, or leave a gap, or do not end with the file of {num_bytes} bytes")


def decoded_chunk(name: str, dtype: torch.dtype, item: Any) -> Chunk:
    """[offset, start, stop, digests] as a chunk.

    Raises:
        CheckpointError: it is no valid chunk.
    """
    what = f"a chunk of {short(name)}"
    if len(typed(item, list, what)) != 4:
        refuse(f"{what} must have four parts, found {len(item)}")
    offset, start, stop = (integer(number, what, 1 << 62) for number in item[:3])
    if not start < stop <= MAX_NUMEL:
        refuse(f"{what} goes from {start} to {stop}")
    count = num_blocks((stop - start) * dtype.itemsize)
    return Chunk(offset, Interval(start, stop), expect_digests(item[3], count, f"the digests of {what}"))
