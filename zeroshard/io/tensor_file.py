"""Reads safetensors files from any source: checks the header, then reads any interval of any tensor.

    | length of the header, 8 bytes | header: JSON | data of the tensors, one after the other |

The format is https://github.com/huggingface/safetensors. A model is one such file, or a folder with several files and
an index that says which tensor is in which file.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from zeroshard.io.checked import CheckpointError, checking, integer, parse_json, reading, refuse, short, sizes, typed
from zeroshard.layout.interval import Interval

MAX_HEADER_BYTES = 100_000_000  # the limit of the format
MAX_OPEN_FILES = 256
"""A process may open about a thousand files; what a large run has written has more."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")

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
"""The names of dtypes in safetensors files."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor whose element 0 is at byte `offset` of the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class TensorFile:
    """An open file. Use it in a `with` statement, or close it.

    Attributes:
        tensors: name -> tensor.
        metadata: the strings of the header's `__metadata__`.

    Raises (in all methods):
        CheckpointError: the file cannot be read, is not a plain file, or its header is not valid.
    """

    def __init__(self, path: Path, *, follow_links: bool = False) -> None:
        self.path = path
        try:
            self._file = open_plain(path, follow_links=follow_links)
        except FileNotFoundError:
            raise CheckpointError(f"there is no file {path}") from None
        except OSError as error:
            hint = ": it is a link, and an import follows links with follow_links=True (--follow-links)"
            hint = hint if path.is_symlink() else ""
            raise CheckpointError(f"{path} cannot be read{hint}: {error}") from None
        try:
            with checking(path):
                self.metadata, self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> tuple[dict[str, str], dict[str, Stored]]:
        size = os.fstat(self._file).st_size
        start = bytearray(8)
        fill(self._file, memoryview(start), 0)
        (length,) = struct.unpack("<Q", start)
        if size - 8 < length <= MAX_HEADER_BYTES:
            refuse(
                f"ends at byte {size}, and its header at {8 + length}: it has been cut off, or is no safetensors file"
            )
        if not 2 <= length <= MAX_HEADER_BYTES:
            refuse(f"is no safetensors file: its first 8 bytes say that the header has {length:,} bytes, of {size:,}")
        header = bytearray(length)
        fill(self._file, memoryview(header), 8)
        return _header(header, 8 + length, size)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def read(self, name: str, part: Interval) -> Tensor:
        """Elements `part` of the flattened tensor, in new memory."""
        stored = self.tensors[name]
        values = torch.empty(part.numel, dtype=stored.dtype, device="cpu")
        with reading(self.path):
            fill(self._file, bytes_of(values), stored.offset + part.start * stored.dtype.itemsize)
        if not are_defined(values):
            refuse(f"{self.path}: {name} has bytes that are neither true nor false")
        return values


def open_model(path: Path, *, follow_links: bool = False) -> dict[str, TensorFile]:
    """Tensor name -> its file. `path`: a file, or a folder with `model.safetensors` or an index. The caller must close
    the files.

    Raises:
        CheckpointError: files are missing; the index names files outside of its folder, or does not agree with their
            contents; there is a file beside it that is a model of its own.
    """
    index = path / INDEX
    if path.is_file() or not index.is_file():
        file = TensorFile(path if path.is_file() else path / SINGLE, follow_links=follow_links)
        return dict.fromkeys(file.tensors, file)
    opened: dict[str, TensorFile] = {}
    try:
        file_of = _index(index, follow_links=follow_links)
        if (path / SINGLE).exists() and SINGLE not in file_of.values():
            refuse(f"{path} has both {SINGLE} and {INDEX}, which names other files: remove the one that is old")
        for name in sorted(set(file_of.values())):
            opened[name] = TensorFile(path / name, follow_links=follow_links)
        for name, of_file in opened.items():
            listed = {tensor for tensor, file in file_of.items() if file == name}
            if listed != set(of_file.tensors):
                odd = sorted(listed ^ set(of_file.tensors))
                refuse(f"{index} and {name} do not agree on what it holds: {short(tuple(odd[:3]))}")
        return {tensor: opened[name] for tensor, name in file_of.items()}
    except BaseException:
        for of_file in opened.values():
            of_file.close()
        raise


def open_plain(path: Path, *, follow_links: bool = False) -> int:
    """A descriptor for reading.

    Raises:
        OSError: there is no such file, or it is a link, a pipe or anything else that is not a plain file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    file = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is not a plain file")
    return file


class OpenFiles:
    """Descriptors of plain files, which are opened when they are first needed. Use it in a `with` statement."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def opened(self, path: Path, check: Callable[[int], None] = lambda file: None) -> int:
        """A descriptor for reading, valid until the next call. `check` is called with one that was opened now.

        Raises:
            OSError: as `open_plain`.
        """
        if path not in self._open:
            while len(self._open) >= MAX_OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            file = open_plain(path)
            try:
                check(file)
            except BaseException:
                os.close(file)
                raise
            self._open[path] = file
        return self._open[path]


def expect_file_name(name: Any, *, reserved: str = "") -> str:
    """Check the name of a file that an untrusted file refers to.

    Raises:
        CheckpointError: it is not a string, leads out of the folder, or is `reserved`.
    """
    if not _FILE_NAME.fullmatch(typed(name, str, "the name of a file")) or name == reserved:
        refuse(f"names the file {short(name)}: only plain names of files in the same folder are read")
    return str(name)


def are_defined(values: Tensor) -> bool:
    """Whether the bytes that were read are valid values: torch.bool may only contain the bytes 0 and 1."""
    return values.dtype is not torch.bool or not bool((values.view(torch.uint8) > 1).any())


def read_whole(path: Path, limit: int, *, follow_links: bool = False) -> bytes:
    """The contents of a small file.

    Raises:
        OSError: it cannot be read.
        CheckpointError: it is larger than `limit`.
    """
    file = open_plain(path, follow_links=follow_links)
    try:
        size = os.fstat(file).st_size
        if size > limit:
            refuse(f"has {size} bytes, more than {limit}")
        data = bytearray(size)
        fill(file, memoryview(data), 0)
        return bytes(data)
    finally:
        os.close(file)


def fill(file: int, place: memoryview, offset: int) -> None:
    """Read exactly `len(place)` bytes from `offset` on into `place`."""
    while place:
        count = os.preadv(file, [place], offset)
        if count == 0:
            raise OSError(f"it ends at byte {offset}, where more is expected: it has been cut off")
        place, offset = place[count:], offset + count


def bytes_of(tensor: Tensor) -> memoryview:
    """A view of the bytes of a contiguous CPU tensor. It does not keep the tensor alive: do not use it longer."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _header(text: bytearray, start: int, size: int) -> tuple[dict[str, str], dict[str, Stored]]:
    """Parse and check the header. The data must begin at byte `start` of the file and fill it, without gaps."""
    body = typed(parse_json(text), dict, "its header")
    metadata = typed(body.pop("__metadata__", {}), dict, "__metadata__")
    if not all(isinstance(value, str) for value in metadata.values()):
        refuse("has metadata that are not texts")
    tensors, parts = {}, [(0, 0)]
    for name, entry in body.items():
        what = f"tensor {short(name)}"
        entry = typed(entry, dict, what)
        shape = sizes(entry.get("shape"), what)
        dtype = DTYPES.get(typed(entry.get("dtype"), str, "dtype"))
        if dtype is None:
            refuse(f"{what} has the dtype {short(entry['dtype'])}, which is not known here")
        offsets = typed(entry.get("data_offsets"), list, "data_offsets")
        if len(offsets) != 2 or set(entry) != {"dtype", "shape", "data_offsets"}:
            refuse(f"{what} needs dtype, shape and two data_offsets")
        first, last = (integer(n, f"an offset of {what}", 1 << 62) for n in offsets)
        if last - first != torch.Size(shape).numel() * dtype.itemsize:
            refuse(f"{what} of shape {short(shape)} does not fill the bytes {first} to {last}")
        parts.append((first, last))
        tensors[name] = Stored(shape, dtype, start + first)
    parts.sort()
    if parts[-1][1] > size - start:
        refuse(f"ends at byte {size}, and its tensors at {start + parts[-1][1]}: it has been cut off")
    if parts[-1][1] != size - start or any(a[1] != b[0] for a, b in pairwise(parts)):
        refuse("has tensors that overlap, or leave a gap, or do not end with the file")
    return metadata, tensors


def _index(path: Path, *, follow_links: bool) -> dict[str, str]:
    """Tensor name -> file name, from an index."""
    with checking(path):
        text = read_whole(path, MAX_HEADER_BYTES, follow_links=follow_links)
        index = typed(parse_json(text), dict, "the index")
        names = typed(index.get("weight_map"), dict, "weight_map")
        return {tensor: expect_file_name(name) for tensor, name in names.items()}
