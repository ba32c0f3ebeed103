"""The weights of one unit: held, gathered, shown to the module, hidden again.

    SHARDED --gather()--> GATHERING --arrive()--> RESIDENT --drop()--> SHARDED

SHARDED: only the own interval is valid. Under a plan with replicated weights a unit is SHARDED just after the
optimizer has updated the own interval, and goes through the same three states; its full buffer is simply its own.

A parameter whose values are not here keeps its shape, and raises when it is read or written (`absent.py`). Autograd
keeps views of the full buffer between forward and backward, so a unit always gathers into the same storage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.pending import Pending
from zeroshard.model.absent import Absent, as_tensors, give
from zeroshard.placement import REPLICATED, SHARDED
from zeroshard.storage.buffer import FlatBuffer


class Residency(Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    RESIDENT = "resident"


class Weights:
    """See the module's note.

    Attributes:
        absent: what the parameters are while they are hidden.
        buffer: the flat buffer, in the compute dtype.
        state: the life cycle above.
        in_use: how many forwards that need these weights, and scopes that show them, are under way.
        shown: whether the parameters point into the full buffer (else they are absent).
    """

    def __init__(self, unit: str, parameters: Sequence[nn.Parameter], buffer: FlatBuffer) -> None:
        self._unit = unit
        self._parameters = tuple(parameters)
        self.absent = Absent(unit, buffer.layout.slots, buffer.shard)
        self._pending = Pending()
        self._pointers: list[int] = []  # where the parameters' data lie, since they were last pointed somewhere
        self.buffer = buffer
        buffer.placement = SHARDED  # until they are filled
        self.state = Residency.SHARDED
        self.in_use = 0
        self.shown = False

    @torch.no_grad()
    def fill(self, rounded: Callable[[Tensor], Tensor]) -> None:
        """Take the values of the parameters and hold what the resting placement holds; parameters are hidden after.

        Args:
            rounded: as main rounds: a remainder takes ties another way than `copy_` does.
        """
        if self.buffer.rests_in_full:
            for view, parameter in zip(self.buffer.views(), self._parameters, strict=True):
                view.copy_(rounded(parameter.detach()))
            self.buffer.placement, self.state = REPLICATED, Residency.RESIDENT
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
        self._pending = self.buffer.redistribute(
            REPLICATED, collectives, unit=self._unit, phase=phase, portions=portions
        )
        self.state = Residency.GATHERING

    def arrive(self, *, stale: bool = False) -> None:
        """GATHERING -> RESIDENT; nothing where they are already. `stale`: they are about to be replaced."""
        if self.state is Residency.RESIDENT:
            return
        self._expect(Residency.GATHERING, "wait for")
        try:
            self._pending.wait(stale=stale)
        except RuntimeError as error:
            error.add_note(
                f"unit {self._unit}: its weights have not all arrived. Every rank must run the same units in the same "
                "order; code that one rank runs more often than another belongs inside `with handle.unsharded():`"
            )
            raise
        self.state = Residency.RESIDENT

    def drop(self, *, forget: bool = False) -> None:
        """RESIDENT (or GATHERING, waited for) -> SHARDED: only the own interval is valid from now on."""
        if self.state is Residency.GATHERING:
            self.arrive(stale=True)
        self.hide()
        self.buffer.detach(forget=forget)
        self.buffer.placement = SHARDED  # nothing moves
        self.state = Residency.SHARDED

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
            self.expect_in_place()
            for parameter, view in zip(self._parameters, self.buffer.views(), strict=True):
                give(parameter, view)
            self._pointed(shown=True)

    def hide(self) -> None:
        """Let the parameters raise when they are read or written."""
        if self.shown or not self._pointers:
            self.expect_in_place()
            self.absent.take(self._parameters)
            self._pointed(shown=False)

    @property
    def is_passing(self) -> bool:
        """Whether they come for the time of a forward or backward alone, and no forward needs them now."""
        return self.buffer.borrows and not self.in_use

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
                raise RuntimeError(
                    f"functional_call: {name} has been taken from the model while its values were not here, and is "
                    "NaN: take and use it inside `with handle.unsharded():`, or take it from handle.full_state_dict()"
                )

    def expect_in_place(self) -> None:
        """The parameters' data lie where this class has put them.

        Raises:
            RuntimeError: somebody else has replaced them (the model would compute with values that no step updates).
        """
        found = self._data_pointers()  # an absent parameter would not tell its own
        if not self._pointers or self._pointers == found:
            return
        for index, (parameter, slot) in enumerate(zip(self._parameters, self.buffer.layout.slots, strict=True)):
            if found[index] != self._pointers[index]:
                raise RuntimeError(
                    f"unit {self._unit}: the data of parameter {slot.name} have been replaced (found {parameter.dtype} "
                    f"on {parameter.device}, expected {self.buffer.dtype} on {self.buffer.shard.device}, in the buffer "
                    "of the unit): move and cast a model before shard(); write values inside "
                    "`with handle.unsharded(write=True):`, in place; a module that casts its own weights when it runs "
                    "belongs in MixedPrecision(keep=...)"
                )

    def _pointed(self, *, shown: bool) -> None:
        self.shown, self._pointers = shown, self._data_pointers()

    def _data_pointers(self) -> list[int]:
        with as_tensors():
            return [parameter.data_ptr() for parameter in self._parameters]

    def _expect(self, state: Residency, verb: str) -> None:
        if self.state is not state:
            raise RuntimeError(
                f"unit {self._unit}: cannot {verb} weights that are {self.state.value}: need {state.value}"
            )
