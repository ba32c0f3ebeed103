"""Every precision, every elementwise optimizer: all plans compute one and the same, and what one process would.

| gradients are reduced     | model      | compared with the reference                                         |
|---------------------------|------------|---------------------------------------------------------------------|
| once per step             | a network  | bit for bit: the same additions in the same order                   |
| at every micro-batch      | `Counting` | bit for bit: integer gradients, so that the order does not matter   |

`fused=True` alone gets a tolerance: its kernel rounds the tail of a vector in another way than the body, and the
reference's vectors (whole parameters) end elsewhere than the engine's pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

import zeroshard
from tests.grids import at, grid
from tests.kit import (
    CANCELLED,
    PLANS,
    SCHEDULES,
    Counting,
    Net,
    Outcome,
    largest_difference,
    loss_of_integers,
    loss_of_tokens,
    same_bits,
    train,
)
from tests.parity.common import (
    ELEMENTWISE,
    FP32,
    PRECISIONS,
    Job,
    all_plans,
    all_references,
    expect_identical,
    expect_logs_of_ranks,
)
from zeroshard.loss_scale import ConstantScale, DynamicScale
from zeroshard.precision import MixedPrecision
from zeroshard.testing import run_ranks

BF16 = torch.bfloat16
FUSED = ("sgd", "adam", "adamw", "adagrad")
NARROW_WIRES = {
    "bf16 weights, fp32 sums, bf16 wire": MixedPrecision(reduce=BF16),
    "fp32 weights, fp32 sums, bf16 wire": MixedPrecision(FP32, FP32, BF16, FP32),
    "remainder, fp32 sums, bf16 wire": MixedPrecision(reduce=BF16, main="remainder"),
}


def tied_net() -> Net:
    return Net(blocks=1, tied=True)


def untied_net() -> Net:
    return Net(blocks=1)


def job_of(schedule: str, **options: Any) -> Job:
    micro_batches, every = SCHEDULES[schedule]
    if every:
        options |= {"model": Counting, "loss_of": loss_of_integers, "units": torch.nn.Linear}
    return Job(micro_batches=micro_batches, reduce_every_micro_batch=every, steps=3, **options)


def scale_of(precision: str, index: int) -> ConstantScale | DynamicScale | None:
    """fp16 grows at every second step, until it overflows and skips; the others have none, or a constant one."""
    if precision.startswith("fp16"):
        return DynamicScale(init=2.0**18, growth_interval=1, max_skips=None)
    return ConstantScale(2.0**10) if index % 3 == 0 else None


CASES = grid(PRECISIONS, ELEMENTWISE, SCHEDULES, PLANS, (2, 3))
"""The one table of precision x optimizer x schedule x plan x ranks. Each case is compared with one process, bit for
bit, and so needs no other plan beside it."""


def job_for(name: str, key: str, schedule: str) -> Job:
    i, j = list(PRECISIONS).index(name), list(ELEMENTWISE).index(key)
    optimizer, defaults = ELEMENTWISE[key]
    return job_of(
        schedule,
        optimizer=optimizer,
        defaults={**defaults, "foreach": j % 3 == 0},
        precision=PRECISIONS[name],
        scale=scale_of(name, i + j),
        model=(tied_net, untied_net)[j % 2],
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_elementwise_optimizers_in_every_precision_and_plan(num_ranks: int) -> None:
    cases = at(CASES, num_ranks)
    parts = [cases[start : start + 96] for start in range(0, len(cases), 96)]
    skipped = [applied for part in parts for applied in steps_skipped_in(part, num_ranks)]
    assert any(skipped) and not all(skipped)
    print(f"{len(cases)} cases on {num_ranks} ranks")


def steps_skipped_in(cases: Sequence[tuple[Any, ...]], num_ranks: int) -> list[bool]:
    """Runs and compares these."""
    jobs = {case[:3]: job_for(*case[:3]) for case in cases}
    references = run_ranks(all_references, 1, num_ranks, list(jobs.values()))[0]
    expected = dict(zip(jobs, references, strict=True))
    found = run_ranks(lambda rank: [[train(jobs[case[:3]], case[3], rank)] for case in cases], num_ranks)
    for index, case in enumerate(cases):
        for rank in range(num_ranks):
            (one,), truth = found[rank][index], expected[case[:3]][rank]
            assert (one.applied, one.scales, one.losses) == (truth.applied, truth.scales, truth.losses), case
            assert same_bits(one.weights, truth.weights), case
            assert same_bits(one.main, truth.main), case
    expect_logs_of_ranks(found)
    return [not applied for of_rank in found for of_job in of_rank for applied in of_job[0].applied]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_fused_kernels_see_the_same_vectors_in_every_plan(num_ranks: int) -> None:
    """Against the reference: the last bits where a vector's tail lies. A 16-bit weight may then be rounded to its
    neighbour (2^-8 of a weight of 1), its fp32 main may not differ by more."""
    matrix = [
        job_of("once per step", optimizer=optimizer, defaults={**defaults, "fused": True}, precision=precision)
        for key, (optimizer, defaults) in ELEMENTWISE.items()
        if key in FUSED
        for precision in ("fp32", "bf16-remainder")
    ]
    expected = run_ranks(all_references, 1, num_ranks, matrix)[0]
    found = run_ranks(all_plans, num_ranks, matrix)
    for index in range(len(matrix)):
        for rank in range(num_ranks):
            expect_identical(found[rank][index], index)
            assert largest_difference(found[rank][index][0].main, expected[index][rank].main) < CANCELLED
    expect_logs_of_ranks(found)


# A narrow wire --------------------------------------------------------------------------------------------------------


def reduced_gradients(rank: int, precision: MixedPrecision) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Per plan: each unit's own shard of the reduced gradient, and this rank's term of the whole."""
    results = []
    for plan in PLANS:
        torch.manual_seed(0)
        model = untied_net()
        handle = zeroshard.shard(model, plan, units=5000, precision=precision)
        terms: dict[str, torch.Tensor] = {}

        def look(name: str, grad: torch.Tensor, terms: dict[str, torch.Tensor] = terms) -> None:
            terms[name] = grad.float().clone()

        for name, parameter in model.named_parameters():
            parameter.register_hook(partial(look, name))
        loss_of_tokens(model, rank, 0, 0).backward()
        own = [unit.grads.piece(unit.own_shard()).clone() for unit in handle.engine.units]
        full = []
        for unit in handle.engine.units:
            term = torch.zeros(unit.layout.numel)
            for slot in unit.layout.slots:
                term[slot.world.slice] = terms[slot.name].reshape(-1)
            full.append(term)
        results.append((own, full))
    return results


@pytest.mark.parametrize("name", NARROW_WIRES)
def test_16_bits_on_the_wire_and_sums_in_fp32(name: str) -> None:
    """What a rank receives has been rounded to the wire's dtype, its own term has not; sums are fp32, in rank order,
    and become the mean."""
    by_rank = run_ranks(reduced_gradients, 3, NARROW_WIRES[name])
    for plan in range(len(PLANS)):
        for owner in range(3):
            for unit, own in enumerate(by_rank[owner][plan][0]):
                terms = [by_rank[rank][plan][1][unit].view(3, -1)[owner] for rank in range(3)]
                rounded = [term if rank == owner else term.bfloat16().float() for rank, term in enumerate(terms)]
                assert own.dtype == FP32 and torch.equal(own, ((rounded[0] + rounded[1]) + rounded[2]) / 3)
                if name.startswith("fp32 weights") and own.any():  # the negative control
                    assert not torch.equal(own, ((terms[0] + terms[1]) + terms[2]) / 3)
                    rounded_sum = ((rounded[0] + rounded[1]).bfloat16() + rounded[2]).float()
                    assert not torch.equal(own, rounded_sum / 3)


def test_a_narrow_wire_is_the_same_in_every_plan_and_halves_the_bytes() -> None:
    """Against fp32 on the wire: each foreign term is off by at most 2^-9 of itself, and so is a plain SGD step."""

    def check(rank: int) -> list[Any]:
        logs: list[Any] = []
        for every in (False, True):
            for precision in NARROW_WIRES.values():
                wide = dataclasses.replace(precision, reduce=None)
                narrow, full = (
                    [
                        train(
                            Job(
                                torch.optim.SGD,
                                {"lr": 0.1, "foreach": False},
                                which,
                                micro_batches=2,
                                reduce_every_micro_batch=every,
                            ),
                            plan,
                            rank,
                        )
                        for plan in PLANS
                    ]
                    for which in (precision, wide)
                )
                expect_identical(narrow)
                exact = every and precision.param == BF16  # each term is one 16-bit gradient: nothing to round
                assert same_bits(narrow[0].main, full[0].main) == exact
                assert largest_difference(narrow[0].main, full[0].main) < 4 * 0.1 * 2**-8
                for a, b in zip(narrow, full, strict=True):
                    assert 2 * a.log.bytes("reduce_scatter") == b.log.bytes("reduce_scatter") > 0
                    assert a.log.bytes("all_gather") == b.log.bytes("all_gather")
                logs += [[outcome] for outcome in narrow]
        return [logs]

    expect_logs_of_ranks([of_rank[0] for of_rank in run_ranks(check, 3)])


# Several dtypes in one model ------------------------------------------------------------------------------------------


class WithFp32Norms(Net):
    """bf16 but for its norms, which compute in fp32 whatever they are given."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.bfloat16()
        for module in self.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.float()
                module.register_forward_pre_hook(lambda _, args: tuple(x.float() for x in args))
                module.register_forward_hook(lambda _, args, out: out.bfloat16())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_norms_kept_in_fp32_inside_a_16_bit_model(num_ranks: int) -> None:
    matrix = [Job(precision=None, model=WithFp32Norms, micro_batches=k) for k in (1, 3)]
    expected = run_ranks(all_references, 1, num_ranks, matrix)[0]
    found = run_ranks(all_plans, num_ranks, matrix)
    for index in range(len(matrix)):
        for rank in range(num_ranks):
            expect_identical(found[rank][index])
            one, truth = found[rank][index][0], expected[index][rank]
            assert one.losses == truth.losses
            assert same_bits(one.weights, truth.weights)
            assert {str(value.dtype) for value in one.weights.values()} == {"torch.float32", "torch.bfloat16"}
    expect_logs_of_ranks(found)


def test_inputs_are_cast_where_the_engine_changed_the_dtype_and_only_there() -> None:
    def check(rank: int) -> None:
        for precision, expected in (("bf16", BF16), ("fp16", torch.float16), ("fp32", FP32), (None, FP32)):
            for plan in PLANS:
                seen: list[Any] = []
                model = torch.nn.Sequential(torch.nn.Linear(4, 4))
                zeroshard.shard(model, plan, precision=precision)
                model[0].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].dtype))
                model(torch.randn(2, 4)).sum().backward()
                assert seen == [expected]

    run_ranks(check, 2)


# Negative controls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"lr": 1.001e-2}, {"betas": (0.9, 0.9991)}, {"eps": 1.1e-8}])
def test_another_hyper_parameter_is_seen(change: dict[str, Any]) -> None:
    """Parity would mean little if the runs could not tell small things apart."""

    def check(rank: int) -> None:
        one = train(Job(), zeroshard.ZERO2, rank)
        other = train(Job(defaults={"lr": 1e-2, "foreach": False, **change}), zeroshard.ZERO2, rank)
        assert not same_bits(one.weights, other.weights)

    run_ranks(check, 2)


def test_every_precision_computes_something_else() -> None:
    """The rows of the matrix are different computations. (A remainder is left out: it differs from a master in the
    rounding of ties alone, and these few steps meet none.)"""
    precisions = [p for name, p in (PRECISIONS | NARROW_WIRES).items() if "remainder" not in name]

    def check(rank: int) -> list[Outcome]:
        return [train(Job(precision=precision, micro_batches=3), zeroshard.ZERO3, rank) for precision in precisions]

    outcomes = run_ranks(check, 3)[0]
    for i, one in enumerate(outcomes):
        for other in outcomes[:i]:
            assert not same_bits(one.main, other.main)
