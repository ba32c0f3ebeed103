"""Finds the origin of a gradient that is not finite: which parameter, on which rank, in which micro-batch.

A sum over ranks does not show which rank's term was not finite. So each rank takes the norm of each of its own
gradients before a unit is reduced, and after a backward that reduces nothing. The norms stay on the device, and are
read only if a step finds a gradient that is not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.storage.gradients import Gradients
from zeroshard.storage.unit import Unit

_NAMED = 3
"""How many parameters are named at most, for each rank."""


class Look:
    """The gradients of one unit after one backward. `names`: of the parameters."""

    def __init__(self, names: list[str], grads: Gradients, slots: list[int]) -> None:
        self.names = names
        self.norms: list[Tensor] = []
        self._grads, self._slots = grads, slots

    def take(self) -> None:
        """Take the norm of each gradient, if the bucket is still here. Later calls have no effect."""
        buffer = self._grads.buffer
        if self._slots and buffer.is_here:
            views, wide = buffer.views(), torch.promote_types(buffer.dtype, torch.float32)
            # The 2-norm, as it takes a tenth of the time of the largest value on a CPU.
            self.norms = list(torch._foreach_norm([views[index] for index in self._slots], 2, dtype=wide))
        self._slots = []


class Origins:
    """Norms of the gradients that this rank has accumulated since the last step, in the order of backward."""

    def __init__(self, num_ranks: int) -> None:
        self._is_alone = num_ranks == 1
        self._backwards: list[list[Look]] = [[]]
        self._version: object = None  # of the gradients, at the end of the last backward

    def look(self, unit: Unit, grads: Gradients) -> None:
        """Take the norms of the current backward's gradients of a unit, or, on a single rank, remember to do so. (Slots
        lie in the order of backward.)"""
        slots = unit.layout.slots
        if fresh := sorted((grads.ready - grads.stale) & unit.layout.filled):
            look = Look([slots[index].name for index in fresh], grads, fresh)
            self._backwards[-1].append(look)
            if not self._is_alone:
                look.take()

    @property
    def has_ended_backward(self) -> bool:
        """Whether a backward since the last step has come to its end."""
        return len(self._backwards) > 1

    def end_backward(self, version: object) -> None:
        """From here on, only the user changes gradients. `version`: of the gradients (`VisibleGradients.version`)."""
        self._backwards.append([])
        self._version = version

    def take(self, version: object) -> None:
        """Take the norms that have not been taken yet: a backward is about to add to the gradients, or somebody asks.
        If the user has changed gradients since the last backward, nothing is known about it."""
        for look in self._backwards[-2] if len(self._backwards) > 1 and version == self._version else ():
            look.take()

    def clear(self) -> None:
        """The gradients have been used, or discarded."""
        self._backwards = [[]]

    def first(self, among: set[str]) -> tuple[int, str] | None:
        """(micro-batch, names in words) of the first micro-batch with a gradient of these parameters that is not
        finite. Later micro-batches may contain what was reduced before, so the ranks with the earliest micro-batch are
        the origin."""
        for micro_batch, looks in enumerate(self._backwards):
            names = [name for look in looks if look.norms for name in look.names]
            values = [value for look in looks for value in look.norms]
            finite = torch.isfinite(torch.stack(values)).tolist() if values else []
            bad = [name for name, fine in zip(names, finite, strict=True) if not fine and name in among]
            if bad and len(bad) == len(names) > 1:
                return micro_batch, (
                    f"all of them, {bad[0]} first (micro-batch {micro_batch}; the loss, or what forward had computed, "
                    "was not finite already; or the loss used a weight inside `with handle.unsharded():`, and this "
                    "backward ran outside of it)"
                )
            if bad:
                others = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
                return micro_batch, ", ".join(f"{name} (micro-batch {micro_batch})" for name in bad[:_NAMED]) + others
        return None
