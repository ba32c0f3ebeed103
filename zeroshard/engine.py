"""What trains a sharded model: its units, and who moves, reduces and steps what of them, from `shard` to `close`.

The optimizers, checkpoints and joins of a model work on its engine. `handle.py` is what its user reads and touches.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroshard.buffer import live_bytes
from zeroshard.casting import Cast
from zeroshard.claims import Claims
from zeroshard.collectives import Collectives
from zeroshard.freezing import Freezing
from zeroshard.gather import Gatherer, in_backward
from zeroshard.hooks import NotCopied, OutsideGraphs, Schedule
from zeroshard.loss_ledger import LossLedger
from zeroshard.managed import EVERYTHING, Managed
from zeroshard.parking import Parked
from zeroshard.placement import Plan
from zeroshard.planner import check_limit
from zeroshard.pool import KINDS as TRANSIENT_KINDS
from zeroshard.pool import Pool
from zeroshard.reduce import Reducer
from zeroshard.transforms import outside_transforms
from zeroshard.unit import Unit, plain_name

KINDS = ("weights", "grads", "main", "state", "scalars", *TRANSIENT_KINDS)


class HoldsTensors(Protocol):
    def tensors(self) -> dict[str, list[Tensor]]: ...


class Unfinished(Protocol):
    """Work that goes on in the background. `settle`: wait for it, and raise its error if nobody has seen it yet."""

    def settle(self) -> None: ...


class Engine(NotCopied):
    """Of one sharded model.

    Attributes:
        plan: where weights, gradients and main rest.
        managed: which parameters and buffers of the model are sharded.
        units: in registration order.
        pool: full-size buffers for weights, gradients and scratch.
        ledger: which loss was multiplied by what.
        claims: which optimizer has which parameters.
        background: a checkpoint that is still being written.
        untaken: under OPTIMIZER_ONLY, parameters of its optimizer that are not trained yet, by their names.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        collectives: Collectives,
        model: nn.Module | None,
        managed: Managed = EVERYTHING,
        max_transient_bytes: int | None = None,
    ) -> None:
        self.plan = plan
        self.managed = managed
        self.collectives = collectives
        self.units = tuple(units)
        self.pool = Pool(collectives, max_transient_bytes)
        self.ledger = LossLedger()
        self.gatherer = Gatherer(self.units, collectives, self.pool)
        self.reducer = Reducer(self.units, collectives, self.pool, self.ledger)
        self.schedule = Schedule(self.gatherer, self.reducer)
        self.claims = Claims(self.name_of)
        self.pool.besides = self.claims.scratch_bytes
        self._freezing = Freezing(self.units, collectives)
        self._model = weakref.ref(model) if model is not None else lambda: None
        self._guards: list[RemovableHandle] = []
        self.background: Unfinished | None = None
        self.untaken: dict[str, nn.Parameter] = {}
        self._reading = False
        self._closed = False
        self._parked: Parked | None = None
        self._shards: dict[Unit, Tensor] = {}

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this handle is gone (or it was built from parameters only)")
        return model

    def trainable_parameters(self) -> list[nn.Parameter]:
        """In the order of the model's `parameters()`: a plain optimizer over those has the same state_dict."""
        trainable = {id(p) for unit in self.units if unit.main is not None for p in unit.parameters}
        return [p for p in self.model.parameters() if id(p) in trainable]

    def name_of(self, parameter: nn.Parameter) -> str:
        for unit in self.units:
            for mine, slot in zip(unit.parameters, unit.layout.slots, strict=True):
                if mine is parameter:
                    return slot.name
        return "(unknown)"

    # The plain model's names ---------------------------------------------------------------------------------------

    def unsharded_state(self) -> dict[str, Tensor]:
        """What the plain model's `state_dict()` lists besides the sharded parameters: its buffers themselves."""
        if self.plan.external_gradients:
            return {}  # built from parameters alone
        sharded = {id(parameter) for unit in self.units for parameter in unit.parameters}
        return {name: value for name, value in self.names().items() if id(value) not in sharded}

    def tied(self) -> dict[str, str]:
        """Of parameters with several names in the plain model's `state_dict()`: further name -> the one in `units`."""
        if self.plan.external_gradients:
            return {}
        first = {id(p): s.name for u in self.units for p, s in zip(u.parameters, u.layout.slots, strict=True)}
        return {name: first[id(v)] for name, v in self.names().items() if first.get(id(v), name) != name}

    def names(self) -> dict[str, Tensor]:
        """What the plain model's `state_dict()` lists: parameters and buffers themselves, under its names."""
        self._reading = True
        try:
            return {plain_name(name): value for name, value in self.model.state_dict(keep_vars=True).items()}
        finally:
            self._reading = False

    # Memory --------------------------------------------------------------------------------------------------------

    def memory(self, *, peak: bool = False) -> dict[str, int]:
        """See `Handle.memory`."""
        if self._parked is None:
            self.check_open("memory")
        kinds: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        for kind in TRANSIENT_KINDS:
            kinds[kind] = self.pool.tensors(kind)
        for holder in (*self.units, *self.claims.owners()):
            for held, tensors in holder.tensors().items():
                kinds[held] += tensors
        if self._parked is not None:
            return self._parked.memory(kinds, list(self._shards.values()))
        found = {kind: live_bytes(tensors) for kind, tensors in kinds.items()}
        if peak:
            found["grads"] = sum(unit.grads.buffer.most for unit in self.units if unit.grads is not None)
            found |= {kind: self.pool.most.get(kind, 0) for kind in TRANSIENT_KINDS}
            found["scratch"] += self.pool.besides()
        return found

    # Gradients and what is frozen ----------------------------------------------------------------------------------

    def has_gradients(self, *, reduced: bool = False) -> bool:
        """Whether any wait for a step; `reduced`: only those that have been reduced."""
        self.reducer.notice()
        return self.reducer.has_gradients(reduced=reduced)

    def expect_no_gradients(self, what: str) -> None:
        """Raises:
        RuntimeError: gradients are waiting for a step."""
        if self.has_gradients():
            raise RuntimeError(
                f"{what}: gradients are waiting for a step, and they are not part of a checkpoint: save and load "
                "between a step (or zero_grad) and the next backward"
            )

    @torch.no_grad()
    def unfreeze(self) -> None:
        """Which parameters require grad may have changed: those that do not are not reduced any more, until they do
        again; units that were frozen at `shard` get gradients and main, and the optimizers that have them
        begin to update them. Collective; done by the next call of the model.

        Raises:
            ValueError: ranks differ; more transients than `max_transient_bytes` allows.
            RuntimeError: gradients are waiting for a step, and a unit needs some for the first time.
        """
        if not self._freezing.has_changed():
            return
        slots = self._freezing.agree()
        self._begin_to_train()
        self._freezing.settle(slots)
        self.reducer.find_order()

    def _begin_to_train(self) -> None:
        frozen = [unit for unit in self.units if unit.main is None and unit.requiring_grad()]
        if not frozen:
            return
        if self.has_gradients():
            raise RuntimeError(
                "parameters that were frozen require grad now, and gradients of other parameters are waiting: let "
                "parameters require grad between a step (or zero_grad) and the next forward"
            )
        if self.pool.limit is not None:
            specs = [replace(unit.spec, trainable=unit.spec.trainable or unit in frozen) for unit in self.units]
            mesh = self.collectives.mesh
            shape = mesh.shard.size, mesh.replicate.size
            check_limit(
                specs, self.pool.limit, self.plan, shape, self.collectives.transport, self.collectives.device.type
            )
        self.gatherer.settle()  # the next gatherer knows nothing of what is arriving
        for unit in self.units:
            if not unit.weights.buffer.owns_full:
                unit.weights.drop(forget=True)
        for unit in frozen:
            unit.unfreeze(self.collectives)
        local = self.reducer.local
        self.pool.clear()
        self.gatherer = Gatherer(self.units, self.collectives, self.pool)
        self.reducer = Reducer(self.units, self.collectives, self.pool, self.ledger)
        self.reducer.local = local
        self.schedule.take(self.gatherer, self.reducer, frozen)
        self.collectives.meet()
        for owner in self.claims.owners():
            owner.rebuild()

    # Life cycle ----------------------------------------------------------------------------------------------------

    def check_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{what}: this handle is closed, and its model is a plain one again; call shard() anew")
        if self._parked is not None:
            raise RuntimeError(f"{what}: this handle is parked; call unpark() first")

    def finish_background(self) -> None:
        """Wait for the checkpoint that is being written, if there is one; raises what went wrong with it."""
        unfinished, self.background = self.background, None
        if unfinished is not None:
            unfinished.settle()

    @torch.no_grad()
    def park(self, device: torch.device) -> None:
        """See `Handle.park`."""
        self.check_open("park")
        if self.has_gradients():
            raise RuntimeError("park: gradients are waiting for a step; call step() or zero_grad() first")
        self.gatherer.settle()
        self.collectives.exchange_objects(None)  # nobody reads any more what is emptied here
        self.pool.empty()
        kept: list[Tensor] = []
        emptied: list[Tensor] = []
        self._shards = {}
        for unit in self.units:
            if unit.weights.buffer.owns_full:
                self._shards[unit] = unit.weights.own().to(device, copy=True)
                emptied += unit.weights.buffer.storages()
            else:
                kept += unit.weights.buffer.storages()
            unit.weights.drop(forget=True)
            emptied += unit.grads.buffer.storages() if unit.grads is not None else []
            kept += [unit.main.extra] if unit.main is not None and unit.main.extra is not None else []
        for owner in self.claims.owners():
            for kind, tensors in owner.tensors().items():
                (emptied if kind == "scratch" else kept).extend(tensors)
        self._parked = Parked(kept, emptied, device, self.collectives)

    @torch.no_grad()
    def unpark(self) -> None:
        """Everything is back where it was. Collective."""
        if self._parked is None:
            raise RuntimeError("unpark: this handle is not parked")
        self._parked.restore()
        self._parked = None
        for unit, values in self._shards.items():
            unit.weights.own().copy_(values)
        self.collectives.exchange_objects(None)  # nobody reads what is not there yet
        for unit in self._shards:
            unit.weights.gather(self.collectives, "unshard")
        self._shards = {}
        self.gatherer.settle()

    def attach(self, casts: Mapping[nn.Module, Cast]) -> None:
        """Install the hooks."""
        model = self.model
        self.schedule.attach(model, casts)
        self._guards = [
            model.register_forward_pre_hook(OutsideGraphs(self.before_forward), prepend=True),
            model.register_state_dict_pre_hook(self._before_state_dict),  # type: ignore[no-untyped-call]
        ]

    def before_forward(self, module: nn.Module, args: object) -> None:
        self.check_open("forward")
        self.schedule.come_first()
        orders, in_use = self.collectives.orders, any(unit.weights.in_use for unit in self.units)
        if orders is not None and not in_use:
            orders.before_forward()
        with outside_transforms():
            if torch.is_grad_enabled():
                self._expect_known_parameters()
                if not in_use and not in_backward():  # inside `unsharded` ranks run what they like
                    self.unfreeze()
            self.expect_in_place()
            self.gatherer.begin_forward()
        if torch.is_grad_enabled() and not self.claims.has_any() and self.has_gradients(reduced=True):
            raise RuntimeError(
                "gradients have been reduced, and no optimizer uses them: build a zeroshard.ShardedOptimizer over the "
                "parameters (a plain optimizer sees no gradient, and would train nothing)"
            )

    def _expect_known_parameters(self) -> None:
        known = {id(parameter) for unit in self.units for parameter in unit.parameters}
        for name, parameter in self.managed.parameters(self.model).items():
            if id(parameter) not in known and isinstance(
                parameter, nn.Parameter
            ):  # else a functional_call is under way
                raise RuntimeError(
                    f"parameter {name} has come into the model after shard(), which does not know it: nobody would "
                    "reduce its gradient or update it. close() the handle, and shard() the changed model. (For a "
                    "functional_call: pass tensors, `parameter.detach()`, not Parameters)"
                )

    def expect_in_place(self) -> None:
        """Every parameter's data lie where the engine has put them (see `Weights`). Also where nothing moves them."""
        for unit in self.units:
            unit.weights.expect_in_place()

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.gatherer.settle()
        if not self._reading and not all(unit.weights.shown for unit in self.units):
            raise RuntimeError(
                "the parameters of this model are sharded, and their values not here: call handle.full_state_dict(), "
                "or model.state_dict() inside `with handle.unsharded():`"
            )

    def release(self) -> None:
        """Let go of the model."""
        self._closed = True
        self.schedule.detach()
        for guard in self._guards:
            guard.remove()
        self.units = ()
        self.pool = Pool(self.collectives)
        self.gatherer = Gatherer((), self.collectives, self.pool)
        self.reducer = Reducer((), self.collectives, self.pool, self.ledger)
        self.schedule = Schedule(self.gatherer, self.reducer)
        self._freezing = Freezing((), self.collectives)
