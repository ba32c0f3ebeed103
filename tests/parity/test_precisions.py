"""Every precision with every elementwise optimizer: all plans compute the same bits, and those of one process.

| gradients are reduced     | model      | compared with the reference                                         |
|---------------------------|------------|---------------------------------------------------------------------|
| once per step             | a network  | bit for bit: the same additions in the same order                   |
| at every micro-batch      | `Counting` | bit for bit: integer gradients, so that the order does not matter   |

Only `fused=True` has a tolerance: its kernel rounds the last elements of a vector differently, and the reference's
vectors (whole parameters) end at other elements than the engine's pieces.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import pytest
import torch

import zeroshard
from tests.grids import EVERYTHING, at, grid, on_fewest_ranks
from tests.kit import (
    CANCELLED,
    DEVICE,
    PLANS,
    SCHEDULES,
    Counting,
    Net,
    Outcome,
    beside_one_process,
    largest_difference,
    loss_of_integers,
    loss_of_tokens,
    plans_of,
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
    as_one_process,
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
    return Job(micro_batches=micro_batches, reduce_every_micro_batch=every, **{"steps": 2, **options})


def scale_of(precision: str, index: int) -> ConstantScale | DynamicScale | None:
    """For fp16 a scale that grows at every second step, until a step overflows and is skipped; else none or a constant
    one."""
    if precision.startswith("fp16"):
        return DynamicScale(init=2.0**18, growth_interval=1, max_skips=None)
    return ConstantScale(2.0**10) if index % 3 == 0 else None


CASES = on_fewest_ranks(grid(PRECISIONS, ELEMENTWISE, SCHEDULES, PLANS, (2, 3), apart=(0, 1)), 2)
"""The grid of precision x optimizer x schedule x plan x ranks. Each case is compared to one process, bit for bit, so
plans need not be compared to each other. By default an optimizer meets about half of the precisions, as it sees nothing
but main, gradients and state."""


def job_for(name: str, key: str, schedule: str) -> Job:
    i, j = list(PRECISIONS).index(name), list(ELEMENTWISE).index(key)
    optimizer, defaults = ELEMENTWISE[key]
    return job_of(
        schedule,
        optimizer=optimizer,
        defaults={**defaults, "foreach": j % 3 == 0},
        precision=PRECISIONS[name],
        scale=scale_of(name, i + j),
        steps=3 if name.startswith("fp16") else 2,  # its loss scale overflows
        model=(tied_net, untied_net)[j % 2],
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_elementwise_optimizers_in_every_precision_and_plan(num_ranks: int) -> None:
    cases = at(CASES, num_ranks)
    skipped = []
    for start in range(0, len(cases), 96):
        part = cases[start : start + 96]
        jobs = {case[:3]: job_for(*case[:3]) for case in part}
        outcomes = as_one_process([(jobs[case[:3]], case[3]) for case in part], num_ranks, part)
        skipped += [not applied for outcome in outcomes for applied in outcome.applied]
    assert any(skipped) and not all(skipped)
    print(f"{len(cases)} cases on {num_ranks} ranks")


FUSED_CASES = (
    grid(FUSED, ("fp32", "bf16-remainder"))
    if EVERYTHING
    else list(zip(FUSED, itertools.cycle(("fp32", "bf16-remainder")), strict=False))
)


@pytest.mark.parametrize("num_ranks", [2, 3] if EVERYTHING else [3])
def test_fused_kernels_see_the_same_vectors_in_every_plan(num_ranks: int) -> None:
    """Results differ from the reference in the last bits at the ends of vectors. A 16-bit weight may then round to its
    neighbour (2^-8 for a weight of 1); fp32 main may not differ by more."""
    matrix = [
        job_of("one", optimizer=optimizer, defaults={**defaults, "fused": True}, precision=precision)
        for optimizer, defaults, precision in ((*ELEMENTWISE[key], precision) for key, precision in FUSED_CASES)
        if optimizer is not torch.optim.Adagrad or DEVICE.type != "cuda"  # torch has no fused kernel of it there
    ]
    expected, found = beside_one_process(
        lambda: all_references(0, num_ranks, matrix), lambda rank: all_plans(rank, matrix), num_ranks
    )
    for index in range(len(matrix)):
        for rank in range(num_ranks):
            expect_identical(found[rank][index], index)
            assert largest_difference(found[rank][index][0].main, expected[index][rank].main) < CANCELLED
    expect_logs_of_ranks(found)


# Wire dtypes that are narrower than gradients -------------------------------------------------------------------------


def reduced_gradients(rank: int, precision: MixedPrecision) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """For each plan: each unit's own shard of the reduced gradient, and this rank's term of the full gradient."""
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
        own = [unit.grads.read(unit.own_shard()).clone() for unit in handle.engine.units]
        full = []
        for unit in handle.engine.units:
            term = torch.zeros(unit.layout.numel)
            for slot in unit.layout.slots:
                term[slot.world.slice] = terms[slot.name].reshape(-1)
            full.append(term)
        results.append((own, full))
    return results


def test_16_bits_on_the_wire_and_sums_in_fp32() -> None:
    """Received terms have been rounded to the wire dtype, the own term has not; sums are in fp32, in rank order, and
    are divided to the mean."""
    every = run_ranks(lambda rank: {name: reduced_gradients(rank, of) for name, of in NARROW_WIRES.items()}, 3)
    for name, plan, owner in itertools.product(NARROW_WIRES, range(len(PLANS)), range(3)):
        of_ranks = [of_rank[name][plan] for of_rank in every]
        for unit, own in enumerate(of_ranks[owner][0]):
            terms = [full[unit].view(3, -1)[owner] for _, full in of_ranks]
            rounded = [term if rank == owner else term.bfloat16().float() for rank, term in enumerate(terms)]
            assert own.dtype == FP32 and torch.equal(own, ((rounded[0] + rounded[1]) + rounded[2]) / 3), (name, plan)
            if name.startswith("fp32 weights") and own.any():  # the negative control
                assert not torch.equal(own, ((terms[0] + terms[1]) + terms[2]) / 3)
                rounded_sum = ((rounded[0] + rounded[1]).bfloat16() + rounded[2]).float()
                assert not torch.equal(own, rounded_sum / 3)


def test_a_narrow_wire_is_the_same_in_every_plan_and_halves_the_bytes() -> None:
    """Compared to fp32 on the wire, each foreign term differs by at most 2^-9 of itself, and so does a plain SGD step.
    Each case compares DDP with another plan, and one of the two with fp32 on the wire."""
    cases = list(itertools.product((False, True), NARROW_WIRES.values()))

    def check(rank: int) -> list[list[Outcome]]:
        result = []
        for index, (every, precision) in enumerate(cases):
            narrow, wide = (
                Job(
                    torch.optim.SGD,
                    {"lr": 0.1, "foreach": False},
                    which,
                    steps=2,
                    micro_batches=2,
                    reduce_every_micro_batch=every,
                )
                for which in (precision, dataclasses.replace(precision, reduce=None))
            )
            plans = (zeroshard.DDP, PLANS[1 + index % 3])
            by_plan = [train(narrow, plan, rank) for plan in plans]
            assert same_bits(by_plan[0].weights, by_plan[1].weights), (index, plans)
            assert same_bits(by_plan[0].main, by_plan[1].main) and by_plan[0].losses == by_plan[1].losses, index
            one, full = by_plan[index % 2], train(wide, plans[index % 2], rank)
            exact = every and precision.param == BF16  # each term is a 16-bit gradient: no rounding
            assert same_bits(one.main, full.main) == exact
            assert largest_difference(one.main, full.main) < 2 * 0.1 * 2**-8
            assert 2 * one.log.bytes("reduce_scatter") == full.log.bytes("reduce_scatter") > 0
            assert one.log.bytes("all_gather") == full.log.bytes("all_gather")
            result.append(by_plan)
        return result

    expect_logs_of_ranks(run_ranks(check, 3))


# Several dtypes in one model ------------------------------------------------------------------------------------------


class WithFp32Norms(Net):
    """bf16, except for its norms, which compute in fp32 for inputs of any dtype."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.bfloat16()
        for module in self.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.float()
                module.register_forward_pre_hook(lambda _, args: tuple(x.float() for x in args))
                module.register_forward_hook(lambda _, args, out: out.bfloat16())


@pytest.mark.parametrize(("num_ranks", "micro_batches"), [(2, 1), (3, 3)])
def test_norms_kept_in_fp32_inside_a_16_bit_model(num_ranks: int, micro_batches: int) -> None:
    job = Job(precision=None, model=WithFp32Norms, micro_batches=micro_batches, steps=2)
    for outcome in as_one_process([(job, plan) for plan in plans_of(num_ranks)], num_ranks):
        assert {value.dtype for value in outcome.weights.values()} == {FP32, BF16}


def test_inputs_are_cast_where_the_engine_changed_the_dtype_and_only_there() -> None:
    def check(rank: int) -> None:
        for precision, expected in (("bf16", BF16), ("fp16", torch.float16), ("fp32", FP32), (None, FP32)):
            for plan in PLANS:
                seen: list[Any] = []
                model = torch.nn.Sequential(torch.nn.Linear(4, 4))
                zeroshard.shard(model, plan, precision=precision)
                model[0].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].dtype))
                model(torch.randn(2, 4)).sum().backward()
                assert seen == [expected], (plan, precision)

    run_ranks(check, 1)


# Negative controls ----------------------------------------------------------------------------------------------------


def test_another_hyper_parameter_is_seen() -> None:
    """The comparison detects small changes of hyper-parameters."""
    changes: tuple[dict[str, Any], ...] = ({"lr": 1.001e-2}, {"betas": (0.9, 0.9991)}, {"eps": 1.1e-8})

    def check(rank: int) -> None:
        one = train(Job(), zeroshard.ZERO2, rank)
        for change in changes:
            other = train(Job(defaults={"lr": 1e-2, "foreach": False, **change}), zeroshard.ZERO2, rank)
            assert not same_bits(one.weights, other.weights), change

    run_ranks(check, 2)


def test_every_precision_computes_something_else() -> None:
    """Each precision gives another result. (Except the remainder: it differs from fp32 main only in the rounding of
    ties, which do not occur in these few steps.)"""
    precisions = [p for name, p in (PRECISIONS | NARROW_WIRES).items() if "remainder" not in name]

    def check(rank: int) -> list[Outcome]:
        jobs = [Job(precision=precision, steps=2, micro_batches=3) for precision in precisions]
        return [train(job, zeroshard.ZERO3, rank) for job in jobs]

    outcomes = run_ranks(check, 3)[0]  # on two ranks the one sum is rounded once in any dtype
    for i, one in enumerate(outcomes):
        for other in outcomes[:i]:
            assert not same_bits(one.main, other.main)
