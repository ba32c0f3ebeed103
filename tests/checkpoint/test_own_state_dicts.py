"""Models whose `state_dict()` is not torch's: a checkpoint has all weights and buffers, whatever it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import plans_of, same_bits
from zeroshard.testing import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.norm(self.a(x))))


class WithoutArguments(Net):
    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()


class InParts(Net):
    def state_dict(self, **kwargs: Any) -> Any:  # type: ignore[override]
        return {"a": self.a.state_dict(), "others": {"b": self.b.state_dict()}}


class OfCopies(Net):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.detach().clone() for name, value in super().state_dict(*args, **kwargs).items()}


class CopiesOfBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._copy)

    @staticmethod
    def _copy(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["norm.running_mean"] = state["norm.running_mean"].clone()


def real_state(model: nn.Module, handle: Any) -> dict[str, Tensor]:
    with handle.unsharded():
        return {name: one.detach().clone() for name, one in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.by_gloo
def test_a_checkpoint_has_everything_whatever_the_models_state_dict_returns(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        for number, of_class in enumerate((WithoutArguments, InParts, OfCopies, CopiesOfBuffers)):
            for plan in plans_of(number):
                found = []
                for is_new in (True, False):
                    model = of_class()
                    handle = zeroshard.shard(model, plan, units=nn.Linear)
                    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=0.1)
                    folder = tmp_path / f"{of_class.__name__}-{plan}"
                    if is_new:
                        model(torch.randn(6, 4)).pow(2).mean().backward()
                        optimizer.step()
                        model.norm.running_mean.fill_(rank + 1.0)
                        zeroshard.save(folder, handle, optimizer, step=1)
                    else:
                        zeroshard.load(folder, handle, optimizer)
                    found.append(real_state(model, handle))
                assert same_bits(*found), (of_class, plan)
                assert found[0]["norm.running_mean"][0] == rank + 1

    run_ranks(check, 2)


@pytest.mark.by_gloo
def test_a_state_dict_without_arguments_is_refused_with_what_to_write() -> None:
    def check(rank: int) -> None:
        model = WithoutArguments()
        handle = zeroshard.shard(model, "zero3")
        with pytest.raises(RuntimeError, match=r"WithoutArguments does not take keep_vars=True.*model\.state_dict\(\)"):
            handle.full_state_dict()
        with handle.unsharded():
            assert len(model.state_dict()) == 9

    run_ranks(check, 2)
