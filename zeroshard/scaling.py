"""Loss scales as one optimizer sees them: which loss was multiplied by what, and whose gradients overflowed.

A gradient that is not finite is found in the reduced shard, in the control exchange, at no extra cost. *Which loss* it
came from is known where gradients are looked at before they are accumulated. That is done for losses with a scaler of
their own. (Which parameter, rank and micro-batch it was: `origins.py`.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zeroshard.loss_scale import LossScaler
from zeroshard.reduce import Reducer


class LossScaling:
    """See the module's note.

    Attributes:
        default: the scaler of losses that name none; None for no scaling.
        weight: sum of the weights of this rank's losses since the last step; None where none was given.
    """

    def __init__(self, default: LossScaler | None) -> None:
        self.default = default
        self.weight: float | None = None
        self._used: list[LossScaler] = []  # since the last step, the same on every rank
        self._looked: list[tuple[LossScaler | None, Tensor]] = []
        self._own_scalers = False
        self._num_backwards = 0

    @contextmanager
    def backward(
        self, reducer: Reducer, scaler: LossScaler | None, weight: float | None, together: Sequence[LossScaling]
    ) -> Iterator[float]:
        """Around one backward pass; gives the factor on its loss.

        Args:
            together: this one and those of all other optimizers of the model: the loss is theirs as well.
        """
        if reducer.order and not (reducer.notice() or reducer.has_gradients()):
            for one in together:  # what there was has been discarded, perhaps by `model.zero_grad()`
                one.reset()
        if any(one._num_backwards and (weight is None) != (one.weight is None) for one in together):
            raise RuntimeError("either all losses of a step have a weight, or none has")
        own, scaler = scaler is not None, scaler or self.default
        for one in together:
            one._note(scaler, own, weight)

        def look(grad: Tensor) -> None:
            finite = torch.isfinite(grad).all()
            for one in together:
                one._looked.append((scaler, finite))

        scale = scaler.scale if scaler is not None else 1.0
        with reducer.scaled(scale, look if own else None, weighted=weight is not None):
            yield scale * (1.0 if weight is None else weight)

    def _note(self, scaler: LossScaler | None, own: bool, weight: float | None) -> None:
        if scaler is not None and scaler not in self._used:
            self._used.append(scaler)
        self._own_scalers |= own
        self._num_backwards += 1
        if weight is not None:
            self.weight = (self.weight or 0.0) + weight

    @property
    def used(self) -> Sequence[LossScaler]:
        """Since the last step."""
        return tuple(self._used)

    def use_as(self, used: Sequence[LossScaler], weight: float) -> None:
        """As other ranks have done with losses that this one has not."""
        self._used, self.weight = list(used), weight

    def check_used(self) -> None:
        """Raises:
        RuntimeError: there is a loss scale, and no loss of this step went through `backward`."""
        if self.default is not None and not self._used:
            raise RuntimeError(
                "this optimizer scales losses, and this step's was not: call optimizer.backward(loss) instead of "
                "loss.backward(), or pass loss_scale=1.0"
            )

    def overflows(self) -> list[bool]:
        """For each scaler in use: whether this rank saw its loss overflow (all False where nobody looked)."""
        flags = torch.stack([finite for _, finite in self._looked]).tolist() if self._looked else []
        guilty = {id(scaler) for (scaler, _), finite in zip(self._looked, flags, strict=True) if not finite}
        return [id(scaler) in guilty for scaler in self._used]

    def settle(self, reducer: Reducer, found_inf: bool, overflows: list[bool]) -> None:
        """All ranks agree: every scaler in use adjusts, on its own overflow where that is known. Once, however many
        optimizers of the model step: from the state before the first, on an overflow of any."""
        for scaler, overflow in zip(self._used, self._blamed(found_inf, overflows), strict=True):
            before, found = reducer.settled.get(scaler, (scaler.state, False))
            reducer.settled[scaler] = before, found or overflow
            scaler.state = scaler.policy.next_state(before, found or overflow)
        self.reset()

    def _blamed(self, found_inf: bool, overflows: list[bool]) -> list[bool]:
        return overflows if any(overflows) and self._own_scalers else [found_inf] * len(self._used)

    def reset(self) -> None:
        """Gradients have been used or discarded."""
        self.weight = None
        self._used, self._looked, self._own_scalers, self._num_backwards = [], [], False, 0

    @property
    def is_scaled(self) -> bool:
        """Whether a loss since the last step had a scaler."""
        return bool(self._used)

    def exhausted(self, reducer: Reducer, overflows: list[bool]) -> int | None:
        """Overflows in a row, with the one at hand, of a scaler that gives up now. `overflows`: as for `settle`."""
        for scaler, overflow in zip(self._used, self._blamed(True, overflows), strict=True):
            before, _ = reducer.settled.get(scaler, (scaler.state, False))
            most = scaler.policy.max_skips
            if overflow and most is not None and before.skips_in_a_row + 1 >= most:
                return before.skips_in_a_row + 1
        return None

    def state_dict(self) -> dict[str, Any]:
        return {} if self.default is None else self.default.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.default is not None and state:
            self.default.load_state_dict(state)
