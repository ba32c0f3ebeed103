"""The weights of one unit: held, gathered, shown to the module, hidden again.

    SHARDED --gather()--> GATHERING --arrive()--> RESIDENT --drop()--> SHARDED

SHARDED: only the own interval is valid. Under a plan with replicated weights a unit is SHARDED just after the
optimizer has updated the own interval, and goes through the same three states; its full buffer is simply its own.

The three are names for where the buffer's values are ([Note: placement] in `buffer.py`): SHARDED; REPLICATED and
arriving; REPLICATED.

A parameter whose values are not here keeps its shape, and raises when it is read or written (`absent.py`).

[Note: storage that autograd holds] Autograd keeps views of the full buffer between forward and backward. So a unit
always gathers into the same storage: the tensors that forward has saved then have the weights again when backward reads
them. Nothing warns of another storage, or of other values in it: a parameter that is pointed to a view by `p.data =
view` has a version counter of its own, which writes to the buffer do not count up. (FSDP2 resizes storages for the same
reason: [Note: FSDP and autograd] in torch/distributed/fsdp/_fully_shard/_fsdp_param.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import NoReturn

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.errors import InvalidState
from zeroshard.model.absent import Absent, as_tensors, give
from zeroshard.placement import REPLICATED, SHARDED
from zeroshard.storage.buffer import FlatBuffer


class Residency(Enum):
    """See the module's note."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    RESIDENT = "resident"


class Weights:
    """See the module's note.

    Attributes:
        absent: what the parameters are while they are hidden.
        buffer: the flat buffer, in the compute dtype.
        in_use: how many forwards that need these weights, and scopes that show them, are under way.
        writers: how many of these scopes allow writes.
        shown: whether the parameters point into the full buffer (else they are absent).
    """

    def __init__(self, unit: str, parameters: Sequence[nn.Parameter], buffer: FlatBuffer) -> None:
        self._unit = unit
        self._parameters = tuple(parameters)
        self.absent = Absent(unit, buffer.layout.slots, buffer.shard)
        self._offsets = [slot.world.start * buffer.dtype.itemsize for slot in buffer.layout.slots]
        self._pointers: list[int] = []  # where the parameters' data lie, since they were last pointed somewhere
        self.buffer = buffer
        buffer.become(SHARDED)  # until they are filled
        self.in_use = self.writers = 0
        self.shown = False

    @property
    def state(self) -> Residency:
        """
        Raises:
            RuntimeError: weights are nothing of these three.
        """
        buffer = self.buffer
        if buffer.placement is REPLICATED:
            return Residency.GATHERING if buffer.is_arriving else Residency.RESIDENT
        if buffer.placement is not SHARDED or buffer.is_arriving:
            found = "without values" if buffer.placement is None else buffer.placement.value
            arriving = " and arriving" if buffer.is_arriving else ""
            raise InvalidState(f"unit {self._unit}: weights cannot be {found}{arriving}")
        return Residency.SHARDED

    @torch.no_grad()
    def fill(self, rounded: Callable[[Tensor], Tensor]) -> None:
        """Take the values of the parameters and hold what the resting placement holds; parameters are hidden after.

        Args:
            rounded: as main rounds: a remainder takes ties another way than `copy_` does.
        """
        if self.buffer.rests_in_full:
            for view, parameter in zip(self.buffer.views(), self._parameters, strict=True):
                view.copy_(rounded(parameter.detach()))
            self.buffer.become(REPLICATED)
            self.show()
        else:
            for fragment in self.buffer.layout.fragments(self.buffer.rank):
                parameter = self._parameters[self.buffer.layout.slots.index(fragment.slot)]
                value = parameter.detach().reshape(-1)[fragment.param.slice]
                self.buffer.shard[fragment.local.slice] = rounded(value)
            self.hide()

    def gather(
        self,
        collectives: Collectives,
        phase: str,
        full: Tensor | None = None,
        slots: Collection[int] | None = None,
    ) -> None:
        """SHARDED -> GATHERING.

        Args:
            full: where to, for weights that only hold their shard.
            slots: of weights that rest in full: what has changed since they were all there; None: anything.
        """
        self._expect(Residency.SHARDED, "gather")
        if full is not None:
            self.buffer.attach(full)
            self.buffer.own_part_of_full().copy_(self.buffer.shard)
        portions = self.buffer.layout.portions(slots) if slots is not None else None
        self.buffer.redistribute(REPLICATED, collectives, unit=self._unit, phase=phase, portions=portions)

    def arrive(self, *, stale: bool = False) -> None:
        """GATHERING -> RESIDENT; nothing where they are already. `stale`: they are about to be replaced."""
        state = self.state
        if state is Residency.RESIDENT:
            return
        if state is not Residency.GATHERING:
            self._refuse("wait for", Residency.GATHERING)
        try:
            self.buffer.arrive(stale=stale)
        except RuntimeError as error:
            error.add_note(
                f"unit {self._unit}: its weights have not all arrived. Every rank must run the same units in the same "
                "order; code that one rank runs more often than another belongs inside `with handle.unsharded():`"
            )
            raise

    def drop(self, *, forget: bool = False) -> None:
        """RESIDENT (or GATHERING, waited for) -> SHARDED: only the own interval is valid from now on."""
        if self.buffer.is_arriving:
            # A message that has been posted writes into the buffer whenever it arrives, also over the next unit that
            # has it.
            self.arrive(stale=True)
        self.hide()
        self.buffer.detach(forget=forget)
        self.buffer.become(SHARDED)

    def rest(self) -> None:
        """Back to where they rest: what is borrowed is given back, for good."""
        if self.buffer.borrows:
            self.drop(forget=True)

    def put_away(self) -> None:
        """Nobody needs them for now, and they need not be shown: hidden, but the values stay until they are dropped."""
        if self.shown:
            self.hide()

    def show(self) -> None:
        """Point the parameters at their values."""
        if not self.shown:
            self._expect(Residency.RESIDENT, "show")
            # First: after `give` nobody could tell any more that somebody had replaced the data.
            self.expect_in_place()
            self.absent.give(self._parameters, self.buffer.views())
            first = self.full.data_ptr()  # another one each time: the storage is emptied and refilled
            self.shown, self._pointers = True, [first + offset for offset in self._offsets]

    def hide(self) -> None:
        """Let the parameters raise when they are read or written."""
        if self.shown or not self._pointers:
            self.expect_in_place()
            self.absent.take(self._parameters)
            self.shown, self._pointers = False, self.absent.pointers

    def abandon(self) -> None:
        """Nobody moves them any more. Values that rest here in full, and are all here, stay with the parameters; the
        others are lost, and a read says so. What the user has replaced is left alone."""
        buffer = self.buffer
        are_here = buffer.rests_in_full and buffer.placement is REPLICATED and not buffer.is_arriving
        with as_tensors():
            found = [parameter.data_ptr() for parameter in self._parameters]
        for index, parameter in enumerate(self._parameters):
            if parameter.numel() and found[index] != self._pointers[index]:
                continue
            if are_here:
                give(parameter, buffer.views()[index])
            else:
                self.absent.lose(index, parameter)
        self.shown, self._pointers = False, self.absent.pointers
        buffer.abandon()

    @property
    def is_passing(self) -> bool:
        """Whether they come for the time of a forward or backward alone, and no forward needs them now."""
        return not self.in_use and self.buffer.borrows

    @property
    def is_resting_in_full(self) -> bool:
        return self.buffer.rests_in_full and self.state is Residency.RESIDENT

    @property
    def full(self) -> Tensor:
        """[layout.numel] all of the unit's weights, which must have been gathered."""
        assert self.buffer.full is not None, f"the full weights of unit {self._unit} are not here"
        return self.buffer.full

    def own(self) -> Tensor:
        """[shard_numel] the interval that is valid in every state."""
        return self.buffer.shard

    def absent_index(self, tensor: Tensor) -> int | None:
        """Of which slot the tensor has been taken while its values were not here, if of any."""
        return self.absent.index_of(tensor)

    def expect_present(self, values: Mapping[str, Tensor]) -> None:
        """None of these has been taken from a parameter while its values were not here.

        Raises:
            RuntimeError: with the name that `values` has for it.
        """
        for name, value in values.items():
            if self.absent_index(value) is not None:
                raise InvalidState(
                    f"functional_call: {name} has been taken from the model while its values were not here, and is "
                    "NaN: take and use it inside `with handle.unsharded():`, or take it from handle.full_state_dict()"
                )

    def expect_in_place(self) -> None:
        """The parameters' data lie where this class has put them.

        Raises:
            RuntimeError: somebody else has replaced them (the model would compute with values that no step updates).
        """
        if not self._pointers:
            return
        with as_tensors():  # an absent parameter would not tell its own
            found = [parameter.data_ptr() for parameter in self._parameters]
        if found == self._pointers:
            return
        for index, (parameter, slot) in enumerate(zip(self._parameters, self.buffer.layout.slots, strict=True)):
            if found[index] != self._pointers[index] and parameter.numel():  # what is empty lies nowhere
                raise InvalidState(
                    f"unit {self._unit}: the data of parameter {slot.name} have been replaced (found {parameter.dtype} "
                    f"on {parameter.device}, expected {self.buffer.dtype} on {self.buffer.shard.device}, in the buffer "
                    "of the unit): move and cast a model before shard(); write values inside "
                    "`with handle.unsharded(write=True):`, in place; a module that casts its own weights when it runs "
                    "belongs in MixedPrecision(keep=...)"
                )

    def _expect(self, state: Residency, verb: str) -> None:
        if self.state is not state:
            self._refuse(verb, state)

    def _refuse(self, verb: str, needed: Residency) -> NoReturn:
        raise InvalidState(f"unit {self._unit}: cannot {verb} weights that are {self.state.value}: need {needed.value}")
