"""Takes over an existing plain optimizer, for `ShardedOptimizer.from_optimizer`.

The inner optimizers are new instances of its class, so the arguments that it was made with must be found. They are
looked up among its defaults and attributes, by the names of the constructor's arguments; then a new instance is
compared with it. Its param groups (the dicts themselves) are shared: a scheduler that was made for it sets the learning
rates that the sharded optimizer uses.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.gradients.settings import plain
from zeroshard.step.assignment import OptimizerClass, Options, numbered
from zeroshard.step.by_group import over_group

_HOOKS = tuple(
    f"_optimizer_{when}_hooks"
    for when in (
        *("step_pre", "step_post", "state_dict_pre", "state_dict_post"),
        *("load_state_dict_pre", "load_state_dict_post"),
    )
)
_TAKEN_OVER = "{name}: this optimizer has been taken over: call {name}() of what from_optimizer has returned"
_OF_TORCH = {"defaults", "state", "param_groups", "step"}
"""Attributes that every optimizer has (or gets from a scheduler), and that are not compared."""


def arguments_of(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> Options:
    """The keyword arguments that the optimizer was made with.

    Args:
        given: arguments that the user names; they override those that are found.

    Raises:
        ValueError: an argument cannot be found; or a new optimizer made with these arguments differs from this one.
    """
    of_class, found = type(optimizer), dict[str, Any]()
    for name, parameter in _parameters(of_class).items():
        if name in given:
            continue
        if name in optimizer.defaults:
            found[name] = optimizer.defaults[name]
        elif not name.startswith("_") and name in vars(optimizer):
            found[name] = vars(optimizer)[name]
        elif parts := _parts(name, optimizer.defaults):
            found[name] = parts
        elif parameter.default is parameter.empty:
            raise InvalidValue(
                f"from_optimizer: {of_class.__name__} does not tell with which {name} it was made: "
                f"from_optimizer(handle, optimizer, {name}=...), or optimizer.{name} = ... before it is taken over "
                "(in a Trainer, Accelerate or Lightning)"
            )
    found |= given
    _expect_alike(optimizer, found)
    return found


def _parts(name: str, defaults: Mapping[str, Any]) -> tuple[Any, ...]:
    """`betas`, where an optimizer has kept it as beta1 and beta2."""
    numbered = [f"{name.removesuffix('s')}{number}" for number in range(1, 5)] if name.endswith("s") else []
    return tuple(defaults[one] for one in numbered if one in defaults)


def groups_of(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Copies of its param groups."""
    return [{**group, "params": list(group["params"])} for group in optimizer.param_groups]


def state_dict_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Like its `state_dict()`, without running the user's hooks, and without copies."""
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {number: optimizer.state[p] for number, p in enumerate(params) if optimizer.state.get(p)}
    return {"state": state, "param_groups": numbered(optimizer.param_groups)}


def expect_to_step_itself(optimizer: torch.optim.Optimizer) -> None:
    """Raises:
    ValueError: it divides its state over the ranks itself (ZeroRedundancyOptimizer, OSS); or the instance's `step` has
        been replaced by another function, which would be lost. (Schedulers also replace it, but only count steps.)"""
    if hasattr(optimizer, "consolidate_state_dict"):
        inner = type(optimizer.optim).__name__ if hasattr(optimizer, "optim") else "Adam"
        raise InvalidValue(
            f"from_optimizer: {type(optimizer).__name__} divides its state over the ranks itself: make the plain "
            f"optimizer in its place, {inner}(params, ...), whose state is divided here"
        )
    step = vars(optimizer).get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        raise InvalidValue(
            f"from_optimizer: the step() of this {type(optimizer).__name__} has been replaced by another function: "
            "take the optimizer over before it is wrapped"
        )


def hand_over(optimizer: torch.optim.Optimizer, to: torch.optim.Optimizer) -> None:
    """Let both optimizers share param groups and hooks. The one that is taken over loses its state, and raises when it
    is asked to step, save or load. Its `zero_grad` is that of the other one, as loops keep calling it."""
    for mine, theirs in zip(to.param_groups, optimizer.param_groups, strict=True):
        theirs.update({**mine, **theirs})
    to.param_groups[:] = optimizer.param_groups
    optimizer.param_groups = to.param_groups
    for hooks in _HOOKS:
        setattr(to, hooks, getattr(optimizer, hooks))
    optimizer.state.clear()
    _refuse(optimizer, _TAKEN_OVER)
    optimizer.zero_grad = partial(_zero_grad, weakref.ref(to))  # type: ignore[method-assign]
    # A scheduler warns if the optimizer that it was made for has never stepped, so its step is noted there.
    to.register_step_post_hook(partial(_note_step, weakref.ref(optimizer)))


def retire(optimizer: Any) -> None:
    """Free the state of a sharded optimizer, and give up its parameters, so that another one can have them. It then
    raises as one that is taken over."""
    optimizer.engine.claims.release(optimizer)
    optimizer.let_go()
    _refuse(
        optimizer,
        "{name}: this optimizer is out of use, as another one has got its parameters since, in another fit, prepare or "
        "setup (or in this one: give each its own parameters)",
        "backward",
        "clip_grad_norm_",
        "clip_grad_value_",
    )


def _refuse(optimizer: Any, text: str, *more: str) -> None:
    for name in ("step", "state_dict", "load_state_dict", "add_param_group", *more):
        setattr(optimizer, name, _refusing(text.format(name=name)))


def _refusing(text: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise InvalidState(text)

    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers look for this mark
    return refuse


def _zero_grad(of: weakref.ref[Any], set_to_none: bool = True) -> None:
    """p.grad alone is not all: losses have been counted, and a backward may have raised, or run now."""
    if (sharded := of()) is None:
        raise InvalidState(_TAKEN_OVER.format(name="zero_grad"))
    sharded.zero_grad(set_to_none)


def _note_step(optimizer: weakref.ref[Any], *_: object) -> None:
    if (alive := optimizer()) is not None:
        alive._opt_called = True


def _parameters(of_class: OptimizerClass) -> dict[str, inspect.Parameter]:
    """The named arguments of the constructor without `params`, and those of base classes that get its `**kwargs`."""
    found: dict[str, inspect.Parameter] = {}
    for kind in of_class.__mro__:
        if "__init__" not in vars(kind):
            continue
        parameters = list(inspect.signature(vars(kind)["__init__"]).parameters.values())[2:]
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        found = {p.name: p for p in named} | found
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    found.pop("params", None)
    return found


def _expect_alike(optimizer: torch.optim.Optimizer, arguments: Options) -> None:
    """Raises:
    ValueError: a new optimizer made with these arguments has other defaults or attributes."""
    name = type(optimizer).__name__
    try:
        new = type(optimizer)([torch.zeros(2, 2, device="cpu")], **arguments)
    except Exception as error:  # of a class that takes the model in place of parameters, for example
        try:
            new = over_group(type(optimizer), arguments, optimizer.param_groups[0])
        except Exception:
            raise InvalidValue(
                f"from_optimizer: {name} cannot be made anew ({error}): write ShardedOptimizer(handle, {name}, ...), "
                "which needs a class that takes parameters, and not the model"
            ) from error
    for what, mine, theirs in (
        ("the default", optimizer.defaults, new.defaults),
        ("the attribute", _attributes(optimizer), _attributes(new)),
    ):
        for key in mine.keys() & theirs.keys():
            one, other = mine[key], theirs[key]
            if plain(one) != plain(other) or (isinstance(one, (set, frozenset)) and one != other):
                raise InvalidValue(
                    f"from_optimizer: {what} {key} is {_short(one)}, and {_short(other)} in a {name} that "
                    "is made anew, as the one that steps: name the argument that it comes from, "
                    "from_optimizer(handle, optimizer, ARGUMENT=...), or set optimizer.ARGUMENT = ... before it is "
                    "taken over (in a Trainer, Accelerate or Lightning)"
                )


def _attributes(optimizer: torch.optim.Optimizer) -> Options:
    return {k: v for k, v in vars(optimizer).items() if not k.startswith("_") and k not in _OF_TORCH}


def _short(value: Any) -> str:
    """The value in words; tensors, also those in a dict, by their shape."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_short(one)}' for key, one in value.items())}}}"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.numel() > 1 else repr(value)
