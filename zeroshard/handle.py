"""The handle of a sharded model: training scopes, weights to read and to write, memory, and the life of it all.

Ownership: the handle and the model's hooks own the units, units own the buffers; the handle refers to the model
weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from zeroshard.absent import give
from zeroshard.buffer import live_bytes
from zeroshard.casting import Cast
from zeroshard.collectives import Collectives
from zeroshard.comm_log import CommLog
from zeroshard.freezing import Freezing
from zeroshard.full_state import IncompatibleKeys, Taking, full_state, load_full_state
from zeroshard.gather import Gatherer, in_backward
from zeroshard.gradients import GradState
from zeroshard.hooks import NotCopied, OutsideGraphs, Schedule
from zeroshard.join import join
from zeroshard.managed import EVERYTHING, Managed
from zeroshard.parking import Parked
from zeroshard.placement import Plan
from zeroshard.planner import check_limit
from zeroshard.pool import KINDS as TRANSIENT_KINDS
from zeroshard.pool import Pool
from zeroshard.precision import in_words
from zeroshard.reads import ReadsRaise
from zeroshard.reduce import Reducer
from zeroshard.right_call import NotTheModel
from zeroshard.same import expect_same
from zeroshard.transforms import outside_transforms
from zeroshard.unit import Unit, plain_name
from zeroshard.unsharded import Part, units_of, unsharded, written

_HANDLES: MutableMapping[Tensor, weakref.ref[Handle]] = WeakTensorKeyDictionary()
"""Parameter -> weak reference to the handle that owns its data. The one piece of global state: a parameter handed to
`shard` or to an optimizer says in no other way whether, and by whom, it is sharded."""

KINDS = ("weights", "grads", "main", "state", "scalars", *TRANSIENT_KINDS)


class HoldsTensors(Protocol):
    def tensors(self) -> dict[str, list[Tensor]]: ...


class Unfinished(Protocol):
    """Work that goes on in the background. `settle`: wait for it, and raise its error if nobody has seen it yet."""

    def settle(self) -> None: ...


class Owner(HoldsTensors, Protocol):
    """An optimizer, as its handle sees it. `rebuild`: there are more parameters to update than there were."""

    def rebuild(self) -> None: ...


class Handle(NotTheModel, NotCopied):
    """A sharded model: what `shard` returns.

    Attributes:
        plan: where weights, gradients and main rest.
        managed: which parameters and buffers of the model are the handle's.
        units: in registration order.
        comm_log: what has been communicated.
        pool: full-size places, buckets and scratch.
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
        self.gatherer = Gatherer(self.units, collectives, self.pool)
        self.reducer = Reducer(self.units, collectives, self.pool)
        self.schedule = Schedule(self.gatherer, self.reducer)
        self._freezing = Freezing(self.units, collectives)
        self._model = weakref.ref(model) if model is not None else lambda: None
        self._claims: dict[int, weakref.ref[Owner]] = {}
        self._owners: list[weakref.ref[Owner]] = []  # also those that have no parameter yet
        self.pool.besides = partial(_scratch_of_owners, weakref.ref(self))
        self._guards: list[RemovableHandle] = []
        self.background: Unfinished | None = None
        self.untaken: dict[str, nn.Parameter] = {}
        self._reading = False
        self._closed = False
        self._parked: Parked | None = None
        self._shards: dict[Unit, Tensor] = {}

    def __repr__(self) -> str:
        """In one line: plan, units, parameters, ranks, precision."""
        if self._closed:
            return "Handle(closed)"
        mesh, numel = self.collectives.mesh, sum(s.world.numel for unit in self.units for s in unit.layout.slots)
        ranks = f"{mesh.world.size} rank{'s' * (mesh.world.size > 1)}"
        if mesh.replicate.size > 1:
            ranks += f" ({mesh.replicate.size} replicas of {mesh.shard.size} shards)"
        kinds = ", ".join(sorted({in_words(unit.spec.precision) for unit in self.units})) or "no parameters"
        units = f"{len(self.units)} unit{'s' * (len(self.units) != 1)}"
        return f"Handle({self.plan.name}, {units}, {numel:,} parameters on {ranks}, {kinds})"

    @property
    def comm_log(self) -> CommLog:
        return self.collectives.log

    # Training ----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, *parts: Part) -> Iterator[None]:
        """Backward passes inside accumulate locally; the first one outside reduces the sum. Legal under every plan;
        under ZERO2 and ZERO3 the price is a full-size gradient. The same on every rank.

        Args:
            parts: modules, parameters, or names of either; none: the whole model. Whole units come.

        Raises:
            ValueError: a part that this handle does not have.
            RuntimeError: `max_transient_bytes` does not allow it.
        """
        before = self.reducer.local
        self.set_requires_gradient_sync(False, *parts)
        try:
            yield
        finally:
            self.reducer.local = before

    def set_requires_gradient_sync(self, requires: bool, *parts: Part) -> None:
        """As `no_sync`, but until it is called again. (The name is FSDP2's.)"""
        self.check_open("set_requires_gradient_sync")
        units = self._units_of(parts, "set_requires_gradient_sync")
        local = self.reducer.local
        self.reducer.accumulate_locally(local - frozenset(units) if requires else local | frozenset(units))

    def _units_of(self, parts: Sequence[Part], what: str) -> Sequence[Unit]:
        return units_of(parts, self.model, self.units, what) if parts else self.units

    def join(
        self, *others: Handle, divide_by_initial_world_size: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[None]:
        """Around a training loop, where ranks have inputs for different numbers of steps. A rank that comes to the end
        of the block takes part in what the others do, with gradients of zero, until all have come there; it runs no
        model. Collective, as torch's `Join`.

        Inside, call the model itself (all ranks meet before each call of it), backward, clip and step as always;
        `state_dict`, `save` and other collective calls raise once a rank has run out. All ranks end with the same
        weights, optimizer state and hyper-parameters. A scheduler of a rank that has run out stands still: set it to
        the others' count before it goes on.

        Args:
            others: handles of further models of the same loop (a GAN's), in the same order on each rank.
            divide_by_initial_world_size: gradients are means over all ranks, also those that have run out; False: over
                those that have not.
            throw_on_early_termination: raise on all ranks as soon as one has run out.

        Raises:
            ValueError: handles of different ranks; someone else reduces the gradients.
        """
        for handle in (self, *others):
            handle.check_open("join")
            if handle.plan.external_gradients:
                raise ValueError(
                    "join: under OPTIMIZER_ONLY someone else reduces the gradients: use "
                    "torch.distributed.algorithms.Join([ddp, optimizer])"
                )
        return join((self, *others), divide_by_initial_world_size, throw_on_early_termination)

    def unsharded(
        self, *parts: Part, write: bool = False, modifier_rank: int | None = None
    ) -> AbstractContextManager[None]:
        """Inside, parameters have their full values, under every plan. Collective.

        Entering and leaving are; what happens inside need not be: a forward inside gathers nothing, so ranks may call
        the model, or `generate`, as often as each likes.

        Args:
            parts: modules, parameters, or names of either; none: the whole model. Whole units come.
            write: changes made inside, the same on every rank, become the new weights, and main follows. Without it
                they raise. After an error inside, and where ranks differ, the values are as before.
            modifier_rank: the rank whose changes are taken, by all; `write` goes without saying. (The name is
                DeepSpeed's.)

        Raises:
            ValueError: a part that this handle does not have; ranks that have written different values.
            RuntimeError: a parameter has been written to without `write`.
        """
        self.check_open("unsharded")
        units = self._units_of(parts, "unsharded")
        if write or modifier_rank is not None:
            return written(units, self.gatherer, modifier_rank)
        return unsharded(units, self.gatherer)

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
        found = [(unit, slot) for unit in self.units for slot in unit.layout.slots if slot.name == name]
        if not found or found[0][0].grads is None:
            raise ValueError(f"gradient: the model has no trainable parameter of the name {name!r}")
        unit, slot = found[0]
        assert unit.grads is not None
        self.reducer.notice()
        if unit.grads.state is not GradState.REDUCED:
            raise RuntimeError(
                f"gradient: that of {name} is {unit.grads.state.value}; call backward (not under no_sync)"
            )
        full = torch.zeros(unit.layout.numel, dtype=unit.grads.buffer.dtype, device=unit.weights.own().device)
        own = slot.world & unit.own_shard()
        unit.read_gradient(own, full[own.slice])
        portions = unit.layout.portions({unit.slot_index(name)})
        self.collectives.all_gather(full, unit=unit.name, phase="unshard", portions=portions).wait()
        return full[slot.world.slice].view(slot.shape).div(self.reducer.scale or 1.0)

    @torch.no_grad()
    def set_gradient(self, name: str, values: Tensor) -> None:
        """Between backward and step: the reduced gradient of a parameter becomes `values`, the mean over ranks in full
        (as `gradient` gives it), the same on every rank. Collective.

        Raises:
            ValueError: no trainable parameter of that name; values of another shape, or other values on each rank.
            RuntimeError: gradients of its unit that are only accumulated (`no_sync`); weighted losses.
        """
        self.check_open("set_gradient")
        found = [(unit, index) for unit in self.units for index, s in enumerate(unit.layout.slots) if s.name == name]
        if not found or found[0][0].grads is None:
            raise ValueError(f"set_gradient: the model has no trainable parameter of the name {name!r}")
        unit, index = found[0]
        slot, grads = unit.layout.slots[index], unit.grads
        assert grads is not None
        if tuple(values.shape) != slot.shape:
            raise ValueError(f"set_gradient: {name} has the shape {slot.shape}, found {tuple(values.shape)}")
        expect_same(
            self.collectives, {name: values}, "set_gradient", "Pass the same on every rank: the mean over ranks"
        )
        self.reducer.set_gradient(unit, index, values)

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
        self.collectives.exchange_objects(None, "set_main_parts()")  # nobody writes before everybody has read
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
        for buffer in self.managed.buffers(self.model).values():
            if not buffer.is_floating_point():
                self.collectives.broadcast([buffer])
            elif buffer.numel():
                rows = self.collectives.exchange(buffer.reshape(-1).to(self.collectives.device), "average_buffers()")
                buffer.copy_(rows.mean(0).view(buffer.shape))

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let `module.name(...)` do what `module(...)` does: give the module's own parameters their values, and cast
        inputs and outputs where calls of the module do.

        Needed for a method that uses parameters of that very module and is called in place of it (a `forward_features`
        that adds `self.position`, say). Methods that only call other modules work as they are. The name is FSDP2's.
        """
        self.check_open("register_forward_method")
        self.schedule.wrap(module, name, self._before_forward if module is self.model else None)

    # Weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def full_state_dict(
        self, *, main: bool = False, rank0_only: bool = False, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        """Names and values of the plain model's `state_dict()`, full tensors on every rank. Collective.

        Args:
            main: fp32 main values instead of the compute-precision weights.
            rank0_only: on rank 0 alone; the others take part, and get an empty dict.
            device: where to ("cpu"); None: where the model is. At most one unit is there in full meanwhile.
        """
        self.check_open("full_state_dict")
        state = full_state(self._names(), self.units, self.gatherer, Taking(rank0_only, device), main=main)
        self.pool.rest()
        return state

    @torch.no_grad()
    def load_full_state_dict(
        self, state_dict: Mapping[str, Tensor] | None, *, strict: bool = True, broadcast_from_rank0: bool = False
    ) -> IncompatibleKeys:
        """Take full values by the plain model's names; weights and main follow. Collective.

        Args:
            state_dict: the same on every rank (but for buffers, of which each rank takes its own).
            strict: whether names that are missing or unexpected are an error; else they are left, and returned.
            broadcast_from_rank0: rank 0 alone has a state_dict; the others get the values unit by unit. They pass {} or
                None.

        Returns:
            `missing_keys` and `unexpected_keys`, as `nn.Module.load_state_dict` does.

        Raises:
            ValueError: on every rank, and nothing has been changed: names that are missing or unexpected; other shapes;
                parameters of which the ranks have other values.
        """
        self.check_open("load_full_state_dict")
        return load_full_state(
            self._names(),
            self.units,
            self.gatherer,
            state_dict,
            strict=strict,
            from_rank0=broadcast_from_rank0,
            left_alone=frozenset(map(plain_name, self.managed.ignored)),
        )

    def unsharded_state(self) -> dict[str, Tensor]:
        """What the plain model's `state_dict()` lists besides the sharded parameters: its buffers themselves."""
        if self.plan.external_gradients:
            return {}  # built from parameters alone
        sharded = {id(parameter) for unit in self.units for parameter in unit.parameters}
        return {name: value for name, value in self._names().items() if id(value) not in sharded}

    def tied(self) -> dict[str, str]:
        """Of parameters with several names in the plain model's `state_dict()`: further name -> the one in `units`."""
        if self.plan.external_gradients:
            return {}
        first = {id(p): s.name for u in self.units for p, s in zip(u.parameters, u.layout.slots, strict=True)}
        return {name: first[id(v)] for name, v in self._names().items() if first.get(id(v), name) != name}

    def _names(self) -> dict[str, Tensor]:
        """What the plain model's `state_dict()` lists: parameters and buffers themselves, under its names."""
        self._reading = True
        try:
            return {plain_name(name): value for name, value in self.model.state_dict(keep_vars=True).items()}
        finally:
            self._reading = False

    # Looking -----------------------------------------------------------------------------------------------------

    def find_reads(self) -> AbstractContextManager[Any]:
        """A parameter whose values are not here raises when it is read. Inside, on this thread, also where C++ or a
        `torch.func` transform reads it, which finds NaN else. It takes some ten microseconds an operation."""
        self.check_open("find_reads")
        return ReadsRaise(self.units)

    def memory(self, *, peak: bool = False) -> dict[str, int]:
        """Live bytes on this rank by kind: weights, grads, main, state, scalars, and the transients (ring: full-size
        places of weights; buckets: of gradients; scratch). What is mapped of another rank's memory is counted there.

        Args:
            peak: of what comes and goes in a step, the most of each kind that has been held at once since `shard`.
        """
        if self._parked is None:
            self.check_open("memory")
        kinds: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        for kind in TRANSIENT_KINDS:
            kinds[kind] = self.pool.tensors(kind)
        for holder in [*self.units, *self.owners()]:
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
        values: list[tuple[nn.Parameter, Tensor]] = []
        for unit in self.units:
            full = unit.gather_main(self.collectives) if unit.main is not None else None
            if full is None:
                self.gatherer.unshard(unit)
                full = unit.weights.buffer.full
                assert full is not None
            for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
                values.append((parameter, full[slot.world.slice].view(slot.shape).to(unit.spec.dtype, copy=True)))
        for parameter, value in values:  # after the last gather: units that take turns in a place move each other's
            give(parameter, value)
        self._release()

    def finish_background(self) -> None:
        """Wait for the checkpoint that is being written, if there is one; raises what went wrong with it."""
        unfinished, self.background = self.background, None
        if unfinished is not None:
            unfinished.settle()

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
    def thaw(self) -> None:
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
            unit.thaw(self.collectives)
        local = self.reducer.local
        self.pool.clear()
        self.gatherer = Gatherer(self.units, self.collectives, self.pool)
        self.reducer = Reducer(self.units, self.collectives, self.pool)
        self.reducer.local = local
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

    def attach(self, casts: Mapping[nn.Module, Cast]) -> None:
        """Install the hooks. They keep the handle: a model whose handle is dropped trains on."""
        model = self.model
        self.schedule.attach(model, casts)
        self._guards = [
            model.register_forward_pre_hook(OutsideGraphs(self._before_forward), prepend=True),
            model.register_state_dict_pre_hook(self._before_state_dict),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_pre_hook(self._before_load_state_dict),  # type: ignore[no-untyped-call]
        ]

    def _before_forward(self, module: nn.Module, args: object) -> None:
        self.check_open("forward")
        self.schedule.come_first()
        orders, in_use = self.collectives.orders, any(unit.weights.in_use for unit in self.units)
        if orders is not None and not in_use:
            orders.before_forward()
        with outside_transforms():
            if torch.is_grad_enabled():
                self._expect_known_parameters()
                if not in_use and not in_backward():  # inside `unsharded` ranks run what they like
                    self.thaw()
            self.expect_in_place()
            self.gatherer.begin_forward()
        if torch.is_grad_enabled() and not self._has_owner() and self.has_gradients(reduced=True):
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
            give_up_parameters(unit.parameters)
        self.units = ()
        self.pool = Pool(self.collectives)
        self.gatherer = Gatherer((), self.collectives, self.pool)
        self.reducer = Reducer((), self.collectives, self.pool)
        self.schedule = Schedule(self.gatherer, self.reducer)
        self._freezing = Freezing((), self.collectives)

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
            other = self._owner_of(parameter)
            if other is not None and other is not owner:
                raise ValueError(
                    f"parameter {self.name_of(parameter)} belongs to another ShardedOptimizer: give each its own "
                    "parameters, or delete the other one first"
                )
        self._claims.update({id(parameter): weakref.ref(owner) for parameter in parameters})
        if all(known is not owner for known in self.owners()):
            self._owners.append(weakref.ref(owner))

    @contextmanager
    def claimed(self, parameters: Iterable[nn.Parameter], owner: Owner) -> Iterator[None]:
        """As `claim`; what is done inside may fail, and then nothing has been claimed."""
        new, before = [p for p in parameters if self._owner_of(p) is not owner], list(self._owners)
        self.claim(new, owner)
        try:
            yield
        except BaseException:
            for parameter in new:
                self._claims.pop(id(parameter), None)
            self._owners = before
            raise

    def unclaimed(self, unit: Unit) -> set[int]:
        """Slots that no living optimizer has."""
        return {index for index, parameter in enumerate(unit.parameters) if self._owner_of(parameter) is None}

    def _owner_of(self, parameter: nn.Parameter) -> Owner | None:
        return self._claims.get(id(parameter), lambda: None)()

    def owners(self) -> list[Owner]:
        """The living optimizers of this model."""
        return [owner for reference in self._owners if (owner := reference()) is not None]

    def _has_owner(self) -> bool:
        return any(ref() is not None for ref in self._claims.values())

    def name_of(self, parameter: nn.Parameter) -> str:
        for unit in self.units:
            for mine, slot in zip(unit.parameters, unit.layout.slots, strict=True):
                if mine is parameter:
                    return slot.name
        return "(unknown)"


def _scratch_of_owners(handle: weakref.ref[Handle]) -> int:
    alive = handle()
    owners = alive.owners() if alive is not None else []
    return live_bytes([tensor for owner in owners for tensor in owner.tensors().get("scratch", [])])


def handle_of(parameter: nn.Parameter) -> Handle | None:
    """The living handle that owns a parameter's data."""
    reference = _HANDLES.get(parameter)
    return reference() if reference is not None else None


def claim_parameters(handle: Handle, parameters: Iterable[nn.Parameter]) -> None:
    """From now on `handle_of` says so."""
    for parameter in parameters:
        _HANDLES[parameter] = weakref.ref(handle)


def give_up_parameters(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        _HANDLES.pop(parameter, None)
