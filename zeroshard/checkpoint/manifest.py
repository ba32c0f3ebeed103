"""The manifest of a checkpoint: its files, and which file has which part of which tensor, as frozen records; encoded as
JSON, and checked.

    {"digest": "<of the text after it>", "manifest": {
        "format": 2, "step": 12, "id": "...", "versions": {...},
        "files":   [{"name": "rank-00000.safetensors", "bytes": ..., "index_bytes": ..., "index_digest": ...}, ...],
        "tensors": {"model/embed.weight": {"shape": [...], "dtype": "F32",
                                           "runs": [[file, start, numel, count], ...]}, ...},
        "values":  {...}}}

A run is a row of files that hold equal parts: `count` files from number `file` on have `numel` elements each of the
flattened tensor, beginning with element `start`. The runs of a tensor are disjoint and cover it. As shards are equal, a
parameter has about three runs on any number of ranks. Where in a file the elements lie, and their digests, is in the
file's index (`index.py`), so that nobody has to write or read all of it.

The bytes read here may be damaged, or made by an attacker: they are either valid, or raise a CheckpointError.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from zeroshard.checkpoint.index import DIGEST_LENGTH, Index, digest_of, expect_digests
from zeroshard.io.checked import MAX_NUMEL, integer, parse_json, refuse, short, sizes, typed
from zeroshard.io.checked import CheckpointError as CheckpointError
from zeroshard.io.tensor_file import DTYPE_NAMES, DTYPES, expect_file_name
from zeroshard.layout.interval import Interval

FORMAT = 2
MAX_MANIFEST_BYTES = 256 << 20
"""The most bytes of a manifest, and of an index."""
MANIFEST_NAME = "manifest.json"

_PREFIX, _MIDDLE, _SUFFIX = b'{"digest": "', b'", "manifest": ', b"}\n"


def expect_readable(num_bytes: int, what: str = "the manifest has") -> None:
    """Called before a manifest or an index is written, so that none is committed that `Reader` would refuse.

    Raises:
        CheckpointError: it is too large.
    """
    if num_bytes > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{what} {num_bytes} bytes, and no reader takes more than {MAX_MANIFEST_BYTES}: a manifest has an entry "
            "for each file and each tensor, and the plain values of extra=; an index has a digest for each MiB of its "
            "file. Put large values into tensors or files of their own; save on more ranks"
        )


def digest_in(data: bytes) -> str:
    """The digest that an encoded manifest contains."""
    return data[len(_PREFIX) : len(_PREFIX) + DIGEST_LENGTH].decode()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A safetensors file, and its index."""

    name: str
    num_bytes: int
    index_bytes: int
    index_digest: str

    @property
    def index_name(self) -> str:
        return f"{self.name}.index.json"


@dataclass(frozen=True, slots=True)
class Run:
    """See the module's note."""

    file: int
    start: int
    numel: int
    count: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.numel * self.count

    def parts(self, wanted: Interval) -> Iterator[tuple[int, Interval]]:
        """(file, interval) of each file whose interval intersects `wanted`."""
        first = max(0, wanted.start - self.start) // self.numel
        for number in range(first, self.count):
            start = self.start + number * self.numel
            if start >= wanted.stop:
                return
            yield self.file + number, Interval(start, start + self.numel)


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same parts in as few runs as possible, by their starts."""
    found: list[Run] = []
    for run in sorted(runs, key=lambda run: run.start):
        last = found[-1] if found else None
        if last and (last.file + last.count, last.stop, last.numel) == (run.file, run.start, run.numel):
            found[-1] = replace(last, count=last.count + run.count)
        else:
            found.append(run)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A whole tensor. `stored`: its name in the indices, also if the program has another name for it."""

    stored: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: tuple[Run, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_parts(self) -> int:
        return sum(run.count for run in self.runs)

    def parts(self, wanted: Interval) -> Iterator[tuple[int, Interval]]:
        """(file, interval) of each part that intersects `wanted`, in order."""
        if wanted:
            first = bisect_right(self.runs, wanted.start, key=lambda run: run.stop)
            for run in self.runs[first:]:
                if run.start >= wanted.stop:
                    return
                yield from run.parts(wanted)


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
        tied: dict[str, str] = self.values["tied"]
        return tied

    @property
    def of_model(self) -> dict[str, str]:
        """Name of a parameter or buffer -> name of its tensor in the manifest."""
        return {name.removeprefix("model/"): name for name in self.tensors if name.startswith("model/")}

    @cached_property
    def num_parts(self) -> list[int]:
        """How many parts of tensors each file has."""
        changes = [0] * (len(self.files) + 1)
        for entry in self.tensors.values():
            for run in entry.runs:
                changes[run.file] += 1
                changes[run.file + run.count] -= 1
        return list(accumulate(changes))[:-1]

    def expect_fits(self, number: int, index: Index) -> None:
        """Check that the index of file `number` has what the manifest says, and covers the file.

        Raises:
            CheckpointError: it does not.
        """
        found = list(index.parts())
        for name, part in found:
            if list(self.tensors[name].parts(part)) != [(number, part)]:
                refuse(f"has elements {part.start} to {part.stop} of {short(name)}; the manifest says otherwise")
        if len(found) != self.num_parts[number]:
            refuse(f"has {len(found)} parts of tensors; the manifest says {self.num_parts[number]}")
        index.expect_covers(self.files[number].num_bytes, self.tensors)

    def encode(self) -> bytes:
        body = {
            "format": FORMAT,
            "step": self.step,
            "id": self.id,
            "versions": self.versions,
            "files": [encode_file(file) for file in self.files],
            "tensors": {name: encode_tensor(entry) for name, entry in self.tensors.items()},
            "values": self.values,
        }
        text = json.dumps(body, allow_nan=False).encode()
        return b"".join([_PREFIX, digest_of(text).encode(), _MIDDLE, text, _SUFFIX])

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """
        Raises:
            CheckpointError: the bytes cannot be the result of `encode`.
        """
        body = unpacked(data)
        number = body.get("format")
        if isinstance(number, bool) or number != FORMAT:
            refuse(f"has format {short(number)}; this version of zeroshard reads format {FORMAT}")
        files = tuple(decode_file(entry) for entry in typed(body.get("files"), list, "files"))
        entries = typed(body.get("tensors"), dict, "tensors").items()
        tensors = {name: decode_tensor(name, entry, len(files)) for name, entry in entries}
        if len({file.name for file in files}) != len(files):
            refuse("names a file twice")
        values = typed(body.get("values"), dict, "values")
        for alias, name in typed(values.get("tied"), dict, "tied").items():
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


def unpacked(data: bytes) -> dict[str, Any]:
    """The JSON of a manifest, after a check of its digest.

    Raises:
        CheckpointError: the bytes are no manifest, or are damaged.
    """
    start = len(_PREFIX) + DIGEST_LENGTH + len(_MIDDLE)
    text = data[start : len(data) - len(_SUFFIX)]
    digest = data[len(_PREFIX) : len(_PREFIX) + DIGEST_LENGTH]
    framed = data.startswith(_PREFIX) and data[start - len(_MIDDLE) : start] == _MIDDLE and data.endswith(_SUFFIX)
    if not framed:
        refuse("is not a manifest that zeroshard wrote")
    if digest_of(text).encode() != digest:
        refuse(f"has the digest {digest_of(text)}, and says {digest!r}: it is damaged")
    body: dict[str, Any] = typed(parse_json(text), dict, "the manifest")
    return body


# The parts of a manifest in JSON --------------------------------------------------------------------------------------


def encode_file(file: FileEntry) -> dict[str, Any]:
    return {
        "name": file.name,
        "bytes": file.num_bytes,
        "index_bytes": file.index_bytes,
        "index_digest": file.index_digest,
    }


def decode_file(entry: Any) -> FileEntry:
    """Raises:
    CheckpointError: a name, a size or a digest is invalid."""
    entry = typed(entry, dict, "a file")
    name = expect_file_name(entry.get("name"), reserved=MANIFEST_NAME)
    num_bytes = integer(entry.get("bytes"), f"the size of {name}", 1 << 62)
    index_bytes = integer(entry.get("index_bytes"), f"the size of the index of {name}", MAX_MANIFEST_BYTES)
    return FileEntry(name, num_bytes, index_bytes, expect_digests(entry.get("index_digest"), 1, "the index's digest"))


def encode_tensor(entry: TensorEntry) -> dict[str, Any]:
    runs = [encode_run(run) for run in entry.runs]
    return {"shape": list(entry.shape), "dtype": DTYPE_NAMES[entry.dtype], "runs": runs}


def encode_run(run: Run) -> list[int]:
    return [run.file, run.start, run.numel, run.count]


def decode_tensor(name: str, entry: Any, num_files: int) -> TensorEntry:
    """Raises:
    CheckpointError: the shape, the dtype or a run is invalid; the runs overlap, or are not the whole tensor."""
    entry = typed(entry, dict, f"tensor {short(name)}")
    dtype = DTYPES.get(typed(entry.get("dtype"), str, "dtype"))
    if dtype is None:
        refuse(f"tensor {short(name)} has the unknown dtype {short(entry['dtype'])}")
    shape, end = sizes(entry.get("shape"), f"tensor {short(name)}"), 0
    runs = tuple(_run(name, item, num_files) for item in typed(entry.get("runs"), list, "runs"))
    for run in runs:
        if run.start != end:
            refuse(f"tensor {short(name)}: a part must start at {end}, found {run.start}")
        end = run.stop
    if end != math.prod(shape):
        refuse(f"tensor {short(name)} has {math.prod(shape)} elements, its parts end at {end}")
    return TensorEntry(name, shape, dtype, runs)


def _run(name: str, item: Any, num_files: int) -> Run:
    if len(typed(item, list, f"a run of {short(name)}")) != 4:
        refuse(f"tensor {short(name)}: a run has four parts, found {len(item)}")
    file, start, numel, count = (integer(number, f"a run of {short(name)}", MAX_NUMEL) for number in item)
    if not count or not numel or start + numel * count > MAX_NUMEL:
        refuse(f"tensor {short(name)}: a run of {count} times {numel} elements from {start} on")
    if file + count > num_files:
        refuse(f"tensor {short(name)} lies in the files {file} to {file + count - 1} of {num_files}")
    return Run(file, start, numel, count)
