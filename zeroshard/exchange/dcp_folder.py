"""Reads folders of `torch.distributed.checkpoint` (DCP), as FSDP2 and others save them, without unpickling anything.

    .metadata       pickle: for each name a tensor (size, dtype, boxes), or "bytes"; and the location of each box
    __0_0.distcp    consecutive slices: each is the torch.save of one tensor, or of one other value

A box is a part of a tensor: offsets and sizes in each dimension. A slice is a zip archive: `data.pkl` describes the
layout of the bytes in `data/0`. There are no digests: damage to the bytes of a tensor is not detected.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import files
from zeroshard.exchange.pickles import Name, Persistent, Recipe, read_pickle
from zeroshard.io.checked import MAX_NUMEL, CheckpointError, checking, integer, reading, refuse, short, sizes, typed
from zeroshard.io.tensor_file import DTYPES, are_defined, bytes_of, expect_file_name, read_whole
from zeroshard.layout.interval import Interval

METADATA = ".metadata"
MAX_METADATA_BYTES = 256 << 20
MAX_ITEMS = 1_000_000
"""The most items of a plain value."""
MAX_VALUE_BYTES = 16 << 20
"""The most bytes that are read of one slice, apart from the bytes of a tensor."""

_CLASSES = "torch.distributed.checkpoint.metadata."
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}
_IN_METADATA = {
    *(_CLASSES + name for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(_CLASSES + name for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    *(_CLASSES + "_MEM_FORMAT_ENCODING", _INFO, "torch.Size", "torch.serialization._get_layout"),
    *(f"pathlib.{local}{name}" for local in ("", "_local.") for name in ("PosixPath", "WindowsPath")),
    *("collections.OrderedDict", *_DTYPES),
}
_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
}
_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_MADE: dict[str, tuple[Callable[[Any], Any], type]] = {
    **dict.fromkeys(("__builtin__.set", "builtins.set"), (set, list)),
    **dict.fromkeys(("__builtin__.frozenset", "builtins.frozenset"), (frozenset, list)),
    "collections.Counter": (Counter, dict),
}
"""Calls of a pickle that are carried out, and the type of their one argument."""
_IN_VALUES = {
    *(f"torch.{name}Storage" for name in _STORAGES),
    *("torch.storage.UntypedStorage", *_REBUILD, "torch.Size", "collections.OrderedDict", *_DTYPES, *_MADE),
}


@dataclass(frozen=True)
class Slice:
    """Bytes [offset, offset + length) of a file in the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Box:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    slice: Slice

    @property
    def numel(self) -> int:
        return torch.Size(self.sizes).numel()


@dataclass(frozen=True)
class Boxed:
    """A whole tensor, in boxes that are not empty."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @cached_property
    def intervals(self) -> tuple[Interval, ...] | None:
        """The boxes as intervals of the flattened tensor, if they are rows: then they can be read block by block."""
        row = torch.Size(self.shape[1:]).numel()
        if any(box.sizes[1:] != self.shape[1:] for box in self.boxes):
            return None
        starts = [(box.offsets[0] if box.offsets else 0) * row for box in self.boxes]
        return tuple(Interval(start, start + box.numel) for start, box in zip(starts, self.boxes, strict=True))


@dataclass(frozen=True)
class _Strided:
    """Where the elements of a box lie in its file: `offset` in bytes, the rest in elements."""

    offset: int
    numel: int
    start: int
    strides: tuple[int, ...]


_OF_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(ValueError, TypeError, KeyError, EOFError, RuntimeError),
)


class DcpFolder:
    """An open folder. Use it in a `with` statement.

    Attributes:
        tensors: name -> tensor.
        values: name -> slice of a value that is not a tensor.

    Raises (in all methods):
        CheckpointError: something is missing, damaged, or not written by DCP.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}
        self._held: tuple[str, Tensor | list[_Strided]] | None = None  # name and places (or values) of the last tensor
        path = folder / METADATA
        with checking(path):
            self.tensors, self.values = _metadata(read_pickle(read_whole(path, MAX_METADATA_BYTES), _IN_METADATA))

    def __enter__(self) -> DcpFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def value(self, name: str) -> Any:
        """A value: numbers, strings, dtypes, and lists, tuples, dicts, sets and counters of them; other objects as
        `pickles.Recipe`."""
        with self._reading(self.values[name]) as archive:
            value = archive.pickled()
            rest, count = [value], 0
            while rest:  # a few bytes of a pickle can contain the same list a million times: count before anything else
                inside = _inside(rest.pop())
                rest.extend(inside)
                count += len(inside)
                if count > MAX_ITEMS:
                    refuse(f"{name} is too large for a plain value")
            return _plain(value)

    def read(self, name: str, part: Interval) -> Tensor:
        """Elements `part` of the flattened tensor. If its boxes are rows, only these elements are read; else the whole
        tensor is assembled in memory, and kept until another one is read."""
        tensor = self.tensors[name]
        if self._held is None or self._held[0] != name:
            self._held = None
            places = [self._place(box, tensor.dtype) for box in tensor.boxes]
            rows = tensor.intervals is not None and all(map(_in_order, tensor.boxes, places))
            self._held = name, places if rows else self._assembled(tensor, places)
        held = self._held[1]
        if isinstance(held, Tensor):
            return held[part.slice]
        values = torch.empty(part.numel, dtype=tensor.dtype, device="cpu")
        for box, interval, place in zip(tensor.boxes, tensor.intervals or (), held, strict=True):
            if common := interval & part:
                start = place.offset + (place.start + common.start - interval.start) * tensor.dtype.itemsize
                self._fill(box.slice.file, values[common.relative_to(part.start).slice], start)
        return values

    def _assembled(self, tensor: Boxed, places: list[_Strided]) -> Tensor:
        """The whole tensor, flattened. Needs memory for the tensor, one box, and one byte per element."""
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        seen = torch.zeros(tensor.shape, dtype=torch.bool, device="cpu")
        for box, place in zip(tensor.boxes, places, strict=True):
            storage = torch.empty(place.numel, dtype=tensor.dtype, device="cpu")
            self._fill(box.slice.file, storage, place.offset)
            where = tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))
            values[where] = storage.as_strided(box.sizes, place.strides, place.start)
            seen[where] = True
        if not bool(seen.all()):
            refuse(f"{self.folder}: the boxes of a tensor overlap, or leave a gap")
        return values.reshape(-1)

    def _fill(self, name: str, values: Tensor, offset: int) -> None:
        with reading(self.folder / name):
            files.fill(self._file(name), bytes_of(values), offset)
        if not are_defined(values):
            refuse(f"{self.folder / name}: bytes that are neither true nor false")

    def _place(self, box: Box, dtype: torch.dtype) -> _Strided:
        with self._reading(box.slice) as archive:
            made = archive.pickled()
            if not isinstance(made, Recipe) or made.of not in _REBUILD or len(made.args) < 6:
                refuse("something else where a tensor is expected")
            storage, start, shape, strides = made.args[:4]
            parts = storage.id if isinstance(storage, Persistent) else None
            if not isinstance(parts, tuple) or len(parts) != 5 or not isinstance(parts[1], Name):
                refuse("a tensor without a storage")
            stored = _DTYPES.get(made.args[6].text) if len(made.args) > 6 and isinstance(made.args[6], Name) else None
            stored = stored or _STORAGES.get(parts[1].text.removeprefix("torch.").removesuffix("Storage"))
            if stored != dtype or shape != box.sizes:
                refuse(f"a tensor of {stored} and shape {short(shape)}, expected {dtype} and {box.sizes}")
            offset, num_bytes = archive.stored(f"data/{typed(parts[2], str, 'the key of a storage')}")
            numel = num_bytes // dtype.itemsize
            start = integer(start, "the start of a tensor", numel)
            strides = tuple(integer(n, "a stride", MAX_NUMEL) for n in typed(strides, tuple, "strides"))
            if len(strides) != len(shape):
                refuse(f"{len(strides)} strides for the shape {short(shape)}")
            last = start + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
            if num_bytes % dtype.itemsize or last >= numel:
                refuse(f"{num_bytes} bytes for a tensor of {dtype} that ends at element {last}")
            return _Strided(box.slice.offset + offset, numel, start, strides)

    @contextmanager
    def _reading(self, of: Slice) -> Iterator[_Archive]:
        where = f"{self.folder / of.file}, bytes {of.offset} to {of.offset + of.length}"
        try:
            yield _Archive(self._file(of.file), of)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{where}: {error}") from None
        except _OF_DAMAGE as error:
            raise CheckpointError(f"{where}: not what torch.save writes: {error!r:.100}") from None

    def _file(self, name: str) -> int:
        if name not in self._open:
            with reading(self.folder / name):
                self._open[name] = files.open_plain(self.folder / name)
        return self._open[name]


class _Window(io.RawIOBase):
    """A slice as a readable file; raises after MAX_VALUE_BYTES have been read."""

    def __init__(self, file: int, of: Slice) -> None:
        self._file, self._of, self._at, self._left = file, of, 0, MAX_VALUE_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._of.length)[whence]
        if self._at < 0:
            raise OSError("a negative position")
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, place: Any) -> int:
        view = memoryview(place).cast("B")
        view = view[: max(0, min(len(view), self._of.length - self._at))]
        self._left -= len(view)
        if self._left < 0:
            raise OSError(f"more than {MAX_VALUE_BYTES} bytes beside the tensor")
        files.fill(self._file, view, self._of.offset + self._at)
        self._at += len(view)
        return len(view)


class _Archive:
    """The zip archive that torch.save writes, without compression."""

    def __init__(self, file: int, of: Slice) -> None:
        if os.fstat(file).st_size < of.offset + of.length:
            refuse(f"the file ends at byte {os.fstat(file).st_size}: it has been cut off")
        self._window = _Window(file, of)
        self._zip = zipfile.ZipFile(self._window)
        self._root = self._zip.namelist()[0].partition("/")[0] if self._zip.namelist() else ""
        if f"{self._root}/byteorder" in self._zip.namelist() and self._read("byteorder") != b"little":
            refuse("its numbers are big-endian")

    def pickled(self) -> Any:
        """The saved object, without the bytes of tensors."""
        return read_pickle(self._read("data.pkl"), _IN_VALUES)

    def _read(self, name: str) -> bytes:
        info = self._info(name)
        if info.file_size > MAX_VALUE_BYTES:
            refuse(f"{name} has {info.file_size} bytes, more than {MAX_VALUE_BYTES}")
        return self._zip.read(info)

    def stored(self, name: str) -> tuple[int, int]:
        """(first byte in the slice, number of bytes) of a member of the archive."""
        info = self._info(name)
        self._window.seek(info.header_offset)
        header = self._window.read(30)
        if header is None or len(header) != 30 or header[:4] != b"PK\3\4":
            refuse(f"{name} does not begin where it should")
        start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        if start + info.file_size > self._window.seek(0, os.SEEK_END):
            refuse(f"{name} does not end where it should")
        return start, info.file_size

    def _info(self, name: str) -> zipfile.ZipInfo:
        info = self._zip.getinfo(f"{self._root}/{name}")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            refuse(f"{name} is compressed, or encrypted")
        return info


def _inside(value: Any) -> Sequence[Any]:
    """The parts of a value of a pickle."""
    if isinstance(value, Recipe):
        return value.args
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()


def _plain(value: Any) -> Any:
    """A value of a pickle, with what `_MADE` has, and with dtypes for their names."""
    if isinstance(value, Recipe) and len(value.args) == 1 and value.state is None and value.of in _MADE:
        make, kind = _MADE[value.of]
        if type(value.args[0]) is kind:
            return make(_plain(value.args[0]))
    if isinstance(value, Name):
        return _DTYPES.get(value.text, value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _in_order(box: Box, place: _Strided) -> bool:
    """Whether the elements of the box are contiguous in the file."""
    step, expected = 1, []
    for size in reversed(box.sizes):
        expected.append((size, step))
        step *= size
    return all(size == 1 or stride == s for (size, s), stride in zip(reversed(expected), place.strides, strict=True))


# The metadata ---------------------------------------------------------------------------------------------------------


def _metadata(body: Any) -> tuple[dict[str, Boxed], dict[str, Slice]]:
    state = _state(body, _CLASSES + "Metadata")
    slices: dict[tuple[str, tuple[int, ...] | None], Slice] = {}
    for index, info in typed(state.get("storage_data"), dict, "storage_data").items():
        of = _state(index, _CLASSES + "MetadataIndex")
        offset = of.get("offset")
        slices[typed(of.get("fqn"), str, "a name"), None if offset is None else _size(offset)] = _slice(info)
    tensors: dict[str, Boxed] = {}
    values: dict[str, Slice] = {}
    for name, entry in typed(state.get("state_dict_metadata"), dict, "state_dict_metadata").items():
        typed(name, str, "a name")
        if isinstance(entry, Recipe) and entry.of == _CLASSES + "BytesStorageMetadata":
            values[name] = _known(slices, name, None)
        else:
            tensors[name] = _tensor(name, _state(entry, _CLASSES + "TensorStorageMetadata"), slices)
    _expect_disjoint(tensors)
    return tensors, values


def _tensor(name: str, state: dict[str, Any], slices: dict[tuple[str, tuple[int, ...] | None], Slice]) -> Boxed:
    what = f"tensor {short(name)}"
    shape = _size(state.get("size"))
    properties = state.get("properties")
    first = properties.state[0] if isinstance(properties, Recipe) and isinstance(properties.state, tuple) else None
    dtype = _DTYPES.get(first.text) if isinstance(first, Name) else None
    if dtype is None:
        refuse(f"{what} has a dtype that is not known here: {short(first.text if isinstance(first, Name) else first)}")
    boxes = []
    for chunk in typed(state.get("chunks"), list, "chunks"):
        of = _state(chunk, _CLASSES + "ChunkStorageMetadata")
        offsets, extent = _size(of.get("offsets")), _size(of.get("sizes"))
        if not len(offsets) == len(extent) == len(shape) or any(
            a + b > c for a, b, c in zip(offsets, extent, shape, strict=True)
        ):
            refuse(f"{what} of shape {short(shape)} has a box at {short(offsets)} of sizes {short(extent)}")
        if torch.Size(extent).numel():
            boxes.append(Box(offsets, extent, _known(slices, name, offsets)))
    boxes.sort(key=lambda box: box.offsets)
    tensor = Boxed(shape, dtype, tuple(boxes))
    if sum(box.numel for box in boxes) != tensor.numel:
        refuse(f"{what} of shape {short(shape)} is not what its boxes hold")
    if tensor.intervals is not None and any(a.stop != b.start for a, b in pairwise(tensor.intervals)):
        refuse(f"the boxes of {what} overlap, or leave a gap")
    return tensor


def _expect_disjoint(tensors: dict[str, Boxed]) -> None:
    """Check that no two tensors share bytes, unless they share all (tied parameters). So a small malicious file cannot
    make the reader allocate more than the file's size."""
    with_boxes = [tensor for tensor in tensors.values() if tensor.boxes]
    parts = sorted({(box.slice.file, box.slice.offset, box.slice.length) for t in with_boxes for box in t.boxes})
    if any(a[0] == b[0] and a[1] + a[2] > b[1] for a, b in pairwise(parts)):
        refuse("has slices that overlap")
    whole: dict[tuple[Slice, ...], Boxed] = {}
    same = [tensor == whole.setdefault(tuple(box.slice for box in tensor.boxes), tensor) for tensor in with_boxes]
    if not all(same) or sum(len(slices) for slices in whole) != len(parts):
        refuse("has a slice that belongs to several tensors")
    for tensor in with_boxes:
        for box in tensor.boxes:
            if box.numel * tensor.dtype.itemsize > box.slice.length:
                refuse(f"has a box of {box.numel} elements in a slice of {box.slice.length} bytes")


def _slice(info: Any) -> Slice:
    state = _state(info, _INFO)
    name = expect_file_name(state.get("relative_path"))
    if state.get("transform_descriptors"):
        refuse(f"has transformed (compressed?) slices in {name}")
    offset, length = (integer(state.get(key), f"the {key} of a slice", 1 << 62) for key in ("offset", "length"))
    return Slice(name, offset, length)


def _known(slices: dict[tuple[str, tuple[int, ...] | None], Slice], name: str, at: tuple[int, ...] | None) -> Slice:
    if (name, at) not in slices:
        refuse(f"does not say where {short(name)} lies{'' if at is None else f', at {short(at)}'}")
    return slices[name, at]


def _state(value: Any, of: str) -> dict[str, Any]:
    """The attributes of a pickled object of that class."""
    if not isinstance(value, Recipe) or value.of != of:
        refuse(f"has something else where a {of.rpartition('.')[2]} is expected")
    return {} if value.state is None else typed(value.state, dict, "a state")


def _size(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Recipe) or value.of != "torch.Size" or len(value.args) != 1:
        refuse(f"has {short(value)} where a torch.Size is expected")
    return sizes(list(typed(value.args[0], tuple, "a size")), "a tensor")
