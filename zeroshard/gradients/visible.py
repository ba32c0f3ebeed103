"""Shows gradients in `p.grad` between backward and step, and notices what the user has changed there.

| gradients of the unit           | `p.grad`                                                                           |
|---------------------------------|------------------------------------------------------------------------------------|
| PARTIAL, nothing reduced before | a view of the bucket: this rank's terms, as torch DDP leaves them under `no_sync`  |
| REDUCED, in full on every rank  | a view of the bucket: the mean over ranks                                          |
| used by a step                  | a `UsedGradient`, until the next forward or `zero_grad`                            |
| all others                      | a `ShardedGradient`                                                                |

If losses were scaled or weighted, gradients are not yet the values that the step uses: `p.grad` is then always a
`ShardedGradient`, and operations on it raise an error that says so. The same after a backward with `create_graph`:
plain torch has a graph in `p.grad`, and a loss that is computed from it would lose that term in silence.

| found later        | means                                                                           |
|--------------------|---------------------------------------------------------------------------------|
| the same tensor    | changed in place or not, the step uses it                                       |
| None               | `model.zero_grad()`, `p.grad = None`: this gradient is discarded                |
| another tensor, or | a gradient of this rank, set by hand: the step takes the mean over ranks, and a |
| other memory       | backward before the step adds to it (`p.grad.data = values`)                    |

The step divides by scales and weights of losses. A gradient set by hand beside gradients of such losses may have these
factors or not: it is *doubtful*, and refused.

`withdraw` sets `p.grad` to None when a backward begins, so that autograd does not add to these tensors.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.utils.weak import WeakTensorKeyDictionary

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.packets import on_device
from zeroshard.errors import InvalidState
from zeroshard.gradients.loss_ledger import LossLedger
from zeroshard.gradients.settings import Items, plain
from zeroshard.gradients.sharded_gradient import UsedGradient, WithoutValues
from zeroshard.model.absent import as_tensors
from zeroshard.placement import REPLICATED
from zeroshard.storage.gradients import Gradients, GradState
from zeroshard.storage.unit import Unit


class VisibleGradients:
    """The gradients in `p.grad` of all trainable units of a model.

    Attributes:
        version: changes whenever a reduced gradient may have changed.
        clips: clips that wait for the step, as functions that apply them.
        edits: operations on gradients that no rank holds in full, since the ranks last compared them: (parameter,
            operation).
        had_graphs: whether backward has given gradients with graphs, which buckets do not keep.
        doubtful: the name of a parameter whose gradient set by hand is doubtful (`notice` finds it); None if none is.
    """

    def __init__(self, units: Sequence[Unit], collectives: Collectives, ledger: LossLedger) -> None:
        self._grads = {unit: unit.grads for unit in units if isinstance(unit.grads, Gradients)}
        self._collectives, self._ledger = collectives, ledger
        self._shown: dict[Unit, dict[int, Tensor]] = {unit: {} for unit in self._grads}
        self._without_values = WithoutValues(self, self._grads)
        self._kept = WeakTensorKeyDictionary()  # gradients that were used, and that somebody still has
        self._edits = self._num_writes_of_steps = 0
        self.clips: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.edits: list[tuple[str, str]] = []
        self.had_graphs = False
        self.doubtful: str | None = None
        self._last_number: tuple[Tensor, int, Any] | None = None
        self._norms: tuple[tuple[int, ...], float, dict[tuple[Unit, int], Tensor]] | None = None

    @property
    def final(self) -> bool:
        """Whether reduced gradients are the values that the step uses."""
        return self._ledger.has_final

    @property
    def version(self) -> tuple[int, ...]:
        # The bucket's version counter counts in-place edits of `p.grad`, which is a view of it.
        return self._edits, self._num_writes - self._num_writes_of_steps

    @property
    def _num_writes(self) -> int:
        return sum(grads.buffer.version for grads in self._grads.values() if grads.means_in_full)

    @contextmanager
    def unedited(self) -> Iterator[None]:
        """Inside, a step writes to the gradients that it uses. For other optimizers this changes none, and whether it
        writes at all may differ between ranks: an update ahead of the host multiplies by 1 where the host does not."""
        before = self._num_writes
        try:
            yield
        finally:
            self._num_writes_of_steps += self._num_writes - before

    def apply_clips(self) -> None:
        """Call it before gradients are read, changed or added to between backward and step."""
        clips, self.clips = self.clips, []
        for clip in clips:
            if (apply := clip()) is not None:
                apply()

    def changed(self) -> None:
        """Count a change of reduced gradients."""
        self._edits += 1

    # Backward ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def show(self) -> None:
        """Put gradients into `p.grad`, after a backward."""
        self.changed()
        with as_tensors():
            unsure = [one for unit, grads in self._grads.items() for one in self._show(unit, grads)]
            # One read for all of them: on a GPU the host waits for it.
            means = [self._grads[unit].is_nothing(mean) for unit, _, _, mean in unsure]
            is_nothing = torch.stack(means).tolist() if means else []
            for unit, index, gradient, _ in compress(unsure, map(operator.not_, is_nothing)):
                unit.parameters[index].grad = self._shown[unit][index] = gradient

    def _show(self, unit: Unit, grads: Gradients) -> list[tuple[Unit, int, Tensor, Tensor]]:
        """`show` one unit, but for slots whose mean tells whether any rank had a gradient: (unit, slot, what to put
        into `p.grad`, mean). In full these are the same slots on all ranks: else the ranks would add up a norm of all
        gradients in different orders, and clip by factors that differ in the last bits."""
        if grads.state is GradState.EMPTY:
            return []
        is_in_full = self.final and (grads.is_local or grads.buffer.placement is REPLICATED)
        views = grads.buffer.views() if is_in_full else []
        sharded, shown, present = self._without_values.sharded[unit], self._shown[unit], grads.present
        unsure = []
        for index in sorted(present if grads.is_local or grads.is_of_all else grads.waiting):
            parameter = unit.parameters[index]
            if parameter.grad is not None:
                continue
            view = views[index] if views and _takes(parameter, grads) else None
            gradient = sharded[index] if view is None or self.had_graphs else view
            if view is None or index in present:
                parameter.grad = shown[index] = gradient
            else:
                unsure.append((unit, index, gradient, view))
        return unsure

    def withdraw(self) -> None:
        """Before a backward: set `p.grad` to None, except for gradients set by hand, to which backward adds.

        Raises:
            RuntimeError: one is doubtful, or the loss is scaled or weighted and it is not.
        """
        by_hand = self.notice()
        if self.doubtful is not None:
            raise InvalidState(f"backward: {doubtful(self.doubtful)}")
        if by_hand and not self._ledger.loss.is_final:
            raise InvalidState(f"backward: {doubtful(self._name_of(by_hand))}")
        self.apply_clips()
        self.had_graphs &= any(grads.state is not GradState.EMPTY for grads in self._grads.values())
        for unit in self._grads:
            with as_tensors():
                for index in self._shown[unit]:
                    unit.parameters[index].grad = None
            self._shown[unit].clear()
        self.remove_used()

    def remove_used(self) -> None:
        """Set `p.grad` to None where a step has used it. Before a forward as well: torch.compile leaves out what it
        comes to while a `p.grad` has another dtype than its parameter."""
        self._without_values.remove_used()

    # Between backward and step -------------------------------------------------------------------------------------

    @torch.no_grad()
    def notice(self) -> dict[tuple[int, int], Tensor]:
        """Discard gradients that the user has removed from `p.grad`. Returns gradients set by hand: (index of the unit,
        slot) -> this rank's gradient."""
        by_hand = {}
        for unit, found in self._discard_gone().items():
            shown = self._shown[unit]
            for index, gradient in enumerate(found):
                if gradient is None or index in shown:
                    continue
                if not (isinstance(gradient, UsedGradient) and gradient.is_of(unit, index)):
                    self._expect_new(unit, index, gradient)
                    by_hand[unit.index, index] = gradient.detach()
        has_factors = not self.final and any(grads.state is not GradState.EMPTY for grads in self._grads.values())
        self.doubtful = self._name_of(by_hand) if by_hand and has_factors else None
        return by_hand

    def _name_of(self, by_hand: Iterable[tuple[int, int]]) -> str:
        (number, index), *_ = by_hand
        return next(unit for unit in self._grads if unit.index == number).layout.slots[index].name

    def _keep_apart(self) -> None:
        """Copy gradients set by hand that lie in a bucket: what is discarded there next would change them."""
        fulls = [full for grads in self._grads.values() if (full := grads.buffer.full) is not None]
        buckets = {full.untyped_storage().data_ptr() for full in fulls}
        with as_tensors():
            for unit, shown in self._shown.items():
                for index, gradient in enumerate(unit.user_grads()):
                    if gradient is None or gradient is shown.get(index) or gradient in self._kept:
                        continue
                    if gradient.layout == torch.strided and gradient.untyped_storage().data_ptr() in buckets:
                        unit.parameters[index].grad = gradient.detach().clone()

    def _expect_new(self, unit: Unit, index: int, gradient: Tensor) -> None:
        if gradient in self._kept:
            raise InvalidState(
                f"p.grad of {unit.layout.slots[index].name} is a tensor that has been a p.grad before (of an earlier "
                "backward, or of another parameter), and its memory is used again: assign a copy, made before the step "
                "or zero_grad (p.grad.clone(); under ZeRO handle.gradient(name))"
            )

    def _let_go(self, unit: Unit, shown: dict[int, Tensor], slots: Iterable[int]) -> None:
        """Gradients have been used or discarded. If somebody still has one, it may come back as `p.grad`."""
        buffer, sharded = self._grads[unit].buffer, self._without_values.sharded[unit]
        views = buffer.known_views
        for index in slots:
            is_view = bool(views) and views[index] is shown[index]
            # Two are `shown` and the call. (For a local variable Python 3.14 no longer counts the call.)
            if sys.getrefcount(shown[index]) > 2 + (is_view or index in sharded):
                self._kept[shown[index]] = True
                sharded.pop(index, None)
                if is_view:
                    buffer.renew_view(index)
            del shown[index]

    def assign(self, unit: Unit, index: int, part: Tensor) -> None:
        """Set the reduced gradient of a slot to `part` (see `Gradients.assign`). Call `show` afterwards."""
        self.apply_clips()
        unit.parameters[index].grad = None
        self._grads[unit].assign(index, part)
        self.changed()

    def shows(self, unit: Unit) -> bool:
        """Whether a gradient of the unit has been put into `p.grad`."""
        return bool(self._shown.get(unit))

    def forget(self, unit: Unit, slots: set[int], *, used: Collection[int] = ()) -> None:
        """Remove the gradients of these slots from `p.grad`: they have been discarded or, in those of `used`, used by a
        step."""
        shown = self._shown.get(unit, {})
        slots = slots & shown.keys()
        in_place = self._without_values.used(unit) if used else {}
        with as_tensors():
            for index in slots:
                if unit.parameters[index].grad is shown[index]:
                    unit.parameters[index].grad = in_place[index] if index in used else None
        self._let_go(unit, shown, slots)

    def _changed_by_user(self) -> dict[Unit, list[Tensor | None]]:
        """`p.grad` of all parameters of the units in which one is not what `show` has put there."""
        found = {unit: unit.user_grads() for unit in self._grads}
        return {
            unit: found[unit]
            for unit, shown in self._shown.items()
            if not all(map(operator.is_, found[unit], map(shown.get, count())))
        }

    def _discard_gone(self) -> dict[Unit, list[Tensor | None]]:
        """Discard gradients that the user has removed from `p.grad`. If none is left there, also discard gradients that
        were not shown (of parameters for which no rank had a gradient). Returns `_changed_by_user`, afterwards."""
        self._find_other_memory()
        found = self._changed_by_user()
        gone = {
            unit: {index for index, gradient in self._shown[unit].items() if grads[index] is not gradient}
            for unit, grads in found.items()
        }
        if not any(gone.values()):
            return found
        self._keep_apart()
        for unit, slots in gone.items():
            if slots:
                self._discard(unit, slots)
        if not any(self._shown.values()):
            self._ledger.discard_losses()
            for grads in self._grads.values():
                grads.consume()
        return self._changed_by_user()

    def _find_other_memory(self) -> None:
        """Make what the user has given to a view of the bucket by `p.grad.data = values` the parameter's gradient."""
        for unit, shown in self._shown.items():
            buffer = self._grads[unit].buffer
            for index in buffer.moved_views if shown else ():
                gradient = shown.get(index)
                if buffer.known_views[index] is gradient:
                    values = buffer.restore_view(index)
                    with as_tensors():
                        if unit.parameters[index].grad is gradient:
                            unit.parameters[index].grad = values

    def _discard(self, unit: Unit, slots: set[int]) -> None:
        """Discard these gradients. If none of the unit is left in `p.grad`, discard all of the unit."""
        grads, shown = self._grads[unit], self._shown[unit]
        if not grads.is_local:
            self._collectives.give_order("discard", unit.name, sorted(slots))
        self._let_go(unit, shown, slots)
        # Logged, because all ranks must discard the same: a rank that keeps its part of a sharded gradient would step
        # with it. The digest of the log is compared in the next control exchange.
        if not grads.is_local and not grads.means_in_full:
            names = ", ".join(unit.layout.slots[index].name for index in sorted(slots))
            self._collectives.log.record("discard gradients", f"{unit.name}: {names}", "step", 0)
        grads.consume(slots if shown else None)
        self.changed()

    # A gradient that no rank holds in full ---------------------------------------------------------------------------

    def edited(self) -> Items:
        """For the comparison between ranks: for each parameter, the operations on its gradient."""
        of_each: dict[str, list[str]] = {}
        for name, what in self.edits:
            of_each.setdefault(name, []).append(what)
        return tuple((f"what was done to p.grad of {name}", ", ".join(done)) for name, done in of_each.items())

    def _number(self, value: Any) -> Any:
        """An operand as a number. Cached for a tensor that many gradients are multiplied by (the factor of a clip), as
        reading it waits for the device."""
        if not isinstance(value, Tensor) or value.is_inference():
            return plain(value)
        if self._last_number is None or self._last_number[0] is not value or self._last_number[1] != value._version:
            self._last_number = value, value._version, plain(value)
        return self._last_number[2]

    def edit(
        self, unit: Unit, index: int, operation: Callable[[Tensor], object], what: str, operands: Sequence[Any]
    ) -> None:
        self.apply_clips()
        if (view := self.in_full(unit, index)) is not None:
            operation(view)
            return
        name = unit.layout.slots[index].name
        self.edits.append((name, f"{what}({', '.join(repr(self._number(value)) for value in operands)})"))
        if what == "zero_":  # alone allowed where terms are not reduced yet, as `model.zero_grad` calls it
            self._grads[unit].zero(index)
        elif (part := self._grads[unit].held_part(index)).numel():
            operation(part)
        self._collectives.log.record(f"gradient.{what}", f"{unit.name}: {name}", "step", 0)
        self.changed()

    def is_partial_here(self, unit: Unit, index: int) -> bool:
        """Whether others may take the norm of what is partial on this rank: a backward under `no_sync` that left the
        parameter out on other ranks has added to a mean on this one. (Where they have the mean in full, they need no
        exchange.)"""
        grads = self._grads[unit]
        if grads.state is not GradState.PARTIAL or grads.is_local:
            return False
        if torch._C._current_graph_task_id() != -1:  # a hook inside of a backward, where ranks may be elsewhere
            return False
        return not grads.means_in_full or not _takes(unit.parameters[index], grads)

    def in_full(self, unit: Unit, index: int) -> Tensor | None:
        """What others have in `p.grad` where this rank has no values, as its backward gave a graph: they change it, and
        take its norm, without an exchange. None: no rank has it in full, or it is not final."""
        grads = self._grads[unit]
        is_in_full = grads.state is GradState.REDUCED and grads.means_in_full and self.final
        return grads.buffer.views()[index] if is_in_full and _takes(unit.parameters[index], grads) else None

    @torch.no_grad()
    def norm(self, unit: Unit, index: int, norm_type: float) -> Tensor | None:
        """The norm of one gradient. The norms of all are computed by one exchange, and cached. None on all ranks: one
        of them has terms that are not reduced."""
        self.apply_clips()
        if self._norms is None or self._norms[:2] != (self.version, norm_type):
            self._norms = self.version, norm_type, self._all_norms(norm_type)
        return self._norms[2].get((unit, index))

    def _all_norms(self, norm_type: float) -> dict[tuple[Unit, int], Tensor]:
        """The norm of each slot of all units whose gradients are reduced on every rank. Collective."""
        of_each = [(unit, index) for unit in self._grads for index in range(len(unit.parameters))]
        largest = norm_type == torch.inf
        row = torch.zeros(len(of_each) + len(self._grads), dtype=torch.float64, device=self._collectives.device)
        for position, (unit, index) in enumerate(of_each):
            is_reduced = self._grads[unit].state is GradState.REDUCED
            if is_reduced and (part := self._grads[unit].own_part(index)).numel():
                value = vector_norm(part, norm_type, dtype=torch.float64)
                row[position] = value if largest or not norm_type else value**norm_type  # p = 0 counts elements
        # Behind these: which units are not reduced here. It may differ between ranks.
        partial = [int(grads.state is not GradState.REDUCED) for grads in self._grads.values()]
        row[len(of_each) :] = on_device(partial, row.device)
        rows = self._collectives.exchange(row, _norm_of(norm_type))
        reduced = {unit for unit, n in zip(self._grads, rows[:, len(of_each) :].sum(0).tolist(), strict=True) if not n}
        rows = rows[self._collectives.mesh.one_of_each_shard, : len(of_each)]
        norms = rows.amax(0) if largest else rows.sum(0) ** (1 / (norm_type or 1))
        dtypes = {unit: torch.promote_types(torch.float32, grads.buffer.dtype) for unit, grads in self._grads.items()}
        return {
            (unit, index): norm.to(unit.parameters[index].device, dtypes[unit])
            for (unit, index), norm in zip(of_each, norms.unbind(0), strict=True)
            if unit in reduced
        }


def _takes(parameter: nn.Parameter, grads: Gradients) -> bool:
    """Whether torch accepts a view of the bucket as `p.grad`: in no other dtype."""
    return (parameter.grad_dtype or parameter.dtype) == grads.buffer.dtype


def doubtful(name: str) -> str:
    """The error for a doubtful gradient."""
    return (
        f"p.grad of {name} was set by hand, and losses of this step are scaled or weighted: it is unknown whether "
        "these values are. Discard the gradients of the losses by optimizer.zero_grad() before you set others; change "
        "those of no_sync in place (p.grad.mul_(0.5)); where losses are only scaled, handle.set_gradient(name, values) "
        "sets one"
    )


def _norm_of(norm_type: float) -> str:
    return f"the {norm_type:g}-norm of a p.grad (p.grad.norm(), torch.nn.utils.clip_grad_norm_)"
