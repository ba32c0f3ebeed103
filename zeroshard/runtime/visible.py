"""What the user finds in `p.grad` between backward and step, and what it means if something else is found there later.

| gradients of the unit           | `p.grad`                                                                           |
|---------------------------------|------------------------------------------------------------------------------------|
| PARTIAL, nothing reduced before | a view of the bucket: this rank's terms, as torch DDP leaves them under `no_sync`  |
| REDUCED, in full on every rank  | a view of the bucket: the mean over ranks                                          |
| all others                      | a `ShardedGradient`                                                                |

Where losses were scaled or weighted, what is REDUCED is not yet what the step uses: it is a `ShardedGradient`, too,
which says so.

| found later        | means                                                                           |
|--------------------|---------------------------------------------------------------------------------|
| what was put there | changed in place or not, it is what the step uses                               |
| None               | `model.zero_grad()`, `p.grad = None`: this gradient is discarded                |
| another tensor     | a gradient set by hand, of this rank: the step takes the mean over ranks, and a |
|                    | backward before it adds to it                                                   |

Nothing of this is in the way of autograd: `withdraw` empties `p.grad` when a backward begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.settings import Items, plain
from zeroshard.errors import InvalidState
from zeroshard.model.absent import as_tensors
from zeroshard.placement import REPLICATED
from zeroshard.runtime.loss_ledger import LossLedger
from zeroshard.runtime.sharded_gradient import ShardedGradient
from zeroshard.storage.gradients import Gradients, GradState
from zeroshard.storage.unit import Unit


class VisibleGradients:
    """Of all trainable units of a model.

    Attributes:
        version: changes whenever a reduced gradient may have changed.
        edits: what has been done to gradients that no rank holds in full, since ranks have compared it: (parameter,
            what).
    """

    def __init__(self, units: Sequence[Unit], collectives: Collectives, ledger: LossLedger) -> None:
        self._grads = {unit: unit.grads for unit in units if isinstance(unit.grads, Gradients)}
        self._collectives, self._ledger = collectives, ledger
        self._shown: dict[Unit, dict[int, Tensor]] = {unit: {} for unit in self._grads}
        self._sharded: dict[tuple[Unit, int], ShardedGradient] = {}
        self._edits = 0
        self.edits: list[tuple[str, str]] = []
        self._last_number: tuple[Tensor, int, Any] | None = None
        self._norms: tuple[tuple[int, ...], float, dict[tuple[Unit, int], Tensor]] | None = None

    @property
    def final(self) -> bool:
        """Whether reduced gradients are what the step uses."""
        return self._ledger.has_final

    @property
    def version(self) -> tuple[int, ...]:
        buckets = (grads.buffer.full for grads in self._grads.values() if grads.means_in_full)
        # The bucket's version counter counts in-place edits of `p.grad`, which is a view of it.
        return self._edits, sum(full._version for full in buckets if full is not None)

    def changed(self) -> None:
        """Reduced gradients are others than they were."""
        self._edits += 1

    # Backward ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def show(self) -> None:
        """A backward is over."""
        self.changed()
        with as_tensors():
            for unit, grads in self._grads.items():
                if grads.state is not GradState.EMPTY:
                    self._show(unit, grads)

    def _show(self, unit: Unit, grads: Gradients) -> None:
        in_full = grads.is_local or (grads.buffer.placement is REPLICATED and self.final)
        for index in sorted(grads.present if grads.is_local else grads.waiting):
            parameter = unit.parameters[index]
            if parameter.grad is not None:
                continue
            if not in_full or grads.buffer.dtype != _dtype_of_grad(parameter):
                shown: Tensor = self._sharded_gradient(unit, index, grads)
            elif index in grads.present or bool(grads.buffer.views()[index].any()):  # some rank has had one
                shown = grads.buffer.views()[index]
            else:
                continue
            parameter.grad = self._shown[unit][index] = shown

    def withdraw(self) -> None:
        """A backward begins: `p.grad` is empty, but for what was set by hand, which backward adds to."""
        self._discard_all_gone()
        for unit in self._grads:
            with as_tensors():
                for index in self._shown[unit]:
                    unit.parameters[index].grad = None
            self._shown[unit].clear()

    # Between backward and step -------------------------------------------------------------------------------------

    @torch.no_grad()
    def notice(self) -> dict[tuple[int, int], Tensor]:
        """Discard what has been discarded since. Returns what has been set by hand: (unit, slot) -> this rank's."""
        by_hand = {}
        self._discard_all_gone()
        for unit in self._grads:
            for index, gradient in enumerate(unit.user_grads()):
                if gradient is not None and index not in self._shown[unit]:
                    by_hand[unit.index, index] = gradient.detach()
        return by_hand

    def assign(self, unit: Unit, index: int, part: Tensor) -> None:
        """The reduced gradient of a slot becomes `part` (see `Gradients.assign`). `show` shows it."""
        unit.parameters[index].grad = None
        self._grads[unit].assign(index, part)
        self.changed()

    def shows(self, unit: Unit) -> bool:
        """Whether something of it has been put into `p.grad`."""
        return bool(self._shown.get(unit))

    def forget(self, unit: Unit, slots: set[int]) -> None:
        """The gradients of these slots are used up, or discarded."""
        shown = self._shown.get(unit, {})
        with as_tensors():
            for index in slots & shown.keys():
                if unit.parameters[index].grad is shown[index]:
                    unit.parameters[index].grad = None
                del shown[index]

    def _discard_all_gone(self) -> None:
        """Where nothing that was shown is left, units of which nothing need be shown (no rank had a gradient) are
        discarded, too."""
        gone = [self._discard_gone(unit, grads) for unit, grads in self._grads.items()]
        if any(gone) and not any(self._shown.values()):
            for grads in self._grads.values():
                grads.consume(set(grads.waiting))

    def _discard_gone(self, unit: Unit, grads: Gradients) -> bool:
        """Discard what was shown and is not there any more; where that is all, also what need not be shown."""
        shown = self._shown[unit]
        found = unit.user_grads() if shown else []
        slots = {index for index, gradient in shown.items() if found[index] is not gradient}
        if not slots:
            return False
        for index in slots:
            del shown[index]
        if not grads.is_local and not grads.means_in_full:  # a rank that keeps its part would go another way
            names = ", ".join(unit.layout.slots[index].name for index in sorted(slots))
            self._collectives.log.record("discard gradients", f"{unit.name}: {names}", "step", 0)
        grads.consume(slots if shown else set(grads.waiting))
        self.changed()
        return True

    # A gradient that no rank holds in full ---------------------------------------------------------------------------

    def _sharded_gradient(self, unit: Unit, index: int, grads: Gradients) -> ShardedGradient:
        shown = self._sharded.get((unit, index))
        if shown is None:
            parameter = unit.parameters[index]
            nan = torch.full((), torch.nan, dtype=_dtype_of_grad(parameter), device=grads.buffer.shard.device)
            shown = ShardedGradient(nan.expand(parameter.shape), _Holder(self, unit, index))
            self._sharded[unit, index] = shown
        return shown

    def edited(self) -> Items:
        """For ranks to compare: of each parameter, what has been done to its gradient."""
        of_each: dict[str, list[str]] = {}
        for name, what in self.edits:
            of_each.setdefault(name, []).append(what)
        return tuple((f"what was done to p.grad of {name}", ", ".join(done)) for name, done in of_each.items())

    def _number(self, value: Any) -> Any:
        """Of an operand; of a tensor that many gradients are multiplied by (a clip's) it is asked for once."""
        if not isinstance(value, Tensor) or value.is_inference():
            return plain(value)
        if self._last_number is None or self._last_number[0] is not value or self._last_number[1] != value._version:
            self._last_number = value, value._version, plain(value)
        return self._last_number[2]

    def edit(
        self, unit: Unit, index: int, operation: Callable[[Tensor], object], what: str, operands: Sequence[Any]
    ) -> None:
        name = unit.layout.slots[index].name
        self.edits.append((name, f"{what}({', '.join(repr(self._number(value)) for value in operands)})"))
        part = self._grads[unit].held_part(index)
        if part.numel():
            operation(part)
        self._collectives.log.record(f"gradient.{what}", f"{unit.name}: {unit.layout.slots[index].name}", "step", 0)
        self.changed()

    @torch.no_grad()
    def norm(self, unit: Unit, index: int, norm_type: float) -> Tensor:
        """Of one gradient; one exchange for those of all."""
        if self._norms is None or self._norms[:2] != (self.version, norm_type):
            self._norms = self.version, norm_type, self._all_norms(norm_type)
        return self._norms[2][unit, index]

    def _all_norms(self, norm_type: float) -> dict[tuple[Unit, int], Tensor]:
        """Every slot of every unit that has been reduced. Collective."""
        slots = [
            (unit, index, grads.own_part(index))
            for unit, grads in self._grads.items()
            if grads.state is GradState.REDUCED
            for index in range(len(unit.parameters))
        ]
        largest = norm_type == torch.inf
        parts = [vector_norm(part, norm_type, dtype=torch.float64) if part.numel() else None for *_, part in slots]
        row = torch.zeros(len(slots), dtype=torch.float64, device=self._collectives.device)
        for position, value in enumerate(parts):
            if value is not None:
                row[position] = value if largest else value**norm_type
        rows = self._collectives.exchange(row, _norm_of(norm_type))[self._collectives.mesh.one_of_each_shard]
        norms = rows.amax(0) if largest else rows.sum(0) ** (1 / norm_type)
        return {
            (unit, index): norm.to(torch.promote_types(torch.float32, part.dtype)).to(part.device)
            for (unit, index, part), norm in zip(slots, norms.unbind(0), strict=True)
        }


def _norm_of(norm_type: float) -> str:
    return f"the {norm_type:g}-norm of a p.grad (p.grad.norm(), torch.nn.utils.clip_grad_norm_)"


def _dtype_of_grad(parameter: nn.Parameter) -> torch.dtype:
    """What torch lets into `p.grad`."""
    return parameter.grad_dtype or parameter.dtype


class _Holder:
    """The values behind the `ShardedGradient` of one slot. Weak: a parameter, whose `grad` it is, owns nobody."""

    def __init__(self, visible: VisibleGradients, unit: Unit, index: int) -> None:
        self._visible_ref, self._unit_ref, self._index = weakref.ref(visible), weakref.ref(unit), index

    @property
    def _visible(self) -> VisibleGradients:
        visible = self._visible_ref()
        if visible is None:
            raise InvalidState("the handle of this gradient is gone")
        return visible

    @property
    def _unit(self) -> Unit:
        unit = self._unit_ref()
        if unit is None:
            raise InvalidState("the handle of this gradient is gone")
        return unit

    def edit(self, operation: Callable[[Tensor], object], what: str, operands: Sequence[Any]) -> None:
        if what != "zero_":
            self._expect_final(what)
        self._visible.edit(self._unit, self._index, operation, what, operands)

    def norm(self, norm_type: float) -> Tensor:
        self._expect_final("norm")
        return self._visible.norm(self._unit, self._index, norm_type)

    def explain(self, what: str) -> NoReturn:
        name = self._unit.layout.slots[self._index].name
        if "_amp_" in what:
            raise InvalidState(
                f"torch.amp.GradScaler looks at the gradient of {name}, and no rank holds it in full: pass "
                "loss_scale='dynamic' to ShardedOptimizer, and call optimizer.backward(loss) in place of the scaler"
            )
        raise InvalidState(
            f"{what} on the gradient of {name}: no rank holds it in full. Its full values are handle.gradient({name!r})"
            f", new ones are set by handle.set_gradient({name!r}, values), both on every rank. "
            "In place it can be multiplied, divided, clamped and zeroed, its norm can be taken, and torch.nn.utils can "
            "clip it. A step is that of a zeroshard.ShardedOptimizer, not of a plain one"
        )

    def _expect_final(self, what: str) -> None:
        state, name = self._unit.grads.state, self._unit.layout.slots[self._index].name
        if state is not GradState.REDUCED:
            raise InvalidState(
                f"{what} on the gradient of {name}, which is {state.value}: it can be used between a backward outside "
                "of no_sync() and the step"
            )
        if not self._visible.final:
            raise InvalidState(
                f"{what} on the gradient of {name}: this step's losses were scaled or weighted, and so is the gradient "
                "until the step. Use optimizer.clip_grad_norm_ or optimizer.clip_grad_value_, which know by how much"
            )
