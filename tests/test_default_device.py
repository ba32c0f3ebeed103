"""`torch.set_default_device`, as scripts for GPUs call it: what the engine makes for the host stays on the CPU.

The default is "meta" here, which stands for a GPU: values that land there by mistake cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS
from tests.timed_backend import timed_ranks
from zeroshard.testing import run_ranks


class Momentum(torch.optim.Optimizer):
    """A class that is not on the list, so a trial steps it."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                moment = state.setdefault("moment", torch.zeros_like(p))
                p.add_(moment.mul_(0.9).add_(p.grad), alpha=-group["lr"])


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def whole_life(rank: int, plan: zeroshard.Plan, kind: type[torch.optim.Optimizer], folder: Path) -> dict[str, Tensor]:
    """Train, save, load, read and write the weights; the weights at the end."""
    with torch.device("cpu"):
        model = model_of()
    x = torch.randn(4, 8, device="cpu", generator=torch.Generator().manual_seed(rank))
    handle = zeroshard.shard(model, plan)
    optimizer = zeroshard.ShardedOptimizer(handle, kind, lr=0.1)
    for step in range(3 if EVERYTHING else 2):
        optimizer.zero_grad()
        optimizer.backward(model(x).square().mean(), weight=1.0 + rank)
        optimizer.clip_grad_norm_(0.1)
        assert optimizer.step().applied
        zeroshard.save(folder, handle, optimizer, step=step, background=step == 1)
    zeroshard.load(folder, handle, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    handle.load_full_state_dict(handle.full_state_dict())
    with torch.no_grad(), handle.unsharded(write=True):
        model[0].weight.mul_(2)
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    state = handle.full_state_dict(device="cpu")
    handle.close()
    return state


@pytest.mark.parametrize("backend", ["gloo", "late"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, Momentum, zeroshard.optim.Lamb])
def test_training_does_not_depend_on_the_default_device(
    kind: type[torch.optim.Optimizer], backend: str, tmp_path: Path
) -> None:
    """Each class and each backend under all plans, in turn."""
    first = (kind is Momentum) ^ (backend == "late")
    plans = PLANS if EVERYTHING else PLANS[first::2]

    def check(rank: int) -> None:
        for number, plan in enumerate(plans):
            expected = whole_life(rank, plan, kind, tmp_path / f"cpu-{number}")
            with torch.device("meta"):
                assert torch.empty(1).is_meta  # the control
                found = whole_life(rank, plan, kind, tmp_path / f"meta-{number}")
            assert all(torch.equal(found[name], value) for name, value in expected.items())

    if backend == "gloo":
        run_ranks(check, 2)
    else:
        with timed_ranks(backend):
            run_ranks(check, 2)


def test_a_model_may_be_sharded_inside_the_scope_that_made_it_without_values() -> None:
    def make(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    def check(rank: int) -> None:
        with torch.device("meta"):
            handle = zeroshard.shard(model_of(), "zero3", materialize=make)
        assert all(bool(value.isfinite().all()) for value in handle.full_state_dict().values())

    run_ranks(check, 2)
