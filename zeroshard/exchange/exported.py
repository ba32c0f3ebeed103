"""Exports a committed step to `model.safetensors`, or to several safetensors files with an index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from zeroshard.checkpoint import files
from zeroshard.checkpoint.folders import is_step, new_id, steps
from zeroshard.checkpoint.manifest import CheckpointError
from zeroshard.checkpoint.reader import Reader
from zeroshard.checkpoint.writer import FilePlan, Item, write_file
from zeroshard.errors import AlreadyExists, InvalidValue
from zeroshard.io.refused import naming
from zeroshard.io.tensor_file import INDEX, SINGLE
from zeroshard.layout.interval import Interval

_OURS = re.compile(rf"{re.escape(SINGLE)}|{re.escape(INDEX)}|model-[0-9]{{5,}}-of-[0-9]{{5,}}\.safetensors")


def export(
    step: Path | str,
    out: Path | str,
    *,
    max_file_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    copies: bool = False,
    force: bool = False,
) -> list[Path]:
    """Write the weights and buffers of a step folder under the names of the plain model. Not collective. It holds one
    block (1 MiB) in memory at a time, and checks each against its digest.

    Files are written under temporary names, and renamed when all are complete, the index last.

    Args:
        step: a step folder.
        out: a folder; it may contain other files (a configuration, for example).
        max_file_bytes: the most bytes of tensors in one file; if that is not enough, several files and an index are
            written.
        dtype: to which floating-point tensors (except 8-bit ones) are cast; None: as stored, usually fp32 main.
        copies: True: write tied parameters once for each of their names; False: once, with the other names in the
            header, as `safetensors.torch.save_model` does.
        force: True: replace existing files of these names.

    Returns:
        The files, the index last.

    Raises:
        FileExistsError: `out` contains such files, and `force` is False.
        ValueError: `out` is a step folder, or a directory of steps; or a value would become infinite by the cast.
        CheckpointError: the step is damaged.
    """
    expect_no_checkpoints(Path(out))
    with Reader(step) as reader:
        tied = {} if copies else reader.manifest.tied
        names = reader.manifest.of_model
        if copies:
            names |= {alias: f"model/{name}" for alias, name in reader.manifest.tied.items()}
        if "__metadata__" in names:
            raise CheckpointError("__metadata__ is no name that a tensor can have in a safetensors file")
        items = [stored_item(reader, name, stored, dtype) for name, stored in sorted(names.items())]
        parts = list(_parts(items, max_file_bytes))
        single = len(parts) == 1
        file_names = [
            SINGLE if single else f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))
        ]
        work: dict[str, Callable[[Path], object]] = {}
        for file_name, part in zip(file_names, parts, strict=True):
            mine = {item.name for item in part}
            metadata = {**{alias: name for alias, name in tied.items() if name in mine}, "format": "pt"}
            plan = FilePlan.of(part, metadata, whole=True)
            work[file_name] = partial(write_file, plan=plan, tick=lambda: None)
        if not single:
            file_of = {item.name: name for name, part in zip(file_names, parts, strict=True) for item in part}
            index = {"metadata": {"total_size": sum(item.num_bytes for item in items)}, "weight_map": file_of}
            work[INDEX] = partial(files.write_new, data=json.dumps(index, indent=2, sort_keys=True).encode())
        return place(Path(out), work, _OURS, force=force)


def expect_no_checkpoints(out: Path) -> None:
    """Nothing is written into a published step, and a folder for other tools holds no steps.

    Raises:
        ValueError: `out` is a step folder, or a directory of steps.
    """
    if is_step(out) or steps(out):
        raise InvalidValue(f"{out} holds checkpoints: name another folder")


def place(out: Path, work: dict[str, Callable[[Path], object]], stale: re.Pattern[str], *, force: bool) -> list[Path]:
    """Write files (name -> function that writes it) under temporary names, then rename all of them, in this order. With
    `force`, existing files of these names, or of names that match `stale`, are replaced. The old index (the last name)
    is removed first, so that no reader finds an old index of new files.

    Raises:
        FileExistsError: there are such files, and `force` is False.
    """
    with files.made(out):
        old = [name for name in sorted(os.listdir(out)) if stale.fullmatch(name) or name in work]
        if old and not force:
            raise AlreadyExists(f"{out} holds {old[0]} already (--force replaces it)")
        unique, last = new_id(), list(work)[-1]
        temporary = {name: out / f".{name}.tmp-{unique}" for name in work}
        try:
            for name, write in work.items():
                with naming(out / name):
                    write(temporary[name])
            for name in sorted(old, key=lambda name: name not in (INDEX, last)):
                if name not in work or (name == last and len(work) > 1):
                    files.remove_file(out / name)
            for name in work:
                files.replace(temporary[name], out / name)
            files.sync_folder(out)
        finally:
            for path in temporary.values():
                with suppress(FileNotFoundError):
                    files.remove_file(path)
        return [out / name for name in work]


def stored_item(reader: Reader, name: str, stored: str, dtype: torch.dtype | None) -> Item:
    """An item for a whole stored tensor, which is read and cast block by block."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise InvalidValue(f"weights are cast to floating-point numbers of 16 bits or more, found dtype={dtype!r}")
    entry = reader.entry(stored)
    castable = entry.dtype.is_floating_point and entry.dtype.itemsize > 1
    target = dtype if dtype is not None and castable else entry.dtype

    def read(block: Interval) -> Tensor:
        values = torch.empty(block.numel, dtype=entry.dtype, device="cpu")
        reader.read_into(stored, block, values)
        cast = values.to(target)
        if target != entry.dtype and bool(cast.isinf().any()) and not torch.equal(cast.isinf(), values.isinf()):
            raise InvalidValue(f"{name} has values that are too large for {target}")
        return cast

    return Item(name, entry.shape, target, Interval(0, entry.numel), read)


def _parts(items: Sequence[Item], max_file_bytes: int | None) -> Iterator[list[Item]]:
    """The items of each file, in order, as many as fit. An item that is too large gets a file of its own."""
    part: list[Item] = []
    num_bytes = 0
    for item in items:
        if part and max_file_bytes is not None and num_bytes + item.num_bytes > max_file_bytes:
            yield part
            part, num_bytes = [], 0
        part.append(item)
        num_bytes += item.num_bytes
    yield part
