"""The tensor in `p.grad` of a parameter whose gradient no rank holds in full, or which a step has used.

It has the parameter's shape, and no values of its own. It supports what torch's utilities do to gradients between
backward and step: a norm (collective), and in-place operations that treat every element alike; these act on the part
that this rank holds. All other operations raise, and the message says what to write instead. So
`torch.nn.utils.clip_grad_norm_`, `clip_grad_value_`, `p.grad.div_(n)` and `model.zero_grad()` work as in plain torch.

(FSDP2 uses a `DTensor` for the same purpose.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.utils import _pytree as pytree

from zeroshard.errors import InvalidState
from zeroshard.model.absent import as_tensors, by_whom
from zeroshard.model.outside_graphs import called_by_torch
from zeroshard.storage.gradients import Gradients, GradState
from zeroshard.storage.unit import Unit

T = TypeVar("T")
S = TypeVar("S", bound="ShardedGradient")

_aten = torch.ops.aten

IN_PLACE = {
    _aten.mul_.Tensor,
    _aten.mul_.Scalar,
    _aten.div_.Tensor,
    _aten.div_.Scalar,
    _aten.clamp_.default,
    _aten.clamp_min_.default,
    _aten.clamp_max_.default,
    _aten.nan_to_num_.default,
    _aten.neg_.default,
    _aten.sign_.default,
    _aten.zero_.default,
}
"""In-place operations that treat every element alike. (They are applied to slots only, never to padding.)"""
SAME = {_aten.detach.default, _aten.alias.default, _aten.detach_.default}
EACH = {
    _aten._foreach_mul_.Scalar: _aten.mul_.Scalar,
    _aten._foreach_mul_.Tensor: _aten.mul_.Tensor,
    _aten._foreach_div_.Scalar: _aten.div_.Scalar,
    _aten._foreach_div_.Tensor: _aten.div_.Tensor,
    _aten._foreach_zero_.default: _aten.zero_.default,
    _aten._foreach_clamp_min_.Scalar: _aten.clamp_min_.default,
    _aten._foreach_clamp_max_.Scalar: _aten.clamp_max_.default,
    _aten._foreach_neg_.default: _aten.neg_.default,
}


class ShardedGradient(Tensor):
    """See the module's note."""

    # Weak: a parameter, whose `grad` this is, must not keep the model alive.
    _visible_ref: weakref.ref[Any]
    _unit_ref: weakref.ref[Unit]
    _index: int

    @staticmethod
    def __new__(cls, like: Tensor, visible: object, unit: Unit, index: int) -> Self:
        """`like`: NaN in the parameter's shape: what code that bypasses the dispatch would read. `visible`: the
        `VisibleGradients` of the model."""
        gradient = Tensor._make_subclass(cls, like)
        gradient._visible_ref, gradient._unit_ref, gradient._index = weakref.ref(visible), weakref.ref(unit), index
        return gradient

    def __init__(self, like: Tensor, visible: object, unit: Unit, index: int) -> None:
        pass

    def in_dtype(self, dtype: torch.dtype) -> Self:
        """Such a gradient of the same parameter, in another dtype."""
        nan = torch.full((), torch.nan, dtype=dtype, device=self.device)
        gradient = Tensor._make_subclass(type(self), nan.expand(self.shape))
        vars(gradient).update(vars(self))
        return gradient

    @property
    def _unit(self) -> Unit:
        unit = self._unit_ref()
        return _living(None if unit is None or unit.weights.buffer.placement is None else self._unit_ref)

    @property
    def _visible(self) -> Any:
        return _living(self._visible_ref)

    @property
    def _name(self) -> str:
        return self._unit.layout.slots[self._index].name

    @property
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, values: Tensor) -> None:
        with as_tensors():
            self._unit.parameters[self._index].grad = values.detach()

    def apply_(self, function: Callable[..., Any]) -> Tensor:
        self._explain("apply_")  # torch writes to the memory, without a dispatch

    def map_(self, other: Tensor, function: Callable[..., Any]) -> Tensor:
        self._explain("map_")

    def numpy(self, **options: Any) -> Any:
        self._explain("numpy")  # of this and the next ones torch says only that subclasses have none, or pickle does

    def __array__(self, *args: Any, **options: Any) -> Any:
        self._explain("numpy")

    def tolist(self) -> Any:
        self._explain("tolist")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._explain("pickling")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient(shape={tuple(self.shape)}, dtype={self.dtype}): see handle.gradient(name)"

    @classmethod
    @called_by_torch
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if func in SAME and isinstance(first, ShardedGradient):
            return first
        edited = [first] if func in IN_PLACE else args[0] if func in EACH else ()
        if edited and all(isinstance(one, ShardedGradient) for one in edited) and _are_scalars(args[1:], kwargs):
            of_one = EACH.get(func, func)
            for one in edited:
                operands = [*args[1:], *kwargs.values()]
                one._edit(lambda part: of_one(part, *args[1:], **kwargs), _name(func), operands)
            return first if func in IN_PLACE else None
        if func is _aten._foreach_norm.Scalar and all(isinstance(one, ShardedGradient) for one in args[0]):
            norm_type, dtype = _operands(args, 2.0, kwargs.get("dtype"))
            return [one._norm(float(norm_type), dtype) for one in args[0]]
        if func is _aten.linalg_vector_norm.default:
            norm_type, dim, keepdim = _operands(args, 2.0, kwargs.get("dim"), kwargs.get("keepdim"))
            if dim is None or len(dim) in (0, first.dim()):
                norm = first._norm(float(norm_type), kwargs.get("dtype"))
                return norm.view([1] * first.dim()) if keepdim else norm
        sharded = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedGradient)]
        sharded[0]._explain(_name(func))

    def _edit(self, operation: Callable[[Tensor], object], what: str, operands: Sequence[Any]) -> None:
        """Apply `operation` to the flat part that this rank holds. Every rank must do the same; `operands` are compared
        between ranks."""
        if what != "zero_":
            self._expect_final(what)
        self._visible.edit(self._unit, self._index, operation, what, operands)

    def _norm(self, norm_type: float, dtype: torch.dtype | None = None) -> Tensor:
        """The norm of the whole gradient, 0-d, equal on all ranks. Collective, unless this rank holds it in full."""
        if not self._visible.is_partial_here(self._unit, self._index):
            self._expect_final("norm")
        elif not self._visible.final:
            self._refuse_factors("norm")
        if norm_type == -torch.inf:
            self._explain("norm of type -inf, the smallest element,")
        if torch.is_grad_enabled() and self._visible.had_graphs:
            self._explain("norm")
        in_full: Tensor | None = self._visible.in_full(self._unit, self._index)
        if in_full is not None:
            of_view: Tensor = vector_norm(in_full, norm_type, dtype=dtype)
            return of_view
        norm: Tensor | None = self._visible.norm(self._unit, self._index, norm_type)
        if norm is None:
            self._expect_final("norm")
            self._refuse_state("norm", "not reduced on another rank")
        return norm if dtype is None else norm.to(dtype)

    def _explain(self, what: str) -> NoReturn:
        name = self._name
        if "_amp_" in what:
            raise InvalidState(
                f"torch.amp.GradScaler looks at the gradient of {name}, and no rank holds it in full: pass "
                "loss_scale='dynamic' to ShardedOptimizer, and call optimizer.backward(loss) in place of the scaler"
            )
        if self._visible.had_graphs:
            raise InvalidState(
                f"{what} on the gradient of {name}: a backward had create_graph=True, and in p.grad there is no graph, "
                "so a loss that is computed from it would have no gradient. torch.autograd.grad(loss, parameters, "
                "create_graph=True) returns gradients with graphs, those of this rank (under zero3 inside `with "
                f"handle.unsharded():`). Values without a graph: handle.gradient({name!r}) on every rank; norms "
                "under torch.no_grad()"
            )
        if (told := by_whom(lambda parameter: isinstance(parameter.grad, ShardedGradient))) is not None:
            raise InvalidState(f"{what} on the gradient of {name}: {told}")
        grads = self._unit.grads
        if grads.state is GradState.EMPTY:
            raise InvalidState(
                f"{what} on the gradient of {name}: its memory is freed by a step or zero_grad. Read gradients between "
                f"backward and step: p.grad, or handle.gradient({name!r}) on every rank"
            )
        in_full = isinstance(grads, Gradients) and grads.means_in_full and grads.state is GradState.REDUCED
        if in_full and not self._visible.final:
            self._refuse_factors(what)
        raise InvalidState(
            f"{what} on the gradient of {name}: no rank holds it in full. Its full values are handle.gradient({name!r})"
            f", new ones are set by handle.set_gradient({name!r}, values), both on every rank. Gradients are averaged "
            "over the ranks already: leave out what does that (an all_reduce). "
            "In place it can be multiplied, divided, clamped and zeroed, its norm can be taken, and torch.nn.utils can "
            "clip it. A step is that of a zeroshard.ShardedOptimizer, not of a plain one"
        )

    def _expect_final(self, what: str) -> None:
        """Raises:
        RuntimeError: the gradient is not what plain torch would have in `p.grad`."""
        if (state := self._unit.grads.state) is not GradState.REDUCED:
            self._refuse_state(what, state.value)
        if not self._visible.final:
            self._refuse_factors(what)

    def _refuse_state(self, what: str, state: str) -> NoReturn:
        raise InvalidState(
            f"{what} on the gradient of {self._name}, which is {state}: it can be used between a backward outside "
            "of no_sync() and the step"
        )

    def _refuse_factors(self, what: str) -> NoReturn:
        raise InvalidState(
            f"{what} on the gradient of {self._name}: this step's losses were scaled or weighted, or some ranks have "
            "run out of inputs in a join that divides by the number of the others; so the gradient is not final until "
            "the step. Use optimizer.clip_grad_norm_ or optimizer.clip_grad_value_, which know by how much; its values "
            f"without a scale are handle.gradient({self._name!r}) on every rank"
        )


class UsedGradient(ShardedGradient):
    """In `p.grad` behind a step that has used the gradient, until the next forward or a `zero_grad`. Plain torch has
    the gradient there. So what asks whether there is one (`Lookahead`) finds it, and what reads it is told."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UsedGradient(shape={tuple(self.shape)}, dtype={self.dtype}): a step has used it"

    def _edit(self, operation: Callable[[Tensor], object], what: str, operands: Sequence[Any]) -> None:
        if what != "zero_":
            self._refuse(what)

    def _norm(self, norm_type: float, dtype: torch.dtype | None = None) -> Tensor:
        self._refuse("norm")

    def _explain(self, what: str) -> NoReturn:
        if "_amp_" in what or by_whom(lambda parameter: isinstance(parameter.grad, ShardedGradient)) is not None:
            super()._explain(what)
        self._refuse(what)

    def _refuse(self, what: str) -> NoReturn:
        name = self._name
        raise InvalidState(
            f"{what} on the gradient of {name}: a step has used it, and freed its memory. Read gradients between "
            f"backward and step (p.grad, or handle.gradient({name!r}) on every rank); optimizer.step() returns their "
            "norm, as grad_norm and group_norms"
        )

    def is_of(self, unit: Unit, index: int) -> bool:
        """Whether it was the gradient of this slot."""
        return self._unit_ref() is unit and self._index == index


class OfSlots(dict[int, S]):
    """Slot -> its tensor of that class, which is made when it is first asked for; of one unit."""

    def __init__(self, of_class: type[S], visible: object, unit: Unit) -> None:
        super().__init__()
        self._of_class, self._visible, self._unit = of_class, weakref.ref(visible), weakref.ref(unit)

    def __missing__(self, index: int) -> S:
        unit = _living(self._unit)
        parameter = unit.parameters[index]
        nan = torch.full((), torch.nan, dtype=parameter.grad_dtype or parameter.dtype, device=parameter.device)
        made = self[index] = self._of_class(nan.expand(parameter.shape), self._visible(), unit, index)
        return made


class WithoutValues:
    """The tensors of both classes for the parameters of a model. Each is made once.

    Attributes:
        sharded: unit -> those of its slots; without one, the next is another one.
    """

    def __init__(self, visible: object, units: Iterable[Unit]) -> None:
        self.sharded = {unit: OfSlots(ShardedGradient, visible, unit) for unit in units}
        self._used = {unit: OfSlots(UsedGradient, visible, unit) for unit in self.sharded}
        self._shows_used = False  # whether one of them may be in `p.grad`

    def used(self, unit: Unit) -> OfSlots[UsedGradient]:
        """To be put into `p.grad`."""
        self._shows_used = True
        return self._used[unit]

    def remove_used(self) -> None:
        """Set `p.grad` to None where a step has used it."""
        if self._shows_used:
            with as_tensors():
                for unit, of_slots in self._used.items():
                    for index, used in of_slots.items():
                        if unit.parameters[index].grad is used:
                            unit.parameters[index].grad = None
            self._shows_used = False


def _living(reference: weakref.ref[T] | None) -> T:
    found = reference() if reference is not None else None
    if found is None:
        raise InvalidState(
            "this gradient is from before handle.close() (or abandon()), and no rank holds it any more: call "
            "optimizer.step(), or read handle.gradient(name), before that. To go on with the plain model, discard it: "
            "model.zero_grad()"
        )
    return found


def _operands(args: Sequence[Any], *defaults: Any) -> list[Any]:
    """What follows the first of `args`, with these defaults."""
    return [*args[1:], *defaults[len(args) - 1 :]]


def _are_scalars(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all operands are single numbers."""
    return all(
        not isinstance(leaf, Tensor) or (leaf.dim() == 0 and not isinstance(leaf, ShardedGradient))
        for leaf in pytree.tree_leaves((args, kwargs))
    )


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)
