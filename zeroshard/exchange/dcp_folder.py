"""Reads folders of `torch.distributed.checkpoint` (DCP), as FSDP2 and others save them, without unpickling anything.

    .metadata       for each name a tensor (size, dtype, boxes), or "bytes"; and the slice of each (`dcp_metadata.py`)
    __0_0.distcp    consecutive slices: each is the torch.save of one tensor, or of one other value

A slice is a zip archive: `data.pkl` describes the layout of the bytes in `data/0`. There are no digests: damage to the
bytes of a tensor is not detected.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import files
from zeroshard.exchange.dcp_metadata import DTYPES_BY_NAME, METADATA, Box, Boxed, Slice, read_metadata
from zeroshard.exchange.pickles import Name, Persistent, Recipe, read_pickle
from zeroshard.io.checked import MAX_NUMEL, CheckpointError, integer, reading, refuse, short, typed
from zeroshard.io.tensor_file import OpenFiles, are_defined, bytes_of
from zeroshard.layout.interval import Interval

MAX_ITEMS = 1_000_000
"""The most items of a plain value."""
MAX_VALUE_BYTES = 16 << 20
"""The most bytes that are read of one slice, apart from the bytes of a tensor."""

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
    *("torch.storage.UntypedStorage", *_REBUILD, "torch.Size", "collections.OrderedDict", *DTYPES_BY_NAME, *_MADE),
}


@dataclass(frozen=True)
class _Strided:
    """Where the elements of a box lie in its file: `offset` in bytes, the rest in elements. `marks`: "conj" and "neg",
    if what lies there is the conjugate, or the negative, of the values."""

    offset: int
    numel: int
    start: int
    strides: tuple[int, ...]
    marks: frozenset[str]


_OF_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(ValueError, TypeError, KeyError, EOFError, RuntimeError),
)


class DcpFolder(OpenFiles):
    """An open folder. Use it in a `with` statement.

    Attributes:
        tensors: name -> tensor.
        values: name -> slice of a value that is not a tensor.

    Raises (in all methods):
        CheckpointError: something is missing, damaged, or not written by DCP.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._held: tuple[str, Tensor | list[_Strided]] | None = None  # name and places (or values) of the last tensor
        self.tensors, self.values = read_metadata(folder / METADATA)

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
                start = place.start + common.start - interval.start
                self._fill(box.slice.file, values[common.relative_to(part.start).slice], place, start)
        return values

    def _assembled(self, tensor: Boxed, places: list[_Strided]) -> Tensor:
        """The whole tensor, flattened. Needs memory for the tensor, one box, and one byte per element."""
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        seen = torch.zeros(tensor.shape, dtype=torch.bool, device="cpu")
        for box, place in zip(tensor.boxes, places, strict=True):
            storage = torch.empty(place.numel, dtype=tensor.dtype, device="cpu")
            self._fill(box.slice.file, storage, place, 0)
            where = tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))
            values[where] = storage.as_strided(box.sizes, place.strides, place.start)
            seen[where] = True
        if not bool(seen.all()):
            refuse(f"{self.folder}: the boxes of a tensor overlap, or leave a gap")
        return values.reshape(-1)

    def _fill(self, name: str, values: Tensor, place: _Strided, first: int) -> None:
        """Read the elements from number `first` on."""
        with reading(self.folder / name):
            files.fill(self._file(name), bytes_of(values), place.offset + first * values.element_size())
        if not are_defined(values):
            refuse(f"{self.folder / name}: bytes that are neither true nor false")
        if "conj" in place.marks:
            torch.conj_physical_(values)
        if "neg" in place.marks:
            values.neg_()

    def _place(self, box: Box, dtype: torch.dtype) -> _Strided:
        with self._reading(box.slice) as archive:
            made = archive.pickled()
            if not isinstance(made, Recipe) or made.of not in _REBUILD or len(made.args) < 6:
                refuse("something else where a tensor is expected")
            storage, start, shape, strides = made.args[:4]
            parts = storage.id if isinstance(storage, Persistent) else None
            if not isinstance(parts, tuple) or len(parts) != 5 or not isinstance(parts[1], Name):
                refuse("a tensor without a storage")
            named, *marks = [*([None] if made.of == _REBUILD[0] else ()), *made.args[6:]] or [None]
            stored = DTYPES_BY_NAME.get(named.text) if isinstance(named, Name) else None
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
            return _Strided(box.slice.offset + offset, numel, start, strides, _marks(marks, dtype))

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
        with reading(self.folder / name):
            return self.opened(self.folder / name)


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
        return DTYPES_BY_NAME.get(value.text, value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _marks(given: Sequence[Any], dtype: torch.dtype) -> frozenset[str]:
    """Those of a tensor that is a conjugate or negative view: the last argument of its pickle, a dict."""
    found = [name for marks in given for name, is_set in typed(marks, dict, "marks of a tensor").items() if is_set]
    if not {*found} <= {"conj", "neg"} or (found and not (dtype.is_complex or dtype.is_floating_point)):
        refuse(f"a tensor of {dtype} with the marks {short(tuple(found))}")
    return frozenset(found)


def _in_order(box: Box, place: _Strided) -> bool:
    """Whether the elements of the box are contiguous in the file."""
    step, expected = 1, []
    for size in reversed(box.sizes):
        expected.append((size, step))
        step *= size
    return all(size == 1 or stride == s for (size, s), stride in zip(reversed(expected), place.strides, strict=True))
