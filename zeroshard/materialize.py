"""Models that were built on the meta device get their values one module, or one fragment, at a time.

No rank ever holds more than its own part and the parameters of one module (or the fragments of one parameter).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.collectives import Collectives
from zeroshard.interval import Interval
from zeroshard.unit import Unit, plain_name

META = torch.device("meta")
Source = Callable[[nn.Module], None] | str | os.PathLike[str]


def is_on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def move(model: nn.Module, source: torch.device, target: torch.device) -> None:
    """From the meta device, or back to it. Every parameter stays the object it is; away from the meta device it reads
    as NaN, and takes no memory. Buffers do."""
    for parameter in model.parameters():
        if parameter.device.type == source.type:
            nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=target).expand(parameter.shape)
            moved = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
            moved.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, moved)  # type: ignore[no-untyped-call]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == source.type:
                module._buffers[name] = torch.empty_like(buffer, device=target)


def materialize(model: nn.Module, units: Sequence[Unit], source: Source, collectives: Collectives) -> None:
    """Give the units of a model that has left the meta device their values. Weights that rest in full have to be
    gathered then.

    Raises:
        ValueError: a file without, or with other, parameters.
    """
    if callable(source):
        _initialize(model, units, source, collectives)
    else:
        _read(model, units, Path(source))


def _initialize(
    model: nn.Module, units: Sequence[Unit], init: Callable[[nn.Module], None], collectives: Collectives
) -> None:
    """As `model.apply(init)`, with the values of one module at a time; rank 0's win."""
    place = {id(p): (unit, index) for unit in units for index, p in enumerate(unit.parameters)}
    for module in _children_first(model):
        own = [p for p in module._parameters.values() if p is not None]  # a shared one is filled by the last who has it
        absent = [parameter.data for parameter in own]
        problem = ""
        for parameter in own:
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        try:
            with torch.no_grad():
                init(module)
        except Exception as error:
            problem = repr(error)
        problems = collectives.exchange_objects(problem)
        if any(problems):
            raise ValueError(f"materialize, at a {type(module).__name__}: {next(filter(None, problems))}")
        collectives.broadcast([*(parameter.data for parameter in own), *module.buffers(recurse=False)])
        for parameter, before in zip(own, absent, strict=True):
            unit, index = place[id(parameter)]
            unit.take(index, partial(_part, parameter.data.reshape(-1)))
            parameter.data = before


def _part(values: Tensor, param: Interval) -> Tensor:
    return values[param.slice]


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """The order of `Module.apply`."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _read(model: nn.Module, units: Sequence[Unit], path: Path) -> None:
    """Of each parameter, the rows of a safetensors file that hold what this rank keeps."""
    files = _Files(path)
    wanted: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        wanted.setdefault(plain_name(name), tensor)
    persistent = {plain_name(name) for name in model.state_dict(keep_vars=True)}
    present = set(files.names)
    found_as = {id(tensor): name for name, tensor in wanted.items() if name in present}
    missing = sorted(n for n, tensor in wanted.items() if id(tensor) not in found_as and n in persistent)
    unexpected = sorted(present - set(wanted))
    if missing or unexpected:
        raise ValueError(f"{path}: missing {missing[:5] or 'nothing'}, unexpected {unexpected[:5] or 'nothing'}")
    for unit in units:
        for index, parameter in enumerate(unit.parameters):
            unit.take(index, files.reader(found_as[id(parameter)], tuple(parameter.shape)))
    for buffer in model.buffers():
        if id(buffer) in found_as:
            buffer.copy_(files.tensor(found_as[id(buffer)]))


class _Files:
    """One safetensors file, or a folder with an index of several."""

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(
                "reading a safetensors file needs the package safetensors: pip install safetensors"
            ) from error
        open_file: Callable[..., Any] = safe_open
        index = path / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {file: open_file(path / file, framework="pt") for file in set(names.values())}
            self._file_of: dict[str, Any] = {name: files[file] for name, file in names.items()}
        else:
            file = path / "model.safetensors" if path.is_dir() else path
            if not file.is_file():
                raise ValueError(f"materialize: there is no file {file}")
            opened = open_file(file, framework="pt")
            self._file_of = dict.fromkeys(opened.keys(), opened)

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._file_of[name].get_tensor(name)
        return found

    def reader(self, name: str, shape: tuple[int, ...]) -> Callable[[Any], Tensor]:
        """Interval of the flattened parameter -> its values; whole rows are read."""
        rows = self._file_of[name].get_slice(name)
        if tuple(rows.get_shape()) != shape:
            raise ValueError(f"{name}: expected shape {shape}, found {tuple(rows.get_shape())}")
        if len(shape) < 2 or not all(shape):
            return lambda param: self.tensor(name).reshape(-1)[param.slice]
        row = torch.Size(shape[1:]).numel()

        def read(param: Any) -> Tensor:
            first, last = param.start // row, -(-param.stop // row)
            values: Tensor = rows[first:last].reshape(-1)
            return values[param.start - first * row : param.stop - first * row]

        return read
