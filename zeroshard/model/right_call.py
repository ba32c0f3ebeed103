"""Errors that name the right call after common mistakes.

For example `handle(x)`, an optimizer instance in place of its class, the model in place of its handle.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from zeroshard.comm.user_streams import is_captured
from zeroshard.errors import InvalidState, InvalidType, InvalidValue
from zeroshard.model.absent import IN_DDP, IN_FSDP, RECORDED
from zeroshard.model.paths import Modules
from zeroshard.model.readers import takes_hooks

_RETURNS = "shard() returns a handle, and the model stays the object it was: `handle = zeroshard.shard(model, ...)`"


_ELSEWHERE = {
    "backward": "loss.backward(), or optimizer.backward(loss), of a zeroshard.ShardedOptimizer",
    "step": "optimizer.step(), of a zeroshard.ShardedOptimizer",
    "clip_grad_norm_": "optimizer.clip_grad_norm_(max_norm), of a zeroshard.ShardedOptimizer",
    "save_checkpoint": "zeroshard.save(directory, handle, optimizer, step=...)",
    "load_checkpoint": "zeroshard.load(directory, handle, optimizer)",
    "module": "handle.model",
}
"""Methods and attributes of the wrappers of other libraries -> what to write here."""


class NotTheModel:
    """Base class of handles: calls that only a module supports (`handle(x)`, `handle.parameters()`, ...) raise, and
    name the right call."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise InvalidType(f"a {type(self).__name__} cannot be called. {_RETURNS}, then model(...)")

    if not TYPE_CHECKING:  # so that type checkers still find misspelt names

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _ELSEWHERE:
                text += f": write {_ELSEWHERE[name]}"
            elif name in ("state_dict", "load_state_dict"):
                text += f". {_RETURNS}, then handle.{name.replace('state', 'full_state')}(...)"
            elif hasattr(nn.Module, name) and not name.startswith("_"):
                text += f". {_RETURNS}, then model.{name}"
            raise AttributeError(text, name=name, obj=self)


def expect_handle(found: object, call: str) -> None:
    """Raises:
    TypeError: `found` is not a handle. `call`: the right call, with `handle` in its place, for the message."""
    if not isinstance(found, NotTheModel):
        hint = f". {_RETURNS}" if isinstance(found, nn.Module) else ""
        raise InvalidType(f"expected the handle that shard() has returned, found {_kind(found)}: write {call}{hint}")


_WRAPPERS = {
    "DistributedDataParallel": "and reduces gradients as well",
    "DDP": "by replicate(), and reduces gradients as well",
    "DataParallel": "and copies it to other devices at each forward",
    "FullyShardedDataParallel": "and sharded already",
    "DeepSpeedEngine": "and trained by it",
}
"""Wrappers of a module that do what shard() does."""


def expect_module(found: object) -> None:
    """Raises:
    TypeError: the argument of `shard` is not a module."""
    if isinstance(found, nn.Module) and not takes_hooks(found):
        raise InvalidType(
            "shard: torch.jit.script has made this module, and torch runs no hooks around its calls. Shard the module "
            "that it was made from, or an nn.Module that contains the scripted one"
        )
    if isinstance(found, nn.Module):
        return
    hint = ": the model comes first, shard(model, 'zero3')"
    if isinstance(found, torch.optim.Optimizer):
        hint += ", then ShardedOptimizer.from_optimizer(handle, optimizer)"
    elif isinstance(found, NotTheModel):
        hint = f": it is sharded already. {_RETURNS}"
    elif isinstance(found, type) and issubclass(found, nn.Module):
        hint = f": build the model first, {found.__name__}(...)"
    raise InvalidType(f"shard takes a module, found {_kind(found)}{hint}")


def expect_unwrapped(modules: Modules, managed: Collection[nn.Parameter]) -> None:
    """`managed`: the parameters that are to be sharded.

    Raises:
        ValueError: some of them are inside another library's wrapper, or a CUDA graph.
    """
    mine = set(map(id, managed))
    for path, module in modules.items():
        wrapper, is_graph = _wrapper(type(module).__mro__), _is_graph(module)
        if not (wrapper or is_graph) or mine.isdisjoint(map(id, module.parameters())):
            continue
        if wrapper is not None:
            raise InvalidValue(
                f"{path or 'the model'} is wrapped in {wrapper}, {_WRAPPERS[wrapper]}: shard a model that has never "
                "been wrapped. (To keep torch DDP, pass its parameters to ShardedOptimizer, without shard())"
            )
        raise InvalidValue(
            f"{path or 'the model'} is a CUDA graph (torch.cuda.make_graphed_callables), which reads its weights where "
            "they lay when it was captured, and shard() moves them: shard a model that has not been captured"
        )


def _is_graph(module: nn.Module) -> bool:
    """Whether `torch.cuda.make_graphed_callables` has replaced its forward."""
    return getattr(vars(module).get("forward"), "__qualname__", "").startswith("make_graphed_callables.")


@lru_cache(maxsize=256)  # a model has many modules of few classes
def _wrapper(classes: tuple[type, ...]) -> str | None:
    """The name of the wrapper that the class with these base classes is, or extends; None: it is none."""
    of_libraries = [one.__name__ for one in classes if one.__module__.split(".")[0] in _LIBRARIES]
    return next((name for name in of_libraries if name in _WRAPPERS), None)


_LIBRARIES = ("torch", "deepspeed", "apex", "fairscale")


def expect_no_recording(stay: Iterable[bool]) -> bool:
    """Called when a forward begins. `stay`: of each unit, whether its weights stay where they are after it; asked only
    if something records. Returns whether it becomes a part of a CUDA graph, and may.

    Raises:
        RuntimeError: torch.export runs it; or torch.jit.trace, which keeps the memory of weights that do not stay; or
            it becomes a part of a CUDA graph, and something has to be done on the host.
    """
    if torch.compiler.is_exporting() or (torch._C._is_tracing() and not all(stay)):
        raise InvalidState(RECORDED)
    if not is_captured():
        return False
    if torch.is_grad_enabled() or not all(stay):
        raise InvalidState(
            "a CUDA graph would record a forward of the sharded model, and a replay does nothing on the host, where "
            "weights are gathered and gradients are taken: capture only a forward under torch.no_grad() whose weights "
            "are replicated (zero2), or a plain model that has loaded handle.full_state_dict()"
        )
    return True


def expect_autograd() -> None:
    """Called when a backward begins, or is about to.

    Raises:
        RuntimeError: torch's compiled autograd runs it, which does not call what it was asked to call at its end.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if any(getattr(module, name, False) for name in ("compiled_autograd_enabled", "in_compiled_autograd_region")):
        raise InvalidState(
            "backward: torch's compiled autograd runs it, and nothing would be called when it is over: gradients would "
            "not be complete. Set torch._dynamo.config.compiled_autograd = False (modules, and functions that are a "
            "whole step, may be compiled)"
        )


def expect_no_ddp_around(parameters: Iterable[nn.Parameter]) -> None:
    """Called when a module begins that needs these parameters.

    Raises:
        RuntimeError: it runs inside a DistributedDataParallel that reduces gradients of some of these parameters.
    """
    ddp = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None:
        return
    reduced = {id(p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}
    if not reduced.isdisjoint(map(id, parameters)):
        raise InvalidState(IN_DDP)


def expect_no_ddp_inside(modules: Iterable[nn.Module], parameters: set[int]) -> None:
    """`parameters`: the ids of the sharded ones.

    Raises:
        RuntimeError: one of these modules has been put into a DistributedDataParallel, or into `replicate()`, that
            reduces gradients of some of them.
    """
    for module in modules:
        is_ddp = _wrapper(type(module).__mro__) in ("DistributedDataParallel", "DDP")
        if is_ddp and not parameters.isdisjoint(map(id, module.parameters())):
            raise InvalidState(IN_DDP)


def expect_no_fsdp(model: nn.Module, newcomer: str) -> None:
    """`newcomer`: the name of a parameter that has come into the model.

    Raises:
        RuntimeError: it is one of FSDP's.
    """
    classes = {one.__name__ for module in model.modules() for one in type(module).__mro__}
    if "FSDPModule" in classes or newcomer.endswith("_flat_param"):
        raise InvalidState(IN_FSDP)


def expect_parameters(found: object) -> None:
    """Check the `params` argument of an optimizer.

    Raises:
        TypeError: neither a handle nor an iterable of tensors or dicts.
    """
    hint = ""
    if isinstance(found, nn.Module):
        hint = f": write ShardedOptimizer(handle, torch.optim.AdamW, lr=...). {_RETURNS}"
    elif isinstance(found, (type, torch.optim.Optimizer)):
        hint = ": the handle comes first, ShardedOptimizer(handle, torch.optim.AdamW, lr=...)"
    elif isinstance(found, Tensor):
        hint = ": put it in a list"
    elif isinstance(found, NotTheModel) or hasattr(found, "__iter__"):
        return
    raise InvalidType(f"params must be a handle, or an iterable of tensors or dicts, found {_kind(found)}{hint}")


def expect_class(found: object, positional: Sequence[object], named: Iterable[str]) -> None:
    """Check the `optimizer_class` argument, that nothing comes behind it without a name (`positional`), and that no
    name is `params` (`named`).

    Raises:
        TypeError: an instance, a name, or something else; arguments without a name; parameters.
    """
    if isinstance(found, type) and hasattr(found, "consolidate_state_dict"):
        raise InvalidType(
            f"optimizer_class: {found.__name__} divides its state over the ranks itself: pass the class that it was "
            "given, ShardedOptimizer(handle, torch.optim.AdamW, lr=...), whose state is divided here"
        )
    if isinstance(found, type) and all(hasattr(found, name) for name in ("step", "zero_grad")):
        if "params" in named or (positional and (isinstance(positional[0], nn.Parameter) or _is_many(positional[0]))):
            raise InvalidType(
                f"{found.__name__} takes its parameters from the first argument, the handle: write ShardedOptimizer("
                f'handle, {found.__name__}, lr=...). Param groups go in its place: ShardedOptimizer([{{"params": ..., '
                f'"lr": ...}}, ...], {found.__name__})'
            )
        if positional:
            names = list(inspect.signature(found).parameters)[1:]  # without `params`
            words = ", ".join(f"{name}={value!r:.80}" for name, value in zip(names, positional, strict=False))
            raise InvalidType(
                f"the arguments of {found.__name__} are passed by name: write ShardedOptimizer(handle, "
                f"{found.__name__}, {words or 'lr=...'})"
            )
        return
    name = "torch.optim.AdamW"
    if isinstance(found, torch.optim.Optimizer):
        raise InvalidType(
            f"optimizer_class must be a class of optimizers, found {_kind(found)}: write "
            "ShardedOptimizer.from_optimizer(handle, optimizer), which takes it over as it is"
        )
    if isinstance(found, str):
        known = {one.lower(): one for one in dir(torch.optim) if isinstance(getattr(torch.optim, one), type)}
        name = f"torch.optim.{known.get(found.lower(), 'AdamW')}"
    what = f"the text {found!r}" if isinstance(found, str) else _kind(found)
    raise InvalidType(
        f"optimizer_class must be a class of optimizers, found {what}: write ShardedOptimizer(handle, {name}, lr=...), "
        "with the arguments of the class behind it; it is built over the parts of the parameters that a rank has"
    )


def as_limit(name: str, found: object) -> float:
    """The argument of a clip as a number.

    Raises:
        TypeError: something else; torch's functions have the parameters in its place."""
    with suppress(TypeError, ValueError, RuntimeError):  # of a tensor of many elements
        return float(found)  # type: ignore[arg-type]
    call = "clip_grad_value_(1.0)" if name == "clip_value" else "clip_grad_norm_(1.0)"
    raise InvalidType(
        f"{name} must be a number, found {_kind(found)}: write optimizer.{call}, which clips the gradients of all "
        "parameters of the optimizer, and takes no parameters"
    )


def _is_many(found: object) -> bool:
    return isinstance(found, Iterable) and not isinstance(found, (str, tuple))


_BESIDE_STEP = {
    "optimizer.clip_grad_norm_(1.0) before step(), with the norm": (
        *("clip_norm", "max_norm", "max_grad_norm", "grad_norm", "clip_grad_norm", "gradient_clipping", "clip_grad"),
        "gradient_clip_val",
    ),
    "optimizer.clip_grad_value_(1.0) before step(), with the bound": ("clip_value", "clip_grad_value"),
    "ShardedOptimizer(..., loss_scale='dynamic'), and optimizer.backward(loss) in place of loss.backward()": (
        *("grad_scaler", "scaler", "amp_scaler", "grad_scale", "scale", "loss_scale", "found_inf"),
    ),
    "optimizer.param_groups[0]['lr'] = ... before step(), or a scheduler": ("lr", "learning_rate"),
}
"""What to write -> arguments of `step` that others have in its place (DeepSpeed, apex, FairScale, Accelerate)."""


def beside_step(name: str) -> str:
    """For the message about an argument that `step` does not take: what to write; "" if that is not known."""
    return next((f": write {remedy}" for remedy, names in _BESIDE_STEP.items() if name in names), "")


def expect_instance(found: object, *, is_sharded: bool) -> None:
    """Check the argument of `from_optimizer`, a plain optimizer. `is_sharded`: `found` is a ShardedOptimizer.

    Raises:
        TypeError: a class, a sharded optimizer, or something else.
    """
    if isinstance(found, torch.optim.Optimizer) and not is_sharded:
        return
    remedy = "make it over model.parameters() first"
    if isinstance(found, type):
        remedy = f"write ShardedOptimizer(handle, {found.__name__}, lr=...), with the arguments of the class behind it"
    elif is_sharded:
        remedy = "it is what from_optimizer returns"
    elif isinstance(found, NotTheModel):
        remedy = "the handle comes first, from_optimizer(handle, optimizer)"
    raise InvalidType(f"from_optimizer takes a plain optimizer that is made already, found {_kind(found)}: {remedy}")


def _kind(found: object) -> str:
    if isinstance(found, type):
        return f"the class {found.__name__}"
    name = type(found).__name__
    if isinstance(found, nn.Module):
        return f"a module ({name})"
    if isinstance(found, torch.optim.Optimizer):
        return f"an optimizer that is made already ({name})"
    return "a tensor" if isinstance(found, Tensor) else f"an object of type {name}"
