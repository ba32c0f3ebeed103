"""Plan OPTIMIZER_ONLY: a handle over parameters alone, whose gradients something else reduces (torch DDP, say).

Parameters may come later: those of an added param group, and those that have begun to require grad. They become further
units; what is there stays where it is. A parameter that does not require grad is left alone until then. The name of a
parameter is its position in the optimizer, whether it trains or not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.mesh import Mesh
from zeroshard.comm.together import together
from zeroshard.errors import InvalidValue
from zeroshard.handle import Handle, claim_parameters, handle_of
from zeroshard.model.units import UnitSpec, refuse_unsupported
from zeroshard.placement import OPTIMIZER_ONLY
from zeroshard.precision import precision_for
from zeroshard.ready import device_of, expect_same_model
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.reduce import Reducer
from zeroshard.storage.unit import build_units


class EngineOfParameters(Engine):
    """Nothing is reduced here, and parameters may come later.

    Attributes:
        handle: whose they become; held weakly.
    """

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(OPTIMIZER_ONLY, (), collectives, None)
        self.handle: Callable[[], Handle | None] = lambda: None

    def new_reducer(self) -> Reducer:
        return ReducedByOthers(self.units, self.collectives, self.pool, self.ledger)

    def admits(self, parameter: nn.Parameter) -> bool:
        """Also one that nobody has."""
        return handle_of(parameter) is None or super().admits(parameter)

    def take_newcomers(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Those that are to be trained from now on. Collective; errors as `shard_parameters`."""
        new = newcomers(self, parameters)
        if new:
            self.take(new)
        note_untaken(self, parameters)
        return bool(new)

    def take(self, new: dict[str, nn.Parameter]) -> None:
        """Further ones, by their names; rank 0's values win. Collective; errors as `shard_parameters`."""
        parameters, handle = list(new.values()), self.handle()
        assert handle is not None, "its optimizer has it"
        together(self.collectives, "ShardedOptimizer", partial(self._expect_ready, new))
        specs = list(_specs(new, is_first=not self.units))
        expect_same_model(self.collectives, new, specs, OPTIMIZER_ONLY)  # what differs must not be broadcast
        self.collectives.broadcast([parameter.data for parameter in parameters])
        self.add(build_units(new, specs, OPTIMIZER_ONLY, self.collectives, first=len(self.units)))
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
    """What an optimizer asks of a reducer. Nothing is accumulated, no hook says when a backward begins, and `p.grad` is
    the user's: it changes without our knowing, and what lies there is not "set by hand"."""

    @property
    def version(self) -> object:
        return object()  # perhaps another one by now

    def notice(self) -> dict[tuple[int, int], Tensor]:
        return {}

    def expect_backward(self) -> None:
        """It begins.

        Raises:
            ValueError: `p.grad` may hold gradients of losses with another scale.
        """
        self.ledger.expect_one_scale()
        self.begin_backward()


def shard_parameters(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> Handle:
    """A handle over those of the parameters that require grad; rank 0's values win. Collective.

    Raises:
        ValueError: on every rank: ranks that have others, or what cannot be sharded; nothing has been changed.
    """
    collectives = Collectives(Mesh.of(group, device_of(parameters)), CommLog())
    engine = EngineOfParameters(collectives)
    handle = Handle(engine)
    engine.handle = weakref.ref(handle)
    engine.take({name: parameter for name, parameter in named(parameters).items() if is_wanted(parameter)})
    note_untaken(engine, parameters)
    return handle


def named(parameters: Iterable[nn.Parameter]) -> dict[str, nn.Parameter]:
    """All parameters of an optimizer."""
    return {str(position): parameter for position, parameter in enumerate(dict.fromkeys(parameters))}


def note_untaken(engine: Engine, parameters: Iterable[nn.Parameter]) -> None:
    """`parameters`: all of the optimizer's."""
    engine.untaken = {name: p for name, p in named(parameters).items() if handle_of(p) is None}


def is_wanted(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad or parameter.grad is not None


def newcomers(engine: Engine, parameters: Iterable[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those of the optimizer's parameters that the engine does not have yet, and that are to be trained from now on, on
    every rank. Collective.

    Raises:
        ValueError: on every rank: the ranks do not agree on them.
    """
    wanted = {name: p for name, p in named(parameters).items() if handle_of(p) is None and is_wanted(p)}
    for rank, theirs in enumerate(
        found := engine.collectives.exchange_objects(list(wanted), "a look at what requires grad")
    ):
        if theirs != found[0]:
            name = f"parameter number {min({*theirs} ^ {*found[0]}, key=int)}"
            raise InvalidValue(
                f"the ranks differ in which parameters require grad: {name} on rank 0 or on rank {rank}, not on both. "
                "Freeze and unfreeze on every rank alike"
            )
    return wanted


def _specs(named: dict[str, nn.Parameter], *, is_first: bool) -> Iterable[UnitSpec]:
    """One unit for each dtype: nothing is gathered before all of it has been stepped, and then at once."""
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
    if parameter.device.type != collectives.device.type:
        raise InvalidValue(
            f"parameter {name} is on {parameter.device}, and this process group moves {collectives.device.type} tensors"
        )
