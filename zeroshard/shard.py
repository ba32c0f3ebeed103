"""`shard(model, plan)`: choose units, agree with the other ranks, attach; and the handle that it returns.

Ownership: the handle and the model's hooks own the units, units own the buffers; the handle refers to the model
weakly. The model keeps its class, its names and its `nn.Parameter` objects; only where their data lie has changed.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from zeroshard.buffer import live_bytes
from zeroshard.collectives import Collectives, CommLog
from zeroshard.gather import Gatherer
from zeroshard.gradients import GradState
from zeroshard.hooks import Schedule
from zeroshard.mesh import Mesh
from zeroshard.placement import OPTIMIZER_ONLY, Plan, as_plan
from zeroshard.planner import check_limit, fit_units
from zeroshard.precision import MixedPrecision, as_precision
from zeroshard.reduce import Reducer
from zeroshard.unit import Unit, UnitPolicy, UnitSpec, choose_units

_HANDLES: MutableMapping[Tensor, weakref.ref[Handle]] = WeakTensorKeyDictionary()
"""Parameter -> weak reference to the handle that owns its data. The one piece of global state: a parameter handed to
`shard` or to an optimizer says in no other way whether, and by whom, it is sharded."""

KINDS = ("weights", "grads", "main", "state", "scalars", "ring", "buckets", "scratch")


class HoldsTensors(Protocol):
    def tensors(self) -> dict[str, list[Tensor]]: ...


class Unfinished(Protocol):
    """Work that goes on in the background. `settle`: wait for it, and raise its error if nobody has seen it yet."""

    def settle(self) -> None: ...


class Owner(HoldsTensors, Protocol):
    """An optimizer, as its handle sees it. `rebuild`: there are more parameters to update than there were."""

    def rebuild(self) -> None: ...


class Handle:
    """A sharded model: what `shard` returns.

    Attributes:
        plan: where weights, gradients and main rest.
        units: in registration order.
        comm_log: what has been communicated.
        background: a checkpoint that is still being written.
    """

    def __init__(self, plan: Plan, units: Sequence[Unit], collectives: Collectives, model: nn.Module | None) -> None:
        self.plan = plan
        self.collectives = collectives
        self.units = tuple(units)
        self.gatherer = Gatherer(self.units, collectives)
        self.reducer = Reducer(self.units, collectives)
        self.schedule = Schedule(self.gatherer, self.reducer)
        self._model = weakref.ref(model) if model is not None else lambda: None
        self._claims: dict[int, weakref.ref[Owner]] = {}
        self._guards: list[RemovableHandle] = []
        self.background: Unfinished | None = None
        self._reading = False
        self._closed = False

    @property
    def comm_log(self) -> CommLog:
        return self.collectives.log

    # Training ----------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate locally; the first one outside reduces the sum. Legal under every plan;
        under ZERO2 and ZERO3 the price is a full-size gradient."""
        self.check_open("no_sync")
        return self.reducer.no_sync()

    @contextmanager
    def unsharded(self, *, write: bool = False) -> Iterator[None]:
        """Inside, all parameters have their full values, under every plan. Collective.

        Args:
            write: changes made inside (the same on every rank) become the new weights, and main follows. Without it
                they must not be changed: what becomes of a change depends on the plan.
        """
        self.check_open("unsharded")
        with torch.no_grad():
            for unit in self.units:
                full = None
                if not unit.weights.buffer.owns_full:
                    full = unit.weights.own().new_empty(unit.layout.numel)
                self.gatherer.unshard(unit, full)
                unit.weights.show()
        if write:  # nobody writes before everybody has read
            self.collectives.exchange_objects(None)
        try:
            yield
        finally:
            with torch.no_grad():
                for unit in self.units:
                    if write:
                        unit.take_full()
                    if not unit.weights.buffer.owns_full:
                        unit.weights.drop(forget=True)

    # Weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def full_state_dict(self, *, main: bool = False) -> dict[str, Tensor]:
        """Names and values of the plain model's `state_dict()`, full tensors on every rank. Collective.

        Args:
            main: fp32 main values instead of the compute-precision weights.
        """
        self.check_open("full_state_dict")
        values: dict[int, Tensor] = {}
        for unit in self.units:
            full = unit.gather_main(self.collectives) if main and unit.main is not None else None
            if full is None:
                self.gatherer.unshard(unit)
                full = unit.weights.buffer.full
                assert full is not None
            for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
                values[id(parameter)] = full[slot.world.slice].view(slot.shape).clone()
        self.gatherer.settle()
        state = self._names()
        return {name: values[id(v)] if id(v) in values else v.detach().clone() for name, v in state.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take full values by the plain model's names, the same on every rank; weights and main follow. Collective.

        Raises:
            ValueError: names that are missing or unexpected, or other shapes; nothing has been changed.
        """
        self.check_open("load_full_state_dict")
        current = self._names()
        problems = [f"missing {name}" for name in current if name not in state_dict]
        problems += [f"unexpected {name}" for name in state_dict if name not in current]
        problems += [
            f"{name}: expected {tuple(current[name].shape)}, found {tuple(value.shape)}"
            for name, value in state_dict.items()
            if name in current and current[name].shape != value.shape
        ]
        self.raise_together("; ".join(problems[:10]), "load_full_state_dict")
        by_parameter = {id(value): state_dict[name] for name, value in current.items()}
        for unit in self.units:
            unit.set([by_parameter[id(parameter)] for parameter in unit.parameters])
            self.gatherer.updated(unit)
        for name, value in self.unsharded_state().items():
            value.copy_(state_dict[name])
        self.gatherer.settle()

    def unsharded_state(self) -> dict[str, Tensor]:
        """What the plain model's `state_dict()` lists besides the sharded parameters: its buffers themselves."""
        if self.plan.external_gradients:
            return {}  # built from parameters alone
        sharded = {id(parameter) for unit in self.units for parameter in unit.parameters}
        return {name: value for name, value in self._names().items() if id(value) not in sharded}

    def _names(self) -> dict[str, Tensor]:
        """What the plain model's `state_dict()` lists: parameters and buffers themselves."""
        self._reading = True
        try:
            return dict(self.model.state_dict(keep_vars=True))
        finally:
            self._reading = False

    # Looking -----------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Live bytes on this rank by kind: what rests between steps (weights, grads, main, state, scalars) and the
        preallocated transients (ring: full-size places of weights; buckets: of gradients; scratch). What is mapped of
        another rank's memory is counted there."""
        self.check_open("memory")
        kinds: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        kinds["ring"] = self.gatherer.tensors()
        holders: list[HoldsTensors] = [*self.units, self.reducer]
        holders += self.owners()
        for holder in holders:
            for kind, tensors in holder.tensors().items():
                kinds[kind] += tensors
        return {kind: live_bytes(tensors) for kind, tensors in kinds.items()}

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

    # Life cycle --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def close(self) -> None:
        """Give back a plain model: every parameter with its own full storage, in the dtype it had before `shard` and
        with main's values. Collective. The handle and its optimizers raise from now on; a second close does nothing."""
        if self._closed:
            return
        self.finish_background()
        for unit in self.units:
            full = unit.gather_main(self.collectives) if unit.main is not None else None
            if full is None:
                self.gatherer.unshard(unit)
                full = unit.weights.buffer.full
                assert full is not None
            for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
                value = full[slot.world.slice].view(slot.shape)
                parameter.data = value.to(unit.spec.dtype, copy=True)
        self._release()

    def finish_background(self) -> None:
        """Wait for the checkpoint that is being written, if there is one; raises what went wrong with it."""
        unfinished, self.background = self.background, None
        if unfinished is not None:
            unfinished.settle()

    def expect_no_gradients(self, what: str) -> None:
        """Raises:
        RuntimeError: gradients are waiting for a step."""
        if any(unit.grads is not None and unit.grads.state is not GradState.EMPTY for unit in self.units):
            raise RuntimeError(
                f"{what}: gradients are waiting for a step, and they are not part of a checkpoint: save and load "
                "between a step (or zero_grad) and the next backward"
            )

    @torch.no_grad()
    def thaw(self) -> None:
        """Parameters that were frozen at `shard` and require grad now: their units get gradients and main, and the
        optimizers that have them begin to update them. Collective; done by the next call of the model, between steps.

        Raises:
            RuntimeError: gradients are waiting for a step.
        """
        frozen = [unit for unit in self.units if unit.main is None and any(p.requires_grad for p in unit.parameters)]
        if not frozen:
            return
        if any(unit.grads is not None and unit.grads.state is not GradState.EMPTY for unit in self.units):
            raise RuntimeError(
                "parameters that were frozen require grad now, and gradients of other parameters are waiting: let "
                "parameters require grad between a step (or zero_grad) and the next forward"
            )
        for unit in self.units:
            if not unit.weights.buffer.owns_full:
                unit.weights.drop(forget=True)
        for unit in frozen:
            unit.thaw(self.collectives)
        before = self.reducer
        self.gatherer, self.reducer = Gatherer(self.units, self.collectives), Reducer(self.units, self.collectives)
        self.reducer.num_backwards = before.num_backwards
        self.schedule.take(self.gatherer, self.reducer, frozen)
        self.collectives.meet()
        for owner in self.owners():
            owner.rebuild()

    def attach(self) -> None:
        """Install the hooks. They keep the handle: a model whose handle is dropped trains on."""
        model = self.model
        self.schedule.attach(model)
        self._guards = [
            model.register_forward_pre_hook(self._before_forward, prepend=True),
            model.register_state_dict_pre_hook(self._before_state_dict),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_pre_hook(self._before_load_state_dict),  # type: ignore[no-untyped-call]
        ]

    def _before_forward(self, module: nn.Module, args: object) -> None:
        self.thaw()
        reduced = not self._claims and any(unit.grads is not None and unit.grads.present for unit in self.units)
        if reduced and torch.is_grad_enabled():
            raise RuntimeError(
                "gradients have been reduced, and no optimizer uses them: build a zeroshard.ShardedOptimizer over the "
                "parameters (a plain optimizer sees no gradient, and would train nothing)"
            )

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.gatherer.settle()
        if not self._reading and not all(unit.weights.shown for unit in self.units):
            raise RuntimeError(
                "the parameters of this model are sharded and would read as NaN: call handle.full_state_dict(), or "
                "model.state_dict() inside `with handle.unsharded():`"
            )

    def _before_load_state_dict(self, module: nn.Module, *args: object) -> None:
        raise RuntimeError(
            "this model is sharded: call handle.load_full_state_dict(state_dict), which updates the main weights too"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            "a sharded model cannot be copied: copy it before shard(), or build a new one and load "
            "handle.full_state_dict() into it"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a sharded model cannot be pickled: save handle.full_state_dict() instead")

    def _release(self) -> None:
        self._closed = True
        self.schedule.detach()
        for guard in self._guards:
            guard.remove()
        for unit in self.units:
            for parameter in unit.parameters:
                _HANDLES.pop(parameter, None)
        self.units = ()
        self.gatherer = Gatherer((), self.collectives)
        self.reducer = Reducer((), self.collectives)
        self.schedule = Schedule(self.gatherer, self.reducer)

    def check_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{what}: this handle is closed, and its model is a plain one again; call shard() anew")

    def claim(self, parameters: Iterable[nn.Parameter], owner: Owner) -> None:
        """One optimizer per parameter.

        Raises:
            ValueError: a parameter that another living optimizer has.
        """
        parameters = list(parameters)
        for parameter in parameters:
            other = self._claims.get(id(parameter), lambda: None)()
            if other is not None and other is not owner:
                raise ValueError(
                    f"parameter {self.name_of(parameter)} belongs to another ShardedOptimizer: give each its own "
                    "parameters, or delete the other one first"
                )
        self._claims.update({id(parameter): weakref.ref(owner) for parameter in parameters})

    def unclaimed(self, unit: Unit) -> set[int]:
        """Slots that no living optimizer has."""
        return {i for i, p in enumerate(unit.parameters) if self._claims.get(id(p), lambda: None)() is None}

    def owners(self) -> list[Owner]:
        """The living optimizers of this model."""
        return list({id(owner): owner for ref in self._claims.values() if (owner := ref()) is not None}.values())

    def name_of(self, parameter: nn.Parameter) -> str:
        for unit in self.units:
            for mine, slot in zip(unit.parameters, unit.layout.slots, strict=True):
                if mine is parameter:
                    return slot.name
        return "(unknown)"

    def raise_together(self, problem: str, what: str) -> None:
        """If any rank has a problem, all raise: ValueError with the first one."""
        _raise_together(self.collectives, problem, what)


def shard(
    model: nn.Module,
    plan: Plan | str,
    *,
    units: UnitPolicy = None,
    precision: MixedPrecision | str | None = None,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    max_transient_bytes: int | None = None,
) -> Handle:
    """Shard a model in place. Collective: every rank passes the same model and arguments; rank 0's values win.

    Args:
        model: on the device where it is to train. It is called, and named, as before.
        plan: DDP, ZERO1, ZERO2 or ZERO3, or the lower-case name.
        units: what is gathered, reduced and freed together: module classes, a callable `module -> bool`, or a number
            of bytes; None groups neighbouring modules up to 32 MiB. The rest of the model is the root unit.
        precision: a `MixedPrecision`, "fp32", "bf16", ..., or None: as the model is.
        mesh: a process group, or a `DeviceMesh` with one axis, or with "replicate" and "shard". None: all ranks.
        max_transient_bytes: the most that full-size places, buckets and scratch may take. With `units=None` units are
            made small enough.

    Raises:
        ValueError: bad arguments, a model that differs between ranks, a parameter that is sharded already, a limit
            that cannot be kept. On every rank alike; the model is as it was before.
        RuntimeError: `zeroshard.init()` has not been called.
    """
    collectives = Collectives(Mesh.of(mesh), CommLog())
    problem, specs, chosen = "", [], OPTIMIZER_ONLY
    try:
        chosen = as_plan(plan)
        if chosen.external_gradients:
            raise ValueError(
                "OPTIMIZER_ONLY is for parameters whose gradients something else reduces: pass model.parameters() to "
                "ShardedOptimizer, without shard()"
            )
        specs = _choose(model, chosen, units, as_precision(precision), collectives, max_transient_bytes)
        _refuse_unready(model, collectives)
    except Exception as error:  # also what a user's callable raises: the other ranks must hear of it
        problem = str(error) if isinstance(error, (ValueError, TypeError)) else repr(error)
    _raise_together(collectives, problem, "shard")
    _expect_same_model(collectives, model, specs, chosen)
    before = [(parameter, parameter.data) for parameter in model.parameters()]
    handle, failure = None, None
    try:
        collectives.broadcast([*(data for _, data in before), *model.buffers()])
        handle = Handle(chosen, _build(model, specs, chosen, collectives), collectives, model)
        for parameter, _ in before:
            _HANDLES[parameter] = weakref.ref(handle)
        handle.attach()
    except Exception as error:
        failure = error
    try:
        _raise_together(collectives, "" if failure is None else repr(failure), "shard")
    except ValueError:
        if handle is not None:
            handle._release()
        for parameter, data in before:
            parameter.data = data
            _HANDLES.pop(parameter, None)
        raise
    assert handle is not None
    collectives.meet()
    return handle


def shard_parameters(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> Handle:
    """A handle under plan OPTIMIZER_ONLY over parameters whose gradients someone else reduces."""
    collectives = Collectives(Mesh.of(group), CommLog())
    holder = nn.ParameterList([p for p in dict.fromkeys(parameters) if p.requires_grad])
    if not len(holder):
        raise ValueError("none of the parameters requires grad: there is nothing to optimize")
    specs = choose_units(holder, None, None)
    collectives.broadcast([parameter.data for parameter in holder])
    _expect_same_model(collectives, holder, specs, OPTIMIZER_ONLY)
    handle = Handle(OPTIMIZER_ONLY, _build(holder, specs, OPTIMIZER_ONLY, collectives), collectives, None)
    for parameter in holder.parameters():
        _HANDLES[parameter] = weakref.ref(handle)
    collectives.meet()
    return handle


def handle_of(parameter: nn.Parameter) -> Handle | None:
    """The living handle that owns a parameter's data."""
    reference = _HANDLES.get(parameter)
    return reference() if reference is not None else None


def _choose(
    model: nn.Module,
    plan: Plan,
    units: UnitPolicy,
    precision: MixedPrecision | None,
    collectives: Collectives,
    max_transient_bytes: int | None,
) -> list[UnitSpec]:
    if max_transient_bytes is None:
        return choose_units(model, units, precision)
    mesh_shape = collectives.mesh.shard.size, collectives.mesh.replicate.size
    if units is None:
        return fit_units(model, precision, max_transient_bytes, plan, mesh_shape, collectives.pairwise)
    specs = choose_units(model, units, precision)
    device_type = next(model.parameters()).device.type
    check_limit(specs, max_transient_bytes, plan, mesh_shape, collectives.pairwise, device_type)
    return specs


def _build(model: nn.Module, specs: Sequence[UnitSpec], plan: Plan, collectives: Collectives) -> list[Unit]:
    """Allocate one unit after the other."""
    parameters = dict(model.named_parameters())
    units = []
    for index, spec in enumerate(specs):
        of_unit = [parameters[name] for name in reversed(spec.names)]
        unit = Unit(index, spec, of_unit, plan, collectives)
        unit.fill()
        units.append(unit)
    return units


def _refuse_unready(model: nn.Module, collectives: Collectives) -> None:
    device_type = collectives.device.type
    for name, parameter in model.named_parameters():
        if handle_of(parameter) is not None:
            raise ValueError(f"parameter {name} is sharded already: close() the other handle first")
        if parameter.device.type == "meta":
            raise ValueError(f"parameter {name} is on the meta device: materialise the model first (model.to_empty)")
        if parameter.device.type != device_type:
            raise ValueError(
                f"parameter {name} is on {parameter.device}, and this process group moves {device_type} tensors: "
                f"call model.to({device_type!r}) first, or zeroshard.init with another backend"
            )


def _expect_same_model(collectives: Collectives, model: nn.Module, specs: Sequence[UnitSpec], plan: Plan) -> None:
    """Ranks compare a digest of what they are about to shard; where it differs, they look for the first difference."""
    named = model.named_parameters()
    lines = [f"plan {plan.name}"]
    lines += [f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for name, p in named]
    lines += [f"unit {spec.name} of {len(spec.names)} parameters, {spec.precision}" for spec in specs]
    digests = collectives.exchange_objects(hashlib.sha256(json.dumps(lines).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    by_rank = collectives.exchange_objects(lines)
    for rank, theirs in enumerate(by_rank):
        if theirs != by_rank[0]:
            pairs = zip([*by_rank[0], "(nothing more)"], [*theirs, "(nothing more)"], strict=False)
            mine, other = next((a, b) for a, b in pairs if a != b)
            raise ValueError(f"the ranks have different models: rank 0 has {mine!r} where rank {rank} has {other!r}")


def _raise_together(collectives: Collectives, problem: str, what: str) -> None:
    problems = collectives.exchange_objects(problem)
    if any(problems):
        rank = next(rank for rank, text in enumerate(problems) if text)
        where = "" if all(text == problems[0] for text in problems) else f" (on rank {rank})"
        raise ValueError(f"{what}{where}: {problems[rank]}")
