"""The manifest of a checkpoint: its tensors and where they lie, as frozen records; encoded as JSON, and checked.

    {"digest": "<of the text after it>", "manifest": {
        "format": 1, "step": 12, "id": "...", "versions": {...},
        "files":   [{"name": "rank-00000.safetensors", "bytes": ..., "header_bytes": ..., "digest": ...}, ...],
        "tensors": {"model/embed.weight": {"shape": [...], "dtype": "F32",
                                           "chunks": [[file, offset, start, stop, digests], ...]}, ...},
        "values":  {...}}}

A chunk is an interval of a flattened tensor: elements [start, stop), at `offset` bytes in the file of that number, with
one digest for each BLOCK_BYTES. The chunks of a tensor are disjoint and cover it. Every byte of every file belongs to
its header or to one chunk, so the digests cover everything; the manifest's own digest covers them.

The bytes read here may be damaged, or made by an attacker: they are either valid, or raise a CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from zeroshard.io.checked import MAX_NUMEL, integer, parse_json, refuse, short, sizes, typed
from zeroshard.io.checked import CheckpointError as CheckpointError
from zeroshard.io.tensor_file import DTYPE_NAMES as DTYPE_NAMES
from zeroshard.io.tensor_file import DTYPES, MAX_HEADER_BYTES, expect_file_name
from zeroshard.layout.interval import Interval

FORMAT = 1
BLOCK_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 256 << 20
MANIFEST_NAME = "manifest.json"

_PREFIX, _MIDDLE, _SUFFIX = b'{"digest": "', b'", "manifest": ', b"}\n"
_DIGEST = re.compile(r"[0-9a-f]{32}")


def expect_readable(num_bytes: int, what: str = "has") -> None:
    """Called before a manifest is written, so that no manifest is committed that `Reader` would refuse.

    Raises:
        CheckpointError: it is too large.
    """
    if num_bytes > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the manifest {what} {num_bytes} bytes, and no reader takes more than {MAX_MANIFEST_BYTES}: a digest for "
            "each MiB, an entry for each tensor, and the plain values of extra=. Put large values into tensors or "
            "files of their own; save a model of more than 7 TB in parts"
        )


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """The first 128 bits of SHA-256, as 32 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:32]


def digest_in(data: bytes) -> str:
    """The digest that an encoded manifest contains."""
    return data[len(_PREFIX) : len(_PREFIX) + 32].decode()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A safetensors file. `header_bytes`: including the eight bytes of its length. `digest`: of these bytes."""

    name: str
    num_bytes: int
    header_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements `interval` of a flattened tensor, from byte `offset` of file number `file`."""

    file: int
    offset: int
    interval: Interval
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A whole tensor, with its chunks in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """See the module's note. `values`: values that are no tensors (see `values.py`). The value "tied" is checked here:
    further name of a parameter -> the name under which it is stored."""

    step: int
    id: str
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    versions: dict[str, str]

    @property
    def tied(self) -> dict[str, str]:
        tied: dict[str, str] = self.values.get("tied", {})  # older checkpoints have no "tied"
        return tied

    @property
    def of_model(self) -> dict[str, str]:
        """Name of a parameter or buffer -> name of its tensor in the manifest."""
        return {name.removeprefix("model/"): name for name in self.tensors if name.startswith("model/")}

    def encode(self) -> bytes:
        body = {
            "format": FORMAT,
            "step": self.step,
            "id": self.id,
            "versions": self.versions,
            "files": [
                {"name": f.name, "bytes": f.num_bytes, "header_bytes": f.header_bytes, "digest": f.digest}
                for f in self.files
            ],
            "tensors": {name: encode_tensor(entry) for name, entry in self.tensors.items()},
            "values": self.values,
        }
        text = json.dumps(body, allow_nan=False).encode()
        return b"".join([_PREFIX, digest_of(text).encode(), _MIDDLE, text, _SUFFIX])

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Raises:
        CheckpointError: the bytes cannot be the result of `encode`."""
        start = len(_PREFIX) + 32 + len(_MIDDLE)
        text = data[start : len(data) - len(_SUFFIX)]
        digest = data[len(_PREFIX) : len(_PREFIX) + 32]
        framed = data.startswith(_PREFIX) and data[len(_PREFIX) + 32 : start] == _MIDDLE and data.endswith(_SUFFIX)
        if not framed:
            refuse("is not a manifest that zeroshard wrote")
        if digest_of(text).encode() != digest:
            refuse(f"has the digest {digest_of(text)}, and says {digest!r}: it is damaged")
        return cls._checked(parse_json(text))

    @classmethod
    def _checked(cls, body: Any) -> Manifest:
        body = typed(body, dict, "the manifest")
        if body.get("format") != FORMAT or isinstance(body.get("format"), bool):
            refuse(f"has format {short(body.get('format'))}; this version of zeroshard reads format {FORMAT}")
        files = tuple(_file(entry) for entry in typed(body.get("files"), list, "files"))
        if len({file.name for file in files}) != len(files):
            refuse("names a file twice")
        tensors = {
            name: decode_tensor(name, entry) for name, entry in typed(body.get("tensors"), dict, "tensors").items()
        }
        _expect_covered(files, tensors)
        values = typed(body.get("values"), dict, "values")
        for alias, name in typed(values.get("tied", {}), dict, "tied").items():
            if f"model/{typed(name, str, 'a tied name')}" not in tensors or f"model/{alias}" in tensors:
                refuse(f"ties {short(alias)} to {short(name)}: the first must not be stored, the second must")
        return cls(
            step=integer(body.get("step"), "step", MAX_NUMEL),
            id=typed(body.get("id"), str, "id"),
            files=files,
            tensors=tensors,
            values=values,
            versions=typed(body.get("versions"), dict, "versions"),
        )


def encode_tensor(entry: TensorEntry) -> dict[str, Any]:
    chunks = [[c.file, c.offset, c.interval.start, c.interval.stop, list(c.digests)] for c in entry.chunks]
    return {"shape": list(entry.shape), "dtype": DTYPE_NAMES[entry.dtype], "chunks": chunks}


def decode_tensor(name: str, entry: Any) -> TensorEntry:
    """Raises:
    CheckpointError: the shape, the dtype or a chunk is invalid."""
    entry = typed(entry, dict, f"tensor {short(name)}")
    shape = sizes(entry.get("shape"), f"tensor {short(name)}")
    dtype = DTYPES.get(typed(entry.get("dtype"), str, "dtype"))
    if dtype is None:
        refuse(f"tensor {short(name)} has the unknown dtype {short(entry['dtype'])}")
    chunks = [_chunk(name, dtype, item) for item in typed(entry.get("chunks"), list, "chunks")]
    end = 0
    for chunk in chunks:
        if chunk.interval.start != end or not chunk.interval:
            refuse(f"tensor {short(name)}: a chunk must start at {end}, found {chunk.interval}")
        end = chunk.interval.stop
    if end != math.prod(shape):
        refuse(f"tensor {short(name)} has {math.prod(shape)} elements, its chunks end at {end}")
    return TensorEntry(shape, dtype, tuple(chunks))


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def _chunk(name: str, dtype: torch.dtype, item: Any) -> Chunk:
    item = typed(item, list, f"a chunk of {short(name)}")
    if len(item) != 5:
        refuse(f"tensor {short(name)}: a chunk has five parts, found {len(item)}")
    file, offset, start, stop = (integer(n, f"a chunk of {short(name)}", 1 << 62) for n in item[:4])
    if not start <= stop <= MAX_NUMEL:
        refuse(f"tensor {short(name)}: a chunk from {start} to {stop}")
    digests = typed(item[4], list, "digests")
    expected = num_blocks((stop - start) * dtype.itemsize)
    if len(digests) != expected or not all(isinstance(text, str) and _DIGEST.fullmatch(text) for text in digests):
        refuse(f"tensor {short(name)}: a chunk of {stop - start} elements needs {expected} digests")
    return Chunk(file, offset, Interval(start, stop), tuple(digests))


def _file(entry: Any) -> FileEntry:
    entry = typed(entry, dict, "a file")
    name = expect_file_name(entry.get("name"), reserved=MANIFEST_NAME)
    num_bytes = integer(entry.get("bytes"), f"the size of {name}", 1 << 62)
    header_bytes = integer(entry.get("header_bytes"), f"the header of {name}", MAX_HEADER_BYTES)
    if not 8 <= header_bytes <= num_bytes:
        refuse(f"file {name} of {num_bytes} bytes cannot have a header of {header_bytes}")
    digest = typed(entry.get("digest"), str, "digest")
    if not _DIGEST.fullmatch(digest):
        refuse(f"file {name} has the digest {short(digest)}")
    return FileEntry(name, num_bytes, header_bytes, digest)


def _expect_covered(files: Sequence[FileEntry], tensors: dict[str, TensorEntry]) -> None:
    """Check that header and chunks cover each file without gaps and overlaps."""
    parts: list[list[tuple[int, int]]] = [[(0, file.header_bytes)] for file in files]
    for name, entry in tensors.items():
        for chunk in entry.chunks:
            if chunk.file >= len(files):
                refuse(f"tensor {short(name)} lies in file number {chunk.file} of {len(files)}")
            num_bytes = chunk.interval.numel * entry.dtype.itemsize
            parts[chunk.file].append((chunk.offset, chunk.offset + num_bytes))
    for file, of_file in zip(files, parts, strict=True):
        of_file.sort()
        if of_file[-1][1] != file.num_bytes or any(a[1] != b[0] for a, b in pairwise(of_file)):
            refuse(f"the chunks in {file.name} overlap, or leave a gap, or do not end with the file")
