"""Weights that are used in a block of `handle.unsharded()`, for a backward after the block.

Autograd saves a parameter as it is, not its values, and when backward reads it, they may be gone. So while a block is
open, hooks on what autograd saves keep the values: those that the block has gathered lie in memory of their own, which
then lives as long as the graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch.autograd import graph
from torch.autograd.grad_mode import _force_original_view_tracking

from zeroshard.errors import InvalidState
from zeroshard.layout.interval import Interval
from zeroshard.model.absent import as_tensors
from zeroshard.model.outside_graphs import called_by_torch
from zeroshard.model.transforms import under_transform
from zeroshard.storage.unit import Unit

Packed = Callable[[], Tensor]
"""What the hook makes of a saved tensor: what returns it."""


def keeping(units: Iterable[Unit], every: Sequence[Unit]) -> AbstractContextManager[None]:
    """A scope inside of which autograd keeps the weights that it saves. Where all weights rest in full, it does
    nothing; where no graph is built, it costs nothing.

    Args:
        units: those that the block shows.
        every: of the model.
    """
    allowed = _autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    if under_transform() or not allowed:
        return nullcontext()
    # Those of units that a running forward needs lie in pool buffers.
    apart = {unit for unit in units if unit.weights.is_between_forwards}
    around = _autograd._top_saved_tensors_default_hooks(True)
    if around is not None and isinstance(around[0], _Keeper):
        apart |= around[0].apart  # of a block around this one
    return _kept(_Keeper(apart, every, around)) if apart else nullcontext()


class _Keeper:
    """The hook that autograd calls with what it saves.

    Attributes:
        apart: units whose weights lie in memory of their own.
    """

    def __init__(self, apart: set[Unit], every: Sequence[Unit], around: tuple[Any, Any] | None) -> None:
        """`around`: the hooks that were there before (checkpoints, `save_on_cpu`): they get all other tensors."""
        self.apart, self._every, self._around = apart, every, around
        self._known: dict[int, tuple[Unit, int]] | None = None  # made when it is first needed, as the next one
        self._of_storage: dict[int, Unit] | None = None  # by their storages

    @called_by_torch  # as it is for each tensor that compiled code saves
    def __call__(self, tensor: Tensor) -> Packed:
        if self._known is None:
            self._known = {
                id(parameter): (unit, index)
                for unit in self._every
                if unit.weights.buffer.borrows
                for index, parameter in enumerate(unit.parameters)
            }
        with as_tensors():
            base = tensor._base if tensor._is_view() else None
            place = self._known.get(id(tensor)) or self._known.get(id(base)) or self._detached(tensor)
            if place is not None and (place[0] in self.apart or base is None):
                unit, index = place
                if unit not in self.apart:
                    return partial(_in_pool, weakref.ref(unit), index)
                # `data`: with a version of its own. That of the parameter, which a view has, too, is another one while
                # its values are gone, and a gradient of a gradient saves these values once more.
                version = unit.weights.versions.number(index)
                is_parameter = tensor is unit.parameters[index]
                return partial(_of_weight, weakref.ref(unit), index, tensor.data, version, is_parameter)
        if self._around is not None:
            pack, unpack = self._around
            return partial(unpack, pack(tensor))
        # Without its graph, which autograd adds again: a node that saves its own result would otherwise own itself, and
        # a graph that no backward frees (an evaluation with gradients) would stay in memory, with the weights it uses.
        kept = tensor if tensor.grad_fn is None else tensor.detach()
        return partial(_as_it_is, kept, kept._version)

    def _detached(self, tensor: Tensor) -> tuple[Unit, int] | None:
        """The unit and slot of the parameter whose memory this is (`p.detach()`, of which autograd knows no base)."""
        if self._of_storage is None:
            fulls = [(unit, full) for unit in self.apart if (full := unit.weights.buffer.full) is not None]
            self._of_storage = {full.untyped_storage()._cdata: unit for unit, full in fulls}
        if tensor.requires_grad or not tensor.numel() or not torch._C._has_storage(tensor):
            return None
        unit = self._of_storage.get(tensor.untyped_storage()._cdata)
        if unit is None or not unit.weights.holds(tensor):
            return None
        full = unit.weights.full
        first = (tensor.data_ptr() - full.data_ptr()) // full.element_size()
        slots = unit.layout.slots_in(Interval(first, first + 1))
        return (unit, slots[0]) if slots else None


def _as_it_is(tensor: Tensor, version: int) -> Tensor:
    """A tensor that had this version when it was saved: autograd does not compare it where there are hooks."""
    _expect_version(tensor, version, tensor._version)
    return tensor


def _of_weight(reference: weakref.ref[Unit], index: int, values: Tensor, version: int, is_parameter: bool) -> Tensor:
    """The values of a parameter, or of a view of it, in memory of their own, and its version when it was saved. In a
    block that writes, a parameter itself has what `p.data = ...` has put there since, as autograd keeps no values."""
    if (unit := reference()) is not None:
        versions = unit.weights.versions
        _expect_version(values, version, versions.number(index))
        versions.kept[index] = torch._C._current_graph_task_id()
        if is_parameter and unit.weights.writers:
            with as_tensors():
                return unit.parameters[index].detach()
    return values


def _in_pool(reference: weakref.ref[Unit], index: int) -> Tensor:
    """A parameter of a unit that a running forward needs. A hook gathers it for backward, if that comes to the forward
    first."""
    unit = reference()
    if unit is None or not unit.weights.shown:
        name = "a parameter" if unit is None else f"parameter {unit.layout.slots[index].name}"
        raise InvalidState(
            f"backward: the values of {name} are not here. It was used inside of `with handle.unsharded():` in a "
            "forward, and backward comes to that use when its unit is done: open the block around forward and "
            "backward, or use the weight in a forward of its own module"
        )
    with as_tensors():
        return unit.parameters[index].detach()


def _expect_version(tensor: Tensor, saved: int, found: int) -> None:
    if saved != found:
        raise InvalidState(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"tensor of shape {tuple(tensor.shape)} is at version {found}; expected version {saved} instead"
        )


@called_by_torch
def _unpacked(packed: Packed) -> Tensor:
    return packed()


_lock = threading.Lock()
_num_scopes = 0
_torch_disables = graph.disable_saved_tensors_hooks


@contextmanager
def _kept(keeper: _Keeper) -> Iterator[None]:
    global _num_scopes
    with _lock:
        _num_scopes += 1
        graph.disable_saved_tensors_hooks = _disable
    try:
        # A view of a weight may be used after the block. Autograd then makes its node anew: from the view's operations,
        # as the weight has other strides while it is hidden.
        with _force_original_view_tracking(True), graph.saved_tensors_hooks(keeper, _unpacked):
            yield
    finally:
        with _lock:
            _num_scopes -= 1
            if not _num_scopes:
                graph.disable_saved_tensors_hooks = _torch_disables


@contextmanager
def _disable(error_message: str) -> Iterator[None]:
    """In place of torch's while a block is open: `torch.func.grad` and `vjp` refuse to run where there are hooks. They
    run their backward at once, when the weights are here."""
    taken: list[_Keeper] = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None and isinstance(top[0], _Keeper):
        _autograd._pop_saved_tensors_default_hooks()
        taken.append(top[0])
    try:
        with _torch_disables(error_message):
            yield
    finally:
        for keeper in reversed(taken):
            _autograd._push_saved_tensors_default_hooks(keeper, _unpacked)
