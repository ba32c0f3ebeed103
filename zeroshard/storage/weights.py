"""The weights of one unit: held, gathered, shown to the module, hidden again.

    SHARDED --gather()--> GATHERING --arrive()--> RESIDENT --drop()--> SHARDED

SHARDED: only the own interval is valid. Under a plan with replicated weights, a unit is SHARDED after the optimizer has
updated the own interval, and goes through the same three states; the full buffer then belongs to the unit.

The states are derived from the buffer's placement ([Note: placement] in `buffer.py`): SHARDED is SHARDED; GATHERING is
REPLICATED while it arrives; RESIDENT is REPLICATED.

A parameter whose values are not on this rank keeps its shape, and raises when it is read or written (`absent.py`).

[Note: storage that autograd holds] Autograd keeps views of the full buffer between forward and backward. So a unit
must always gather into the same storage: the tensors that forward has saved then contain the weights again when
backward reads them. Autograd does not notice another storage, or other values in it: a parameter that was pointed to a
view by `p.data = view` has its own version counter, which writes to the buffer do not change. (FSDP2 resizes storages
for the same reason: [Note: FSDP and autograd] in torch/distributed/fsdp/_fully_shard/_fsdp_param.py.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils._python_dispatch import _disable_current_modes

from zeroshard.comm.collectives import Collectives
from zeroshard.errors import InvalidState
from zeroshard.failures.blame import SAME_UNITS, USE_THE_SAME
from zeroshard.failures.lost import LostPeer
from zeroshard.layout.interval import Interval
from zeroshard.model.absent import Absent, as_tensors, give, give_each
from zeroshard.placement import REPLICATED, SHARDED
from zeroshard.ranks.common import Common
from zeroshard.storage.buffer import FlatBuffer, refuse_after_close
from zeroshard.storage.main_weights import have_same_bits
from zeroshard.storage.versions import Versions

_MOVED = "in shared memory, to which share_memory() and queues of torch.multiprocessing move a tensor: give them a copy"


class Residency(Enum):
    """See the module's note."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    RESIDENT = "resident"


class Weights:
    """See the module's note.

    Attributes:
        absent: the stand-ins for the parameters while they are hidden.
        buffer: the flat buffer, in the compute dtype.
        place: where the full weights always lie, if the shards of all ranks lie side by side. None: they are gathered
            into a pool buffer.
        in_use: how many running forwards and open scopes (`unsharded`) need these weights.
        scopes: how many of these are scopes.
        writers: how many of the scopes allow writes.
        shown: whether the parameters point into the full buffer (else they are absent).
        versions: of the parameters.
    """

    def __init__(
        self, unit: str, parameters: Sequence[nn.Parameter], buffer: FlatBuffer, common: Common | None = None
    ) -> None:
        """`common`: the memory in which the shard of `buffer` lies beside those of the other ranks."""
        self._unit = unit
        self._parameters = tuple(parameters)
        self.absent = Absent(unit, buffer.layout.slots, buffer.shard)
        self._pointers: list[int] = []  # addresses of the parameters' data as this class has set them
        self.buffer = buffer
        self._common = common
        self.place = None if common is None else common.full.view(buffer.dtype)
        buffer.become(SHARDED)  # until they are filled
        self.in_use = self.scopes = self.writers = 0
        self.shown = False
        self._writes: list[int] = []  # when the parameters were last shown in a borrowed buffer
        self._compared: set[bool] = set()  # whether after a forward, after a backward
        self.versions = Versions(parameters)

    @property
    def state(self) -> Residency:
        """
        Raises:
            RuntimeError: the placement is none of these three states.
        """
        buffer = self.buffer
        if buffer.placement is REPLICATED:
            return Residency.GATHERING if buffer.is_arriving else Residency.RESIDENT
        if buffer.placement is not SHARDED or buffer.is_arriving:
            if buffer.placement is None:
                refuse_after_close(self._unit)
            arriving = " and arriving" if buffer.is_arriving else ""
            raise InvalidState(f"unit {self._unit}: weights cannot be {buffer.placement.value}{arriving}")
        return Residency.SHARDED

    def gather(
        self,
        collectives: Collectives,
        phase: str,
        full: Tensor | None = None,
        slots: Collection[int] | None = None,
    ) -> None:
        """SHARDED -> GATHERING. Collective.

        Args:
            full: the tensor to gather into, for weights that only hold their shard.
            slots: for weights that rest in full: the slots that have changed since all were there; None: any.
        """
        self._expect(Residency.SHARDED, "gather")
        portions = self.buffer.layout.portions(slots) if slots is not None else None
        with _unseen():
            if full is not None:
                self.buffer.attach(full)
                if self._common is not None and full is self.place:
                    self._common.begin()
                else:
                    self.buffer.own_part_of_full().copy_(self.buffer.shard)
            elif padding := self.buffer.padding():
                # A step may have moved the padding, which lies in its pieces (Adam with eps=0 computes 0 / 0). A gather
                # of some slots does not send all of it, and the ranks would find that their weights differ.
                torch._foreach_zero_(padding)
            try:
                self.buffer.redistribute(REPLICATED, collectives, unit=self._unit, phase=phase, portions=portions)
            except BaseException:  # a peer is gone, for example: these are SHARDED as before
                self.buffer.detach()
                raise

    def arrive(self, *, stale: bool = False) -> None:
        """GATHERING -> RESIDENT; no effect on RESIDENT weights. `stale`: the weights will not be used."""
        state = self.state
        if state is Residency.SHARDED:
            self._refuse("wait for", Residency.GATHERING)
        try:
            if state is Residency.GATHERING:
                self.buffer.arrive(stale=stale)
        except RuntimeError as error:
            _explain(error, self._unit)
            raise
        if not stale:
            self.versions.may_be_differentiated = False

    def drop(self, *, forget: bool = False, may_be_written: bool = False) -> None:
        """RESIDENT or GATHERING (which is waited for) -> SHARDED: only the own interval remains valid.
        `may_be_written`: what has been written to the full buffer is lost, without an error."""
        if self.buffer.is_arriving:
            # A posted receive writes into the buffer whenever its message arrives, even if another unit then occupies
            # the buffer. So it must complete here.
            self.arrive(stale=True)
        if may_be_written and self._common is not None:
            self._common.renew()
        elif self.shown:
            self.expect_unwritten_by_hooks()  # while the values can be compared
        self.hide()
        self.buffer.detach(forget=forget)
        self.buffer.become(SHARDED)

    def make_room(self) -> None:
        """Other values come to the memory that these have borrowed."""
        self.put_away(after_forward=False)  # if a backward has shown them
        self.drop()

    def rest(self) -> None:
        """Return to the resting placement: a borrowed buffer is given back, and its views are forgotten."""
        if self.buffer.borrows:
            self.drop(forget=True)
            self.versions.may_be_differentiated = True

    def put_away(self, *, after_forward: bool = True) -> None:
        """Hide the parameters after a forward or backward. The values stay in the buffer until `drop`.

        Raises:
            RuntimeError: a parameter has been written to.
        """
        if self.shown:
            self.expect_unwritten_by_hooks()
            self._expect_unwritten(after_forward=after_forward)
            self.hide()

    def expect_unwritten_by_hooks(self) -> None:
        """Check what the user's hooks on gradients have done since `Versions.look`.

        Raises:
            RuntimeError: one of them has written to its parameter.
        """
        if not self.versions.before_hooks:
            return
        values = self.buffer.views() if self.shown and not self.writers else self._parameters
        if written := self.versions.written_by_hooks(values):
            raise InvalidState(
                f"backward: {self.buffer.layout.slots[written[0]].name} has been written to in a hook of a gradient, "
                "which is this rank's alone there: the weights of the ranks would differ, and those of this rank have "
                "changed. An optimizer that is stepped in such hooks cannot be used: step a zeroshard.ShardedOptimizer "
                "after backward (under zero2 and zero3 it needs no gradients in full, either)"
            )

    def _expect_unwritten(self, *, after_forward: bool) -> None:
        """Check that a borrowed buffer has not been written to: what is written there is lost when the buffer is given
        back. Writes through `p.data` leave the version as it is. Where shards lie side by side, the page table shows
        them (`Common.is_written`). Elsewhere the own interval is compared as well, after the first forward and the
        first backward: modules that set their parameters themselves do so in their first forward.

        Raises:
            RuntimeError: a parameter has been written to.
        """
        writes, names = self.versions.writes(), []
        if writes != self._writes:
            slots = zip(self.buffer.layout.slots, self._writes, writes, strict=True)
            names = [slot.name for slot, before, after in slots if before != after]
        if not names and self._differs_from_shard(after_forward=after_forward):
            names = _names_that_differ(self.buffer, self._common if self.buffer.full is self.place else None)
        if names:
            if self._common is not None:  # the values are as before: training can go on
                self._common.renew()
                self._writes = writes
            raise InvalidState(
                f"unit {self._unit}: {names[0]} has been written to in a forward or backward, where its values are "
                "borrowed: the write is lost. Write inside `with handle.unsharded(write=True), torch.no_grad():`. If a "
                "module sets its parameters in its first forward, call the model once before shard(). If it writes in "
                "each forward (PEFT's target_parameters), call the model inside `with handle.unsharded(write=True):`. "
                "Statistics that are parameters (of Keras) belong in shard(..., ignored=)"
            )

    def _differs_from_shard(self, *, after_forward: bool) -> bool:
        found, is_first = None, after_forward not in self._compared
        self._compared.add(after_forward)
        # The pages that a later backward has written to are still there in the next forward.
        if self._common is not None and self.buffer.full is self.place and (after_forward or is_first):
            found = self._common.is_written()
        if found is None and is_first:
            found = not have_same_bits(self.buffer.own_part_of_full(), self.buffer.shard)
        return bool(found)

    def show(self) -> None:
        """Point the parameters at their values."""
        if not self.shown:
            self._expect(Residency.RESIDENT, "show")
            # Before `give_each`: afterwards a replacement by the user would go unnoticed, and its values would be lost.
            self.expect_in_place()
            self._pointers = []  # until all have their values, as in `hide`
            give_each(self._parameters, self.buffer.views())
            self.shown, self._pointers = True, self.buffer.addresses()
            if self._common is not None:
                self._common.watch()
            if self.buffer.borrows:
                self.versions.unguard()
                self._writes = self.versions.writes()
                self.versions.copies.renew(self._parameters, self.versions.number)

    def hide(self) -> None:
        """Make the parameters absent: they raise when they are read or written, also by a backward."""
        if self.shown or not self._pointers:
            self.expect_in_place()
            self.shown, self._pointers = False, []  # until all are absent: if this is interrupted, it can be repeated
            self._pointers = self.absent.take(self._parameters)
            if self.buffer.borrows:
                self.versions.guard()

    def free(self) -> None:
        """Free the buffer for good. The parameters become absent: give them values at once."""
        if self.buffer.is_arriving:
            self.arrive(stale=True)
        if self.shown:
            self.absent.take(self._parameters)
        self.shown, self._pointers = False, self.absent.pointers
        self.buffer.free()
        self.place = None
        if self._common is not None:
            self._common.free()

    def abandon(self) -> None:
        """Give the parameters up. If all values rest here in full, the parameters keep them; else they are lost, and a
        read raises and says so. Parameters whose data the user has replaced are not touched."""
        buffer = self.buffer
        are_here = buffer.rests_in_full and buffer.placement is REPLICATED and not buffer.is_arriving
        with as_tensors():
            found = list(map(Tensor.data_ptr, self._parameters))
        why = "its handle was abandoned (Lightning does so after an exception) while they were divided over the ranks"
        pointers = self._pointers or found  # none amid `hide`
        for index, parameter in enumerate(self._parameters):
            if parameter.numel() and found[index] not in (pointers[index], self.absent.pointers[index]):
                continue
            if are_here:
                give(parameter, buffer.views()[index])
            else:
                self.absent.lose(index, parameter, why)
        self.shown, self._pointers = False, self.absent.pointers
        buffer.abandon()

    @property
    def is_passing(self) -> bool:
        """Whether the weights are gathered only for a forward or backward, and no forward needs them now."""
        return not self.in_use and self.buffer.borrows

    @property
    def is_between_forwards(self) -> bool:
        """Like `is_passing`, but a scope may be open."""
        return self.in_use == self.scopes and self.buffer.borrows

    def expect_shown(self, parameter: Tensor) -> None:
        """Check that the parameters have their values when a gradient has been computed for one of them.

        Raises:
            RuntimeError: no hook has gathered them for this backward. (If it had read what autograd has saved, that had
                raised. But views have other strides while their weight is hidden: their gradients would be wrong.)
        """
        if not self.shown and not self.versions.may_be_differentiated:
            index = next(i for i, p in enumerate(self._parameters) if p is parameter)
            if self.versions.kept.get(index) == torch._C._current_graph_task_id():
                return  # a scope has kept them
            raise InvalidState(
                f"backward: the values of parameter {self.absent.names[index]} are not here, and its gradient may be "
                "wrong. It was used outside of a forward of its modules (inside `with handle.unsharded():`): run the "
                "backward inside the same block, and open that around the forward. Or the loss uses a value from "
                f"inside of unit {self._unit} that its modules' forward does not return (nor leave in attributes or "
                "inputs): return it"
            )

    @property
    def is_resting_in_full(self) -> bool:
        return self.buffer.rests_in_full and self.state is Residency.RESIDENT

    @property
    def full(self) -> Tensor:
        """[layout.numel], the weights in full, which must have been gathered."""
        assert self.buffer.full is not None, f"the full weights of unit {self._unit} are not here"
        return self.buffer.full

    def own(self) -> Tensor:
        """[shard_numel], the own interval, which is valid in every state."""
        return self.buffer.shard

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in the memory of the full weights: a view of a parameter that was made here."""
        full = self.buffer.full
        if full is None or tensor.device != full.device or not torch._C._has_storage(tensor):
            return False
        return full.data_ptr() <= tensor.data_ptr() < full.data_ptr() + full.nbytes

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A copy of a weight or of a view of it, which gets the new values when the weight has some. While the weight
        is hidden, autograd would make the view's node anew, for the strides of what is there in its place."""
        is_shown = self.shown
        self.show()
        copy = _clone(tensor)
        self.versions.copies.add(tensor, copy, self._parameters, self.versions.number)
        if not is_shown:
            self.hide()
        return copy

    def expect_in_place(self) -> None:
        """Check that the parameters' data lie where this class has put them.

        Raises:
            RuntimeError: other code has replaced them (the model would compute with values that no step updates).
        """
        for name, found in self.replaced():
            raise InvalidState(
                f"unit {self._unit}: the data of parameter {name} have been replaced ({found}): move and cast a model "
                "before shard(); replace data and write values inside `with handle.unsharded(write=True):`; a module "
                "that casts its own weights when it runs belongs in MixedPrecision(keep=...), one that sets its "
                "weights when it first runs has to run once before shard(), and one that does so in every forward has "
                "to run in such a block, forward and backward"
            )

    def replaced(self) -> Iterator[tuple[str, str]]:
        """The parameters whose data other code has replaced, and what it has put there. Where a scope allows
        writes, it may do so (`replaced.py`)."""
        if not self._pointers or self.writers:
            return
        with as_tensors():  # outside of it, `data_ptr()` of an absent parameter raises
            found = list(map(Tensor.data_ptr, self._parameters))
            squares = self.buffer.layout.turnable if self.shown else ()  # placeholders are expanded
            turned = squares and [index for index in squares if not self._parameters[index].is_contiguous()]
        if found == self._pointers and not turned:
            return
        for index, (parameter, slot) in enumerate(zip(self._parameters, self.buffer.layout.slots, strict=True)):
            if index in turned:
                yield slot.name, f"found strides {parameter.stride()}; expected those of a contiguous tensor"
            elif found[index] != self._pointers[index] and parameter.numel():  # an empty tensor has no address
                kept = f"{self.buffer.dtype} on {self.buffer.shard.device}, in the buffer of the unit"
                with as_tensors():
                    where = _MOVED if parameter.untyped_storage().is_shared() else "elsewhere"
                yield slot.name, f"found {parameter.dtype} on {parameter.device}, {where}; expected {kept}"

    def _expect(self, state: Residency, verb: str) -> None:
        if self.state is not state:
            self._refuse(verb, state)

    def _refuse(self, verb: str, needed: Residency) -> NoReturn:
        raise InvalidState(f"unit {self._unit}: cannot {verb} weights that are {self.state.value}: need {needed.value}")


def _explain(error: RuntimeError, unit: str) -> None:
    """Say what may keep weights from arriving, unless the error says it: a rank has ended."""
    if isinstance(error, LostPeer) and error.cause is not None:
        return
    in_backward = torch._C._current_graph_task_id() != -1
    error.add_note(
        f"unit {unit}: its weights have not all arrived. {SAME_UNITS}; code that "
        "one rank runs more often than another belongs inside `with handle.unsharded():`"
        + f"; {USE_THE_SAME}"
        * in_backward
    )


def _unseen() -> AbstractContextManager[Any]:
    """A scope for writes to buffers whose views autograd has saved. `allow_mutation_on_saved_tensors` would clone these
    views before, to keep values that will be here again (and cannot clone a parameter that is absent). It takes writes
    for those of a saved tensor by address and version: on some ranks only."""
    return _disable_current_modes() if graph._allow_mutation_on_saved_tensors_enabled else nullcontext()


def _clone(tensor: Tensor) -> Tensor:
    if not torch.is_inference_mode_enabled():
        return tensor.clone()
    with torch.inference_mode(False), torch.no_grad():  # autograd could not save one that is made in inference mode
        return tensor.clone()


def _names_that_differ(buffer: FlatBuffer, common: Common | None) -> list[str]:
    """For a message: the parameters with other values in the full buffer than in the shard, or in all shards."""
    full, interval, values = buffer.full, buffer.own_interval, buffer.shard
    assert full is not None
    if common is not None:
        interval, values = Interval(0, full.numel()), common.everyone
    found = list(buffer.layout.fragments_in(interval))
    differ = [one for one in found if not have_same_bits(full[one.world.slice], values[one.local.slice])]
    return [one.slot.name for one in differ] or ["a parameter"]
