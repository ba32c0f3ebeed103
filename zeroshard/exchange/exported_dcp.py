"""Exports a committed step to a folder that `torch.distributed.checkpoint.load` reads, for FSDP2 and others."""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import files
from zeroshard.checkpoint.reader import Reader
from zeroshard.checkpoint.saved_state import plain_value, saved_entries, saved_groups, saved_optimizers
from zeroshard.checkpoint.writer import SYNC_BYTES
from zeroshard.errors import InvalidValue
from zeroshard.exchange.dcp_metadata import METADATA
from zeroshard.exchange.exported import expect_no_checkpoints, place, stored_item
from zeroshard.io.values import decode
from zeroshard.layout.interval import Interval

DATA = "__0_0.distcp"
BOX_BYTES = 16 << 20
"""Large tensors are cut into boxes of this many bytes (at least one row); one box at a time is in memory."""
_OURS = re.compile(r"__[0-9]+_[0-9]+\.distcp|\.metadata")


def export_dcp(
    step: Path | str,
    out: Path | str,
    *,
    optimizer: bool = True,
    dtype: torch.dtype | None = None,
    model_key: str = "model",
    optimizer_key: str = "optim",
    force: bool = False,
) -> list[Path]:
    """Write the folder that `dcp.save({model_key: ..., optimizer_key: ...})` would write for the state dicts of
    `torch.distributed.checkpoint.state_dict.get_state_dict`: tied weights under all their names, optimizer state by
    parameter; param groups by number, and also per parameter, as with `flatten_optimizer_state_dict`. Not collective;
    every block is checked against its digest.

    Args:
        step: a step folder.
        out: the folder to write.
        optimizer: True: also write the state of the optimizers, if the step has any.
        dtype: to which floating-point weights are cast; None: as stored.
        model_key: of the model's state dict; "" writes its names without a prefix.
        optimizer_key: of the optimizer's state dict.
        force: True: replace existing files.

    Returns:
        The data file, and `.metadata`, which is a pickle.

    Raises:
        FileExistsError: `out` contains such files, and `force` is False.
        ValueError: `out` is a step folder, or a directory of steps; parameters are named like the numbers of other
            param groups; or a value would become infinite by the cast.
        CheckpointError: the step is damaged.
    """
    expect_no_checkpoints(Path(out))
    with Reader(step) as reader:
        folder = _Folder()
        manifest = reader.manifest
        groups = [group for one in saved_optimizers(manifest) if optimizer for group in saved_groups(one)]
        _expect_no_numbers(groups)
        prefix = (model_key,) if model_key else ()

        def write(path: Path) -> None:
            file = files.create(path)
            try:
                for name, stored in manifest.of_model.items():
                    folder.add_tensor(file, (*prefix, name), reader, stored, dtype)
                for alias, name in manifest.tied.items():
                    folder.add_again((*prefix, alias), (*prefix, name))
                if optimizer:
                    _add_state(folder, file, reader, optimizer_key)
                    _add_groups(folder, file, reader, optimizer_key, groups)
                files.sync(file)
            finally:
                files.close(file)

        def write_metadata(path: Path) -> None:
            files.write_new(path, folder.metadata())

        return place(Path(out), {DATA: write, METADATA: write_metadata}, _OURS, force=force)


def _expect_no_numbers(groups: list[dict[str, Any]]) -> None:
    """Check that the two names of an option, by number of the group and by parameter, do not mean two values.

    Raises:
        ValueError: they do.
    """
    numbered = {str(number): group["options"] for number, group in enumerate(groups)}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if numbered.get(parameter, group["options"]) != group["options"]:
                raise InvalidValue(
                    f"parameter {parameter!r} is of param group {number}, and DCP has no names for its options: they "
                    f"would be those of the options of group {parameter}. Export it without the optimizer "
                    "(optimizer=False), or save a model whose parameters are not named by numbers alone"
                )


def _add_state(folder: _Folder, file: int, reader: Reader, key: str) -> None:
    for parameter, states in saved_entries(reader.manifest).items():
        for one in states:
            path = (key, "state", parameter, one.key)
            if one.kind in ("number", "value"):
                folder.add_value(file, path, plain_value(reader, one))
            else:
                folder.add_tensor(file, path, reader, one.tensor, None)


def _add_groups(folder: _Folder, file: int, reader: Reader, key: str, groups: list[dict[str, Any]]) -> None:
    for number, group in enumerate(groups):
        for option, value in {**group["options"], "params": group["params"]}.items():
            of_group = (key, "param_groups", number, option)
            stored = value.get("$tensor") if isinstance(value, dict) else None
            if isinstance(stored, str) and stored in reader.manifest.tensors:
                folder.add_tensor(file, of_group, reader, stored, None)
            else:
                folder.add_value(file, of_group, decode(value, reader.tensor))
            for parameter in group["params"] if option != "params" else ():
                folder.add_again((key, f"param_groups.{parameter}.{option}"), of_group)


class _Folder:
    """The metadata of what has been written. A path: the keys under which a value is nested in the state dict."""

    def __init__(self) -> None:
        from torch.distributed.checkpoint import filesystem, metadata

        self._make, self._info = metadata, filesystem._StorageInfo
        self._entries: dict[str, Any] = {}
        self._storage: dict[Any, Any] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._unsynced = 0

    def add_tensor(
        self, file: int, path: tuple[str | int, ...], reader: Reader, stored: str, dtype: torch.dtype | None
    ) -> None:
        name, item = self._name(path), stored_item(reader, stored, stored, dtype)
        shape, row = item.shape, torch.Size(item.shape[1:]).numel()
        rows, length = max(1, BOX_BYTES // max(1, row * item.dtype.itemsize)), shape[0] if shape else 1
        boxes = []
        for start in range(0, max(1, length), rows):
            stop = min(start + rows, length)
            values = torch.empty((stop - start) * row, dtype=item.dtype, device="cpu")
            for block in item.blocks(Interval(start * row, stop * row)):
                values[block.relative_to(start * row).slice] = item.read(block)
            values = values.view([stop - start, *shape[1:]] if shape else [])
            offsets = torch.Size([start, *[0] * (len(shape) - 1)] if shape else [])
            boxes.append(self._make.ChunkStorageMetadata(offsets, values.shape))
            self._storage[self._make.MetadataIndex(name, offsets, len(boxes) - 1)] = self._write(file, values)
        properties = self._make.TensorProperties(item.dtype)
        self._entries[name] = self._make.TensorStorageMetadata(properties, torch.Size(shape), boxes)

    def add_value(self, file: int, path: tuple[str | int, ...], value: Any) -> None:
        name = self._name(path)
        self._entries[name] = self._make.BytesStorageMetadata()
        self._storage[self._make.MetadataIndex(name)] = self._write(file, value)

    def add_again(self, path: tuple[str | int, ...], known: tuple[str | int, ...]) -> None:
        """Add a further name for a value that has been added. No effect if the name exists already."""
        name, of = ".".join(map(str, path)), ".".join(map(str, known))
        if name not in self._entries:
            self._paths[name] = path
            self._entries[name] = self._entries[of]
            for index, info in self._indices(of):
                self._storage[self._make.MetadataIndex(name, index.offset, index.index)] = info

    def _indices(self, name: str) -> list[tuple[Any, Any]]:
        offsets = [chunk.offsets for chunk in getattr(self._entries[name], "chunks", ())] or [None]
        wanted = [self._make.MetadataIndex(name, offset, i) for i, offset in enumerate(offsets)]
        return [(index, self._storage[index]) for index in wanted]

    def metadata(self) -> bytes:
        return pickle.dumps(self._make.Metadata(self._entries, self._paths, self._storage, version="1.0.0"))

    def _name(self, path: tuple[str | int, ...]) -> str:
        name = ".".join(map(str, path))
        self._paths[name] = path
        return name

    def _write(self, file: int, value: Any) -> Any:
        memory = io.BytesIO()
        torch.save(value, memory)
        written, start = memory.getvalue(), os.lseek(file, 0, os.SEEK_CUR)
        files.write_all(file, written)
        self._unsynced += len(written)
        if self._unsynced > SYNC_BYTES:
            files.sync(file)
            self._unsynced = 0
        return self._info(DATA, start, len(written))
