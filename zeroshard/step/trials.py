"""Experiments with an optimizer class: what does it do to small tensors, alone and together, whole and cut?

What follows from them: `granularity.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroshard.model.trees import tensors_in
from zeroshard.step.assignment import NAMES, OptimizerClass, Options
from zeroshard.step.inner import built_for_trial, expect_state_of_tensors, run_step, stepped_for_trial


@dataclass(frozen=True)
class Tried:
    """A class that is tried out, with its arguments, the options of a param group (None: its defaults), and names for
    its parameters, if the user's have any."""

    optimizer_class: OptimizerClass
    arguments: Options
    of_group: Options | None = None
    names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.optimizer_class.__name__

    def over(self, tensors: list[Tensor], asked: set[str] | None = None) -> torch.optim.Optimizer:
        """An instance over these tensors that can step. `asked`: gets `NAMES` if the class looks at names."""
        of_group = self.of_group and {key: _first_two_differ(value) for key, value in self.of_group.items()}
        names = _Names([*islice(cycle(self.names), len(tensors))], set() if asked is None else asked)
        return built_for_trial(self.optimizer_class, self.arguments, tensors, of_group, names)

    def stepped(self, tensors: list[Tensor], steps: int = 1) -> torch.optim.Optimizer:
        """An instance over these tensors that has stepped."""
        return stepped_for_trial(self.over(tensors), tensors, steps)


def communicates(tried: Tried) -> bool:
    """Whether the first step does, also if it fails there."""
    watching = Watching()
    with suppress(Exception), watching:  # other trials tell of it
        tried.stepped([ones(4, 6)])
    return watching.communicates


def shares_out(tried: Tried) -> bool:
    """Whether the first step leaves the state of some of many parameters on this rank, and of others elsewhere."""
    tensors = [ones(4, 6) for _ in range(128)]
    with suppress(Exception):  # other trials tell of it
        optimizer = tried.stepped(tensors)
        return 0 < sum(bool(optimizer.state.get(tensor)) for tensor in tensors) < len(tensors)
    return False


def kept_beside_state(tried: Tried) -> set[str]:
    """The attributes of an instance with tensors of the size of a parameter."""
    tensor = ones(11, 13)  # a size that no constant of a class has
    with suppress(Exception):  # other trials tell of it
        optimizer = tried.stepped([tensor], 2)
        own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
        known = {one.untyped_storage()._cdata for one in (tensor, tensor.grad) if one is not None}
        held = [(name, one) for name, value in own.items() for one in tree_leaves(value) if isinstance(one, Tensor)]
        return {
            name for name, one in held if one.numel() == tensor.numel() and one.untyped_storage()._cdata not in known
        }
    return set()


def _first_two_differ(value: Any) -> Any:
    """A list may have a number for each parameter of the group, and a trial has two: not the first two, if these are
    equal."""
    if type(value) in (list, tuple) and len(value) > 2 and _is_number(value[0]) and value[0] == value[1]:
        return type(value)([value[0], *sorted(value[1:], key=lambda one: one == value[0])])
    return value


class Outcome(NamedTuple):
    """After a trial: how far all elements have moved, where they are, and the numbers in the param groups of all
    optimizers, (name, number)."""

    moved: Tensor
    values: Tensor
    settings: frozenset[tuple[str, float]]


_STEPS = 24
"""Of a trial: some classes do for ten steps, or until gradients become smaller, what an elementwise one does."""


def try_out(
    tried: Tried,
    watching: AbstractContextManager[Any] | None = None,
    *,
    apart: bool = True,
    cut: bool = False,
    shapes: Sequence[tuple[int, int]] = ((4, 6), (3, 5)),
) -> Outcome:
    """Matrices, or pieces of them, after the steps: by one optimizer, or by one optimizer for each tensor. `watching`:
    around each step."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=generator, device="cpu") for shape in shapes]
    for tensor in tensors[1:]:
        tensor *= 10
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    if cut:
        tensors = [piece.clone() for piece in torch.split(flat, 7)]
    for tensor in tensors:
        tensor.requires_grad_()
    optimizers = [tried.over(members) for members in ([[tensor] for tensor in tensors] if apart else [tensors])]
    for gradient in _gradients(flat.numel()):
        for tensor, part in zip(tensors, torch.split(gradient, [one.numel() for one in tensors]), strict=True):
            tensor.grad = part.view_as(tensor).clone()
        for optimizer in optimizers:
            with watching or nullcontext():
                run_step(optimizer)
    for optimizer in optimizers:
        expect_state_of_tensors(optimizer)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    settings = frozenset((key, float(value)) for group in groups for key, value in group.items() if _is_number(value))
    values = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return Outcome(values - flat, values, settings)


def are_close(a: Outcome, b: Outcome) -> bool:
    return torch.allclose(a.values, b.values, rtol=1e-6, atol=1e-7)


_TWINS = ((4, 6), (4, 6))


def stacks(tried: Tried) -> bool:
    """Whether what the class does to a matrix depends on others of the same shape: it may step them as one stack. A
    stack's products have other last bits, which Muon in bf16 makes larger: only a fifth of the way is a difference."""
    together, one_by_one = (try_out(tried, apart=apart, shapes=_TWINS).moved for apart in (False, True))
    return bool((together - one_by_one).norm() > 0.2 * one_by_one.norm())


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _gradients(numel: int) -> Iterator[Tensor]:
    """One gradient for each step of a trial, some larger and some smaller than those before."""
    generator = torch.Generator().manual_seed(1)
    scales = (1.0, 1.0, 3.0, 0.3, 10.0, 0.1)
    for step in range(_STEPS):
        gradient = torch.randn(numel, generator=generator, device="cpu") * torch.linspace(0.1, 3, numel, device="cpu")
        yield gradient * scales[step % len(scales)]


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all operations inside it that step one tensor at a time.

    Attributes:
        combines: whether one of them has a result with another number of elements than its inputs: a norm, a mean over
            rows, a product of matrices. An operation that is not torch's own counts as one.
        communicates: whether one of them is a collective.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.combines = self.communicates = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.communicates |= "c10d" in func.namespace  # before the call, which may fail
        result = func(*args, **(kwargs or {}))
        inputs = max((tensor.numel() for tensor in tensors_in((args, kwargs))), default=0)
        if "c10d" in func.namespace or func.namespace == "profiler":  # torch's classes have a label around each step
            pass
        elif func.namespace != "aten":
            self.combines = True
        elif inputs > 1 and not func.is_view and not func.overloadpacket.__name__.startswith("new_"):
            # A number (`torch.equal`) is one element; operations in place on lists return nothing.
            outputs = [
                leaf.numel() if isinstance(leaf, Tensor) else 1 for leaf in tree_leaves(result) if leaf is not None
            ]
            self.combines |= any(numel != inputs for numel in outputs)
        return result


def steps_with_a_closure(tried: Tried) -> bool:
    """Whether the class steps with a closure, and calls it."""
    tensor, is_called = ones(4, 6), False

    def closure() -> float:
        nonlocal is_called
        is_called, tensor.grad = True, torch.ones_like(tensor)
        return 1.0

    tensor.grad = torch.ones_like(tensor)
    with suppress(Exception):
        tried.over([tensor]).step(closure)
        return is_called
    return False


def steps_with_graphs(tried: Tried) -> bool:
    """Whether the class steps with gradients that can be differentiated."""
    tensor = ones(4, 6)
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # torch warns of the cycle that `grad = None` below ends
            optimizer = tried.over([tensor])
            torch.autograd.backward(tensor.pow(3).sum(), create_graph=True)
            run_step(optimizer)
    except Exception:
        return False
    finally:
        tensor.grad = None
    return True


def asked_for(
    names: Collection[str], kinds: Sequence[Tried], parameters: Sequence[Tensor], *, once_built: bool = False
) -> list[str]:
    """Those of the names for which the class looks as an attribute of tensors that it steps (which have none here), of
    as many dimensions as the parameters; or `NAMES`, if it looks at the names of these. `once_built`: for which its
    steps look."""
    asked, dims = set[str](), {parameter.ndim for parameter in parameters} if names else ()

    class Asked(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            raise AttributeError(f"no attribute {name!r}")

        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            return _Noting(asked)

    for one in kinds:
        for dim in dims:
            tensor = torch.ones({1: (6,), 2: (4, 6)}.get(dim, (2,) * dim), device="cpu", requires_grad=True)
            tensor.__class__ = Asked
            with suppress(Exception):  # other trials tell of it
                before = set(asked)
                optimizer = one.over([tensor], asked)
                if once_built:
                    asked &= before
                for gradient in _gradients(tensor.numel()):
                    tensor.grad = gradient.view(tensor.shape)
                    run_step(optimizer)
    return sorted(asked.intersection(names))


class _Names(list[str]):
    """Names of parameters; notes that they are looked at."""

    def __init__(self, names: Sequence[str], asked: set[str]) -> None:
        super().__init__(names)
        self._asked = asked

    def __iter__(self) -> Iterator[str]:
        self._asked.add(NAMES)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._asked.add(NAMES)
        return super().__getitem__(index)


class _Noting(dict[str, Any]):
    """Empty; notes what it is asked for."""

    def __init__(self, asked: set[str]) -> None:
        super().__init__()
        self._asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return default

    def __contains__(self, key: object) -> bool:
        self._asked.add(str(key))
        return False

    def __missing__(self, key: str) -> Any:
        self._asked.add(key)
        raise KeyError(key)


def goes_by_shapes(tried: Tried) -> bool:
    """Whether the class looks at the shape of what it steps: it may do something else from a number of rows on, to
    square matrices or to convolutions. To pass a shape on to a function of torch, as for a new state, is no look."""
    tensor, looking = ones(4, 6), _Looking()
    gradients = [gradient.view_as(tensor) for gradient in _gradients(tensor.numel())]
    try:
        with looking:
            optimizer = tried.over([tensor])
            for gradient in gradients:
                tensor.grad = gradient
                run_step(optimizer)
    except Exception:  # it has stepped without this mode: something does not take such a shape
        return True
    return looking.found


_SIZES = (
    *(Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__, torch.numel),
    *(getattr(Tensor, name).__get__ for name in ("ndim", "nbytes")),
)
_SHAPES = (Tensor.size, Tensor.shape.__get__)  # type: ignore[attr-defined]


class _Looking(TorchFunctionMode):
    """Inside, `found` becomes True where the shape of a tensor of several elements is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

        def looked(name: str) -> Any:
            def look(shape: Any, *args: Any) -> Any:
                self.found = True
                return getattr(torch.Size(tuple.__iter__(shape)), name)(*args)

            return look

        ways = ("iter", "len", "getitem", "contains", "eq", "ne", "lt", "le", "gt", "ge", "add", "mul", "hash")
        methods = [*(f"__{name}__" for name in ways), "numel", "count", "index"]
        self._shape = type("Size", (tuple,), {name: looked(name) for name in methods})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SIZES or func in _SHAPES:
            if args[0].numel() <= 1:
                return result
            if isinstance(result, torch.Size):
                return self._shape(result)
            self.found = True
        return result


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, device="cpu", requires_grad=True)
