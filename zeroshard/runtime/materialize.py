"""Models that were built on the meta device get their values one module, or one fragment, at a time.

No rank ever holds more than its own part and the parameters of one module (or the fragments of one parameter).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.same import expect_same
from zeroshard.comm.together import together
from zeroshard.errors import InvalidValue
from zeroshard.io.checked import CheckpointError
from zeroshard.io.tensor_file import TensorFile, open_model
from zeroshard.layout.interval import Interval
from zeroshard.model.managed import Managed
from zeroshard.model.units import plain_name
from zeroshard.storage.unit import Unit

META = torch.device("meta")
LOOKED_AT = 1024
"""Elements of each parameter in a file that ranks compare: files of other weights differ there."""
Source = Callable[[nn.Module], None] | str | os.PathLike[str]


def is_on_meta(tensors: Iterable[Tensor]) -> bool:
    return any(tensor.is_meta for tensor in tensors)


def move(model: nn.Module, source: torch.device, target: torch.device) -> None:
    """From the meta device, or back to it. Every parameter stays the object it is; away from the meta device it reads
    as NaN, and takes no memory. Buffers do."""
    for parameter in model.parameters():
        if parameter.device.type == source.type:
            nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=target).expand(parameter.shape)
            moved = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
            moved.__dict__.update(parameter.__dict__)
            # Swapped, not replaced: tied modules, and optimizers of other parts, refer to the parameter itself.
            torch.utils.swap_tensors(parameter, moved)  # type: ignore[no-untyped-call]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == source.type:
                module._buffers[name] = torch.empty_like(buffer, device=target)


def materialize(
    model: nn.Module, units: Sequence[Unit], source: Source, collectives: Collectives, managed: Managed
) -> None:
    """Give the units of a model that has left the meta device their values. Weights that rest in full have to be
    gathered then.

    Raises:
        ValueError: a file without, or with other, parameters.
    """
    if callable(source):
        _initialize(model, units, source, collectives)
    else:
        _read(model, units, Path(source), managed, collectives)


def _initialize(
    model: nn.Module, units: Sequence[Unit], init: Callable[[nn.Module], None], collectives: Collectives
) -> None:
    """As `model.apply(init)`, with the values of one module at a time; rank 0's win."""
    place = {id(p): (unit, index) for unit in units for index, p in enumerate(unit.parameters)}
    for module in _children_first(model):
        own = [p for p in module._parameters.values() if p is not None]  # a shared one is filled by the last who has it
        absent = [parameter.data for parameter in own]
        for parameter in own:
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        with torch.no_grad():
            together(collectives, f"materialize, at a {type(module).__name__}", partial(init, module), words=repr)
        taken = [parameter.data for parameter in own if id(parameter) in place]
        # Always: ranks draw other random numbers unless the user has seeded them alike, and `init` may depend on
        # anything.
        collectives.broadcast([*taken, *module.buffers(recurse=False)])
        for parameter, before in zip(own, absent, strict=True):
            if id(parameter) in place:
                unit, index = place[id(parameter)]
                unit.write_slot(index, partial(_part, parameter.data.reshape(-1)))
            parameter.data = before


def _part(values: Tensor, param: Interval) -> Tensor:
    return values[param.slice]


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """The order of `Module.apply`."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _read(model: nn.Module, units: Sequence[Unit], path: Path, managed: Managed, collectives: Collectives) -> None:
    """Of each parameter, the part of a safetensors file, or of several with an index, that this rank keeps."""
    with ExitStack() as files:
        found: dict[str, TensorFile] = {}
        names: dict[int, str] = {}
        starts: dict[str, Tensor] = {}

        def look() -> None:
            found.update(open_model(path, follow_links=True))
            for file in set(found.values()):
                files.callback(file.close)
            names.update(_names_in(found, model, path, managed))
            of_model = [names[id(parameter)] for parameter in managed.parameters(model).values()]
            starts.update({name: _start_of(name, found[name]) for name in of_model})

        together(collectives, "materialize", look)
        expect_same(collectives, starts, "materialize", "Every rank must read the same files")
        try:
            _take(found, names, model, units)
        except CheckpointError as error:
            raise InvalidValue(f"materialize: {error}") from None


def _start_of(name: str, file: TensorFile) -> Tensor:
    """Enough to know other weights by."""
    return file.read(name, Interval(0, min(LOOKED_AT, file.tensors[name].numel)))


def _names_in(found: Mapping[str, TensorFile], model: nn.Module, path: Path, managed: Managed) -> dict[int, str]:
    """Id of each parameter and buffer -> its name in the file.

    Raises:
        ValueError: missing, unexpected, or of another shape.
    """
    wanted: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if name not in managed.ignored:
            wanted.setdefault(plain_name(name), tensor)
    persistent = {plain_name(name) for name in model.state_dict(keep_vars=True)}
    found_as = {id(tensor): name for name, tensor in wanted.items() if name in found}
    missing = sorted(n for n, tensor in wanted.items() if id(tensor) not in found_as and n in persistent)
    unexpected = sorted(found.keys() - set(wanted) - set(map(plain_name, managed.ignored)))
    if missing or unexpected:
        raise InvalidValue(f"{path}: missing {missing[:5] or 'nothing'}, unexpected {unexpected[:5] or 'nothing'}")
    for name, tensor in wanted.items():
        if name in found and found[name].tensors[name].shape != tuple(tensor.shape):
            expected, shape = tuple(tensor.shape), found[name].tensors[name].shape
            raise InvalidValue(f"{path}, {name}: expected shape {expected}, found {shape}")
    return found_as


def _take(found: Mapping[str, TensorFile], names: Mapping[int, str], model: nn.Module, units: Sequence[Unit]) -> None:
    for unit in units:
        for index, parameter in enumerate(unit.parameters):
            name = names[id(parameter)]
            unit.write_slot(index, partial(found[name].read, name))
    for buffer in model.buffers():
        if id(buffer) in names:
            name = names[id(buffer)]
            buffer.copy_(found[name].read(name, Interval(0, buffer.numel())).view(buffer.shape))
