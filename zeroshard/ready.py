"""Checks before parameters are sharded: they have values and no other owner, and are the same on all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from zeroshard.errors import InvalidType, InvalidValue
from zeroshard.full_model.materialize import META, Source
from zeroshard.handle import handle_of
from zeroshard.model.paths import Modules
from zeroshard.model.places import has_place, is_dense, overlaps, place_of
from zeroshard.model.trees import tensors_kept_by
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.placement import Plan


def device_of(tensors: Iterable[Tensor]) -> torch.device | None:
    """The device of the first tensor on an accelerator, else of the first tensor (ignored ones may be on the CPU)."""
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_meta))
    return next(iter(sorted(devices, key=lambda device: device.type == "cpu")), None)


def expect_ready(
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    left_alone: Mapping[str, nn.Parameter],
    device: torch.device,
    materialize: Source | None,
) -> None:
    """
    Args:
        parameters, buffers: the managed ones.
        left_alone: the ignored parameters.
        device: on which the model is to train.
        materialize: the argument of `shard`, for a model on the meta device.

    Raises:
        TypeError: `materialize` is neither a function nor a path.
        ValueError: the model has no values and `materialize` is None, or it has values and `materialize` is given; a
            parameter is sharded already, was made in inference mode, or is on another device.
    """
    if not (materialize is None or callable(materialize) or isinstance(materialize, (str, os.PathLike))):
        raise InvalidType(
            "materialize must be a function that initialises a module, or the path of a model.safetensors, found "
            f"{materialize!r}: for PyTorch's own initialisation write materialize=lambda module: "
            "module.reset_parameters() if list(module.parameters(recurse=False)) else None"
        )
    on_meta = [name for name, tensor in {**parameters, **buffers}.items() if tensor.is_meta]
    if on_meta and materialize is None:
        raise InvalidValue(
            f"{on_meta[0]} is on the meta device: pass materialize= a function that initialises a module, or a "
            "safetensors file"
        )
    if materialize is not None and len(on_meta) < len(parameters):
        raise InvalidValue("materialize= is for models on the meta device; this one has values already")
    for name, parameter in left_alone.items():
        if parameter.is_meta:
            raise InvalidValue(f"{name} is ignored, and on the meta device: give it values before shard()")
    for name, parameter in parameters.items():
        if taken := _taken(parameter):
            raise InvalidValue(f"parameter {name} {taken}")
        if parameter.is_inference():
            raise InvalidValue(
                f"parameter {name} was made inside torch.inference_mode(), and no gradient can be computed with it: "
                "build the model outside of that block, or copy it there, model = copy.deepcopy(model)"
            )
        if parameter.device.type not in (device.type, "meta"):
            raise InvalidValue(
                f"parameter {name} is on {parameter.device}, and this process group moves {device.type} tensors: "
                f"call model.to({device.type!r}) first, or zeroshard.init with another backend"
            )
        if parameter.device not in (device, META):
            raise InvalidValue(
                f"parameter {name} is on {parameter.device}, others on {device}: call model.to({str(device)!r}) first. "
                "A rank has the whole model on one device"
            )


def expect_dense(buffers: Mapping[str, Tensor]) -> None:
    """
    Raises:
        ValueError: a buffer has values that cannot be compared, nor sent to other ranks.
    """
    for name, buffer in buffers.items():
        if buffer.layout is not torch.strided or buffer.is_quantized or buffer.is_nested:
            kind = "nested" if buffer.is_nested else "quantised" if buffer.is_quantized else f"of {buffer.layout}"
            raise InvalidValue(
                f"buffer {name} is {kind}: only dense ones are sent from rank 0 to the others. Name it in ignored=, "
                "if each rank computes its own"
            )


def expect_registered(modules: Modules) -> None:
    """
    Raises:
        ValueError: the model lists a parameter that no module has: its class has a `parameters()` of its own.
    """
    model = modules[""]
    registered = {id(one) for module in modules.values() for one in module._parameters.values()}
    for parameter in chain(model.parameters(), dict(model.named_parameters()).values()):
        if id(parameter) not in registered:
            raise InvalidValue(
                f"{type(model).__name__}.parameters() lists a parameter of shape {tuple(parameter.shape)} that no "
                "module has registered, so nobody would reduce its gradient: make it an attribute of a module "
                "(self.weight = nn.Parameter(...)), or keep several in an nn.ParameterList"
            )


def expect_apart(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
    """Check that no element of a parameter is also one of another parameter, or of a buffer.

    Raises:
        ValueError: two tensors overlap: they would be trained apart.
    """
    named = {**parameters, **buffers}.items()
    for name, other in overlaps((name, one) for name, one in named if has_place(one) and is_dense(one)):
        if name in parameters or other in parameters:
            raise InvalidValue(
                f"{name} and {other} have the same memory, and would be trained apart: tie weights by one parameter in "
                "both places (b.weight = a.weight), which may be transposed in forward; or give one of them a copy"
            )


def give_own_versions(parameters: Sequence[nn.Parameter]) -> None:
    """Parameters that were made from views of one tensor (`nn.Parameter(fused[:n])`) share its version counter. A mark
    that the engine sets on one of them would look like a write to the others, so each gets a counter of its own. One
    that has hooks, a gradient or attributes, or that something else refers to, is left as it is."""
    counters = torch._C._autograd._unsafe_set_version_counter
    known, different = [one._version for one in parameters], range(len(parameters))
    counters(tuple(parameters), tuple(different))
    sharing = [one for one, number in zip(parameters, different, strict=True) if one._version != number]
    counters(tuple(parameters), tuple(known))
    for one in sharing:
        has_hooks = one._backward_hooks or one._post_accumulate_grad_hooks
        if type(one) is nn.Parameter and one.grad is None and not vars(one) and not has_hooks:
            with suppress(RuntimeError):  # there are further references
                torch.utils.swap_tensors(one, nn.Parameter(one.data, one.requires_grad))  # type: ignore[no-untyped-call]


def expect_no_views(modules: Modules, parameters: Mapping[str, nn.Parameter]) -> None:
    """Check that no attribute of a module is a view of a parameter.

    Raises:
        ValueError: one is: it would keep the values that the parameter has before `shard`.
    """
    known = {id(one) for one in parameters.values()}
    of_storage: dict[int, list[tuple[range, str]]] = {}
    for name, one in parameters.items():
        if has_place(one):
            of_storage.setdefault(one.untyped_storage().data_ptr(), []).append((place_of(one), name))
    for path, module in modules.items():
        for attribute, tensor in tensors_kept_by(module):
            # (`spectral_norm` leaves a view, which it replaces in each forward. So do RNNs with the list of their
            # weights, if any of these is parametrized: it is another tensor in each.)
            is_replaced = f"{attribute}_orig" in module._parameters
            is_replaced = is_replaced or (attribute == "_flat_weights" and is_parametrized(module))
            if id(tensor) in known or not has_place(tensor) or is_replaced:
                continue
            for place, name in of_storage.get(tensor.untyped_storage().data_ptr(), ()):
                if max(place.start, (mine := place_of(tensor)).start) < min(place.stop, mine.stop):
                    where = f"{path}.{attribute}".lstrip(".")
                    raise InvalidValue(
                        f"the attribute {where} is a view of parameter {name}: shard() moves the weights, and the view "
                        "would keep their old values. Compute it in forward, or let it be a copy (.clone())"
                    )


def _taken(parameter: nn.Parameter) -> str:
    """Which handle has the parameter, in words; "" if none. (Words, as an error that held the handle would keep it
    alive.)"""
    other = handle_of(parameter)
    if other is None or other.engine.life.is_over:  # over: of a shard() that was interrupted
        return ""
    if other.plan.external_gradients:
        return (
            "belongs to a ShardedOptimizer that was built before shard(): call shard() first, then "
            "ShardedOptimizer(handle, ...)"
        )
    return (
        f"is sharded already, as {other!r}: close() that handle first. Models that share modules are sharded as one: "
        "shard(nn.ModuleList([actor, critic]), ...). A part that keeps its own handle (experts of other ranks) belongs "
        "in ignored="
    )


def in_lines(parameters: dict[str, nn.Parameter], specs: Sequence[UnitSpec], plan: Plan) -> list[str]:
    """Plan, parameters and units, for `expect_same_model`."""
    placements = (plan.weights, plan.grads, plan.main)
    lines = [f"plan {plan.name}", "placements " + ", ".join(placement.value for placement in placements)]
    lines += [f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for name, p in parameters.items()]
    return lines + [f"unit {spec.name} of {len(spec.names)} parameters, {spec.precision}" for spec in specs]
