"""Finds the origin of a gradient that is not finite: which parameter, on which rank, in which micro-batch.

A sum over ranks does not show which rank's term was not finite. So each rank looks at its own terms while it has them:
it takes the norm of each gradient. Where the ranks that sum read their peers' memory, they say whether the sum is
finite, and a rank looks only if one is not (`Reduction.look`). Elsewhere it looks before each reduction, and after a
backward that reduces nothing: on a CPU at the norm of the bucket first, which is one number. Norms on a GPU stay there,
and are read only if a step finds a gradient that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable

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
        """Take the norm of each gradient that may not be finite, if the bucket is still here. Later calls have no
        effect."""
        buffer = self._grads.buffer
        if self._slots and buffer.is_here and not _is_surely_finite(buffer.full):
            views, wide = buffer.views(), torch.promote_types(buffer.dtype, torch.float32)
            # The 2-norm, as it takes a tenth of the time of the largest value on a CPU.
            self.norms = list(torch._foreach_norm([views[index] for index in self._slots], 2, dtype=wide))
        self._slots = []

    def not_finite(self) -> list[str]:
        """Names of the parameters whose norm is not finite. None is if the norms have not been taken."""
        finite = torch.isfinite(torch.stack(self.norms)).tolist() if self.norms else [True] * len(self.names)
        return [name for name, fine in zip(self.names, finite, strict=True) if not fine]


class Origins:
    """The gradients that this rank has accumulated since the last step, in the order of backward."""

    def __init__(self, num_ranks: int) -> None:
        self._is_alone = num_ranks == 1
        self._backwards: list[list[Look]] = [[]]
        self._version: object = None  # of the gradients, at the end of the last backward

    def remember(self, unit: Unit, grads: Gradients) -> Callable[[], None] | None:
        """Remember the current backward's gradients of a unit. (Slots lie in the order of backward.) Returns what takes
        their norms: to be called before the bucket changes, if they may not be finite. None: there are none, or there
        is one rank only, whose bucket keeps them until `take`."""
        slots = unit.layout.slots
        fresh = sorted((grads.ready - grads.stale) & unit.layout.filled)
        if not fresh:
            return None
        look = Look([slots[index].name for index in fresh], grads, fresh)
        self._backwards[-1].append(look)
        return None if self._is_alone else look.take

    @property
    def has_ended_backward(self) -> bool:
        """Whether a backward since the last step has come to its end."""
        return len(self._backwards) > 1

    def end_backward(self, version: object) -> None:
        """From here on, only the user changes gradients. `version`: of the gradients (`VisibleGradients.version`)."""
        self._backwards.append([])
        self._version = version

    def take(self, version: object) -> None:
        """On a single rank, take the norms that have not been taken yet: a backward is about to add to the gradients,
        or somebody asks. If the user has changed gradients since the last backward, nothing is known about it."""
        if self._is_alone and self.has_ended_backward and version == self._version:
            for look in self._backwards[-2]:
                look.take()

    def clear(self) -> None:
        """The gradients have been used, or discarded."""
        self._backwards = [[]]

    def first(self, among: set[str]) -> tuple[int, str] | None:
        """(micro-batch, names in words) of the first micro-batch with a gradient of these parameters that is not
        finite. Later micro-batches may contain what was reduced before, so the ranks with the earliest micro-batch are
        the origin."""
        for micro_batch, looks in enumerate(self._backwards):
            known = [look for look in looks if look.norms or not self._is_alone]
            names = [name for look in known for name in look.names]
            bad = [name for look in known for name in look.not_finite() if name in among]
            if len(bad) == len(names) > 1:
                return micro_batch, (
                    f"all of them, {bad[0]} first (micro-batch {micro_batch}; the loss, or what forward had computed, "
                    "was not finite already; or the loss used a weight inside `with handle.unsharded():`, and this "
                    "backward ran outside of it)"
                )
            if bad:
                others = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
                return micro_batch, ", ".join(f"{name} (micro-batch {micro_batch})" for name in bad[:_NAMED]) + others
        return None


def _is_surely_finite(full: Tensor | None) -> bool:
    """Whether a bucket has only finite values, where the host need not wait to know."""
    if full is None or full.device.type != "cpu":
        return False
    wide = torch.promote_types(full.dtype, torch.float32)
    return bool(torch.linalg.vector_norm(full, dtype=wide).isfinite())
