"""Finds and replaces the tensors in a module's inputs and outputs: in pytrees, dataclasses and other objects."""

from __future__ import annotations

import dataclasses
import gc
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.fx import Proxy
from torch.utils import _pytree as pytree

Replaced = Callable[[Any, Any, Any], None]
"""Called with a list, a dict or a dataclass in which something was replaced, what is there now, and what was there."""


def replace_tensors(
    fn: Callable[[Tensor], Tensor],
    tree: Any,
    replaced: Replaced = lambda *_: None,
    around: tuple[Any, ...] = (),
    *,
    objects: tuple[type, ...] = (),
) -> Any:
    """The tree with `fn` applied to its tensors. Lists, dicts and dataclasses stay the same objects: what changes in
    them is replaced there. Tuples, and pytrees of other classes, are copied if something in them changes.

    Args:
        around: the lists, dicts and dataclasses around the tree, one of which it may be.
        objects: classes whose instances are treated like dataclasses: what changes in their attributes is replaced.
    """
    kind = type(tree)
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, _WITHOUT_TENSORS):
        return tree
    if kind is tuple:
        parts = [replace_tensors(fn, part, replaced, around, objects=objects) for part in tree]
        return tree if _are_same(parts, tree) else tuple(parts)
    if kind in _SEQUENCES or isinstance(tree, (*_MAPPINGS, *objects)) or is_record(tree):
        if any(tree is one for one in around):
            return tree
        for name, part in parts_of(tree):
            if (new := replace_tensors(fn, part, replaced, (*around, tree), objects=objects)) is not part:
                put_part(tree, name, new)
                replaced(tree, new, part)
        return tree
    leaves, structure = pytree.tree_flatten(tree, is_leaf=lambda one: one is not tree)  # one level
    if len(leaves) == 1 and leaves[0] is tree:
        return tree
    changed = [replace_tensors(fn, leaf, replaced, around, objects=objects) for leaf in leaves]
    return tree if _are_same(changed, leaves) else pytree.tree_unflatten(changed, structure)


def parts_of(container: Any) -> list[tuple[Any, Any]]:
    """The parts of a list, a dict or a dataclass, with the index, key or field of each."""
    if isinstance(container, _MAPPINGS):
        return list(container.items())
    if isinstance(container, DISTRIBUTIONS):
        return list(vars(container).items())
    if not is_record(container):
        return list(enumerate(container))
    names = [field.name for field in dataclasses.fields(container)]
    return [(name, getattr(container, name)) for name in names if hasattr(container, name)]  # some may have no value


def put_part(container: Any, name: Any, part: Any) -> None:
    """Replace a part of a list, a dict or a dataclass."""
    if isinstance(container, DISTRIBUTIONS) or (is_record(container) and not isinstance(container, _MAPPINGS)):
        object.__setattr__(container, name, part)  # also works for frozen dataclasses
        return
    try:
        container[name] = part  # a class of the user's may have attributes beside its items
    except Exception:
        if not isinstance(container, dict):
            raise
        dict.__setitem__(container, name, part)  # a read-only one


_SEQUENCES: tuple[type[Any], ...] = (tuple, list, deque)
_DICTS: tuple[type, ...] = (dict, OrderedDict, defaultdict)
DISTRIBUTIONS = (Distribution, Transform)
"""Objects of torch that hold tensors. An actor keeps one of the actions that its last forward has found."""
_MAPPINGS = (dict, UserDict)  # the latter: what tokenizers and processors of `transformers` return


def _are_same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(new, old, strict=True))


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors, also those that are attributes of other objects (a cache, an output object)."""
    return _tensors_in(tree, _parts_of_other)


def _tensors_in(tree: Any, parts_of_other: Callable[[Any], list[Any]]) -> list[Tensor]:
    """`parts_of_other`: what is looked at in a tree that is no plain list, tuple or dict."""
    found: list[Tensor] = []
    # `seen`: ids of lists, dicts and objects that have been visited, as they may form cycles. `alive` keeps what may be
    # made for this search, so that no other object gets its id.
    seen, waiting, alive = set[int](), [tree], list[Any]()
    while waiting:  # not a recursion, as this runs for each call of each unit
        one = waiting.pop()
        if isinstance(one, Tensor):
            found.append(one)
            continue
        kind = type(one)
        if kind in _PLAIN or id(one) in seen:
            continue
        if kind in _SEQUENCES:  # `tree_leaves` takes ten times as long
            parts: Collection[Any] = one
        elif kind in _DICTS:
            parts = one.values()
        elif isinstance(one, _WITHOUT_TENSORS):
            continue
        else:
            parts = parts_of_other(one)
            alive.append(parts)
        seen.add(id(one))
        if len(parts) < _MANY or not _PLAIN.issuperset(map(type, parts)):  # a vocabulary, say
            waiting += [*parts][::-1]
    return found


def differentiable(output: Any) -> list[Tensor]:
    """The tensors in an output that have a `grad_fn`."""
    return with_graphs(tensors_in(output))


def with_graphs(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that have a `grad_fn`."""
    return [tensor for tensor in tensors if _has_graph(tensor)]


def _has_graph(tensor: Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # one of several views (`chunk`) of what has been written to since: torch raises if it is used
        return False


def tensors_kept_by(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors in attributes and buffers of the module itself, with the name of the attribute; also in distributions
    of torch there, but not in the user's objects."""
    own = vars(module)
    for name in own.keys() - _OF_TORCH:
        value = own[name]
        if isinstance(value, Tensor):
            yield name, value
        elif not (type(value) in _NEVER or isinstance(value, _WITHOUT_TENSORS) or (name == "_buffers" and not value)):
            yield from ((name, tensor) for tensor in _tensors_in(value, _parts_of_tree))


def replace_kept_in(tree: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors in the attributes of a module (those of `tensors_kept_by`), or in lists, dicts and
    dataclasses of a tree."""
    if not isinstance(tree, nn.Module):
        replace_tensors(fn, tree, objects=DISTRIBUTIONS)
        return
    own = vars(tree)
    for name in own.keys() - _OF_TORCH:
        if (new := replace_tensors(fn, own[name], objects=DISTRIBUTIONS)) is not own[name]:
            own[name] = new


_OF_TORCH = vars(nn.Module()).keys() - {"_buffers"}


def is_record(value: Any) -> bool:
    """Whether it is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


_WITHOUT_TENSORS = (str, bytes, int, float, type, nn.Module, type(None), ModuleType, Proxy)
"""Not into modules: an output that refers to its module would lead to all parameters, and one of Python to all others.
Nor into what stands for a tensor while `torch.fx` traces: it leads to the whole trace."""

_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
_NEVER = _PLAIN | {FunctionType, MethodType}
"""Most arguments and attributes are of these kinds, which no pytree has tensors in."""

_OF_PYTHON = ("builtins", "itertools")
"""The modules of generators, `map`, `zip`, and the iterators of lists."""

_MANY = 32
"""So many parts are looked at all at once first."""

_CONTAINERS = (list, tuple, set, frozenset)


def _parts_of_other(tree: Any) -> list[Any]:
    """What is in a tree that is no plain list, tuple or dict."""
    if isinstance(tree, Iterator) and type(tree).__module__ in _OF_PYTHON:
        return gc.get_referents(tree)  # what it holds, without a step of it: the locals of a generator
    leaves = _level_of(tree)
    if len(leaves) != 1 or leaves[0] is not tree:  # another kind of tree
        return leaves
    names = [name for one in type(tree).__mro__ for name in getattr(one, "__slots__", ())]
    values = [getattr(tree, name, None) for name in names if isinstance(name, str)]
    # Pytrees know containers by their class, and a subclass of the user's is a leaf of them.
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, _CONTAINERS) else ()
    return [*parts, *getattr(tree, "__dict__", {}).values(), *values]


def _parts_of_tree(tree: Any) -> list[Any]:
    """What is in a pytree of another kind, or in a distribution of torch."""
    if isinstance(tree, DISTRIBUTIONS):
        return tensors_in(tree)
    leaves = _level_of(tree)
    return leaves if len(leaves) != 1 or leaves[0] is not tree else []


def _level_of(tree: Any) -> list[Any]:
    """One level of a pytree: what is in it may lead back to it."""
    return pytree.tree_leaves(tree, is_leaf=lambda one: one is not tree)
