"""Views of weights that would outlive the time for which their weights are here: they are replaced by copies.

Under a plan that borrows weights, other units use the memory of a weight after the call of its module, while the
caller, a hook or autograd may still read a view of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from zeroshard.errors import InvalidState
from zeroshard.model.absent import as_tensors
from zeroshard.model.trees import (
    DISTRIBUTIONS,
    replace_kept_in,
    replace_tensors,
    tensors_in,
    tensors_kept_by,
    with_graphs,
)
from zeroshard.storage.unit import Unit


def left_beside(
    inputs: Any, modules: Sequence[nn.Module], units: Sequence[Unit] = (), kept_longer: Sequence[Unit] = ()
) -> list[Tensor]:
    """Where a call may have left results beside its output: in its inputs (a list that they are appended to), and in
    attributes of these modules. Views of the weights of these units are replaced there, as in `without_views`.

    Args:
        kept_longer: units of the calls around this one, which do not look at these modules when they end, and those
            that a scope keeps: their views are replaced in attributes.
    """
    of_inputs, kept = tensors_in(inputs), [tensor for module in modules for _, tensor in tensors_kept_by(module)]
    if _replace_views(of_inputs, units, [inputs]) | _replace_views(kept, [*units, *kept_longer], modules):
        return left_beside(inputs, modules)
    return with_graphs([*of_inputs, *kept])


def _replace_views(tensors: Sequence[Tensor], units: Sequence[Unit], trees: Iterable[Any]) -> bool:
    """In these trees, in which the tensors are. Returns whether there were any."""
    if not units:
        return False
    # Not by `grad_fn`: torch raises for one of several views (`chunk`), as the version is another one by now.
    views = [tensor for tensor in tensors if tensor._is_view() or _may_be_detached(tensor)]
    copies = _copies_of_views(views, units) if views else {}
    for tree in trees if copies else ():
        replace_kept_in(tree, lambda tensor: copies.get(id(tensor), tensor))
    return bool(copies)


def without_views(output: Any, units: Sequence[Unit]) -> Any:
    """The output of a call, with copies in place of the weights of these units, and of views of them.

    Raises:
        RuntimeError: a view is in an object whose fields cannot be replaced.
    """
    tensors = tensors_in(output) if units else ()
    copies = _copies_of_views(tensors, units)
    for parameter in (tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and id(tensor) not in copies):
        for unit in (unit for unit in units if any(parameter is mine for mine in unit.parameters)):
            copies[id(parameter)] = unit.weights.copy_of(parameter)
    if not copies:
        return output
    # In the module's own lists and dicts: it may have kept them.
    output = replace_tensors(lambda tensor: copies.get(id(tensor), tensor), output, objects=DISTRIBUTIONS)
    for unit in filter(None, (_holder(tensor, units) for tensor in tensors_in(output))):
        raise InvalidState(
            f"unit {unit.name}: its forward returns a view of a weight inside of an object, and under this plan the "
            "memory of the weight is used by other units after the forward. Return a copy (`.clone()`), or a tuple, a "
            "dict or a dataclass, in which the view is replaced by a copy"
        )
    return output


def shown_without_views(tree: Any, units: Iterable[Unit]) -> Any:
    """What a hook of the user's is given, with copies in place of views of the weights of these units, which are here:
    the hook may keep it. The same tree if there are none, or if they are in objects whose fields cannot be replaced."""
    views = [one for one in tensors_in(tree) if isinstance(one._base, nn.Parameter) or _may_be_detached(one)]
    if not views:
        return tree
    copies = _copies_of_views(views, [unit for unit in units if unit.weights.buffer.borrows])
    return replace_tensors(lambda tensor: copies.get(id(tensor), tensor), tree) if copies else tree


def _may_be_detached(tensor: Tensor) -> bool:
    """Whether it may be `p.detach()`, `p.data`, or a view of one, of which autograd knows no base."""
    return not tensor.requires_grad and not isinstance(tensor, nn.Parameter)


def _copies_of_views(tensors: Iterable[Tensor], units: Sequence[Unit]) -> dict[int, Tensor]:
    """By the ids of those that lie in the weights of these units."""
    return {id(one): unit.weights.copy_of(one) for one in tensors if (unit := _holder(one, units)) is not None}


def _holder(tensor: Tensor, units: Sequence[Unit]) -> Unit | None:
    with as_tensors():  # a parameter itself may be among them, and it is absent by now
        for unit in units:
            if unit.weights.holds(tensor):
                return unit
    return None
