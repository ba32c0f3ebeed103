"""Memory stays below `max_transient_bytes`; an operation that needs more is refused, with the number of bytes it needs.

With a limit of 200,000 bytes, a backward under `no_sync` once held 417,792 without an error.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import Block, Net, loss_of_tokens, make, travelling
from tests.together import on_ranks
from zeroshard.planner import plan_memory

SHARDED = ("zero2", "zero3")


def transients(memory: dict[str, int]) -> int:
    return memory["ring"] + memory["buckets"] + memory["scratch"]


def needed(plan: str, model: Any = Net, **more: Any) -> int:
    with torch.device("meta"):
        return transients(plan_memory(model(), plan, 2, units=Block, peak=True, **more))


def number_in(error: pytest.ExceptionInfo[BaseException]) -> int:
    found = re.search(r"(\d+) in all", str(error.value))
    assert found is not None, str(error.value)
    return int(found[1])


@pytest.mark.by_gloo
@on_ranks(2)
def test_no_sync_under_a_cap_is_refused_with_the_number_that_is_enough(rank: int) -> None:
    for plan in SHARDED:
        cap = needed(plan)
        handle = zeroshard.shard(make(Net), plan, units=Block, max_transient_bytes=cap)
        with pytest.raises(RuntimeError, match=f"max_transient_bytes={cap}: no_sync") as error, handle.no_sync():
            pass
        enough = number_in(error)
        assert enough == needed(plan, no_sync=True)
        handle.close()
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block, max_transient_bytes=enough)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        for step in range(2):
            with handle.no_sync():
                loss_of_tokens(model, rank, 0, step).backward()
            loss_of_tokens(model, rank, 1, step).backward()
            optimizer.step()
        assert transients(handle.memory(peak=True)) <= enough


@pytest.mark.by_gloo
@on_ranks(2)
def test_a_model_without_values_yet_is_divided_as_one_with_values(rank: int) -> None:
    """`shard` of a model on the meta device, with a limit and units by size, raised KeyError('meta')."""
    limit = needed("zero3") // 2
    filled = zeroshard.shard(make(Net), "zero3", max_transient_bytes=limit)
    with torch.device("meta"):
        model = Net()

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    handle = zeroshard.shard(model, "zero3", max_transient_bytes=limit, materialize=init)
    assert [unit.name for unit in handle.engine.units] == [unit.name for unit in filled.engine.units]
    loss_of_tokens(model, rank, 0, 0).backward()
    assert transients(handle.memory(peak=True)) <= limit


@pytest.mark.by_gloo
@on_ranks(2)
def test_units_that_turn_out_to_be_nested_are_refused_under_a_cap_and_else_get_their_places(rank: int) -> None:
    """Where shards lie side by side, full weights take no memory: then nothing is refused."""

    class Inside(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.other[0](x)) if hasattr(self, "other") else super().forward(x)

    def model() -> nn.Module:
        layers = nn.Sequential(*(Inside(16, 16) for _ in range(3)))
        for outer, inner in ((0, 1), (1, 2)):  # not submodules, so the module tree does not show the nesting
            object.__setattr__(layers[outer], "other", [layers[inner]])
        return layers

    plain = make(model)
    with torch.device("meta"):
        on_meta = model()
    x = torch.randn(2, 16)
    expected = plain(x)
    for way, has_limit in product(("shared", "pairwise"), (True, False)):
        cap = transients(plan_memory(on_meta, "zero3", 2, units=Inside, peak=True, transport=way))
        sharded = make(model)
        with travelling(way):
            zeroshard.shard(sharded, "zero3", units=Inside, max_transient_bytes=cap if has_limit else None)
        if way == "shared" or not has_limit:
            assert torch.equal(sharded(x), expected)
        else:
            with pytest.raises(RuntimeError, match=f"max_transient_bytes={cap}: unit 2, which runs inside") as error:
                sharded(x)
            assert number_in(error) > cap


@on_ranks(2)
def test_gradients_that_wait_for_an_unused_parameter_are_refused_under_a_cap(rank: int) -> None:
    """The unit with the unused parameter is reduced last, so no bucket is free for the units after it."""

    class Unused(Net):
        def __init__(self) -> None:
            super().__init__(blocks=5)
            self.blocks[4].unused = nn.Parameter(torch.ones(3))

    model = make(Unused)
    cap = needed("zero2", Unused)
    zeroshard.shard(model, "zero2", units=Block, max_transient_bytes=cap)
    with pytest.raises(RuntimeError, match=f"max_transient_bytes={cap}: a bucket for unit blocks") as error:
        loss_of_tokens(model, rank, 0, 0).backward()
    assert number_in(error) > cap


@on_ranks(2)
def test_parameters_that_are_let_train_are_refused_under_a_cap_before_anything_changes(rank: int) -> None:
    model = make(Net)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    with torch.device("meta"):
        frozen = Net()
        frozen.requires_grad_(False)
        frozen.head.requires_grad_(True)
    cap = transients(plan_memory(frozen, "zero2", 2, units=Block, peak=True))
    handle = zeroshard.shard(model, "zero2", units=Block, max_transient_bytes=cap)
    model.requires_grad_(True)
    with pytest.raises(ValueError, match=f"max_transient_bytes={cap}: these units need"):
        loss_of_tokens(model, rank, 0, 0)
    assert transients(handle.memory()) <= cap


@pytest.mark.by_gloo
@on_ranks(2)
def test_an_optimizer_whose_scratch_does_not_fit_is_refused(rank: int) -> None:
    cap = needed("zero3")
    model = make(Net)
    zeroshard.shard(model, "zero3", units=Block, max_transient_bytes=cap)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    with pytest.raises(RuntimeError, match=f"max_transient_bytes={cap}: the scratch of this optimizer"):
        zeroshard.ShardedOptimizer([{"params": matrices}], torch.optim.Muon, lr=0.1)
