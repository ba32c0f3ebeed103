"""At 16,384 ranks a full buffer is a multiple of 4.2 M elements. A unit of the fp32 norms of one layer has 32 k, so
each of them was padded to 128 times its size. Now small neighbours are one unit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import PLANS, Block, Job, Net, loss_of_tokens, make, same_bits, train, transport_of
from tests.together import Together
from zeroshard.layout.layout import numel_multiple
from zeroshard.model import small_units
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.model.units import choose_units
from zeroshard.planner import plan_memory
from zeroshard.planning import Configuration, plan
from zeroshard.testing import expect_same_logs, run_ranks

KEPT = zeroshard.MixedPrecision(param=torch.bfloat16, grad=torch.float32, main=torch.float32, keep=(nn.LayerNorm,))
JOBS = {
    "one kind": Job(model=partial(Net, blocks=5)),
    "norms of their own": Job(model=partial(Net, blocks=5), precision=KEPT),
    "every norm and matrix": Job(model=partial(Net, blocks=2), units=[nn.LayerNorm, nn.Linear]),
}
SEVERAL = Together(JOBS, on_three=("norms of their own",))


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges as on many ranks: units of less than 2048 elements (2 ranks; a block has 1481) or 3072 (3 ranks)."""
    monkeypatch.setattr(small_units, "NEGLIGIBLE", 0)
    monkeypatch.setattr(small_units, "LEAST_MULTIPLES", 4)


@pytest.mark.usefixtures("merged")
@pytest.mark.parametrize("name", JOBS)
def test_merged_units_train_to_the_bit(name: str) -> None:
    SEVERAL.expect_reference(name)


def names_of(specs: list[UnitSpec]) -> list[str]:
    return [spec.name for spec in specs]


@pytest.mark.usefixtures("merged")
def test_which_are_merged() -> None:
    def check(rank: int) -> list[Any]:
        model = make(partial(Net, blocks=5))
        handle = zeroshard.shard(model, "zero3", units=Block)
        names = [unit.spec.name for unit in handle.engine.units]
        assert names == ["root", "blocks.0 + blocks.1", "blocks.2 to blocks.4"]
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, non_finite="ignore")
        loss_of_tokens(model, rank, 0, 0).backward()
        gathered = [event.unit for event in handle.comm_log.entries if event.op == "all_gather"]
        # Once in the forward for all of their modules; in backward the last one is there still.
        assert [gathered.count(name) for name in names] == [1, 1, 1], gathered
        optimizer.step()
        return handle.comm_log

    expect_same_logs(run_ranks(check, 2))


@pytest.mark.by_cpu
@pytest.mark.usefixtures("merged")
def test_norms_between_other_units_are_gathered_once_and_planned() -> None:
    """They have a buffer of their own, so that the others still take turns in two."""
    model = partial(Net, blocks=8)
    options: dict[str, Any] = {"units": Block, "precision": KEPT}

    def check(rank: int) -> Any:
        sharded = make(model)
        handle = zeroshard.shard(sharded, "zero3", **options)
        planned = partial(plan_memory, make(model), "zero3", 2, rank=rank, transport=transport_of(handle), **options)
        specs = [unit.spec for unit in handle.engine.units]
        (norms,) = [spec for spec in specs if spec.outer and not spec.name.startswith("root")]
        assert len(norms.names) == 2 * 8
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, non_finite="ignore")
        for step in range(2):
            handle.comm_log.entries.clear()
            loss_of_tokens(sharded, rank, 0, step).backward()
            gathered = [event.unit for event in handle.comm_log.entries if event.op == "all_gather"]
            first = next(spec.name for spec in specs if not spec.outer)
            assert gathered.count(norms.name) == 1 < gathered.count(first), gathered
            optimizer.step()
        for peak in (False, True):
            assert handle.memory(peak=peak) == planned(peak=peak)
        return handle.comm_log

    expect_same_logs(run_ranks(check, 2))


@pytest.mark.usefixtures("merged")
def test_forwards_of_many_modules_in_one_unit() -> None:
    """A forward visits a merged unit once for each of its modules. When only 8 visits for each unit were kept, those of
    a long forward were forgotten in the middle of it."""
    job = Job(model=partial(Net, blocks=40), steps=1)

    def check(rank: int) -> Any:
        small_units.LEAST_MULTIPLES = 10_000  # all blocks are one unit
        outcomes = [train(job, plan, rank) for plan in PLANS]
        assert all(same_bits(outcome.weights, outcomes[0].weights) for outcome in outcomes)
        return outcomes[3].log

    expect_same_logs(run_ranks(check, 2))


# On thousands of ranks, by the planner --------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = (nn.RMSNorm(width, dtype=torch.float32) for _ in range(2))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.up(self.after(self.before(x))))


@pytest.fixture(scope="module")
def large() -> nn.Module:
    """12 layers of 67 M elements in bf16, and fp32 norms of 8 k; on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(*(Layer(2880) for _ in range(12)), nn.RMSNorm(2880)).bfloat16()


@pytest.fixture(scope="module")
def with_norms(large: nn.Module) -> Iterator[nn.Module]:
    for layer in large:
        if isinstance(layer, Layer):
            layer.before.float(), layer.after.float()
    return large


def shares(specs: list[UnitSpec], ranks: int) -> dict[str, float]:
    """Unit -> the share of padding at the end of its full buffer."""
    layouts = {spec.name: spec.layout(ranks) for spec in specs}
    return {name: 1 - layout.end / layout.numel for name, layout in layouts.items()}


@pytest.mark.parametrize("ranks", [1024, 16384])
def test_padding_is_a_small_share(with_norms: nn.Module, ranks: int) -> None:
    before = choose_units(with_norms, Layer, None)
    after = small_units.with_small_ones_merged(before, numel_multiple(ranks))
    assert sorted(name for spec in after for name in spec.names) == sorted(n for spec in before for n in spec.names)
    of_norms = [spec for spec in after if spec.dtype == torch.float32]
    assert names_of(of_norms) == ["0 (float32) to 11 (float32)"]
    large_ones = [spec for spec in after if spec.dtype == torch.bfloat16 and not spec.outer]
    assert max(shares(large_ones, ranks).values()) < 1 / 16
    wasted = [sum(spec.layout(ranks).numel for spec in specs) for specs in (before, after)]
    assert wasted[0] - wasted[1] >= 11 * numel_multiple(ranks), "eleven times the padding of a unit of norms"
    forecast = plan(with_norms, Configuration(plan="zero3", ranks=ranks, units=Layer))
    assert forecast.num_units == len(after) and 0 < forecast.padding_share < 1 / 32
    assert max(shares(before, ranks).values()) > 0.9, "the control: as it was"


def test_up_to_256_ranks_units_stay_as_they_are(with_norms: nn.Module) -> None:
    specs = choose_units(with_norms, Layer, None)
    for ranks in (1, 2, 8, 64, 256):
        assert small_units.with_small_ones_merged(specs, numel_multiple(ranks)) == specs
    assert len(small_units.with_small_ones_merged(specs, numel_multiple(128, num_replicas=4))) < len(specs)
