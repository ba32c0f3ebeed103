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
from typing import Literal, Protocol

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
from zeroshard.hooks import NotCopied, OutsideGraphs, Schedule
from zeroshard.materialize import META, Source, is_on_meta, move
from zeroshard.materialize import materialize as give_values
from zeroshard.mesh import Mesh
from zeroshard.parking import Parked
from zeroshard.placement import OPTIMIZER_ONLY, Plan, as_plan
from zeroshard.planner import check_limit, fit_units
from zeroshard.precision import MixedPrecision, as_precision
from zeroshard.reduce import Reducer
from zeroshard.unit import Unit, UnitPolicy, UnitSpec, choose_units, plain_name

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


class Handle(NotCopied):
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
        self._parked: Parked | None = None
        self._shards: dict[Unit, Tensor] = {}

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
    def unsharded(self, *parts: nn.Module | nn.Parameter | str, write: bool = False) -> Iterator[None]:
        """Inside, parameters have their full values, under every plan. Collective.

        Entering and leaving are; what happens inside need not be: a forward inside gathers nothing, so ranks may call
        the model, or `generate`, as often as each likes.

        Args:
            parts: modules, parameters, or names of either; none: the whole model. Whole units come.
            write: changes made inside (the same on every rank) become the new weights, and main follows. Without it
                they must not be changed: what becomes of a change depends on the plan.

        Raises:
            ValueError: a part that this handle does not have.
        """
        self.check_open("unsharded")
        units = self._units_of(parts)
        with torch.no_grad():
            for unit in units:
                if not unit.weights.in_use:  # else they are here: a scope around this one has gathered them
                    full = None
                    if not unit.weights.buffer.owns_full:
                        full = unit.weights.own().new_empty(unit.layout.numel)
                    self.gatherer.unshard(unit, full)
                    unit.weights.show()
                unit.weights.in_use += 1  # a forward inside leaves them as they are
        if write:  # nobody writes before everybody has read
            self.collectives.exchange_objects(None)
        try:
            yield
        finally:
            with torch.no_grad():
                for unit in units:
                    unit.weights.in_use -= 1
                    if write:
                        unit.take_full()
                    if not unit.weights.in_use and not unit.weights.buffer.owns_full:
                        unit.weights.drop(forget=True)

    def _units_of(self, parts: Sequence[nn.Module | nn.Parameter | str]) -> list[Unit]:
        wanted: set[int] = set()
        for part in parts or [self.model]:
            if isinstance(part, str):
                named: dict[str, nn.Module | nn.Parameter] = {
                    **dict(self.model.named_modules()),
                    **dict(self.model.named_parameters()),
                }
                if part not in named:
                    raise ValueError(f"unsharded: the model has no parameter and no module of the name {part!r}")
                part = named[part]
            mine = set(map(id, part.parameters() if isinstance(part, nn.Module) else [part]))
            if not mine <= {id(p) for unit in self.units for p in unit.parameters}:
                raise ValueError("unsharded: a parameter that is not of this handle's model")
            wanted |= mine
        return [unit for unit in self.units if wanted & {id(p) for p in unit.parameters}]

    @torch.no_grad()
    def gradient(self, name: str) -> Tensor:
        """The full reduced gradient of a parameter, in its shape: the mean over ranks, unscaled, as torch DDP leaves it
        in `p.grad` (where losses have weights: their weighted sum by the number of ranks). Collective; between backward
        and step.

        Raises:
            ValueError: no trainable parameter of that name.
            RuntimeError: no gradient has been reduced.
        """
        self.check_open("gradient")
        found = [(unit, slot) for unit in self.units for slot in unit.layout.slots if plain_name(slot.name) == name]
        if not found or found[0][0].grads is None:
            raise ValueError(f"gradient: the model has no trainable parameter of the name {name!r}")
        unit, slot = found[0]
        assert unit.grads is not None
        if unit.grads.state is not GradState.REDUCED:
            raise RuntimeError(
                f"gradient: that of {name} is {unit.grads.state.value}; call backward (not under no_sync)"
            )
        full = torch.zeros(unit.layout.numel, dtype=unit.grads.buffer.dtype, device=unit.weights.own().device)
        own = unit.own_shard()
        unit.read_gradient(own, full[own.slice])
        self.collectives.all_gather(full, unit=unit.name, phase="unshard").wait()
        factor = self.collectives.mesh.world.size * (self.reducer.scale or 1.0)
        return full[slot.world.slice].view(slot.shape).div(factor)

    @torch.no_grad()
    def main_parts(self) -> list[Tensor]:
        """This rank's part of main, one 1-D tensor per trainable unit, in main's dtype: views of it, or copies where
        only a remainder is kept. For averages of the weights and the like: elementwise, at 1/d of the memory."""
        self.check_open("main_parts")
        parts = []
        for unit in self.units:
            if unit.main is not None:
                scratch = unit.main.weights.new_empty(unit.main.interval.numel, dtype=unit.main.dtype)
                parts.append(unit.main.read(unit.main.interval, scratch))
        return parts

    @torch.no_grad()
    def set_main_parts(self, parts: Sequence[Tensor]) -> None:
        """Main becomes these values (as `main_parts` gives them), and the weights follow. Collective."""
        self.check_open("set_main_parts")
        trainable = [unit for unit in self.units if unit.main is not None]
        self.gatherer.settle()
        self.collectives.exchange_objects(None)  # nobody writes before everybody has read
        for unit, part in zip(trainable, parts, strict=True):
            assert unit.main is not None
            unit.main.set(unit.main.interval, part)
            unit.edits += 1
            self.gatherer.updated(unit)
        self.gatherer.settle()

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Buffers (the running statistics of BatchNorm, say) become equal on all ranks: the mean of those that are
        floating-point, rank 0's of the others. Without it every rank keeps its own. Collective."""
        self.check_open("average_buffers")
        for buffer in self.model.buffers():
            if not buffer.is_floating_point():
                self.collectives.broadcast([buffer])
            elif buffer.numel():
                rows = self.collectives.exchange(buffer.reshape(-1).to(self.collectives.device))
                buffer.copy_(rows.mean(0).view(buffer.shape))

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let `module.name(...)` do what `module(...)` does: give the module's own parameters their values.

        Needed for a method that uses parameters of that very module and is called in place of it (a `forward_features`
        that adds `self.position`, say). Methods that only call other modules work as they are. The name is FSDP2's.
        """
        self.check_open("register_forward_method")
        self.schedule.wrap(module, name)

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
        state_dict = {plain_name(name): value for name, value in state_dict.items()}
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
        """What the plain model's `state_dict()` lists: parameters and buffers themselves, under its names."""
        self._reading = True
        try:
            return {plain_name(name): value for name, value in self.model.state_dict(keep_vars=True).items()}
        finally:
            self._reading = False

    # Looking -----------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Live bytes on this rank by kind: what rests between steps (weights, grads, main, state, scalars) and the
        preallocated transients (ring: full-size places of weights; buckets: of gradients; scratch). What is mapped of
        another rank's memory is counted there."""
        if self._parked is None:
            self.check_open("memory")
        kinds: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        kinds["ring"] = self.gatherer.tensors()
        holders: list[HoldsTensors] = [*self.units, self.reducer]
        holders += self.owners()
        for holder in holders:
            for kind, tensors in holder.tensors().items():
                kinds[kind] += tensors
        if self._parked is not None:
            return self._parked.memory(kinds, list(self._shards.values()))
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

    @torch.no_grad()
    def park(self, device: torch.device | str = "cpu") -> None:
        """Between two phases: main, optimizer state and the own shard of the weights go to `device` (what lies there
        already stays), everything of full size is given back. Until `unpark` the model and the optimizers raise.
        Collective.

        Raises:
            RuntimeError: gradients are waiting for a step.
        """
        self.check_open("park")
        if any(unit.grads is not None and unit.grads.state is not GradState.EMPTY for unit in self.units):
            raise RuntimeError("park: gradients are waiting for a step; call step() or zero_grad() first")
        self.gatherer.settle()
        self.collectives.exchange_objects(None)  # nobody reads any more what is emptied here
        kept: list[Tensor] = []
        emptied = [*self.gatherer.tensors(), *(t for ts in self.reducer.tensors().values() for t in ts)]
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
        for owner in self.owners():
            for kind, tensors in owner.tensors().items():
                (emptied if kind == "scratch" else kept).extend(tensors)
        self._parked = Parked(kept, emptied, torch.device(device), self.collectives)

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

    def attach(self) -> None:
        """Install the hooks. They keep the handle: a model whose handle is dropped trains on."""
        model = self.model
        self.schedule.attach(model)
        self._guards = [
            model.register_forward_pre_hook(OutsideGraphs(self._before_forward), prepend=True),
            model.register_state_dict_pre_hook(self._before_state_dict),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_pre_hook(self._before_load_state_dict),  # type: ignore[no-untyped-call]
        ]

    def _before_forward(self, module: nn.Module, args: object) -> None:
        self.check_open("forward")
        if torch.is_grad_enabled():
            self._expect_known_parameters()
        self.thaw()
        self.expect_in_place()
        reduced = not self._claims and any(unit.grads is not None and unit.grads.present for unit in self.units)
        if reduced and torch.is_grad_enabled():
            raise RuntimeError(
                "gradients have been reduced, and no optimizer uses them: build a zeroshard.ShardedOptimizer over the "
                "parameters (a plain optimizer sees no gradient, and would train nothing)"
            )

    def _expect_known_parameters(self) -> None:
        known = {id(parameter) for unit in self.units for parameter in unit.parameters}
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in known:
                raise RuntimeError(
                    f"parameter {name} has come into the model after shard(), which does not know it: nobody would "
                    "reduce its gradient or update it. close() the handle, and shard() the changed model"
                )

    def expect_in_place(self) -> None:
        """Every parameter's data lie where the engine has put them (see `Weights`). Also where nothing moves them."""
        for unit in self.units:
            unit.weights.expect_in_place()

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
        if self._parked is not None:
            raise RuntimeError(f"{what}: this handle is parked; call unpark() first")

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
    materialize: Source | None = None,
    values: Literal["broadcast", "check"] = "broadcast",
) -> Handle:
    """Shard a model in place. Collective: every rank passes the same model and arguments.

    Args:
        model: on the device where it is to train, or on the meta device. It is called, and named, as before.
        plan: DDP, ZERO1, ZERO2 or ZERO3, or the lower-case name.
        units: what is gathered, reduced and freed together: module classes, a callable `module -> bool`, or a number
            of bytes; None groups neighbouring modules up to 32 MiB. The rest of the model is the root unit.
        precision: a `MixedPrecision`, "fp32", "bf16", ..., or None: as the model is.
        mesh: a process group, or a `DeviceMesh` with one axis, or with "replicate" and "shard". None: all ranks.
        max_transient_bytes: the most that full-size places, buckets and scratch may take. With `units=None` units are
            made small enough.
        materialize: where the values of a model on the meta device come from. A function of a module, called as
            `model.apply` would, that fills the module's own parameters and buffers; or a `model.safetensors` file, or a
            folder of them with an index. No rank ever holds the whole model.
        values: "broadcast": rank 0's win; "check": they must be the same on every rank already, and nothing is sent.

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
        _refuse_unready(model, collectives, materialize)
        if values not in ("broadcast", "check"):
            raise ValueError(f"values must be 'broadcast' or 'check', found {values!r}")
    except Exception as error:  # also what a user's callable raises: the other ranks must hear of it
        problem = str(error) if isinstance(error, (ValueError, TypeError)) else repr(error)
    _raise_together(collectives, problem, "shard")
    _expect_same_model(collectives, model, specs, chosen)
    on_meta = is_on_meta(model)
    if on_meta:
        move(model, META, collectives.device)
    elif values == "check":
        _expect_same_values(collectives, model)
    before = [(parameter, parameter.data) for parameter in model.parameters()]
    handle, failure = None, None
    try:
        if not on_meta and values == "broadcast":
            collectives.broadcast([*(data for _, data in before), *model.buffers()])
        handle = Handle(chosen, _build(model, specs, chosen, collectives, fill=not on_meta), collectives, model)
        if on_meta:
            assert materialize is not None
            give_values(model, handle.units, materialize, collectives)
            for unit in handle.units:
                unit.weights.hide()
                handle.gatherer.updated(unit)
            handle.gatherer.settle()
        for parameter, _ in before:
            _HANDLES[parameter] = weakref.ref(handle)
        handle.attach()
    except Exception as error:
        failure = error
    try:
        text = str(failure) if isinstance(failure, (ValueError, ImportError)) else repr(failure)
        _raise_together(collectives, "" if failure is None else text, "shard")
    except ValueError:
        if handle is not None:
            handle._release()
        for parameter, data in before:
            parameter.data = data
            _HANDLES.pop(parameter, None)
        if on_meta:
            move(model, collectives.device, META)
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


def _build(
    model: nn.Module, specs: Sequence[UnitSpec], plan: Plan, collectives: Collectives, *, fill: bool = True
) -> list[Unit]:
    """Allocate, and fill, one unit after the other."""
    parameters = dict(model.named_parameters())
    units = []
    for index, spec in enumerate(specs):
        of_unit = [parameters[name] for name in reversed(spec.names)]
        unit = Unit(index, spec, of_unit, plan, collectives)
        if fill:
            unit.fill()
        units.append(unit)
    return units


def _refuse_unready(model: nn.Module, collectives: Collectives, materialize: Source | None) -> None:
    device_type = collectives.device.type
    on_meta = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if on_meta and materialize is None:
        raise ValueError(
            f"{on_meta[0]} is on the meta device: pass materialize= a function that initialises a module, or a "
            "safetensors file"
        )
    if materialize is not None and len(on_meta) < len([*model.parameters()]):
        raise ValueError("materialize= is for models on the meta device; this one has values already")
    for name, parameter in model.named_parameters():
        if handle_of(parameter) is not None:
            raise ValueError(f"parameter {name} is sharded already: close() the other handle first")
        if parameter.device.type not in (device_type, "meta"):
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


def _expect_same_values(collectives: Collectives, model: nn.Module) -> None:
    """Ranks compare a digest of every parameter and buffer.

    Raises:
        ValueError: the first that differs.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    digests = {name: _digest(tensor.detach()) for name, tensor in named.items()}
    by_rank = collectives.exchange_objects(digests)
    for rank, theirs in enumerate(by_rank):
        for name, digest in by_rank[0].items():
            if theirs[name] != digest:
                raise ValueError(
                    f"shard: values='check', and {name} has other values on rank {rank} than on rank 0: load the same "
                    "weights or use the same seed on every rank, or let rank 0's win with values='broadcast'"
                )


def _digest(tensor: Tensor) -> int:
    """Of the bytes and where they are: a sum of products, modulo 2^64."""
    total = 0
    for number, piece in enumerate(tensor.contiguous().view(-1).view(torch.uint8).split(1 << 20)):  # type: ignore[no-untyped-call]
        position = torch.arange(1, piece.numel() + 1, device=piece.device)
        total = (total * 31 + number + int((piece.to(torch.int64) * position).sum())) % 2**64
    return total


def _raise_together(collectives: Collectives, problem: str, what: str) -> None:
    problems = collectives.exchange_objects(problem)
    if any(problems):
        rank = next(rank for rank, text in enumerate(problems) if text)
        where = "" if all(text == problems[0] for text in problems) else f" (on rank {rank})"
        raise ValueError(f"{what}{where}: {problems[rank]}")
