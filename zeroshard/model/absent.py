"""Absent parameters: parameters whose values are not on this rank keep their shape, and raise when read or written.

In torch, only the class of a tensor can intercept reads: `__torch_function__` is called before every operation that
Python calls, on every thread, in forked workers, inside and outside of forward. So an absent parameter gets a class of
its own, a subclass of its usual class, and stays the same object. (Both classes have the same memory layout, so
Python allows the change of `__class__`.)

The data of an absent parameter are a placeholder: one scalar, expanded to its shape; NaN, or the lowest number of an
integer dtype. Only code that bypasses `__torch_function__` reads it: C++ that is passed a parameter, and `torch.func`
transforms. `reads.py` finds such reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import handle_torch_function
from torch.utils import _pytree as pytree

from zeroshard.errors import InvalidState, InvalidType
from zeroshard.layout.layout import Slot

IN_DDP = (
    "DistributedDataParallel is around this model, or a part of it (replicate() does the same), and its parameters are "
    "sharded: both would reduce the gradients. Build the model anew without DistributedDataParallel, shard() it, and "
    "call it itself. (Accelerate, Lightning and the Trainer of transformers wrap a model: with them, use "
    "zeroshard.integrations)"
)
"""The error message for a model that is wrapped."""

_IN_LOOP = (
    "this model is sharded, and plain Accelerate, or a plain Trainer, prepares it as its own: use the classes of "
    "zeroshard.integrations, which shard it"
)
IN_FSDP = "this model is sharded by zeroshard, and FSDP would shard it again: leave out FSDP, also fully_shard"
RECORDED = (
    "torch.export and torch.jit.trace would record the memory of the weights, which others use afterwards: build a "
    "plain model, load handle.full_state_dict() into it, and record that one"
)
_MOVED = (
    "a model that is sharded cannot be moved or cast, nor a part of it: move and cast a model before shard(), which "
    "has precision= for 16 bits (MixedPrecision(keep=...): for a module that casts itself); or handle.close() it before"
)
_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel.__init__"): IN_DDP,
    ("accelerate.accelerator", "Accelerator.prepare_model"): _IN_LOOP,
    ("transformers.trainer", "Trainer._move_model_to_device"): _IN_LOOP,
    ("torch.distributed.fsdp._fully_shard._fully_shard", "fully_shard"): IN_FSDP,
    ("torch.distributed._composable.replicate_with_fsdp", "replicate"): IN_FSDP,
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel.__init__"): IN_FSDP,
    ("torch.nn.modules.module", "Module._apply"): _MOVED,
    ("torch.export", "export"): RECORDED,
}
"""Functions that read or move all parameters of a model -> the error message for an absent one."""
_LAZY = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of functions whose lines run after their call."""
_STEP = "torch.optim.optimizer", "Optimizer.profile_hook_step.<locals>.wrapper"
"""What torch puts around the step of every optimizer; its `self` is the optimizer."""

as_tensors = torch._C.DisableTorchFunctionSubclass
"""Inside, on this thread, absent parameters behave as plain tensors. For the engine itself, which knows which values
are absent: a call of `__torch_function__` costs microseconds for each attribute."""

_VALUES = {"data", "real", "imag", "T", "mT", "H", "mH"}
"""Attributes that need values. All others describe the tensor."""
_DESCRIBE = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "storage_offset", "__len__"),
    *("is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference", "is_same_size"),
    *("is_shared", "is_pinned", "is_distributed", "has_names", "sym_size", "sym_numel", "__dir__", "result_type"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"),
    *("_has_compatible_shallow_copy_type", "_is_view"),
}
_STRIDES = {"stride", "is_contiguous", "dim_order"}
_LIKE_ANOTHER = {"to", "type_as", "view_as", "expand_as", "reshape_as", "resize_as_"}
"""Operations that take only shape, dtype and device from their second operand."""
_CONVERT = {"to", "type", "type_as", "cpu", "cuda", "xpu", "float", "half", "double", "bfloat16", "contiguous"}
_TO_THE_GRAPH = {"view_as", "expand_as"}
"""Operations that code uses, with the leaf itself, to find its graph node: `p.expand_as(p).grad_fn`."""

NOT_COPIED = (
    "a sharded model cannot be copied: copy it before shard(), or build a new one and load handle.full_state_dict() "
    "into it"
)
NOT_PICKLED = "a sharded model cannot be pickled: save handle.full_state_dict() instead"


class NotCopied:
    """Cannot be copied or pickled, nor can a module that has such an object as a hook: a copy would share buffers and
    process groups."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise InvalidType(NOT_COPIED)

    def __reduce__(self) -> NoReturn:
        raise InvalidType(NOT_PICKLED)


class _NeedsValues(Exception):
    """An operation needs the values of absent parameters. Arguments: its name, and its operands."""


class _Nowhere:
    """An attribute that a class does not have, although its base has it."""

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError


class AbsentTensor(Tensor):
    """Base class of absent parameters. An operation that reads or writes values first asks `home` for them, which can
    provide them if no other rank is needed.

    Attributes:
        plain: the parameter's usual class.
        home: the unit's `Absent`.

    Raises:
        RuntimeError: from every operation that reads or writes values, if `home` cannot provide them.
    """

    plain: ClassVar[type]
    home: ClassVar[Absent]

    # Code in C++ that exchanges tensors would read the placeholder. Where there is none, it calls `__dlpack__`.
    __dlpack_c_exchange_api__ = _Nowhere()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A tensor of the usual class: `type(p)(p.data)`, and so `copy.deepcopy(p)`, asks for the class first, and the
        values may come with the data."""
        return cls.plain(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return cls._describe(func, args, kwargs or {})
        except _NeedsValues as needed:
            what, operands = needed.args
        operands = _absent_in(operands)
        for parameter in operands:
            if is_absent(parameter):  # `bring` gives values to all parameters of a unit at once
                # Of the class: Dynamo would look up the object, which has values already if Dynamo itself read them.
                type(parameter).home.bring()
        for parameter in operands:
            if is_absent(parameter):
                raise InvalidState(f"{what}: {parameter.home.explain(_name_of(parameter))}")
        return func(*args, **(kwargs or {}))

    @classmethod
    def _describe(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that needs no values; raises `_NeedsValues` for all others."""
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            attribute = getattr(func.__self__, "__name__", "data")
            if name == "__set__" and args[0] is args[1]:  # `p.data = p`, by a Module.to without effect
                return None
            if attribute in _VALUES:
                raise _NeedsValues(attribute if name == "__get__" else f"setting {attribute}", args)
        elif name in _STRIDES:
            # The strides of a contiguous tensor of that shape: those of the placeholder, an expanded scalar, are all 0.
            return func(torch.empty(args[0].shape, dtype=args[0].dtype, device="meta"), *args[1:], **kwargs)
        elif func in (torch.autograd.grad, torch.autograd.backward):
            return _by_edges(func, args, kwargs)
        elif name == "equal" and len(args) == 2 and (args[0] is args[1] or args[0].shape != args[1].shape):
            return args[0] is args[1]
        elif name in _LIKE_ANOTHER and not isinstance(args[0], AbsentTensor):
            pass
        elif name in _CONVERT:
            return _unless_it_changes(func, args, kwargs)
        elif name in _TO_THE_GRAPH and len(args) == 2 and args[0] is args[1]:
            return _absent_view(func, args)
        elif name.endswith("_like") or name.startswith("new_"):
            if absent := _absent_in((args[1:], kwargs)):
                raise _NeedsValues(name, absent)
        elif name not in _DESCRIBE:
            raise _NeedsValues(name, (args, kwargs))
        with as_tensors():
            return func(*args, **kwargs)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        shape = f"shape {tuple(self.shape)}, {self.dtype}, on {self.device}"
        where = "lost" if self.home.why_lost else "not here (`with handle.unsharded():` shows them)"
        return f"parameter {_name_of(self)}: {shape}; its values are {where}"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def as_subclass(self, cls: Any) -> Any:
        """The one method of tensors that torch does not pass to `__torch_function__`."""
        return handle_torch_function(Tensor.as_subclass, (self,), self, cls)

    # A model with parameters of its own comes here before it comes to its hooks, which cannot be copied either.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        try:
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        except InvalidState as error:
            if any(isinstance(copied, nn.Module) for copied in memo.values()) and not self.home.why_lost:
                raise InvalidType(NOT_COPIED) from error
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        try:
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        except InvalidState as error:
            raise InvalidState(f"{NOT_PICKLED}. {error}") from error


class Absent:
    """The placeholders of one unit; makes its parameters absent, and gives them values again. The placeholder of slot i
    is element i of a common storage.

    Attributes:
        bring: gives the parameters their values, if that is possible without the other ranks.
        names: of the slots.
        pointers: addresses of the placeholders.
        why_lost: why the values are lost for good; None: they are not.
    """

    bring: Callable[[], None]

    def __init__(self, unit: str, slots: Sequence[Slot], like: Tensor) -> None:
        value: float = 0
        if like.dtype != torch.bool:
            value = torch.nan if like.is_floating_point() or like.is_complex() else torch.iinfo(like.dtype).min
        scalars = torch.full((len(slots),), value, dtype=like.dtype, device=like.device)
        self._storage = scalars.untyped_storage()._cdata
        self._views = [scalar.expand(slot.shape) for scalar, slot in zip(scalars, slots, strict=True)]
        self.pointers = [view.data_ptr() for view in self._views]
        self._unit, self.names = unit, tuple(slot.name for slot in slots)
        self._classes: dict[type, type[AbsentTensor]] = {}
        self.bring = lambda: None
        self.why_lost: str | None = None

    def take(self, parameters: Sequence[Tensor]) -> list[int]:
        """Make these parameters absent, until `give`. Returns `pointers`."""
        self._take(parameters, self._views)
        return self.pointers

    def _take(self, parameters: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        classes = self._classes
        for parameter, view in zip(parameters, views, strict=True):
            plain = type(parameter)
            if plain not in classes:
                if is_absent(parameter):  # an earlier call was interrupted
                    continue
                self.class_of(plain)
            # Data first, then the class (in `give_each` the other way round): setting the data of an absent one raises.
            parameter.data = view
            parameter.__class__ = classes[plain]

    def class_of(self, plain: type) -> type[AbsentTensor]:
        """The class of an absent tensor whose usual class is `plain`."""
        if plain not in self._classes:
            bases = (AbsentTensor,) if plain is Tensor else (AbsentTensor, plain)
            attributes = {"plain": plain, "home": self, "__module__": __name__}
            self._classes[plain] = type(f"Absent{plain.__name__}", bases, attributes)
        return self._classes[plain]

    def lose(self, index: int, parameter: Tensor, why: str) -> None:
        """Make the parameter of slot `index` absent for good; so become those that are absent already."""
        self.why_lost, self.bring = why, lambda: None
        if not is_absent(parameter):
            self._take([parameter], [self._views[index]])

    def explain(self, name: str) -> str:
        """The error message for a parameter: why its values are absent, and what to write instead."""
        if (told := by_whom(is_absent)) is not None:
            return told
        return not_here(name, self._unit) if self.why_lost is None else _lost(name, self.why_lost)

    def index_of(self, tensor: Tensor) -> int | None:
        """The slot whose placeholder `tensor` is, or is a view of; None if there is none."""
        with as_tensors():
            # By storage, not by class or identity: a view of a placeholder is another object of another class, but has
            # the same storage. The offset in it is the number of the slot.
            if not torch._C._has_storage(tensor) or tensor.untyped_storage()._cdata != self._storage:
                return None
            return int(tensor.storage_offset())

    def expect_present(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Check that none of these tensors was taken from a parameter while it was absent. `values`: with their names.

        Raises:
            RuntimeError: one was.
        """
        for name, value in values:
            if self.index_of(value) is not None:
                raise InvalidState(
                    f"functional_call: {name} has been taken from the model while its values were not here, and is "
                    "NaN: take and use it inside `with handle.unsharded():`, or take it from handle.full_state_dict()"
                )


def give(parameter: Tensor, values: Tensor) -> None:
    """Give a parameter these values, and its usual class if it is absent."""
    give_each([parameter], [values])


def give_each(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give these parameters values, and their usual classes if they are absent."""
    for parameter, value in zip(parameters, values, strict=True):
        if isinstance(parameter, AbsentTensor):
            parameter.__class__ = parameter.plain  # before the data: setting the data of an absent parameter raises
        parameter.data = value


def is_absent(tensor: Tensor) -> bool:
    """Whether the tensor is an absent parameter (or a view of one)."""
    return isinstance(tensor, AbsentTensor)


def kind_of(parameter: Tensor) -> type:
    """The usual class of a parameter, which may be absent."""
    kind = type(parameter)
    return kind.plain if issubclass(kind, AbsentTensor) else kind


def _name_of(absent: AbsentTensor) -> str:
    return absent.home.names[absent.storage_offset()]


def _absent_in(tree: Any) -> list[AbsentTensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, AbsentTensor)]


def not_here(name: str, unit: str) -> str:
    """The error message for an absent parameter: why, and what to write instead."""
    why = f"the values of parameter {name} are not here, as no module of its unit runs (unit {unit}). "
    if (kind := _in_lazy_forward()) is not None:
        return (
            f"{why}This line of a forward runs after the call of the module, as it is in a {kind}: let forward be a "
            "plain function that computes all of its results and returns them, a list in place of yield"
        )
    return (
        f"{why}Read it inside `with handle.unsharded():`, write to it inside `with handle.unsharded(write=True), "
        "torch.no_grad():` (a step: zeroshard.ShardedOptimizer); move and cast a model before shard(). In a forward: "
        "call model(x), not model.forward(x); let units= name a block that contains all uses of it; or register the "
        "method that is called in place of forward with handle.register_forward_method"
    )


def _in_lazy_forward() -> str | None:
    """What the forward (or a part of it) is whose lines read the parameter, if they do not run in its call."""
    frame = inspect.currentframe()
    found: dict[tuple[str, str], str] = {}  # the forward -> what it is
    while frame is not None:
        code, parts = frame.f_code, frame.f_code.co_qualname.split(".")
        if "forward" in parts:
            forward = code.co_filename, ".".join(parts[: parts.index("forward") + 1])
            if code.co_flags & _LAZY:
                found.setdefault(forward, "coroutine" if code.co_flags & inspect.CO_COROUTINE else "generator")
            else:  # a generator in it, sum(... for ...), runs in its call
                found.pop(forward, None)
        frame = frame.f_back
    return next(iter(found.values()), None)


def by_whom(is_sharded: Callable[[Any], bool]) -> str | None:
    """The error message, if other code is making the model its own, and reads or moves all parameters, or if a plain
    optimizer steps such parameters."""
    frame, found = inspect.currentframe(), None
    while frame is not None:
        place = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        if (here := _WRAPPERS.get(place)) is not None:
            if here is not _MOVED:
                return here
            found = here  # what moves it may be what wraps it
        if place[0] == "zeroshard.optimizer":  # a ShardedOptimizer steps: this is its closure
            return found
        optimizer = frame.f_locals.get("self") if place == _STEP else None
        if any(base.__module__ == "zeroshard.optimizer" for base in type(optimizer).__mro__):  # a hook on its step
            return found
        if optimizer is not None and any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
            name = type(optimizer).__name__
            return (
                f"step of a plain {name} over sharded parameters: build zeroshard.ShardedOptimizer(handle, {name}, "
                "lr=...) in its place, or let ShardedOptimizer.from_optimizer(handle, optimizer) take it over"
            )
        frame = frame.f_back
    return found


def _lost(name: str, why: str) -> str:
    return f"the values of parameter {name} are lost: {why}. Build the model anew, and load a checkpoint"


def _unless_it_changes(func: Any, args: Any, kwargs: Any) -> Any:
    """The parameter itself, if the conversion has no effect (`model.to(device)` on the same device)."""
    parameter = args[0]
    with as_tensors():
        shape = (0, *parameter.shape[1:]) if parameter.ndim else ()
        alike = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        result = func(alike, *args[1:], **kwargs)
    if isinstance(result, Tensor) and result is not alike:
        raise _NeedsValues(func.__name__, args)
    return parameter if result is alike else result


def _as_edges(tree: Any) -> Any:
    """The tree with absent parameters replaced by their gradient edges, for `torch.autograd.grad` and `backward`."""

    def as_edge(leaf: Any) -> Any:
        if not isinstance(leaf, AbsentTensor):
            return leaf
        with as_tensors():
            return get_gradient_edge(leaf)

    return pytree.tree_map(as_edge, tree)


def _by_edges(func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.autograd.grad` and `backward` of absent parameters. With edges torch makes no zeros for those without a
    gradient (`materialize_grads`)."""
    if not kwargs.get("materialize_grads"):
        return func(*_as_edges(args), **_as_edges(kwargs))
    found = _by_edges(func, args, {**kwargs, "materialize_grads": False, "allow_unused": True})
    inputs = pytree.tree_leaves(args[1] if len(args) > 1 else kwargs["inputs"])
    return tuple(
        torch.zeros_like(like, requires_grad=kwargs.get("create_graph", False)) if one is None else one
        for one, like in zip(found, inputs, strict=True)
    )


def _absent_view(func: Any, args: Any) -> Tensor:
    parameter = args[0]
    with as_tensors():
        view: Tensor = func(*args)
    view.__class__ = parameter.home.class_of(Tensor)
    return view
