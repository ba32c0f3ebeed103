"""The versions of a unit's parameters, which autograd compares before it reads a weight that it has saved.

[Note: versions of weights that are gone] A backward may come to a unit that no hook has gathered: its forward has left
the result where no hook finds it. The gradients would be wrong without an error. So while borrowed weights are hidden,
their version counters are others: autograd compares the version of each saved tensor before it reads it, and raises.

[Note: versions of new weights] Plain torch raises in the backward of a graph that has saved weights which a step, or a
load, has overwritten since: their gradients would mix old activations with new weights. Here new values are written to
the buffer, which autograd does not notice ([Note: storage that autograd holds] in `weights.py`). So `renew` counts the
versions on.

[Note: writes of gradient hooks] A hook of the user may step a plain optimizer when it has a gradient. That gradient is
this rank's alone, so the weights of the ranks would differ, in silence. So a parameter that has such a hook is looked
at before the hook runs, and again before its unit is reduced. A write through `p.data` leaves the version as it is:
when a hook runs for the first time, the values are compared as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress
from operator import add, attrgetter, sub

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from zeroshard.model.absent import as_tensors
from zeroshard.storage.main_weights import have_same_bits
from zeroshard.storage.view_copies import ViewCopies

_VERSION = attrgetter("_version")


class Versions:
    """See the module's note.

    Attributes:
        may_be_differentiated: whether a gradient may be computed for a parameter while it is hidden: behind a scope,
            where it may have been used by itself, and in a backward that adds to no gradients.
        copies: in place of views of the parameters.
        num_renewals: how often values have been replaced.
        before_hooks: slot -> its number of `writes`, and its values, as `look` has seen them.
        kept: slot -> the backward that last read values of it which a scope has kept (`kept_weights.py`).
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._here: tuple[int, ...] | None = None  # while guarded: the versions before
        self.num_renewals, self._renewals = 0, [0] * len(self._parameters)
        self.before_hooks: dict[int, tuple[int, Tensor | None]] = {}
        self.may_be_differentiated = False
        self.kept: dict[int, int] = {}
        self.copies = ViewCopies()
        self._writes = self.writes()
        self._num_hooks: dict[int, int] = {}  # slot -> how many hooks it had when its values were compared

    def guard(self) -> None:
        """The values are gone: let autograd raise if it reads them ([Note: versions of weights that are gone])."""
        if self._here is None:
            with as_tensors():
                self._here = tuple(map(_VERSION, self._parameters))
            others = tuple([version + 1 for version in self._here])
            torch._C._autograd._unsafe_set_version_counter(self._parameters, others)

    def unguard(self) -> None:
        """The values are here again."""
        if self._here is not None:
            torch._C._autograd._unsafe_set_version_counter(self._parameters, self._here)
            self._here = None

    def renew(self, slots: Collection[int] | None = None) -> None:
        """The values of these slots (None: all) are replaced ([Note: versions of new weights])."""
        new = [slots is None or index in slots for index in range(len(self._parameters))]
        increment_version(compress(self._parameters, new))
        self.num_renewals, self._renewals = self.num_renewals + 1, [*map(add, self._renewals, new)]
        if self._here is not None:
            self._here = tuple(map(add, self._here, new))

    def writes(self) -> list[int]:
        """For each parameter a number that changes when it is written to, and not by the methods above."""
        with as_tensors():
            return self._count_writes()

    def _count_writes(self) -> list[int]:
        return [*map(sub, self._here or map(_VERSION, self._parameters), self._renewals)]

    def has_new_writes(self) -> bool:
        """Whether a parameter has been written to since this was asked last. For units whose weights are here: this is
        asked in each step."""
        before, self._writes = self._writes, self._count_writes()
        return before != self._writes

    def number(self, slot: int) -> int:
        """The version of a parameter, also while its values are gone."""
        with as_tensors():
            return self._here[slot] if self._here is not None else self._parameters[slot]._version

    def look(self, slot: int) -> None:
        """Hooks of the user are about to run for the gradient of this slot ([Note: writes of gradient hooks])."""
        if slot not in self.before_hooks:
            parameter = self._parameters[slot]
            num_hooks = len(parameter._post_accumulate_grad_hooks or ())
            is_known, self._num_hooks[slot] = self._num_hooks.get(slot) == num_hooks, num_hooks
            self.before_hooks[slot] = self.writes()[slot], None if is_known else parameter.detach().clone()

    def written_by_hooks(self, values: Sequence[Tensor]) -> list[int]:
        """The slots that have been written to since `look`. `values`: of all slots, now."""
        found, writes = [], self.writes()
        for slot, (number, before) in self.before_hooks.items():
            if number != writes[slot] or (before is not None and not have_same_bits(before, values[slot])):
                found.append(slot)
        self.forget_looks()
        return found

    def forget_looks(self) -> None:
        """Forget what `look` has seen."""
        self.before_hooks.clear()
