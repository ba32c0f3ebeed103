"""Plan OPTIMIZER_ONLY: a handle over parameters without a model, whose gradients other code (torch DDP) reduces.

Parameters may be added later: those of an added param group, and those that begin to require grad. They become further
units; existing units do not change. A parameter that does not require grad is not touched until it does. The name of a
parameter is its position in the optimizer, whether it trains or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.same import expect_same_model
from zeroshard.comm.together import together
from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.handle import Handle, claim_parameters, handle_of
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.model.units import refuse_unsupported
from zeroshard.placement import OPTIMIZER_ONLY
from zeroshard.precision import precision_for
from zeroshard.ranks.mesh import Mesh
from zeroshard.ranks.shared_memory import many_files
from zeroshard.ready import device_of, in_lines
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.reach import is_accumulated
from zeroshard.runtime.reduce import Reducer
from zeroshard.storage.unit import build_units


class EngineOfParameters(Engine):
    """An engine that reduces no gradients, and to which parameters can be added."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(OPTIMIZER_ONLY, (), collectives, None)

    def new_reducer(self) -> Reducer:
        return ReducedByOthers(self.units, self.collectives, self.pool, self.ledger)

    def admits(self, parameter: nn.Parameter) -> bool:
        """Also a parameter that no handle owns."""
        return handle_of(parameter) is None or super().admits(parameter)

    @property
    def is_in_backward(self) -> bool:
        """Whether a hook makes this call, inside of a backward that adds to these gradients (which has no hook of this
        engine). A callback at its end runs in no node of the graph."""
        hooked = torch._C._current_autograd_node() is not None
        return hooked and any(is_accumulated(p) for unit in self.units for p in unit.parameters)

    def expect_in_place(self) -> None:
        """As of `Engine`, with what to do where there is neither `shard` nor a handle."""
        for unit in self.units:
            for name, found in unit.weights.replaced():
                raise InvalidState(
                    f"ShardedOptimizer: the data of parameter {name} have been replaced ({found}): move and cast a "
                    "model before its optimizer is built, and write values in place, `with torch.no_grad(): "
                    "parameter.copy_(values)` (not by parameter.data = values, as "
                    "torch.nn.utils.vector_to_parameters does)"
                )

    def take_newcomers(self, parameters: Sequence[nn.Parameter], handle: Any) -> None:
        """Shard the parameters that begin to train: they are not sharded yet, and require grad or have a gradient.
        Collective; errors as of `shard_parameters`."""
        wanted = {name: parameter for name, parameter in _wanted(parameters).items() if handle_of(parameter) is None}
        found = self.collectives.by_rank(list(wanted), "a look at what requires grad")
        first = self.collectives.mesh.world.first
        for rank, theirs in found.items():
            if theirs != found[first]:
                name = f"parameter number {min({*theirs} ^ {*found[first]}, key=int)}"
                raise InvalidValue(
                    f"the ranks differ in which parameters require grad: {name} on rank {first} or on rank {rank}, not "
                    "on both. Freeze and unfreeze on every rank alike"
                )
        if wanted:
            self.take(wanted, handle)
        self.note_untaken(parameters)

    def note_untaken(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set `untaken`. `parameters`: all parameters of the optimizer."""
        self.untaken = {name: p for name, p in _named(parameters).items() if handle_of(p) is None}

    def take(self, new: dict[str, nn.Parameter], handle: Handle) -> None:
        """Add parameters, by name, with rank 0's values. Collective; errors as of `shard_parameters`."""
        parameters = list(new.values())
        together(self.collectives, "ShardedOptimizer", partial(self._expect_ready, new))
        specs = list(_specs(new, is_first=not self.units))
        expect_same_model(self.collectives, in_lines(new, specs, OPTIMIZER_ONLY))  # before any broadcast
        self.collectives.broadcast([parameter.data for parameter in parameters])
        with many_files():
            built = build_units(new, specs, OPTIMIZER_ONLY, self.collectives, first=len(self.units))
            self._work_with((*self.units, *built), self.pool)
            claim_parameters(handle, parameters)
            self.collectives.map_peers()

    def _expect_ready(self, new: dict[str, nn.Parameter]) -> None:
        for name, parameter in new.items():
            _refuse_unready(name, parameter, self.collectives)
        devices = {*(unit.weights.own().device for unit in self.units), *(p.device for p in new.values())}
        if len(devices) > 1:
            raise InvalidValue(
                f"parameters on several devices ({', '.join(sorted(map(str, devices)))}): one for each rank"
            )


class ReducedByOthers(Reducer):
    """A reducer that only keeps the records that an optimizer needs. It accumulates nothing and has no hooks. `p.grad`
    belongs to the user: it may change at any time, and gradients in it do not count as set by hand."""

    @property
    def version(self) -> object:
        return object()  # never equal: gradients may have changed

    def notice(self) -> dict[tuple[int, int], Tensor]:
        return {}

    def expect_backward(self, loss: Tensor, *, is_plain: bool) -> AbstractContextManager[None]:
        """Note that a backward begins.

        Raises:
            ValueError: `p.grad` may hold gradients of losses with another scale.
        """
        self.ledger.expect_one_scale()
        self.begin_backward()
        return nullcontext()


def shard_parameters(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> Handle:
    """A handle over the parameters that require grad, with rank 0's values. Collective.

    Raises:
        ValueError: on every rank, before anything has been changed: the ranks' parameters differ, or one cannot be
            sharded.
    """
    collectives = Collectives(Mesh.of(group, device_of(parameters)), CommLog())
    engine = EngineOfParameters(collectives)
    handle = Handle(engine)
    engine.take(_wanted(parameters), handle)
    engine.note_untaken(parameters)
    return handle


def _named(parameters: Iterable[nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters of an optimizer by name, which is the position."""
    return {str(position): parameter for position, parameter in enumerate(dict.fromkeys(parameters))}


def _wanted(parameters: Iterable[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those of them that train."""
    return {name: p for name, p in _named(parameters).items() if p.requires_grad or p.grad is not None}


def _specs(named: dict[str, nn.Parameter], *, is_first: bool) -> Iterable[UnitSpec]:
    """One unit for each dtype. Smaller units would have no use: there is no forward to gather them for."""
    dtypes = dict.fromkeys(parameter.dtype for parameter in named.values())
    for dtype in dtypes:
        names = [name for name, parameter in named.items() if parameter.dtype == dtype]
        label = "root" if is_first else f"from {next(iter(named))} on"
        if len(dtypes) > 1:
            label += f" ({str(dtype).removeprefix('torch.')})"
        yield UnitSpec(
            name=label,
            names=tuple(names),
            shapes=tuple(tuple(named[name].shape) for name in names),
            dtype=dtype,
            precision=precision_for(dtype, None),
            trainable=True,
            modules=(),
            outer=True,
        )


def _refuse_unready(name: str, parameter: nn.Parameter, collectives: Collectives) -> None:
    refuse_unsupported(name, parameter)
    if not parameter.is_floating_point():
        raise InvalidValue(f"parameter {name} is {parameter.dtype}: optimizers train floating-point numbers")
    if not parameter.is_contiguous():
        # DDP lays its buckets out by the strides that it has seen, and reads them by those of now: in another order.
        raise InvalidValue(
            f"parameter {name} has the strides {parameter.stride()} (channels_last?), and its weights will be "
            "contiguous: torch DDP, if it was built before, would mix up the elements of gradients. Make it contiguous "
            "before DDP, parameter.data = parameter.data.contiguous(); images may stay in channels_last"
        )
    if parameter.device.type != collectives.device.type:
        raise InvalidValue(
            f"parameter {name} is on {parameter.device}, and this process group moves {collectives.device.type} tensors"
        )
