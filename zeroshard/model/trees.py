"""Finds and maps the tensors in a module's inputs and outputs: in pytrees, dataclasses and other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The tree with `fn` applied to its tensors. A dataclass, or a user's dict, in it is copied if a part changes."""
    return pytree.tree_map(lambda leaf: _map_leaf(fn, leaf), tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors, also those that are attributes of other objects (a cache, an output object)."""
    found: list[Tensor] = []
    _collect(tree, found, set())
    return found


def _map_leaf(fn: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    put: Callable[[Any, Any, Any], None]
    if isinstance(leaf, Tensor):
        return fn(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        names = [field.name for field in dataclasses.fields(leaf)]
        before = {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}
        put = object.__setattr__  # also works for frozen dataclasses
    elif isinstance(leaf, dict):
        before, put = dict(leaf), dict.__setitem__
    else:
        return leaf
    after = {name: map_tensors(fn, value) for name, value in before.items()}
    if all(new is old for new, old in zip(pytree.tree_leaves(after), pytree.tree_leaves(before), strict=True)):
        return leaf
    result = copy.copy(leaf)
    for name, value in after.items():
        put(result, name, value)
    return result


_WITHOUT_TENSORS = (str, bytes, int, float, type, nn.Module, type(None))
"""Not into modules: an output that refers to its module would lead to all parameters."""

_CONTAINERS = (list, tuple, set, frozenset)


def _collect(tree: Any, found: list[Tensor], seen: set[int]) -> None:
    """`seen`: ids of objects whose attributes have been visited; they may form cycles."""
    if isinstance(tree, Tensor):
        found.append(tree)
    elif type(tree) in (tuple, list, dict):  # `tree_leaves` takes ten times as long
        for part in tree.values() if type(tree) is dict else tree:
            _collect(part, found, seen)
    elif not isinstance(tree, _WITHOUT_TENSORS) and id(tree) not in seen:
        leaves = pytree.tree_leaves(tree)
        if len(leaves) != 1 or leaves[0] is not tree:  # another kind of tree
            _collect(leaves, found, seen)
            return
        seen.add(id(tree))
        names = [name for one in type(tree).__mro__ for name in getattr(one, "__slots__", ())]
        values = [getattr(tree, name, None) for name in names if isinstance(name, str)]
        # Pytrees know containers by their class, and a subclass of the user's is a leaf of them.
        parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, _CONTAINERS) else ()
        _collect([*parts, *getattr(tree, "__dict__", {}).values(), *values], found, seen)
