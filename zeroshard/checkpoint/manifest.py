"""The manifest: what a checkpoint holds and where, as frozen records; to JSON, and back with every number checked.

    {"digest": "<of the text after it>", "manifest": {
        "format": 1, "step": 12, "id": "...", "versions": {...},
        "files":   [{"name": "rank-00000.safetensors", "bytes": ..., "header_bytes": ..., "digest": ...}, ...],
        "tensors": {"model/embed.weight": {"shape": [...], "dtype": "F32",
                                           "chunks": [[file, offset, start, stop, digests], ...]}, ...},
        "values":  {...}}}

A chunk is an interval of a flattened tensor: elements [start, stop), at `offset` bytes in the file of that number, with
one digest for each BLOCK_BYTES. The chunks of a tensor are disjoint and cover it. Every byte of every file belongs to
its header or to one chunk, so the digests cover everything; the manifest's own digest covers them.

What is read here may have been damaged, or made by an enemy: whatever it is, it is either valid or a CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch

from zeroshard.interval import Interval

FORMAT = 1
BLOCK_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 256 << 20
MAX_HEADER_BYTES = 64 << 20
MAX_DIMS = 64
MAX_NUMEL = 1 << 48
MANIFEST_NAME = "manifest.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names that safetensors files use."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_PREFIX, _MIDDLE, _SUFFIX = b'{"digest": "', b'", "manifest": ', b"}\n"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be saved, or is not what it should be: what was expected and found, in which file."""


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """The first 128 bits of SHA-256, as 32 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A safetensors file: `header_bytes` with the eight of its length, `digest` over these."""

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
    """A whole tensor; its chunks in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """See the module's note. `values`: what is not a tensor (see `values.py`)."""

    step: int
    id: str
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    versions: dict[str, str]

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
        CheckpointError: bytes that `encode` cannot have made."""
        start = len(_PREFIX) + 32 + len(_MIDDLE)
        text = data[start : len(data) - len(_SUFFIX)]
        digest = data[len(_PREFIX) : len(_PREFIX) + 32]
        framed = data.startswith(_PREFIX) and data[len(_PREFIX) + 32 : start] == _MIDDLE and data.endswith(_SUFFIX)
        if not framed:
            _refuse("is not a manifest that zeroshard wrote")
        if digest_of(text).encode() != digest:
            _refuse(f"has the digest {digest_of(text)}, and says {digest!r}: it is damaged")
        try:
            body = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"is not valid JSON: {str(error)[:200]}") from None
        return cls._checked(body)

    @classmethod
    def _checked(cls, body: Any) -> Manifest:
        body = _typed(body, dict, "the manifest")
        if body.get("format") != FORMAT or isinstance(body.get("format"), bool):
            _refuse(f"has format {_short(body.get('format'))}; this version of zeroshard reads format {FORMAT}")
        files = tuple(_file(entry) for entry in _typed(body.get("files"), list, "files"))
        if len({file.name for file in files}) != len(files):
            _refuse("names a file twice")
        tensors = {
            name: decode_tensor(name, entry) for name, entry in _typed(body.get("tensors"), dict, "tensors").items()
        }
        _expect_covered(files, tensors)
        return cls(
            step=_integer(body.get("step"), "step", MAX_NUMEL),
            id=_typed(body.get("id"), str, "id"),
            files=files,
            tensors=tensors,
            values=_typed(body.get("values"), dict, "values"),
            versions=_typed(body.get("versions"), dict, "versions"),
        )


def encode_tensor(entry: TensorEntry) -> dict[str, Any]:
    chunks = [[c.file, c.offset, c.interval.start, c.interval.stop, list(c.digests)] for c in entry.chunks]
    return {"shape": list(entry.shape), "dtype": DTYPE_NAMES[entry.dtype], "chunks": chunks}


def decode_tensor(name: str, entry: Any) -> TensorEntry:
    """Raises:
    CheckpointError: a shape, a dtype or a chunk that cannot be."""
    entry = _typed(entry, dict, f"tensor {_short(name)}")
    shape = tuple(
        _integer(n, f"a size of {_short(name)}", MAX_NUMEL) for n in _typed(entry.get("shape"), list, "shape")
    )
    if len(shape) > MAX_DIMS or math.prod(n for n in shape if n) > MAX_NUMEL:
        _refuse(f"tensor {_short(name)} has the shape {_short(shape)}, which is too large")
    dtype = DTYPES.get(_typed(entry.get("dtype"), str, "dtype"))
    if dtype is None:
        _refuse(f"tensor {_short(name)} has the unknown dtype {_short(entry['dtype'])}")
    chunks = [_chunk(name, dtype, item) for item in _typed(entry.get("chunks"), list, "chunks")]
    end = 0
    for chunk in chunks:
        if chunk.interval.start != end or not chunk.interval:
            _refuse(f"tensor {_short(name)}: a chunk must start at {end}, found {chunk.interval}")
        end = chunk.interval.stop
    if end != math.prod(shape):
        _refuse(f"tensor {_short(name)} has {math.prod(shape)} elements, its chunks end at {end}")
    return TensorEntry(shape, dtype, tuple(chunks))


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def _chunk(name: str, dtype: torch.dtype, item: Any) -> Chunk:
    item = _typed(item, list, f"a chunk of {_short(name)}")
    if len(item) != 5:
        _refuse(f"tensor {_short(name)}: a chunk has five parts, found {len(item)}")
    file, offset, start, stop = (_integer(n, f"a chunk of {_short(name)}", 1 << 62) for n in item[:4])
    if not start <= stop <= MAX_NUMEL:
        _refuse(f"tensor {_short(name)}: a chunk from {start} to {stop}")
    digests = _typed(item[4], list, "digests")
    expected = num_blocks((stop - start) * dtype.itemsize)
    if len(digests) != expected or not all(isinstance(text, str) and _DIGEST.fullmatch(text) for text in digests):
        _refuse(f"tensor {_short(name)}: a chunk of {stop - start} elements needs {expected} digests")
    return Chunk(file, offset, Interval(start, stop), tuple(digests))


def _file(entry: Any) -> FileEntry:
    entry = _typed(entry, dict, "a file")
    name = _typed(entry.get("name"), str, "the name of a file")
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
        _refuse(f"names the file {_short(name)}: only plain names of files in the same folder are read")
    num_bytes = _integer(entry.get("bytes"), f"the size of {name}", 1 << 62)
    header_bytes = _integer(entry.get("header_bytes"), f"the header of {name}", MAX_HEADER_BYTES)
    if not 8 <= header_bytes <= num_bytes:
        _refuse(f"file {name} of {num_bytes} bytes cannot have a header of {header_bytes}")
    digest = _typed(entry.get("digest"), str, "digest")
    if not _DIGEST.fullmatch(digest):
        _refuse(f"file {name} has the digest {_short(digest)}")
    return FileEntry(name, num_bytes, header_bytes, digest)


def _expect_covered(files: Sequence[FileEntry], tensors: dict[str, TensorEntry]) -> None:
    """Header and chunks lie in a file one after the other, and fill it."""
    parts: list[list[tuple[int, int]]] = [[(0, file.header_bytes)] for file in files]
    for name, entry in tensors.items():
        for chunk in entry.chunks:
            if chunk.file >= len(files):
                _refuse(f"tensor {_short(name)} lies in file number {chunk.file} of {len(files)}")
            num_bytes = chunk.interval.numel * entry.dtype.itemsize
            parts[chunk.file].append((chunk.offset, chunk.offset + num_bytes))
    for file, of_file in zip(files, parts, strict=True):
        of_file.sort()
        if of_file[-1][1] != file.num_bytes or any(a[1] != b[0] for a, b in pairwise(of_file)):
            _refuse(f"the chunks in {file.name} overlap, or leave a gap, or do not end with the file")


def _typed(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        _refuse(f"{what} must be of type {kind.__name__}, found {_short(value)}")
    return value


def _integer(value: Any, what: str, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        _refuse(f"{what} must be an integer from 0 to {limit}, found {_short(value)}")
    return int(value)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool, tuple)) or value is None else type(value).__name__
    return text if len(text) <= 100 else f"{text[:100]}..."


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name twice in one object")
    return dict(pairs)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _refuse(problem: str) -> NoReturn:
    raise CheckpointError(problem)
