"""Decides which module computes in which precision, and casts inputs and outputs.

    model       inputs -> param         outputs -> output, if its MixedPrecision names one
    unit        inputs -> param
    region      inputs -> its param     outputs -> its output, or param of the region around it

A *region* is a module, with all modules inside it, that has a MixedPrecision of its own. Of the patterns that match a
module, or a module around it, the first one counts. Casts are forward hooks, so a recomputed block has the same casts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import InvalidValue
from zeroshard.model.outside_graphs import called_by_torch
from zeroshard.model.paths import Modules, first_paths, parent
from zeroshard.model.trees import parts_of, put_part, replace_tensors
from zeroshard.precision import NAMED, MixedPrecision, as_precision

Remover = Callable[[], None]
Pattern = str | type[nn.Module]
Precision = MixedPrecision | str | torch.dtype | None
Precisions = Precision | Mapping[Pattern, Precision]
"""The `precision` argument of `shard`: one for the whole model, or one for each pattern (a class, or dotted names with
`*` and `?`)."""


@dataclass(frozen=True, eq=False)
class Region:
    """A region. `number`: of its pattern; the lower one wins. `label`: for the names of units."""

    number: int
    label: str
    precision: MixedPrecision | None


@dataclass(frozen=True)
class Rules:
    """Patterns and their precisions (None: not changed), in order of priority.

    Raises:
        ValueError: an unknown name; a pattern that is neither a string nor a class of modules; a MixedPrecision with
            `keep` that is not for the whole model.
    """

    patterns: tuple[tuple[Pattern, Region], ...]

    @classmethod
    def of(cls, precisions: Precisions) -> Rules:
        if not isinstance(precisions, Mapping):
            record = as_precision(precisions)
            kept = Region(0, "kept", NAMED["fp32"])  # one, so that modules of several classes form one unit
            keep = record.keep if record is not None else ()
            return cls((*((kind, kept) for kind in keep), ("*", Region(1, "", record))))
        if not precisions:
            raise InvalidValue(
                'precision: a dict without a pattern. Write {"*": "bf16"} for the whole model, or None for its '
                "own dtypes"
            )
        rules = []
        for pattern, precision in precisions.items():
            if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
                raise InvalidValue(f"precision: a pattern is a text or a class of modules, found {pattern!r}")
            record = as_precision(precision)
            if record is not None and record.keep:
                raise InvalidValue(
                    "precision: beside patterns, name what is kept in fp32 by a pattern of its own, in front"
                )
            rules.append((pattern, pattern if isinstance(pattern, str) else pattern.__name__, record))
        return cls(tuple((pattern, Region(i, label, record)) for i, (pattern, label, record) in enumerate(rules)))

    def regions(self, modules: Modules) -> dict[str, Region]:
        """Path of each module -> its region.

        Raises:
            ValueError: a string pattern matches no module.
        """
        everywhere = [region for pattern, region in self.patterns if pattern == "*"]
        rest = everywhere[0] if everywhere else Region(len(self.patterns), "", None)
        patterns = [(pattern, region) for pattern, region in self.patterns if pattern != "*"]
        unmatched = {pattern for pattern, _ in patterns if isinstance(pattern, str)}
        found: dict[str, Region] = {}
        for path, module in modules.items():
            best = found[parent(path)] if path else rest
            for pattern, region in patterns:
                if matches(pattern, path, module):
                    unmatched.discard(pattern)
                    best = region if region.number < best.number else best
            found[path] = best
        if unmatched:
            name = type(modules[""]).__name__
            raise InvalidValue(f"precision: {sorted(unmatched)[0]!r} matches no module of {name}")
        return found

    def parameters(self, modules: Modules) -> dict[int, Region]:
        """Id of each parameter -> its region; for a shared parameter, the region with the lowest number."""
        found: dict[int, Region] = {}
        regions = self.regions(modules)
        for path, module in modules.items():
            region = regions[path]
            for parameter in module._parameters.values():
                if parameter is not None:
                    other = found.setdefault(id(parameter), region)
                    if region.number < other.number:
                        found[id(parameter)] = region
        return found


@dataclass(frozen=True)
class Cast:
    """The dtypes that a call's inputs and outputs are cast to; None: not cast."""

    into: torch.dtype | None = None
    out: torch.dtype | None = None


def casts_of(modules: Modules, rules: Rules, units: Iterable[str]) -> dict[nn.Module, Cast]:
    """The casts of the modules that have one, as in the note above. `units`: paths of the modules that are units."""
    casts = {}
    regions = rules.regions(modules)
    inputs = {"", *units}
    for module, path in first_paths(modules).items():
        into, out = _at_border(modules, path, regions)
        precision = regions[path].precision if path in inputs else None
        if into is None and precision is not None:
            into = precision.param if precision.cast_inputs else None
        if into is not None or out is not None:
            casts[module] = Cast(into, out)
    return casts


def attach_casts(casts: Mapping[nn.Module, Cast]) -> Iterator[Remover]:
    for module, one in casts.items():
        if one.into is not None:
            # See [Note: order of hooks] in `hooks.py`.
            inputs = Inputs(one.into)
            yield module.register_forward_pre_hook(inputs.cast, prepend=True, with_kwargs=True).remove
            yield module.register_forward_hook(inputs.give_back, with_kwargs=True, always_call=True).remove
        if one.out is not None:
            yield module.register_forward_hook(_cast_output(one.out)).remove


def _at_border(
    modules: Modules, path: str, regions: Mapping[str, Region]
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtypes that a module's inputs and outputs are cast to, if a region begins there; None: not cast."""
    inner = regions[path].precision
    if not path:
        return None, inner.output if inner is not None else None
    around = parent(path)
    if regions[path] is regions[around]:
        return None, None
    into = _dtype_of(inner, modules[path])
    out = inner.output if inner is not None and inner.output is not None else None
    return (
        into if inner is None or inner.cast_inputs else None,
        out or _dtype_of(regions[around].precision, modules[around]),
    )


def _dtype_of(precision: MixedPrecision | None, module: nn.Module) -> torch.dtype | None:
    """The dtype in which a module computes: by its precision, or that of its first parameter."""
    if precision is not None:
        return precision.param
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def matches(pattern: Pattern, path: str, module: nn.Module) -> bool:
    """Whether the module is of that class, or has a matching name (without the prefixes of wrappers)."""
    if not isinstance(pattern, str):
        return isinstance(module, pattern)
    plain = [name for name in path.split(".") if name not in ("_orig_mod", "_checkpoint_wrapped_module")]
    return fnmatchcase(".".join(plain), pattern)


def cast(output: Any, dtype: torch.dtype | None) -> Any:
    """What a module has returned, with its floating-point tensors cast to `dtype`; None: unchanged. In lists, dicts and
    dataclasses they are replaced: the module may have kept these, and add to them later."""
    return output if dtype is None else _Call().cast_in(output, dtype)


def _differs(tensor: Tensor, dtype: torch.dtype) -> bool:
    # [Note: numbers] A tensor without dimensions is a number (a temperature, a sum of losses). It takes part in an
    # operation of any dtype, and does not change the dtype of the result. So it is not rounded, as under autocast.
    # (FSDP2 rounds it.)
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return False
    return tensor.dim() > 0 or tensor.dtype.itemsize < dtype.itemsize


class Inputs:
    """Casts the inputs of the calls of one module.

    [Note: what a call does to its inputs] A module may add to a list, dict or dataclass that it is given (losses of
    routers, hidden states), keep it, or know it from elsewhere. So it gets the caller's own: the tensors in it are
    replaced for the time of the call. A module may also write to a tensor (a cache). If that was cast, it has written
    to a copy: the caller's tensor is written to when the call is over. (Not in `inference_mode`, whose tensors do not
    tell, and not a leaf that requires grad, which torch lets nobody write to.)
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._traced: list[_Call] = []  # those that torch.compile traces, inside of a module that is compiled

    @called_by_torch
    def cast(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if (dtype := self._dtype) is None:
            return args, kwargs
        call = _Call()
        self._traced.append(call) if torch.compiler.is_compiling() else running().append((self, call))
        args = tuple([call.cast_in(one, dtype) for one in args])
        kwargs = {name: call.cast_in(one, dtype) for name, one in kwargs.items()}
        return args, kwargs

    @called_by_torch
    def give_back(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The call that began last is over."""
        if torch.compiler.is_compiling():  # of one call both hooks are traced, or neither is
            if self._traced:
                self._traced.pop().give_back()
            return
        calls = running()
        for number in reversed(range(len(calls))):
            if calls[number][0] is self:
                end_calls(number)
                break


_OF_THREAD = threading.local()


def running() -> list[tuple[Inputs, _Call]]:
    """The calls of this thread whose inputs are cast now, the innermost last."""
    calls: list[tuple[Inputs, _Call]] = _OF_THREAD.__dict__.setdefault("calls", [])
    return calls


def end_calls(number: int) -> None:
    """Those beyond the first `number` are over. (Of those inside of a call that ends, an interrupt has left some.)"""
    calls = running()
    while len(calls) > number:
        _, call = calls.pop()
        call.give_back()


class _Call:
    """What is cast for one call. torch.compile cannot trace all of it."""

    def __init__(self) -> None:
        self._tensors: dict[int, _CastTensor] = {}
        self._replaced: list[tuple[Any, Any, Any]] = []  # a container, what is there now, and what was there

    def cast_in(self, tree: Any, dtype: torch.dtype) -> Any:
        """The tree with cast tensors: one for each, as modules compare tensors by `is` (attention)."""
        return replace_tensors(lambda one: self._cast(one, dtype) if _differs(one, dtype) else one, tree, self._note)

    def _cast(self, one: Tensor, dtype: torch.dtype) -> Tensor:
        if torch.compiler.is_compiling():
            return one.to(dtype)
        if id(one) not in self._tensors:
            self._tensors[id(one)] = _CastTensor(one, one.to(dtype))
            _copy_attributes(one, self._tensors[id(one)].copy)
        return self._tensors[id(one)].copy

    def _note(self, container: Any, now: Any, before: Any) -> None:
        self._replaced.append((container, now, before))

    def give_back(self) -> None:
        if torch.compiler.is_compiling():
            for container, now, before in self._replaced:
                for name, part in parts_of(container):
                    if part is now:
                        put_part(container, name, before)
            return
        before_of = {id(now): before for _, now, before in self._replaced}
        for container in {id(one): one for one, *_ in self._replaced}.values():
            for name, part in parts_of(container):
                if id(part) in before_of:
                    put_part(container, name, before_of[id(part)])
        for tensor in self._tensors.values():
            tensor.give_back()


@dataclass(frozen=True, eq=False)
class _CastTensor:
    original: Tensor
    copy: Tensor

    def give_back(self) -> None:
        original, copy = self.original, self.copy
        _copy_attributes(copy, original)
        if copy.is_inference() or not copy._version or _is_leaf_with_grad(original):
            return
        same, before = copy.detach() == original.to(copy.dtype), original.detach().clone()
        original.copy_(copy)  # with its gradient, also where a write has left a value as it was
        values = original.detach()
        values.copy_(torch.where(same, before, values))  # what is not written keeps its bits


def _copy_attributes(one: Tensor, other: Tensor) -> None:
    """Those that the user has attached to a plain tensor. (A subclass may keep what it is made of in its own.)"""
    if type(one) is Tensor:
        vars(other).update(vars(one))


def _is_leaf_with_grad(tensor: Tensor) -> bool:
    """Torch lets nobody write to it in place."""
    return tensor.requires_grad and (tensor if tensor._base is None else tensor._base).is_leaf


def _cast_output(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    @called_by_torch
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return cast(output, dtype)

    return hook
