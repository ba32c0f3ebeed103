"""A forward inside of a `TorchFunctionMode` of the user's, as those of nncf."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zeroshard
from tests.kit import DEVICE, make, same_bits
from tests.together import on_ranks


class Masking(TorchFunctionMode):
    """Puts masked weights in the place of weights, and wraps the calls of all modules."""

    def __init__(self, model: nn.Module, mask: Tensor) -> None:
        super().__init__()
        self.model, self.mask, self.calls = model, mask, 0
        self.weights = {id(p) for p in model.parameters() if p.dim() == 2}

    def __enter__(self) -> Any:
        for module in self.model.modules():
            of_module: Any = module._call_impl

            def call(called: nn.Module, *args: Any, of_module: Any = of_module) -> Any:
                self.calls += 1
                return of_module.__func__(called, *args)

            vars(module)["_call_impl"] = MethodType(call, module)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for module in self.model.modules():
            del vars(module)["_call_impl"]
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(one * self.mask if id(one) in self.weights else one for one in args), **(kwargs or {}))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.register_buffer("mask", torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        with Masking(self, self.mask) as mode:
            out: Tensor = self.net(x)
        assert mode.calls == 4
        return out


@on_ranks(2)
def test_a_mode_that_replaces_weights_is_not_for_the_engine(rank: int) -> None:
    """`parameter.data = ...` of the engine went to the masked tensor, and the forward raised; before, the wrapped call
    had no `__func__`."""
    x = torch.arange(8.0, device=DEVICE).reshape(2, 4) - rank
    states = []
    for plan, units in (("ddp", None), ("ddp", nn.Linear), ("zero1", nn.Linear), (zeroshard.ZERO3, nn.Linear)):
        model = make(Masked)
        handle = zeroshard.shard(model, plan, units=units)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
        states.append(handle.full_state_dict())
        before, after = make(Masked).net[0].weight, states[-1]["net.0.weight"]
        assert (before != after).nonzero().tolist() == [[i, i] for i in range(4)]
    assert all(same_bits(states[0], state) for state in states[1:])
