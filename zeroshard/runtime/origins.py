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


class Origins:
    """Norms of the gradients that this rank has accumulated since the last step, in the order of backward."""

    def __init__(self) -> None:
        self._backwards: list[list[tuple[list[str], list[Tensor]]]] = [[]]

    def look(self, unit: Unit, grads: Gradients) -> None:
        """Take the norms of the current backward's gradients of a unit. (Slots lie in the order of backward.)"""
        views = grads.buffer.views()
        fresh = [index for index in sorted(grads.ready - grads.stale) if views[index].numel()]
        if fresh:
            wide = torch.promote_types(grads.buffer.dtype, torch.float32)
            # The 2-norm, as it takes a tenth of the time of the largest value on a CPU.
            norms = torch._foreach_norm([views[index] for index in fresh], 2, dtype=wide)
            self._backwards[-1].append(([unit.layout.slots[index].name for index in fresh], list(norms)))

    def next_backward(self) -> None:
        self._backwards.append([])

    def clear(self) -> None:
        """The gradients have been used, or discarded."""
        self._backwards = [[]]

    def first(self, among: set[str]) -> tuple[int, str] | None:
        """(micro-batch, names in words) of the first micro-batch with a gradient of these parameters that is not
        finite. Later micro-batches may contain what was reduced before, so the ranks with the earliest micro-batch are
        the origin."""
        for micro_batch, looks in enumerate(self._backwards):
            names = [name for of_unit, _ in looks for name in of_unit]
            values = [value for _, of_unit in looks for value in of_unit]
            finite = torch.isfinite(torch.stack(values)).tolist() if values else []
            bad = [name for name, fine in zip(names, finite, strict=True) if not fine and name in among]
            if bad and len(bad) == len(names) > 1:
                return micro_batch, (
                    f"all of them, {bad[0]} first (micro-batch {micro_batch}; the loss, or what forward had computed, "
                    "was not finite already)"
                )
            if bad:
                others = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
                return micro_batch, ", ".join(f"{name} (micro-batch {micro_batch})" for name in bad[:_NAMED]) + others
        return None
