"""Clips gradients between backward and step: each clip acts on what the earlier ones have left, as in torch.

A clip is a record (`clipping.py`) that the step applies, together with everything else that it multiplies by. If
somebody looks at the gradient before the step, changes it or adds to it, the clip is applied first (`Clips.apply`).
Where `p.grad` is a view of the bucket, this cannot be noticed, so a clip is applied at once if that has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from weakref import WeakMethod

import torch
from torch import Tensor

from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.gather import in_backward
from zeroshard.step.agreement import Agreement
from zeroshard.step.clipping import CHANGED_SINCE
from zeroshard.step.stepper import Update
from zeroshard.storage.external_gradients import ExternalGradients, SeenGradients
from zeroshard.storage.gradients import Gradients, GradState
from zeroshard.storage.unit import Unit


class Clips:
    """The clips of one optimizer."""

    def __init__(self, engine: Engine, agreement: Agreement) -> None:
        self._engine, self._agreement = engine, agreement

    def by_norm(self, max_norm: float, norm_type: float, ask: Callable[[float], None], *, needs_host: bool) -> Tensor:
        """See `ShardedOptimizer.clip_grad_norm_`.

        Args:
            ask: begins the control exchange for a norm.
            needs_host: whether a norm that is not finite is an error.
        """
        if not max_norm > 0:
            raise InvalidValue(f"max_norm must be positive, found {max_norm}")
        if not norm_type > 0:
            raise InvalidValue(
                f"norm_type must be a positive number, or inf for the largest element: found {norm_type}"
            )
        agreement, clipping = self._agreement, self._agreement.clipping
        is_second = clipping.waits
        if clipping.awaits_norm:
            agreement.answer()
        if clipping.bounds:
            ask(norm_type)  # the ranks know by now how the losses were scaled and weighted
            control = agreement.answer()
            if agreement.stops_at(control):  # so does the step: the bound must not hide it
                clipping.asked = (max_norm, norm_type)
                return _on_host(agreement.limit(), needs_host=needs_host)
            self.apply(agreement.mean_factor(control))
        elif is_second:
            self.apply()  # the norm is that of what is left, and under every plan it is rounded before the next factor
        # Also as a view of the bucket may have been written to through `p.grad.data`, whose version is its own.
        agreement.ask_anew()
        clipping.asked, clipping.needs_host = (max_norm, norm_type), needs_host
        ask(norm_type)
        # Also on a rank that cannot go ahead: it takes part in the gathers of the others before it reads the answer,
        # and so all ranks must read it at the same place of the program.
        verdict = None if needs_host or is_second or norm_type != 2 else agreement.verdict()
        if verdict is not None:
            clipping.awaits_norm = True  # `Agreement.answer` ends it
            self._wait()
            return verdict.norm.clone()  # the caller may write to it, and the update computes its factor from this one
        agreement.answer()
        found = _on_host(agreement.limit(), needs_host=needs_host)
        self._wait()
        return found

    def by_value(self, clip_value: float) -> None:
        """See `ShardedOptimizer.clip_grad_value_`."""
        if not clip_value > 0:
            raise InvalidValue(f"clip_value must be positive, found {clip_value}")
        self._engine.expect_no_backward("clip_grad_value_")
        if self._engine.reducer.notice():  # no exchange here: their mean is known behind one
            raise InvalidState(
                "clip_grad_value_: gradients have been set by hand, and have not been averaged over the ranks yet. "
                "Call optimizer.clip_grad_norm_(math.inf) before, on every rank, which does it"
            )
        self._agreement.clipping.clamp(clip_value)
        self._wait()

    def _wait(self) -> None:
        """Let the clip wait for the step. Where the gradients lie in `p.grad` and will be used as they are, it does
        not: the multiplication has the same bits now."""
        clipping, units = self._agreement.clipping, self._agreement.units
        if not clipping.waits:
            return
        if clipping.of is None and any(unit.grads.is_external for unit in units):
            clipping.of = SeenGradients(unit.parameters[index] for unit, slots in units.items() for index in slots)
        apply: WeakMethod[Callable[[], None]] = WeakMethod(self.apply)
        if apply not in self._engine.reducer.visible.clips:
            self._engine.reducer.visible.clips.append(apply)
        is_exact = all(
            isinstance(unit.grads, Gradients) and unit.grads.means_in_full and unit.grads.held_in == unit.main.dtype
            for unit in units
        )
        is_told = self._engine.collectives.orders is not None  # followers of a join are told the factor with the step
        if is_exact and not is_told and self._engine.reducer.visible.final:
            if clipping.awaits_norm and clipping.value is not None:
                self._agreement.answer()  # the bound acts on what the factor has left
            self.apply(on_device=True)

    @torch.no_grad()
    def apply(self, mean: float | None = None, *, on_device: bool = False) -> None:
        """Clip the gradients now.

        Args:
            mean: the factor from their values to the mean gradient; None: it may not be known.
            on_device: if the host does not know the norm yet, it does not wait for it.

        Raises:
            RuntimeError: losses are scaled or weighted, and only the step knows the bound of each element; or other
                code has changed the gradients in `p.grad` since the clip.
        """
        clipping, visible = self._agreement.clipping, self._engine.reducer.visible
        if clipping.is_late:
            raise InvalidState(CHANGED_SINCE)
        factor: float | Tensor = clipping.factor
        if clipping.awaits_norm:
            verdict = self._agreement.verdict()
            if verdict is None:
                return
            if on_device or in_backward():  # no exchange here
                assert clipping.asked is not None, "a clip by norm has asked"
                if not clipping.on_device:
                    factor, clipping.on_device = verdict.clip_factor(clipping.asked[0]), True
                clipping.added_to = in_backward()
            else:
                self._agreement.answer()
                factor = clipping.factor
        if not isinstance(factor, Tensor) and factor == 1.0 and clipping.value is None:
            return
        bound = clipping.value
        if bound is not None and mean is not None:
            bound /= mean
        elif bound is not None and not visible.final:
            raise InvalidState(
                "the gradient is used between clip_grad_value_ and the step, and this step's losses were scaled or "
                "weighted: only the step knows the bound of its elements. Call clip_grad_value_ after that"
            )
        parts = [
            part
            for unit, slots in self._agreement.units.items()
            for part in _held_parts(unit, slots & unit.grads.waiting)
            if part.numel()
        ]
        with self._agreement.own_norms.kept():
            with visible.unedited():
                for dtype in {part.dtype for part in parts}:
                    Update(factor, bound).apply([part for part in parts if part.dtype == dtype])
            if clipping.value is not None:
                visible.changed()  # `ShardedGradient.norm` finds it anew
        clipping.factor, clipping.value, clipping.of = 1.0, None, None


def _on_host(norm: float, *, needs_host: bool) -> Tensor:
    if needs_host and not math.isfinite(norm):
        raise InvalidState(f"the gradient norm is {norm}: cannot clip (error_if_nonfinite)")
    return torch.tensor(norm, dtype=torch.float64, device="cpu")


def _held_parts(unit: Unit, slots: Collection[int]) -> list[Tensor]:
    """What this rank holds of the reduced gradients of these slots."""
    grads = unit.grads
    if isinstance(grads, ExternalGradients):
        return [part for index in sorted(slots) if (part := grads.in_place(index)) is not None]
    if grads.state is not GradState.REDUCED:
        return []
    if grads.means_in_full and grads.buffer.full is not None and len(slots) == len(unit.parameters):
        return [grads.buffer.full]  # with padding, which is zero
    return [grads.held_part(index) for index in sorted(slots)]
