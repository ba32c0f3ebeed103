"""The handle of a sharded model: the public interface to its engine.

Ownership: the handle and the model's hooks own the engine; the engine owns the units; units own the buffers. The engine
refers to the model weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.same import expect_same_copies, expect_same_model, expect_writable, of_buffers
from zeroshard.comm.together import together
from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.full_model import give_back
from zeroshard.full_model.full_gradient import full_gradient, set_full_gradient
from zeroshard.full_model.full_state import Destination, IncompatibleKeys, full_state, load_full_state
from zeroshard.full_model.unsharded import (
    Part,
    expect_no_block,
    expect_none_written,
    parts_of,
    units_of,
    unsharded,
    written,
)
from zeroshard.io.checked import CheckpointError
from zeroshard.model.absent import NotCopied
from zeroshard.model.right_call import NotTheModel
from zeroshard.placement import REPLICATED, Plan
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.join import join
from zeroshard.runtime.reads import ReadsRaise
from zeroshard.runtime.summary import in_one_line, table
from zeroshard.runtime.timeline import Timeline

_HANDLES: Any = WeakTensorKeyDictionary()
"""Parameter -> `weakref.ref` of the handle that owns its data. Global, because `shard` and optimizers are given bare
parameters, and must find out whether, and by which handle, they are sharded."""


class Handle(NotTheModel, NotCopied):
    """A sharded model, as `shard` returns it.

    Attributes:
        engine, boundaries: not public. For optimizers and checkpoints; the units asked for (`units.boundaries`).
    """

    def __init__(self, engine: Engine, boundaries: Hashable = None) -> None:
        """Claim the engine's parameters. (If the user drops the handle, the model's hooks keep it alive.)"""
        self.engine, self.boundaries = engine, boundaries
        claim_parameters(self, (parameter for unit in engine.units for parameter in unit.parameters))
        # Bound methods on purpose: they keep the handle alive, which `handle_of` must find as long as the model lives.
        self._guards = engine.plain.guard(self._before_state_dict, self._before_load_state_dict)

    def __repr__(self) -> str:
        """In one line: plan, units, parameters, ranks, precision."""
        return f"Handle({in_one_line(self.engine)})"

    @property
    def plan(self) -> Plan:
        """The plan: the placements in which weights, gradients and main rest."""
        return self.engine.plan

    @property
    def comm_log(self) -> CommLog:
        """The log of this rank's collectives: name, unit and number of bytes of each."""
        return self.engine.collectives.log

    @property
    def model(self) -> nn.Module:
        """The sharded model.

        Raises:
            RuntimeError: the model no longer exists, or the handle was built from parameters only.
        """
        return self.engine.model

    # Training ----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, *parts: Part) -> Iterator[None]:
        """A block in which backward passes only accumulate on this rank; the first backward after it reduces the sum.
        Allowed under every plan; under ZERO2 and ZERO3 it allocates a full-size gradient bucket for each unit. All
        ranks must enter it.

        Args:
            parts: modules, parameters, or names of either; their whole units are meant. None given: the whole model.

        Raises:
            ValueError: the model does not have one of the parts.
            RuntimeError: the buckets would exceed `max_transient_bytes`.
        """
        before = self.engine.reducer.local
        _set_sync(self.engine, False, parts, "no_sync")
        try:
            yield
        finally:
            self.engine.reducer.local = before

    def set_requires_gradient_sync(self, requires: bool, *parts: Part) -> None:
        """Like `no_sync`, without a block: False begins it, True ends it. (The name is FSDP2's.)"""
        _set_sync(self.engine, requires, parts, "set_requires_gradient_sync")

    def join(
        self, *others: Handle, divide_by_initial_world_size: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[None]:
        """A block around a training loop in which ranks have inputs for different numbers of steps. A rank that reaches
        the end of the block takes part in the other ranks' collectives, with gradients of zero and without running the
        model, until all ranks have reached it. Collective, like torch's `Join`.

        Inside, call the model itself (all ranks meet before each call), backward, clip and step as usual. `state_dict`,
        `save` and other collective calls raise once a rank has run out of inputs. All ranks end with the same weights,
        optimizer state and hyper-parameters. The scheduler of a rank that has run out is not stepped: set it to the
        other ranks' step count afterwards.

        Args:
            others: handles of further models of the same loop (a GAN's), in the same order on each rank.
            divide_by_initial_world_size: True: gradients are means over all ranks, including those that have run out;
                False: over the ranks that still have inputs.
            throw_on_early_termination: raise on all ranks as soon as one has run out.

        Raises:
            ValueError: the handles have different ranks; or the plan is OPTIMIZER_ONLY.
        """
        engines = [handle.engine.check_open("join") for handle in (self, *others)]
        for engine in engines:
            if engine.plan.external_gradients:
                raise InvalidValue(
                    "join: under OPTIMIZER_ONLY someone else reduces the gradients: use "
                    "torch.distributed.algorithms.Join([ddp, optimizer])"
                )
        return join(engines, divide_by_initial_world_size, throw_on_early_termination)

    def unsharded(
        self, *parts: Part, write: bool = False, modifier_rank: int | None = None
    ) -> AbstractContextManager[None]:
        """A block in which parameters have their full values, under every plan.

        Entering and leaving the block is collective. What happens inside is not: a forward gathers nothing there, so
        each rank may call the model, or `generate`, as often as it needs.

        Args:
            parts: modules, parameters, or names of either; their whole units are meant. None given: the whole model.
            write: True: allow changes (also `p.data = ...`), the same on every rank. They become the new weights, and
                main is updated to match. After an error inside, or if ranks differ, the old values are restored. False:
                a change raises, and is lost where weights are sharded; elsewhere this rank keeps it.
            modifier_rank: the rank whose changes all ranks take, by its number in the whole job, also if `mesh=` is a
                group; it implies `write`. (The name is DeepSpeed's.)

        Raises:
            ValueError: the model does not have one of the parts; or ranks have written different values.
            RuntimeError: a parameter was written to without `write`.
        """
        engine = self.engine.check_open("unsharded").before_scope()
        units = units_of(parts, engine, "unsharded")
        if write or modifier_rank is not None:
            return written(units, engine, modifier_rank)
        return unsharded(units, engine)

    @torch.no_grad()
    def gradient(self, name: str) -> Tensor:
        """The full reduced gradient of a parameter, in its shape: the unscaled mean over ranks, as in `p.grad` under
        torch DDP. (If losses have weights: their weighted sum, divided by the number of ranks.) Collective; between
        backward and step.

        Raises:
            ValueError: no trainable parameter of that name.
            RuntimeError: no gradient has been reduced.
        """
        return full_gradient(self.engine.check_open("gradient"), name)

    @torch.no_grad()
    def set_gradient(self, name: str, values: Tensor) -> None:
        """Replace the reduced gradient of a parameter by `values`: the full mean over ranks, as `gradient` returns it,
        the same on every rank. Collective; between backward and step.

        Raises:
            ValueError: no trainable parameter of that name; values of another shape, or not the same on every rank.
            RuntimeError: its unit has gradients that are only accumulated (`no_sync`); or losses have weights.
        """
        set_full_gradient(self.engine.check_open("set_gradient"), name, values)

    @torch.no_grad()
    def main_parts(self) -> list[Tensor]:
        """This rank's part of main: one 1-D tensor per trainable unit, in main's dtype. The tensors are views of main,
        or copies if main is kept as a remainder. Use them for elementwise work such as averages, at 1/d of the
        memory."""
        units = self.engine.check_open("main_parts").trained_units("main_parts")
        return [unit.main.read(unit.updated) for unit in units]

    @torch.no_grad()
    def set_main_parts(self, parts: Sequence[Tensor]) -> None:
        """Set this rank's part of main to values in the form of `main_parts`; weights are updated. Collective.

        Raises:
            ValueError: on every rank: parts of another form; or other values on ranks that hold the same part (under
                DDP, and on replicas).
        """
        engine = self.engine.check_open("set_main_parts")
        expect_none_written(engine.units, "set_main_parts")
        units = engine.trained_units("set_main_parts")
        engine.gatherer.settle()
        # Its exchange also says that all ranks have read the weights.
        found = together(engine.collectives, "set_main_parts", partial(parts_of, units, parts))
        values, is_replicated = [part for _, part in found], engine.plan.main is REPLICATED
        expect_same_copies(engine.collectives, values, "set_main_parts", in_full=is_replicated)
        for unit, part in found:
            unit.write(unit.updated, part)
            unit.edits += 1
            engine.gatherer.updated(unit)
        engine.gatherer.settle()

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Make buffers, such as the running statistics of batch norm, equal on all ranks: floating-point buffers become
        their mean, others take rank 0's values. Without this call every rank keeps its own. Collective; a ValueError
        if ranks have buffers of other names, shapes or dtypes."""
        engine = self.engine.check_open("average_buffers")
        collectives = engine.collectives
        buffers = engine.plain.buffers()
        expect_same_model(collectives, of_buffers(buffers), "average_buffers()")
        expect_writable(buffers)
        for buffer in buffers.values():
            if not buffer.is_floating_point():
                collectives.broadcast([buffer])
            elif buffer.numel():
                rows = collectives.exchange(buffer.reshape(-1).to(collectives.device), "average_buffers()")
                rows = rows.float() if rows.dtype.itemsize < 2 else rows  # torch does not add 8-bit numbers
                buffer.copy_(rows.mean(0).view(buffer.shape))

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Make `module.name(...)` gather the module's own parameters and cast inputs and outputs, as `module(...)`
        does.

        Needed for a method that uses parameters of that very module and is called in place of it (for example a
        `forward_features` that adds `self.position`). Methods that only call other modules need no registration. (The
        name is FSDP2's.)
        """
        engine = self.engine.check_open("register_forward_method")
        engine.hooks.wrap(module, name, engine.before_forward if module is engine.model else None)

    # Weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def full_state_dict(
        self, *, main: bool = False, rank0_only: bool = False, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        """A copy of the plain model's (own) `state_dict()`, full tensors on every rank. Collective.

        Args:
            main: True: the values of main (fp32) instead of the weights in the compute dtype.
            rank0_only: True: only rank 0 gets the state; the other ranks take part, and get an empty dict.
            device: of the returned tensors, "cpu" for example; None: the model's. At most one unit at a time is in full
                on the model's device.
        """
        engine = self.engine.check_open("full_state_dict")
        state = full_state(engine, Destination(rank0_only, device), main=main)
        engine.pool.rest()
        return state

    @torch.no_grad()
    def load_full_state_dict(
        self, state_dict: Mapping[str, Tensor] | None, *, strict: bool = True, broadcast_from_rank0: bool = False
    ) -> IncompatibleKeys:
        """Set weights and main from full values under the plain model's names. Collective.

        Args:
            state_dict: the same on every rank (except buffers: each rank takes its own values).
            strict: True: missing or unexpected names raise; False: they are skipped and returned.
            broadcast_from_rank0: True: only rank 0 has a state dict, and sends the values unit by unit; the other ranks
                pass {} or None.

        Returns:
            `missing_keys` and `unexpected_keys`, as `nn.Module.load_state_dict` does.

        Raises:
            ValueError: on every rank, before anything has been changed: missing or unexpected names; other shapes;
                parameters whose values differ between ranks.
        """
        engine = self.engine.check_open("load_full_state_dict")
        return load_full_state(engine, state_dict, strict=strict, from_rank0=broadcast_from_rank0)

    # Looking -----------------------------------------------------------------------------------------------------

    def find_reads(self) -> AbstractContextManager[Any]:
        """A block in which reads of absent parameters by C++ code or `torch.func` transforms raise too; elsewhere they
        return NaN. For this thread only; costs about ten microseconds per operation."""
        return ReadsRaise(self.engine.check_open("find_reads").units)

    def summary(self) -> str:
        """A table to print: for each unit its number of parameters, dtype and resting placement of weights, gradients
        and main, and the bytes that this rank holds; then the bytes on this rank by kind. Not collective."""
        self.engine.life.expect_open("summary")
        return table(self.engine)

    def memory(self, *, peak: bool = False) -> dict[str, int]:
        """Live bytes on this rank by kind: weights, grads, main, state, scalars, and the transients (ring: full-size
        buffers of weights, also in `unsharded`; buckets: of gradients; scratch). Memory of a peer is counted there.
        `peak`: for transients, the most bytes of each kind that were held at once, outside of such blocks."""
        return self.engine.memory(peak=peak)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters in the order of the model's `parameters()`, so that a plain optimizer over them has
        the same `state_dict`."""
        return self.engine.trainable_parameters()

    def timeline(self) -> Timeline:
        """A block, for example of one step, of which this rank records when each gather, reduction, wait, forward,
        backward and batch of the step begins and ends: `with handle.timeline() as timeline:`. Like torch's profiler it
        records the whole process, and one block at a time. Not collective; the results do not change."""
        engine = self.engine.check_open("timeline")
        return Timeline(mesh := engine.collectives.mesh, f"rank {mesh.world.here}: {in_one_line(engine)}")

    # Life cycle --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def close(self, *, rank0_only: bool = False, device: torch.device | str | None = None) -> None:
        """Make the model a plain one again: every parameter gets its own full storage, in its dtype before `shard`,
        with main's values. Collective. Memory is freed and given back unit by unit; an error abandons the handle.
        Afterwards the handle and its optimizers raise. A second `close`, or one after `abandon`, has no effect.

        Args:
            rank0_only: True: only rank 0 gets a plain model; on other ranks, parameters raise when they are read.
            device: to which all of the model moves, "cpu" for example; None: it stays.
        """
        if self.engine.life.is_over:
            return
        destination, engine = give_back.destination_of(rank0_only, device), self.engine.check_open("close")
        expect_no_block(engine.units, "close")
        finish = engine.expect_no_backward("close").finish_background
        # Some ranks may have been told of its error already, by a `wait`.
        together(engine.collectives, "close", finish, errors=(CheckpointError,), patient=True)
        engine.running.carry_out("close", partial(give_back.close, engine, destination))
        self._let_go_of_parameters()  # last: until a close that is interrupted is done, `shard` must find this handle

    def abandon(self) -> None:
        """Release the model and all memory without the other ranks. Use it instead of `close` after a failure, of this
        rank or of another. Not collective; it does not wait for other ranks. A second call has no effect.

        Afterwards the model has no hooks. Parameters whose values are all on this rank keep them, in the compute dtype.
        All others (under ZeRO-3 on several ranks: all parameters) raise when they are read. The handle and its
        optimizers raise. Do not use the process group any more: it may contain messages of unfinished collectives."""
        self._let_go_of_parameters()
        self.engine.abandon()

    def finish_background(self) -> None:
        """Wait for a save in the background, if there is one. Raises its error if it failed."""
        self.engine.finish_background()

    @torch.no_grad()
    def park(self, device: torch.device | str = "cpu") -> None:
        """Free memory between two phases: main, optimizer state and this rank's shard of the weights move to `device`,
        and all full-size buffers are freed. Until `unpark` the model and the optimizers raise. Collective.

        Raises:
            RuntimeError: gradients are waiting for a step.
        """
        expect_no_block(self.engine.units, "park")
        self.engine.park(torch.device(device))

    @torch.no_grad()
    def unpark(self) -> None:
        """Undo `park`. Collective."""
        self.engine.unpark()

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.engine.running.expect_whole("model.state_dict")
        self.engine.gatherer.settle()
        if not self.engine.plain.is_read and not all(unit.weights.shown for unit in self.engine.units):
            raise InvalidState(
                "the parameters of this model are sharded, and their values not here: call handle.full_state_dict(), "
                "or model.state_dict() inside `with handle.unsharded():`"
            )

    def _before_load_state_dict(
        self, module: nn.Module, state_dict: object, prefix: str, metadata: Mapping[str, Any], *args: object
    ) -> None:
        _expect_in_place(metadata)
        if not all(unit.weights.writers for unit in self.engine.units):
            raise InvalidState(
                "this model is sharded: call handle.load_full_state_dict(state_dict), which updates the main weights "
                "too, or model.load_state_dict() inside `with handle.unsharded(write=True):`"
            )

    def _let_go_of_parameters(self) -> None:
        for parameter in _parameters_of(self):
            _HANDLES.pop(parameter, None)
        while self._guards:
            self._guards.pop()()


def handle_of(parameter: nn.Parameter) -> Handle | None:
    """The living handle that owns a parameter's data."""
    reference: weakref.ref[Handle] | None = _HANDLES.get(parameter)
    return reference() if reference is not None else None


def _parameters_of(handle: Handle) -> list[Tensor]:
    # No loop over the mapping itself: another thread, or a finalizer, may shard a model, or drop one, meanwhile.
    living = [parameter for known in _HANDLES.keyrefs() if (parameter := known()) is not None]
    return [parameter for parameter in living if handle_of(parameter) is handle]


def claim_parameters(handle: Handle, parameters: Iterable[nn.Parameter]) -> None:
    """Register the handle as the owner of these parameters, for `handle_of`."""
    reference = weakref.ref(handle)
    for parameter in parameters:
        _HANDLES[parameter] = reference


def _set_sync(engine: Engine, requires: bool, parts: Sequence[Part], what: str) -> None:
    reducer = engine.check_open(what).reducer
    units = frozenset(units_of(parts, engine, what))
    reducer.accumulate_locally(reducer.local - units if requires else reducer.local | units)


def _expect_in_place(metadata: Mapping[str, Any]) -> None:
    """Check that `load_state_dict` writes into the parameters. `metadata`: that torch passes to hooks.

    Raises:
        RuntimeError: it would put others in their place.
    """
    if metadata.get("assign_to_params_buffers"):
        raise InvalidState(
            "load_state_dict(assign=True) would put other parameters into the model, which nobody trains: leave "
            "out assign=True"
        )
    if torch.__future__.get_swap_module_params_on_conversion():
        raise InvalidState(
            "with torch.__future__.set_swap_module_params_on_conversion(True), model.load_state_dict() swaps the "
            "parameters for others, which torch refuses for those that shard() has: call "
            "handle.load_full_state_dict(state_dict), or set it to False around this call"
        )
