"""Gives models that were built on the meta device their values, one unit or one fragment at a time.

No rank holds more than its own part and the parameters of one unit (or the fragments of one parameter).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from zeroshard.model.unit_spec import plain_name
from zeroshard.storage.unit import Unit, slices_of

META = torch.device("meta")
LOOKED_AT = 1024
"""How many elements of each parameter in a file ranks compare, to find out whether they read the same weights."""
Source = Callable[[nn.Module], None] | str | os.PathLike[str]


def move(model: nn.Module, source: torch.device, target: torch.device) -> None:
    """Move a model from the meta device, or back to it. Parameters stay the same objects; off the meta device they are
    NaN and take no memory. Buffers are allocated, and hold what `_is_set` recognises as no values."""
    for parameter in model.parameters():
        if parameter.device.type == source.type:
            nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=target).expand(parameter.shape)
            moved = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
            moved.__dict__.update(parameter.__dict__)
            # Swapped, not replaced: tied modules, and optimizers of other parts, refer to this very object.
            torch.utils.swap_tensors(parameter, moved)  # type: ignore[no-untyped-call]
            # The user's hooks on gradients: the object keeps them, and autograd looks for them in what was swapped.
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                parameter._backward_hooks = parameter._backward_hooks
                parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == source.type:
                module._buffers[name] = _unset(torch.empty_like(buffer, device=target))


def materialize(
    model: nn.Module, units: Sequence[Unit], source: Source, collectives: Collectives, managed: Managed
) -> None:
    """Set main and the own shards of all units, after `move`. The caller must then gather weights that rest in full.
    Collective.

    Raises:
        ValueError: a file does not have the model's parameters or buffers, or has them with other shapes; or a function
            leaves some of them without values.
    """
    if callable(source):
        _initialize(model, units, source, collectives)
    else:
        _read(model, units, Path(source), managed, collectives)


def _initialize(
    model: nn.Module, units: Sequence[Unit], init: Callable[[nn.Module], None], collectives: Collectives
) -> None:
    """Like `model.apply(init)`, with memory for one unit at a time; rank 0's values are used."""
    place = {id(p): (unit, index) for unit in units for index, p in enumerate(unit.parameters)}
    left = {id(p): plain_name(name) for name, p in model.named_parameters() if id(p) in place}
    for modules in _by_unit(model, {of: unit for of, (unit, _) in place.items()}):
        run = partial(_fill, modules, init, place.keys())
        filled: list[tuple[nn.Parameter, Tensor]] = together(collectives, "materialize", run)
        buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
        # Broadcast always: ranks draw different random numbers unless they are seeded alike, and `init` may depend on
        # anything.
        collectives.broadcast([*(values for _, values in filled), *buffers])
        for parameter, values in filled:
            if _is_set(values):
                unit, index = place[id(parameter)]
                unit.write_slot(index, slices_of(values))
                left.pop(id(parameter), None)
    together(collectives, "materialize", partial(_expect_all_set, model, sorted(left.values())))


def _by_unit(model: nn.Module, unit_of: Mapping[int, Unit]) -> Iterator[list[nn.Module]]:
    """The modules in the order of `Module.apply`, divided where the parameters of another unit begin: ranks agree once
    for each part. `unit_of`: by id of the parameter."""
    part: list[nn.Module] = []
    before: set[Unit] = set()
    for module in _children_first(model):
        units = {unit_of[id(p)] for p in module._parameters.values() if p is not None and id(p) in unit_of}
        if units and before and units != before:
            yield part
            part = []
        before = units or before
        part.append(module)
    yield part


@torch.no_grad()
def _fill(
    modules: Iterable[nn.Module], init: Callable[[nn.Module], None], managed: Collection[int]
) -> list[tuple[nn.Parameter, Tensor]]:
    """Call the function with one module after the other. Only the module's own parameters have memory then. Returns the
    managed ones (by id) with their values."""
    filled = []
    for module in modules:
        own = [p for p in module._parameters.values() if p is not None]  # the last module that sets a shared one counts
        absent = [parameter.data for parameter in own]
        for parameter in own:
            parameter.data = _unset(torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device))
        try:
            _run(init, module, managed)
        except InvalidValue:
            raise
        except Exception as error:
            raise InvalidValue(f"at a {type(module).__name__}: {error!r}") from error
        filled += [(parameter, parameter.data) for parameter in own if id(parameter) in managed]
        for parameter, before in zip(own, absent, strict=True):
            parameter.data = before
    return filled


def _run(init: Callable[[nn.Module], None], module: nn.Module, managed: Collection[int]) -> None:
    """Call the function. Managed parameters (by id) of other modules are NaN, expanded: torch refuses most writes to
    them, but fills them with a constant.

    Raises:
        ValueError: it writes to parameters of other modules.
    """
    problem: RuntimeError | None = None
    try:
        init(module)
    except RuntimeError as error:
        if "refers to a single memory location" not in str(error):
            raise
        problem = error
    own = {id(parameter) for parameter in module._parameters.values()}
    others = [p.data for p in module.parameters() if id(p) in managed and id(p) not in own]
    inside = [values for values in others if values.numel() and values.is_floating_point()]
    if problem is not None or not all(values[(0,) * values.dim()].isnan() for values in inside):
        raise InvalidValue(
            f"the function writes parameters of modules inside the {type(module).__name__}, which were filled before: "
            "only its own have memory now. Write `if list(module.parameters(recurse=False)): module.reset_parameters()`"
        ) from problem


def _expect_all_set(model: nn.Module, parameters: Sequence[str]) -> None:
    """Raises:
    ValueError: the function has not filled these parameters, or a buffer."""
    names = [*parameters, *(plain_name(name) for name, buffer in model.named_buffers() if not _is_set(buffer))]
    if names:
        raise InvalidValue(
            f"materialize: the function has set no values for {names[:5]} ({len(names)} in all). It is called with "
            "each module, and must fill the module's own parameters, and the buffers that its __init__ computes"
        )


def _unset(tensor: Tensor) -> Tensor:
    """Fill a new tensor with what no function leaves in one: NaN, or the smallest integer. (Nothing of the kind exists
    for bool and uint8.)"""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(torch.nan)
    return tensor.fill_(torch.iinfo(tensor.dtype).min) if tensor.dtype.is_signed else tensor


def _is_set(tensor: Tensor) -> bool:
    """Whether any element has been written since `_unset`."""
    if tensor.is_floating_point() or tensor.is_complex():
        return not tensor.numel() or not bool(tensor.isnan().all())
    if not tensor.dtype.is_signed:
        return True
    return not tensor.numel() or not bool((tensor == torch.iinfo(tensor.dtype).min).all())


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """The order of `Module.apply`."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _read(model: nn.Module, units: Sequence[Unit], path: Path, managed: Managed, collectives: Collectives) -> None:
    """Read this rank's part of each parameter from a safetensors file, or from several with an index."""
    with ExitStack() as files:
        found: dict[str, TensorFile] = {}
        names: dict[int, str] = {}
        starts: dict[str, Tensor] = {}

        def look() -> None:
            found.update(open_model(path, follow_links=True))
            for file in set(found.values()):
                files.callback(file.close)
            names.update(_names_in(found, model, path, managed))
            _expect_buffers(model, names, path)
            of_model = [names[id(parameter)] for parameter in managed.parameters(model).values()]
            starts.update({name: _start_of(name, found[name]) for name in of_model})

        together(collectives, "materialize", look)
        expect_same(collectives, starts, "materialize", "Every rank must read the same files")
        try:
            _take(found, names, model, units)
        except CheckpointError as error:
            raise InvalidValue(f"materialize: {error}") from None


def _start_of(name: str, file: TensorFile) -> Tensor:
    """The first elements of a parameter, for the comparison between ranks."""
    return file.read(name, Interval(0, min(LOOKED_AT, file.tensors[name].numel)))


def _names_in(found: Mapping[str, TensorFile], model: nn.Module, path: Path, managed: Managed) -> dict[int, str]:
    """Id of each parameter and buffer -> its name in the file.

    Raises:
        ValueError: names are missing or unexpected, or a shape differs.
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


def _expect_buffers(model: nn.Module, names: Mapping[int, str], path: Path) -> None:
    """Raises:
    ValueError: a buffer was on the meta device, and is not in the file, as it is not part of the state dict."""
    lost = [plain_name(n) for n, buffer in model.named_buffers() if id(buffer) not in names and not _is_set(buffer)]
    if lost:
        raise InvalidValue(
            f"{path} has no values for the buffers {lost[:5]} ({len(lost)} in all), which state dicts leave out: set "
            "them before shard, module.buffer = values, or build only the parameters on the meta device"
        )


def _take(found: Mapping[str, TensorFile], names: Mapping[int, str], model: nn.Module, units: Sequence[Unit]) -> None:
    for unit in units:
        for index, parameter in enumerate(unit.parameters):
            name = names[id(parameter)]
            unit.write_slot(index, partial(found[name].read, name))
    for buffer in model.buffers():
        if id(buffer) in names:
            name = names[id(buffer)]
            buffer.copy_(found[name].read(name, Interval(0, buffer.numel())).view(buffer.shape))
