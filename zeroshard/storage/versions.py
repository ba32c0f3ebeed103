"""The versions of a unit's parameters, which autograd compares before it reads a weight that it has saved.

[Note: versions of weights that are gone] A backward may come to a unit that no hook has gathered: its forward has left
the result where no hook finds it. For a trained parameter, its gradient hook notices that. A frozen one has none, and
the gradients of the units before would be wrong without an error. So while its values are gone, its version counter
is another one: autograd compares the version of each saved tensor before it reads it, and raises.

[Note: versions of new weights] Plain torch raises in the backward of a graph that has saved weights which a step, or a
load, has overwritten since: their gradients would mix old activations with new weights. Here new values are written to
the buffer, which autograd does not notice ([Note: storage that autograd holds] in `weights.py`). So `renew` counts the
versions on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress
from operator import add, sub

import torch
from torch import nn
from torch.autograd.graph import increment_version

from zeroshard.model.absent import as_tensors


class Versions:
    """See the module's note."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._here: tuple[int, ...] | None = None  # while guarded: the versions before
        self._renewals = [0] * len(self._parameters)

    def guard(self) -> None:
        """The values are gone: let autograd raise if it reads them ([Note: versions of weights that are gone])."""
        if self._here is None:
            with as_tensors():
                self._here = tuple([parameter._version for parameter in self._parameters])
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
        self._renewals = [*map(add, self._renewals, new)]
        if self._here is not None:
            self._here = tuple(map(add, self._here, new))

    def writes(self) -> list[int]:
        """For each parameter a number that changes when it is written to, and not by the methods above."""
        with as_tensors():
            versions = self._here or [parameter._version for parameter in self._parameters]
        return [*map(sub, versions, self._renewals)]
