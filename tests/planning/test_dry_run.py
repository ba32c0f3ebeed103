"""A dry run as one of up to 1,024 ranks, in one process: the memory of each phase and the sent bytes are as planned."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.grids import EVERYTHING, grid, pairs_of
from tests.kit import PLANS, Block, Net, make
from tests.planning.models import MODELS
from tests.planning.test_plan import LOW_BIT, PRECISIONS, SCHEDULES, accumulate, expect_measured, without_phase
from tests.together import in_turn
from zeroshard.layout import pool_plan
from zeroshard.planning import Configuration, dry_run
from zeroshard.step import agreement
from zeroshard.testing import run_ranks

MESHES = {"2": (2, 1), "8": (8, 1), "64": (64, 1), "1024": (1024, 1), "8 x 8": (64, 8)}
OPTIMIZERS = ("AdamW", "SGD:momentum=0.9", "Muon+AdamW", LOW_BIT)
PLACES = ("first", "middle", "last")
SELECTED = pairs_of(MESHES, PLANS, PRECISIONS, OPTIMIZERS, SCHEDULES, MODELS, PLACES)
PROVEN = ("64", "1024"), PLANS, PRECISIONS, OPTIMIZERS, SCHEDULES, MODELS, ("middle",)


def alone(check: object) -> None:
    """Run `check` in a process of its own, without a process group."""

    def run(rank: int) -> None:
        dist.destroy_process_group()
        assert callable(check)
        check()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    run_ranks(run, 1)


def expect_case(case: tuple[Any, ...]) -> None:
    """A case of `SELECTED`."""
    mesh_name, plan, precision, optimizer, schedule, name, place = case
    (ranks, replicas), (micro_batches, every) = MESHES[mesh_name], SCHEDULES[schedule]
    configuration = Configuration(
        plan=plan,
        ranks=ranks,
        replicas=replicas,
        precision=PRECISIONS[precision],
        optimizer=optimizer,
        units=MODELS[name].units,
        micro_batches=micro_batches,
        reduce_every_micro_batch=every,
        device="cpu",
        transport="native",
        rank={"first": 0, "middle": ranks // 2, "last": ranks - 1}[place],
    )
    with dry_run(ranks, replicas=replicas, rank=configuration.rank) as mesh:
        _, handle, _ = expect_measured(MODELS[name], configuration, mesh, non_finite="ignore")
        handle.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("low_bit")
@pytest.mark.parametrize("model", MODELS if EVERYTHING else [""])
def test_a_dry_run_holds_and_sends_what_is_planned(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is received is arbitrary. If it is not finite, the norms are exchanged once more, which is not planned.
    monkeypatch.setattr(agreement, "exchange_norms", lambda collectives, control, norms: control)
    every = [*SELECTED, *(itertools.product(*PROVEN) if EVERYTHING else ())]
    cases = [(case,) for case in every if model in ("", case[5])]
    alone(lambda: in_turn(lambda rank, case: expect_case(case), cases)(0))
    print(f"{len(cases)} dry runs: planned and measured are equal {model}")


@pytest.mark.parametrize("kept_bytes", [0, 5_000, 12_000, 20_000])
def test_which_frozen_weights_stay_gathered_is_planned(kept_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner once expected all of them to be gathered again in each step if any buffer was given back, also a
    bucket; and not to be gathered for backward in the first block with adapters."""
    monkeypatch.setattr(pool_plan, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(agreement, "exchange_norms", lambda collectives, control, norms: control)  # as above

    def check() -> None:
        with dry_run(2) as mesh:
            configuration = Configuration(plan="zero3", ranks=2, micro_batches=2, device="cpu", transport="native")
            expect_measured(MODELS["LoRA"], configuration, mesh, non_finite="ignore")[1].close()

    alone(check)


def test_a_module_with_more_weights_of_its_own_than_a_unit_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused experts, above the usual size of a unit: under ZERO3 the plan raised "not enough values to unpack"."""
    monkeypatch.setattr(agreement, "exchange_norms", lambda collectives, control, norms: control)  # as above

    def check() -> None:
        with dry_run(3) as mesh:
            configuration = Configuration(plan="zero3", ranks=3, device="cpu", transport="native")
            of = replace(MODELS["experts"], units=1000)
            planned, handle, _ = expect_measured(of, configuration, mesh, non_finite="ignore")
            assert any(not unit.spec.calls for unit in planned.training.units)
            handle.close()

    alone(check)


def test_another_number_of_ranks_is_not_what_is_planned() -> None:
    """The check can fail: with one rank more, neither bytes nor messages match the plan."""

    def check() -> None:
        with torch.device("meta"):
            options = {"units": Block, "device": "cpu", "transport": "native"}
            planned = zeroshard.plan(Net(), Configuration(ranks=8, **options))
        with dry_run(9) as mesh:
            handle = zeroshard.shard(model := make(Net), "zero3", units=Block, mesh=mesh)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, non_finite="ignore")
            accumulate(model, handle, optimizer, planned.configuration, 0)
            optimizer.step()
            assert handle.memory() != vars(planned.at_rest)
            assert Counter(without_phase(handle.comm_log.entries)) != without_phase(planned.events)

    alone(check)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit:block_size=256"])
def test_quantised_state_is_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a piece decides whether torchao's classes quantise its state: they leave small pieces in full
    precision."""
    torchao = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling takes a minute
    class_name, _, option = name.partition(":")

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 100), nn.Linear(100, 7))

    def check() -> None:
        for plan, ranks, precision in grid(PLANS, (2, 8), ("fp32", "bf16")):
            with torch.device("meta"):
                options = {"plan": plan, "units": nn.Linear, "precision": precision, "optimizer": name, "ranks": ranks}
                planned = zeroshard.plan(build(), Configuration(device="cpu", transport="native", **options))
            with dry_run(ranks) as mesh:
                handle = zeroshard.shard(model := make(build), plan, units=nn.Linear, precision=precision, mesh=mesh)
                chosen = {"block_size": 256} if option else {}
                optimizer = zeroshard.ShardedOptimizer(
                    handle, getattr(torchao, class_name), non_finite="ignore", **chosen
                )
                for _ in range(2):
                    model(torch.ones(3, 200)).float().mean().backward()
                    optimizer.step()
                handle.engine.gatherer.settle()
                assert handle.memory() == vars(planned.at_rest), (plan, ranks, precision)
                as_fp32 = zeroshard.plan(build(), replace(planned.configuration, optimizer="AdamW"))
                assert planned.at_rest.state < as_fp32.at_rest.state * (0.5 if ranks == 2 else 1)
                handle.close()

    alone(check)


def test_what_makes_no_mesh_and_a_group_that_is_there() -> None:
    with pytest.raises(ValueError, match="6 ranks do not divide into 4 replicas"), dry_run(6, replicas=4):
        pass
    with pytest.raises(ValueError, match="ranks must be a whole number"), dry_run(0):
        pass

    def check(rank: int) -> None:
        with pytest.raises(RuntimeError, match="in a process group already"), dry_run(2):
            pass

    run_ranks(check, 1)
