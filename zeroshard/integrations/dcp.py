"""A sharded model and its optimizer in `torch.distributed.checkpoint`, as `Stateful` objects.

dcp.save({**stateful(handle, optimizer), "epoch": 3}, checkpoint_id=folder)
dcp.load(stateful(handle, optimizer), checkpoint_id=folder)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from zeroshard.comm.together import together
from zeroshard.errors import InvalidState, InvalidType, InvalidValue
from zeroshard.handle import Handle
from zeroshard.model.right_call import expect_handle
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.plain_model import names_by_id
from zeroshard.step.assignment import Options


def stateful(
    handle: Handle, optimizer: ShardedOptimizer | None = None, *, loss_scale: bool = True
) -> dict[str, Stateful]:
    """The objects to pass to `dcp.save` and `dcp.load`, under the keys `model` and `optim`.

    The folder has the layout of `dcp.save({"model": weights, "optim": state})` with the results of torch's
    `get_state_dict`. So FSDP2 loads it, folders of FSDP2 are loaded, and `zeroshard import` reads both. Weights are
    the values of main. Each rank holds the whole state in the memory of its host while it saves or loads: for models
    too large for that, use `zeroshard.save` with `zeroshard export --format dcp`.

    An optimizer that has not stepped is saved, and asked for, with a state of zeros. The state of a parameter that is
    frozen is asked for only if the optimizer has it: unfreeze before the load what is trained later.

    Gradients that wait for a step are refused, as `zeroshard.save` and `load` refuse them.

    Args:
        handle: of the model.
        optimizer: its optimizer; None: only the model.
        loss_scale: False: leave out the state of the loss scaler, if there is one. `dcp.load` asks for it, and a folder
            of FSDP2, of `zeroshard export`, or of a run without a loss scale (bf16) has none: "Missing key".

    Raises:
        TypeError: not a handle, or not a ShardedOptimizer.
        ValueError: the optimizer belongs to another model.
    """
    expect_handle(handle, "zeroshard.integrations.dcp.stateful(handle, optimizer)")
    if optimizer is None:
        return {"model": _Model(handle)}
    if not isinstance(optimizer, ShardedOptimizer):
        raise InvalidType(
            f"stateful: expected a ShardedOptimizer, found {type(optimizer).__name__}: one optimizer (param groups may "
            "have classes of their own); save a plain optimizer under a key of its own"
        )
    if optimizer.engine is not handle.engine:
        raise InvalidValue("stateful: the optimizer belongs to another model than the handle: one call for each model")
    return {"model": _Model(handle), "optim": _Optimizer(optimizer, loss_scale)}


class _Model(Stateful):
    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def state_dict(self) -> dict[str, Any]:
        """Names -> full tensors on the CPU, main's values. Collective.

        Raises:
            RuntimeError: gradients are waiting for a step, on every rank."""
        _expect_no_gradients(self._handle.engine)
        return dict(self._handle.full_state_dict(main=True, device="cpu"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._handle.load_full_state_dict(state_dict)


def _expect_no_gradients(engine: Engine) -> None:
    expect = partial(engine.expect_no_gradients, "torch.distributed.checkpoint")
    together(engine.collectives, "torch.distributed.checkpoint", expect, errors=(InvalidState,))


class _Optimizer(Stateful):
    """In the layout of torch's `get_optimizer_state_dict`: names in the place of numbers."""

    def __init__(self, optimizer: ShardedOptimizer, loss_scale: bool) -> None:
        self._optimizer, self._loss_scale = optimizer, loss_scale

    def state_dict(self) -> dict[str, Any]:
        """Collective. Parameters that have no state yet get zeros: `dcp.load` reads what is asked for, and nothing
        else, and would skip their state in silence."""
        found, names = self._optimizer.state_dict(device="cpu"), self._names()
        if not self._loss_scale:
            found.pop("loss_scale", None)
        state = {name: found["state"].get(number) or self._blank(number) for number, name in enumerate(names)}
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in found["param_groups"]]
        return {**found, "state": {name: of_name for name, of_name in state.items() if of_name}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Collective. A parameter whose state was blank starts with none, as if it had not been saved: a class may have
        numbers that do not start at zero, or do something else in its first step.

        Raises:
            ValueError: it is of other parameters. (torch reads what is asked for, and the param groups as a whole.)
        """
        number = {name: index for index, name in enumerate(self._names())}
        if unknown := [name for group in state_dict["param_groups"] for name in group["params"] if name not in number]:
            raise InvalidValue(
                f"load: the folder has the optimizer's state of {', '.join(unknown[:3])}, the name of no parameter of "
                "this optimizer: build the model and its param groups as when it was saved; or load the model alone, "
                "stateful(handle, None)"
            )
        state = {number[name]: one for name, one in state_dict["state"].items() if not _is_blank(one)}
        groups = [
            {**group, "params": [number[name] for name in group["params"]]} for group in state_dict["param_groups"]
        ]
        self._optimizer.load_state_dict({**state_dict, "state": state, "param_groups": groups})

    def _names(self) -> list[str]:
        names = names_by_id(self._optimizer.engine.units)
        return [names.get(id(parameter), "(unknown)") for parameter in self._optimizer.groups.parameters()]

    def _blank(self, number: int) -> dict[str, Any]:
        """The state that the class creates for a parameter, of zeros; empty for one that is frozen."""
        lists, classes = self._optimizer.groups.lists, self._optimizer.groups.classes
        indices = [index for index, group in enumerate(lists) for _ in group["params"]]
        parameter, index = self._optimizer.groups.parameters()[number], indices[number]
        if not parameter.requires_grad:
            return {}
        options = {key: value for key, value in lists[index].items() if key != "params"}
        # What is for a GPU is refused on a CPU (foreach: without capturable, if lr is a tensor). The keys are the same.
        options |= {key: False for key in ("capturable", "foreach") if key in options}
        return _blank_state(partial(classes.of_groups[index], **classes.options_of(index)), options, parameter)


def _blank_state(make: Callable[..., torch.optim.Optimizer], options: Options, like: Tensor) -> dict[str, Any]:
    """The state of one parameter after a step with gradients of zeros. Numbers (how many steps there were) become
    zero."""
    dtype = torch.float32 if like.dtype.itemsize < 4 else like.dtype
    parameter = nn.Parameter(torch.zeros(like.shape, dtype=dtype, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([{**options, "params": [parameter]}])
    optimizer.step()
    state = dict(optimizer.state[parameter])
    for value in state.values():
        if isinstance(value, Tensor) and value.dim() == 0:
            value.zero_()
    return state


def _is_blank(state: dict[str, Any]) -> bool:
    """Whether it is that of a parameter that has not been stepped: it counts no step, or all of it is zero."""
    values = [state["step"]] if "step" in state else list(state.values())
    return not any(value.any() if isinstance(value, Tensor) else value for value in values)
