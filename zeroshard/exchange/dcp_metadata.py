"""Reads `.metadata` of a DCP folder: the boxes of each tensor, each in a slice of a file; the slice of any other value.

A pickle, which is read without unpickling anything. A box is a part of a tensor: offsets and sizes in each dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from zeroshard.exchange.pickles import Name, Recipe, read_pickle
from zeroshard.io.checked import checking, integer, refuse, short, sizes, typed
from zeroshard.io.tensor_file import DTYPES, expect_file_name, read_whole
from zeroshard.layout.interval import Interval

METADATA = ".metadata"
MAX_METADATA_BYTES = 256 << 20

_CLASSES = "torch.distributed.checkpoint.metadata."
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
DTYPES_BY_NAME = {str(dtype): dtype for dtype in DTYPES.values()}
_IN_METADATA = {
    *(_CLASSES + name for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(_CLASSES + name for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    *(_CLASSES + "_MEM_FORMAT_ENCODING", _INFO, "torch.Size", "torch.serialization._get_layout"),
    *(f"pathlib.{local}{name}" for local in ("", "_local.") for name in ("PosixPath", "WindowsPath")),
    *("collections.OrderedDict", *DTYPES_BY_NAME),
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


def read_metadata(path: Path) -> tuple[dict[str, Boxed], dict[str, Slice]]:
    """Name -> tensor, and name -> slice of a value that is not a tensor.

    Raises:
        CheckpointError: the file is missing, damaged, or not written by DCP.
    """
    with checking(path):
        return _metadata(read_pickle(read_whole(path, MAX_METADATA_BYTES), _IN_METADATA))


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
    dtype = DTYPES_BY_NAME.get(first.text) if isinstance(first, Name) else None
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
