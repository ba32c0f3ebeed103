"""Finds and maps the tensors in a module's inputs and outputs: in pytrees, dataclasses and other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The tree with `fn` applied to its tensors. A dataclass in it is copied if one of its fields changes."""
    return pytree.tree_map(lambda leaf: _map_leaf(fn, leaf), tree)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors, also those that are attributes of other objects (a cache, an output object)."""
    yield from _tensors(tree, set())


def _map_leaf(fn: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return fn(leaf)
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    before = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)}
    after = {name: map_tensors(fn, value) for name, value in before.items()}
    if all(new is old for new, old in zip(pytree.tree_leaves(after), pytree.tree_leaves(before), strict=True)):
        return leaf
    result = copy.copy(leaf)
    for name, value in after.items():
        object.__setattr__(result, name, value)  # also works for frozen dataclasses
    return result


def _tensors(tree: Any, seen: set[int]) -> Iterator[Tensor]:
    for leaf in [tree] if isinstance(tree, Tensor) else pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        # Not into modules: an output that refers to its module would lead to all parameters. `seen`: objects may form
        # cycles.
        elif not isinstance(leaf, (str, bytes, int, float, type, nn.Module, type(None))) and id(leaf) not in seen:
            seen.add(id(leaf))
            names = [name for one in type(leaf).__mro__ for name in getattr(one, "__slots__", ())]
            values = [getattr(leaf, name, None) for name in names if isinstance(name, str)]
            yield from _tensors([*getattr(leaf, "__dict__", {}).values(), *values], seen)
