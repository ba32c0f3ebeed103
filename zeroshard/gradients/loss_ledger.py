"""Records the scales and weights of losses, the common scale of accumulated gradients, and which losses overflowed.

    LossLedger   of one model: the loss of the current backward; the scale of gradients that wait for a step
    LossAccount  of one optimizer: the losses since its last step. A loss belongs to all optimizers of the model

A gradient that is not finite is found in the reduced shard, by the control exchange, at no extra cost. To know *which
loss* it came from, gradients must be checked before they are accumulated. This is done only for losses with a scaler of
their own and, from the first of these on, for all losses. (Which parameter, rank and micro-batch it was: `origins.py`.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.loss_scale import LossScaler, ScaleState
from zeroshard.ranks.living import Living


@dataclass(eq=False, slots=True)
class Loss:
    """One backward pass, and the factors on its loss.

    Attributes:
        scale: the loss scale; 1 for none.
        is_weighted: whether the loss was also multiplied by a weight; the step then divides by the sum of the weights.
        scaler: the scaler that `scale` comes from.
        looked_at: whether losses have scalers of their own, and each gradient of this one is checked.
        has_begun: whether it has begun to contribute to the gradients.
        finite: for each checked gradient, whether it is finite (0-d bool).
    """

    scale: float = 1.0
    is_weighted: bool = False
    scaler: LossScaler | None = None
    looked_at: bool = False
    has_begun: bool = False
    finite: list[Tensor] = field(default_factory=list)

    @property
    def is_final(self) -> bool:
        """Whether its gradients are those of the loss of the user."""
        return self.scale == 1.0 and not self.is_weighted


class LossLedger:
    """The ledger of one model. See the module's note.

    Attributes:
        looks_or_scales: whether gradients of the current loss are checked or rescaled (`add`).
        discarded: ids of parameters that no optimizer has, and whose gradients a step has discarded since the last
            backward.
        has_scalers: whether a loss has had a scaler of its own.
        of_some_ranks: in a join, whether some ranks have run out, and the step divides by the number of the others.
    """

    def __init__(self) -> None:
        self.looks_or_scales = self.of_some_ranks = self.has_scalers = False
        self.discarded: set[int] = set()
        self._loss = Loss()
        self._scale: float | None = None
        self._is_weighted: bool | None = None  # of the gradients that wait for a step, as `_scale`
        self._are_of_some_ranks = False  # the same
        self._accounts: Living[LossAccount] = Living()
        self._before: dict[LossScaler, tuple[ScaleState, bool]] = {}

    def open_account(self, default: LossScaler | None) -> LossAccount:
        """A new account, for one optimizer. `default`: the scaler of losses that name none."""
        account = LossAccount(self, default)
        self._accounts.add(account)
        return account

    # Gradients -------------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """The scale of the gradients that wait for a step: the scale of the first loss that contributed to them."""
        return 1.0 if self._scale is None else self._scale

    @property
    def has_final(self) -> bool:
        """Whether the gradients that wait for a step are the final means: of losses neither scaled nor weighted, of all
        ranks."""
        return self.scale == 1.0 and not self._is_weighted and not self._are_of_some_ranks

    @property
    def loss(self) -> Loss:
        """The loss of the current backward; outside of `backward`, a loss without scale and weight."""
        return self._loss

    @contextmanager
    def backward(self, loss: Loss) -> Iterator[None]:
        """Set the current loss for the backward that runs inside."""
        self._before.clear()
        self._loss = loss
        try:
            yield
        finally:
            self._loss = Loss()

    def expect_alike(self, *, is_weighted: bool) -> None:
        """Raises:
        RuntimeError: the losses of the gradients that wait for a step have weights, and the next one has none, or the
            reverse: the step would divide all of them by the sum of the weights."""
        if self._is_weighted not in (None, is_weighted):
            raise InvalidState(_ALL_OR_NONE)

    def begin(self) -> None:
        """The current loss begins to contribute to the gradients."""
        self._is_weighted, self._loss.has_begun = self._loss.is_weighted, True
        self.discarded.clear()
        if self._scale is None:
            self._scale = self._loss.scale
        self.looks_or_scales = self._loss.looked_at or self._scale != self._loss.scale
        self._are_of_some_ranks |= self.of_some_ranks

    def add(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """A gradient of the current loss, rescaled to the scale of the gradients that it is added to, in `dtype`."""
        if self._loss.looked_at:
            # Kept on the device. Reading the flag here would make the host wait for the GPU at every gradient.
            self._loss.finite.append(torch.isfinite(grad).all())
        if self._scale is None or self._scale == self._loss.scale:
            return grad
        return grad.to(dtype, copy=True).mul_(self._scale / self._loss.scale)

    def begin_without_loss(self) -> None:
        """A gradient is about to be set as it is.

        Raises:
            RuntimeError: losses have weights, so the step would divide it by their sum.
        """
        if self._is_weighted or self._are_of_some_ranks:
            raise InvalidState("set_gradient: this step's losses were weighted, and the step divides by their weights")
        if self._scale is None:
            self._scale, self._is_weighted = 1.0, False

    def forget_gradients(self) -> None:
        """All gradients have been used or discarded: the next loss sets the scale."""
        self._scale, self._is_weighted, self._are_of_some_ranks = None, None, False

    def forget_losses(self) -> None:
        """Forget the losses of all optimizers: their gradients have been discarded."""
        for account in self._accounts.all():
            account.clear()

    def discard_losses(self) -> None:
        """All gradients have been discarded, or a backward has raised: gradients that are set later have no weight."""
        for account in self._accounts.all():
            account.discard()

    def expect_one_scale(self) -> None:
        """Raises:
        ValueError: the current loss has another scale than earlier ones, and its gradients cannot be rescaled."""
        if self._scale not in (None, self._loss.scale):
            raise InvalidValue(
                f"losses scaled by {self._scale} and by {self._loss.scale} would be mixed in p.grad, which plan "
                "OPTIMIZER_ONLY leaves to others: use one scaler, or shard(model, plan)"
            )

    # Scalers ---------------------------------------------------------------------------------------------------------

    def adjusted(self, scaler: LossScaler, overflow: bool) -> LossScaler:
        """The scaler after a step. If several optimizers of the model step after one backward, each adjusts the scaler
        from its state before the first of these steps, and counts an overflow of any of them."""
        before, found = self._before.get(scaler, (scaler.state, False))
        result = LossScaler(scaler.policy, before)
        result.update(found or overflow)
        return result

    def adjust(self, scaler: LossScaler, overflow: bool) -> None:
        """Adjust the scaler, at the end of one optimizer's step."""
        before, found = self._before.get(scaler, (scaler.state, False))
        scaler.state = self.adjusted(scaler, overflow).state
        self._before[scaler] = before, found or overflow


class LossAccount:
    """The losses of one optimizer since its last step. See the module's note.

    Attributes:
        default: the scaler of losses that name none; None for no scaling.
        weight: sum of the weights of this rank's losses; None if losses have no weights.
    """

    def __init__(self, ledger: LossLedger, default: LossScaler | None) -> None:
        self.default = default
        self.weight: float | None = None
        self._ledger = ledger
        self._losses: list[Loss] = []
        self._used: list[LossScaler] = []  # the same on every rank

    @contextmanager
    def backward(self, scaler: LossScaler | None, weight: float | None, *, anew: bool) -> Iterator[float]:
        """Around one backward pass; yields the factor on its loss.

        Args:
            anew: no gradients wait for a step: those of earlier losses have been discarded.

        Raises:
            RuntimeError: some losses of a step have weights, others have none.
        """
        together = self._ledger._accounts.all()
        if anew:
            self._ledger.forget_losses()
        else:
            self._ledger.expect_alike(is_weighted=weight is not None)
        if any(account._losses and (weight is None) != (account.weight is None) for account in together):
            raise InvalidState(_ALL_OR_NONE)
        used = scaler or self.default
        # Else an overflow of a loss without one could be of any of them.
        self._ledger.has_scalers |= scaler is not None
        looks = used is not None and self._ledger.has_scalers
        loss = Loss(used.scale if used is not None else 1.0, weight is not None, used, looked_at=looks)
        before = [(account, account.weight) for account in together]
        for account in together:
            account._note(loss, weight)
        try:
            with self._ledger.backward(loss):
                yield loss.scale * (1.0 if weight is None else weight)
        except BaseException:
            for account, old in before if not loss.has_begun else ():  # it has raised behind the model: in the loss
                account.weight = old
                account._losses.remove(loss)
            raise

    def _note(self, loss: Loss, weight: float | None) -> None:
        self._losses.append(loss)
        if loss.scaler is not None and loss.scaler not in self._used:
            self._used.append(loss.scaler)
        if weight is not None:
            self.weight = (self.weight or 0.0) + weight

    def clear(self) -> None:
        """Forget the losses: their gradients have been used or discarded."""
        self.discard()
        self._used = []

    def discard(self) -> None:
        """Forget the losses, but not which scalers they have used: in a step these are the same on every rank."""
        self.weight, self._losses = None, []

    def use_as(self, used: Sequence[LossScaler], weight: float) -> None:
        """On a follower of a join: use the scalers of the other ranks' losses, and `weight` if this rank has no losses.
        (If it has run out of inputs between two micro-batches, its own losses keep their weight.)"""
        self._used = list(used)
        if not self._losses:
            self.weight = weight

    @property
    def used(self) -> Sequence[LossScaler]:
        """The scalers of these losses."""
        return tuple(self._used)

    def expect_scaled(self) -> None:
        """Raises:
        RuntimeError: there is a loss scale, and no loss of this step went through `backward`."""
        if self.default is not None and not self._used:
            raise InvalidState(
                "this optimizer scales losses, and this step's was not: call optimizer.backward(loss) instead of "
                "loss.backward(), or pass loss_scale=1.0"
            )

    def overflows(self) -> Tensor | None:
        """For each scaler in use, whether this rank saw its loss overflow, bool [scalers] on the device; None if no
        gradients were checked. The host does not wait for the device."""
        looks = [(loss.scaler, finite) for loss in self._losses for finite in loss.finite]
        if not looks:
            return None
        nothing = [torch.ones_like(looks[0][1])]  # for a scaler whose gradients were not checked
        of_scalers = [[finite for scaler, finite in looks if scaler == used] or nothing for used in self._used]
        return torch.stack([torch.stack(finite).all() for finite in of_scalers]).logical_not()

    def adjust(self, found_inf: bool, overflows: list[bool]) -> None:
        """Adjust every scaler in use: on its own overflow if that is known, else on `found_inf`. The arguments must be
        the same on all ranks.

        Args:
            found_inf: whether the gradient was not finite.
            overflows: for each scaler in use, whether any rank saw its loss overflow.
        """
        for scaler, overflow in zip(self._used, self._blamed(found_inf, overflows), strict=True):
            self._ledger.adjust(scaler, overflow)
        self.clear()

    def exhausted(self, overflows: list[bool]) -> int | None:
        """The number of overflows in a row, with the current one, of a scaler that gives up now; None if none does.
        `overflows`: as for `adjust`."""
        for scaler, overflow in zip(self._used, self._blamed(True, overflows), strict=True):
            adjusted = self._ledger.adjusted(scaler, overflow)
            if overflow and adjusted.exhausted:
                return adjusted.skips_in_a_row
        return None

    def _blamed(self, found_inf: bool, overflows: list[bool]) -> list[bool]:
        """For each scaler in use, whether it counts an overflow."""
        # Use only values that all ranks have agreed on: a follower of a join has not seen the losses.
        return overflows if any(overflows) else [found_inf] * len(self._used)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.default is None else self.default.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.default is not None and state:
            self.default.load_state_dict(state)


_ALL_OR_NONE = "either all losses of a step have a weight, or none has (none: plain loss.backward(), set_gradient)"
