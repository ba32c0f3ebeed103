"""Checks before parameters are sharded: they have values and no other owner, and are the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.errors import InvalidValue
from zeroshard.handle import handle_of
from zeroshard.model.units import UnitSpec
from zeroshard.placement import Plan
from zeroshard.runtime.materialize import META, Source


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
        ValueError: the model has no values and `materialize` is None, or it has values and `materialize` is given; a
            parameter is sharded already; a parameter is on another device.
    """
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


def _taken(parameter: nn.Parameter) -> str:
    """Which handle has the parameter, in words; "" if none. (Words, as an error that held the handle would keep it
    alive.)"""
    other = handle_of(parameter)
    if other is None:
        return ""
    if other.plan.external_gradients:
        return (
            "belongs to a ShardedOptimizer that was built before shard(): call shard() first, then "
            "ShardedOptimizer(handle, ...)"
        )
    return f"is sharded already, as {other!r}: close() that handle first"


def expect_same_model(
    collectives: Collectives, parameters: dict[str, nn.Parameter], specs: Sequence[UnitSpec], plan: Plan
) -> None:
    """Compare a digest of plan, parameters and units between ranks. Collective.

    Raises:
        ValueError: on every rank: they differ; the message has the first difference.
    """
    lines = [f"plan {plan.name}"]
    lines += [f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for name, p in parameters.items()]
    lines += [f"unit {spec.name} of {len(spec.names)} parameters, {spec.precision}" for spec in specs]
    if collectives.are_alike(lines):
        return
    by_rank = collectives.exchange_objects(lines)
    for rank, theirs in enumerate(by_rank):
        if theirs != by_rank[0]:
            pairs = zip([*by_rank[0], "(nothing more)"], [*theirs, "(nothing more)"], strict=False)
            mine, other = next((a, b) for a, b in pairs if a != b)
            raise InvalidValue(f"the ranks have different models: rank 0 has {mine!r} where rank {rank} has {other!r}")
