"""The engine of one sharded model: owns its units and the objects that gather, reduce and park them.

Optimizers, checkpoints and joins work on the engine. `handle.py` is its public face.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.ranges import phase
from zeroshard.errors import InvalidState
from zeroshard.failures.positions import HERE
from zeroshard.gradients.loss_ledger import LossLedger
from zeroshard.model.absent import NotCopied, as_tensors
from zeroshard.model.inference import outside_inference
from zeroshard.model.managed import EVERYTHING, Managed
from zeroshard.model.right_call import expect_no_fsdp, expect_no_recording
from zeroshard.model.transforms import in_plain_torch
from zeroshard.placement import Plan
from zeroshard.runtime.claims import Claims
from zeroshard.runtime.freezing import POINT, Freezing
from zeroshard.runtime.gather import Gatherer, in_backward
from zeroshard.runtime.hooks import Hooks
from zeroshard.runtime.life import Life
from zeroshard.runtime.other_optimizers import expect_none_silent
from zeroshard.runtime.parking import Parking
from zeroshard.runtime.plain_model import PlainModel, names_by_id
from zeroshard.runtime.reduce import Reducer
from zeroshard.runtime.running import Running
from zeroshard.runtime.schedule import Schedule, refuse_inside_of_backward
from zeroshard.storage.pool import KINDS as TRANSIENT_KINDS
from zeroshard.storage.pool import Pool
from zeroshard.storage.unit import Unit

KINDS = ("weights", "grads", "main", "state", "scalars", *TRANSIENT_KINDS)


class Unfinished(Protocol):
    """Work in the background. `finish` waits for it, and raises its error unless it has been raised before."""

    def finish(self) -> None: ...


class Engine(NotCopied):
    """The engine of one sharded model.

    Attributes:
        plan: where weights, gradients and main rest.
        plain: the model as a plain module.
        ledger: the scales and weights of losses.
        claims: which optimizer has which parameters.
        background: a checkpoint that is still being written, or None.
        freezing: changes of what trains.
        untaken: under OPTIMIZER_ONLY, parameters of its optimizer that are not trained yet, by name.
        life: open, parked, closing, closed or abandoned.
        units: in registration order; empty after `close` or `abandon`.
        pool: full-size buffers for weights, gradients and scratch.
        gatherer: gathers and hides weights.
        reducer: accumulates and reduces gradients.
        schedule: calls gatherer and reducer.
        hooks: on the model; they call the schedule.
    """

    untaken: Mapping[str, nn.Parameter] = MappingProxyType({})

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        collectives: Collectives,
        model: nn.Module | None,
        managed: Managed = EVERYTHING,
        max_transient_bytes: int | None = None,
    ) -> None:
        self.plan, self.collectives = plan, collectives
        self.plain = PlainModel(model, managed)
        self.ledger = LossLedger()
        self.claims = Claims()
        self.background: Unfinished | None = None
        self.life = Life.OPEN
        self._parking = Parking(collectives)
        self._hold(units, max_transient_bytes)
        expect_none_silent(self)

    def _hold(self, units: Sequence[Unit], max_transient_bytes: int | None = None) -> None:
        """Start with these units, a new schedule, new hooks and a new pool; drop all previous ones."""
        self.schedule = Schedule()
        self.hooks = Hooks(self.schedule)
        self.freezing = Freezing(units, self.collectives)
        self._work_with(units, Pool(self.collectives, max_transient_bytes))

    def _work_with(self, units: Sequence[Unit], pool: Pool) -> None:
        """Set the units (none of which may have a collective in flight) and the pool, and make a new gatherer and a new
        reducer for them."""
        self.units, self.pool = tuple(units), pool
        pool.besides = self.claims.scratch_bytes
        self.gatherer = Gatherer(self.units, self.collectives, pool)
        self.reducer = self.new_reducer()
        self.schedule.lead_to(self.gatherer, self.reducer)

    def new_reducer(self) -> Reducer:
        """A reducer for the current units and pool."""
        return Reducer(self.units, self.collectives, self.pool, self.ledger)

    @property
    def model(self) -> nn.Module:
        """See `PlainModel`."""
        return self.plain.module

    def admits(self, parameter: nn.Parameter) -> bool:
        """Whether an optimizer of this model may have the parameter."""
        return any(parameter is mine for unit in self.units for mine in unit.parameters)

    def take_newcomers(self, parameters: Sequence[nn.Parameter], handle: Any) -> None:
        """Shard those of an optimizer's parameters that are admitted and not sharded yet: there can be some only under
        OPTIMIZER_ONLY (`external.py`). `handle`: the one that owns them then."""

    def trainable_parameters(self) -> list[nn.Parameter]:
        """See `Handle.trainable_parameters`."""
        self.expect_known_parameters()  # a model that is called by its parts alone has no forward that looks
        trainable = {id(p) for unit in self.units if unit.trainable for p in unit.parameters}
        return [p for p in self.model.parameters() if id(p) in trainable]

    def trained_units(self, what: str) -> list[Unit]:
        """The units that train. `what`: the caller.

        Raises:
            RuntimeError: none does, in a model with parameters: an average of them would do nothing.
        """
        trained = [unit for unit in self.units if unit.trainable]
        if self.units and not trained:
            raise InvalidState(
                f"{what}: no parameter of this model has trained, so there is no main. Read frozen weights "
                "inside `with handle.unsharded():`, and write them inside `with handle.unsharded(write=True):`"
            )
        return trained

    def name_of(self, parameter: nn.Parameter) -> str:
        """The parameter's name, for messages."""
        return names_by_id(self.units).get(id(parameter), "(unknown)")

    def unsharded_state(self) -> dict[str, Tensor]:
        """See `PlainModel`."""
        return self.plain.unsharded_state(self.units)

    def tied(self) -> dict[str, str]:
        """See `PlainModel`."""
        return self.plain.tied(self.units)

    # Memory --------------------------------------------------------------------------------------------------------

    def memory(self, *, peak: bool = False) -> dict[str, int]:
        """See `Handle.memory`."""
        if self.life is not Life.PARKED:
            self.life.expect_open("memory")
        kinds: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        for kind in TRANSIENT_KINDS:
            kinds[kind] = self.pool.tensors(kind)
        for holder in (*self.units, *self.claims.owners()):
            for held, tensors in holder.tensors().items():
                kinds[held] += tensors
        found = self._parking.live_bytes(kinds)
        if peak and self.life is Life.OPEN:
            found["grads"] = sum(unit.grads.most for unit in self.units)
            found |= {kind: self.pool.most.get(kind, 0) for kind in TRANSIENT_KINDS}
            found["scratch"] += self.pool.besides()
        return found

    # Gradients and what is frozen ----------------------------------------------------------------------------------

    def has_gradients(self, *, reduced: bool = False) -> bool:
        """Whether gradients are waiting for a step. `reduced`: only those that have been reduced."""
        self.reducer.notice()  # the user may have set `p.grad = None` in the meantime
        return self.reducer.has_gradients(reduced=reduced)

    def begins_anew(self) -> bool:
        """Whether no gradients wait for a step (the user may have discarded them, by `model.zero_grad()` for
        example)."""
        if external := [unit for unit in self.units if unit.grads.is_external]:
            return all(grad is None for unit in external for grad in unit.user_grads())
        return bool(self.reducer.order) and not (self.reducer.notice() or self.reducer.has_gradients())

    def expect_no_gradients(self, what: str) -> None:
        """Raises:
        RuntimeError: gradients are waiting for a step."""
        self.schedule.expect_to_begin()  # `p.grad` does not show gradients of a backward that has raised
        if self.reducer.notice() or self.has_gradients():
            raise InvalidState(
                f"{what}: gradients are waiting for a step, and they are not part of a checkpoint: save and load "
                "between a step (or zero_grad) and the next backward"
            )

    @torch.no_grad()
    def unfreeze(self) -> None:
        """Follow changes of `requires_grad`. Parameters that no longer require grad are not reduced any more. Units
        that were frozen at `shard` and train now get gradients and main, and their optimizers begin to update them.
        Called before each forward of the model; collective if something has changed.

        Raises:
            ValueError: ranks differ; more pool buffers are needed than `max_transient_bytes` allows.
            RuntimeError: gradients are waiting for a step, and a frozen unit is to train.
        """
        if not self.freezing.has_changed():
            return
        slots = self.freezing.agree()
        self._begin_to_train()
        self.freezing.apply(slots)
        self.reducer.find_order()

    @outside_inference
    def _begin_to_train(self) -> None:
        frozen = [unit for unit in self.units if not unit.trainable and unit.requiring_grad()]
        if not frozen:
            return
        if self.collectives.count(self.has_gradients(), POINT):  # as in `park`
            raise InvalidState(
                "parameters that were frozen require grad now, and gradients of other parameters are waiting: let "
                "parameters require grad between a step (or zero_grad) and the next forward"
            )
        self.pool.expect_units(
            [replace(unit.spec, trainable=unit.spec.trainable or unit in frozen) for unit in self.units]
        )
        self.gatherer.settle()  # a new gatherer does not know of gathers in flight
        for unit in self.units:
            unit.weights.rest()
        self.freezing.unfreeze(frozen)
        local = self.reducer.local
        self.reducer.visible.remove_used()
        # The old buffers are planned for fewer units. Units must have given theirs back by now (`rest` above).
        self.pool.clear()
        self._work_with(self.units, self.pool)
        self.reducer.local = local
        self.hooks.hook_parameters(frozen)
        self.collectives.map_peers()
        for owner in self.claims.owners():
            owner.rebuild()

    # Life cycle ----------------------------------------------------------------------------------------------------

    def check_open(self, what: str) -> Self:
        """Returns the engine. Raises RuntimeError if it is closed, abandoned or parked, or in the middle of a call."""
        self.life.expect_open(what)
        self.running.expect_whole(what)
        self.collectives.come()
        return self

    @property
    def running(self) -> Running:
        """The calls that are running."""
        return self.schedule.running

    @property
    def is_in_backward(self) -> bool:
        """Whether a hook of the user's makes this call, inside of a backward of this model."""
        return self.schedule.is_in_backward

    def expect_no_backward(self, what: str) -> Self:
        """Returns the engine.

        Raises:
            RuntimeError: a hook calls this inside of a backward, or it is called in the middle of another call.
        """
        self.running.expect_whole(what)
        if self.is_in_backward:
            refuse_inside_of_backward(what)
        return self

    def finish_background(self) -> None:
        """Wait for the checkpoint that is being written, if there is one; raises its error."""
        unfinished, self.background = self.background, None
        if unfinished is not None:
            unfinished.finish()

    @torch.no_grad()
    @phase("park")
    def park(self, device: torch.device) -> None:
        """See `Handle.park`."""
        self.life.expect_open("park")
        self.expect_no_backward("park").schedule.expect_to_begin()
        # On any rank: a backward under `no_sync` may have left all parameters out on another one.
        if self.collectives.count(self.has_gradients(), "park"):
            raise InvalidState("park: gradients are waiting for a step; call step() or zero_grad() first")
        self.gatherer.settle()
        # After this exchange no peer reads this rank's memory any more: only then may storages be emptied.
        self.collectives.exchange_objects(None)
        self.pool.empty()
        owners = self.claims.owners()
        self._parking.copy(self.units, owners, device)
        self.life = Life.PARKED  # `unpark` can undo all that follows, wherever it is interrupted
        self._parking.empty(self.units, owners)

    @torch.no_grad()
    @phase("unpark")
    def unpark(self) -> None:
        """See `Handle.unpark`."""
        self.life.expect_parked("unpark")
        self._parking.unpark()
        self.life = Life.OPEN
        self.gatherer.settle()
        # After this exchange all peers have read this rank's shards, which lie in shared memory: the user may write.
        self.collectives.exchange_objects(None)

    @phase("before forward")
    def before_forward(self) -> None:
        """Called before each forward of the model: agree on which parameters train, and check what the user may have
        changed since the last call.

        Raises:
            RuntimeError: closed or parked; the model is exported; a new parameter, or one whose
                data have been replaced; reduced gradients that no optimizer uses; as `unfreeze`.
        """
        self.check_open("forward")
        HERE.note_thread()
        if expect_no_recording(unit.weights.buffer.rests_in_full for unit in self.units):
            self.collectives.is_recorded = True
        self.hooks.come_first()  # the user may have registered hooks since, with `prepend=True`
        orders, in_use = self.collectives.orders, any(unit.weights.in_use for unit in self.units)
        if orders is not None and not in_use:
            orders.before_forward()
        self.collectives.num_reads += not in_use  # in a scope, one rank may call the model alone
        with in_plain_torch():
            self.expect_known_parameters(also_added=torch.is_grad_enabled())
            self.plain.is_known = torch.is_grad_enabled()
            # `unfreeze` is collective. Inside `unsharded` one rank may call the model alone, and in a backward only one
            # may be recomputing: there it would hang.
            if torch.is_grad_enabled() and not in_use and not in_backward():
                self.unfreeze()
            self.expect_in_place()
            self.reducer.visible.remove_used()
            self.gatherer.begin_forward()
        if torch.is_grad_enabled() and not self.claims.has_any() and self.has_gradients(reduced=True):
            raise InvalidState(
                "gradients have been reduced, and no optimizer uses them: build a zeroshard.ShardedOptimizer over the "
                "parameters (a plain optimizer sees no gradient, and would train nothing)"
            )

    def before_scope(self) -> Self:
        """Called before each `unsharded`, inside of which no forward can agree on what trains. Returns the engine."""
        in_use = any(unit.weights.in_use for unit in self.units)
        has_changed = torch.is_grad_enabled() and not in_use and not in_backward() and self.freezing.has_changed()
        if has_changed and not self.collectives.count(self.has_gradients(), POINT):  # as in park
            self.unfreeze()
        return self

    def expect_known_parameters(self, *, also_added: bool = True) -> None:
        """Check that all parameters of the model are in its units.

        Raises:
            RuntimeError: one is not. `also_added`: False: only if another one has left (not one for an evaluation).
        """
        for name in self.plain.newcomers(self.units, also_added=also_added):
            expect_no_fsdp(self.model, name)
            raise InvalidState(
                f"parameter {name} has come into the model after shard(), which does not know it: nobody would "
                "reduce its gradient or update it. close() the handle, and shard() the changed model; give a parameter "
                "other values of its shape inside `with handle.unsharded(write=True):`, by p.data = values. (For a "
                "functional_call: pass tensors, `parameter.detach()`, not Parameters)"
            )

    def expect_parameters_known_since(self) -> None:
        """Before a step: as `expect_known_parameters`, unless a forward since the last step has checked."""
        if not self.plain.is_known:  # a model that is called by its parts alone has no forward that looks
            self.expect_known_parameters()
        self.plain.is_known = False

    def expect_in_place(self) -> None:
        """Check that every parameter's data lie where the engine has put them (see `Weights.expect_in_place`)."""
        for unit in self.units:
            unit.weights.expect_in_place()

    @torch.no_grad()
    def abandon(self) -> None:
        """See `Handle.abandon`."""
        if self.life.is_over:  # teardown code may call this at any time, also twice
            return
        self.life = Life.ABANDONED
        # [Note: nobody waits for what was abandoned]
        # A collective whose data gloo has to receive waits for the peers when it is dropped (`Pending.__del__`), unless
        # `failed` is set. The peers may not come any more, so set it before anything is dropped.
        self.collectives.messages.failed = True
        self.background = None  # the write continues: the caller of save() has the object
        for unit in self.units:
            with as_tensors():
                for parameter in unit.parameters:
                    parameter.grad = None
            unit.weights.abandon()
        self.release()

    def release(self) -> None:
        """Remove the hooks, and free all memory."""
        self.hooks.detach()
        self._hold(())
