"""Optimizers of whole parameters, stepped by owners: the bits of one process under every plan, and the costs.

An owner steps the whole parameter, in its own shape, with the full gradient. The computation is that of one process, so
the comparison with the reference is bit for bit, including Newton-Schulz iterations.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import at, grid
from tests.kit import (
    PLANS,
    SCHEDULES,
    Block,
    Counting,
    Net,
    Outcome,
    State,
    beside_one_process,
    loss_of_integers,
    loss_of_tokens,
    make,
    plans_of,
    same_bits,
    train,
    with_plans,
)
from tests.parity.common import (
    BF16,
    Job,
    as_one_process,
    expect_equal_logs,
    expect_logs_of_ranks,
)
from tests.together import on_ranks
from zeroshard.layout.owners import balance, cost
from zeroshard.layout.sums import divide
from zeroshard.optim import Lamb, Lars
from zeroshard.placement import Plan
from zeroshard.planner import plan_memory
from zeroshard.precision import MixedPrecision
from zeroshard.step.owner_step import OwnerStep
from zeroshard.testing import run_ranks

MUON = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
WHOLE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "muon": (torch.optim.Muon, MUON),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "foreach": False}),
    "lamb": (Lamb, {"lr": 1e-2, "weight_decay": 0.01}),
    "lars": (Lars, {"lr": 0.5, "weight_decay": 1e-3, "trust_coefficient": 0.01}),
}
PRECISIONS = {
    "fp32": "fp32",
    "bf16": "bf16",
    "bf16, 16-bit gradients": MixedPrecision(grad=BF16),
    "fp16": "fp16",
    "remainder": "bf16-remainder",
}


class Matrices(nn.Module):
    """Five matrices of very different cost, as Muon takes matrices only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 24)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ((24, 40), (40, 24), (24, 8), (8, 23)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x)) if layer is not self.layers[-1] else layer(x)
        return x


class CountingMatrices(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Linear(29, 7, bias=False)


CASES = grid(PRECISIONS, WHOLE, SCHEDULES, PLANS, (2, 3))


def job_for(name: str, key: str, schedule: str) -> Job:
    optimizer, defaults = WHOLE[key]
    micro_batches, every = SCHEDULES[schedule]
    model: Any = Matrices if key == "muon" else lambda: Net(blocks=1, tied=True)
    if every:
        model = CountingMatrices if key == "muon" else Counting
    return Job(
        optimizer,
        defaults,
        PRECISIONS[name],
        model,
        loss_of_integers if every else loss_of_tokens,
        units=nn.Linear,
        steps=2,
        micro_batches=micro_batches,
        reduce_every_micro_batch=every,
        scale=zeroshard.ConstantScale(2.0**10) if name == "fp16" else None,
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_precision_and_plan_computes_what_one_process_does(num_ranks: int) -> None:
    cases = at(CASES, num_ranks)
    jobs = {case[:3]: job_for(*case[:3]) for case in cases}
    as_one_process([(jobs[case[:3]], case[3]) for case in cases], num_ranks, cases)


def test_more_ranks_than_matrices() -> None:
    """Two matrices, five ranks: three of them own nothing."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(23, 24), nn.Linear(24, 23, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.table(tokens))

    jobs = {name: Job(*of, model=Two, units=None, steps=2) for name, of in WHOLE.items()}
    cases = with_plans(jobs)
    as_one_process([(jobs[name], plan) for name, plan in cases], 5, cases)


@on_ranks(2)
def test_stepping_pieces_instead_is_seen(rank: int) -> None:
    """The negative control: each class, wrongly declared elementwise, gives other weights than one process."""
    for name, (optimizer, defaults) in WHOLE.items():
        if name == "muon":
            continue  # Muon itself refuses flat pieces
        whole = train(Job(optimizer, defaults, steps=1), zeroshard.ZERO2, rank)
        cut = train(Job(optimizer, {**defaults, "elementwise": True}, steps=1), zeroshard.ZERO2, rank)
        assert not same_bits(whole.weights, cut.weights), name


# Two classes in one optimizer -----------------------------------------------------------------------------------------


def split_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [
        p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name and "head" not in name
    ]
    mine = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in mine]


def train_both(rank: int, plan: Any, precision: Any, steps: int = 2) -> Outcome:
    model = make(Net)
    handle = zeroshard.shard(model, plan, units=Block, precision=precision)
    matrices, rest = split_groups(model)
    optimizer = zeroshard.ShardedOptimizer(
        [
            {"params": matrices, **MUON},
            {"params": rest, "optimizer_class": torch.optim.AdamW, "lr": 3e-3, "weight_decay": 0.0, "foreach": False},
        ],
        torch.optim.Muon,
    )
    losses = []
    for step in range(steps):
        loss = loss_of_tokens(model, rank, 0, step)
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
    weights, main = handle.full_state_dict(), handle.full_state_dict(main=True)
    state = optimizer.state_dict()["state"]
    assert {frozenset(values) for values in state.values()} == {
        frozenset({"momentum_buffer"}),
        frozenset({"step", "exp_avg", "exp_avg_sq"}),
    }
    return Outcome(losses, weights, handle.comm_log, main=main)


def both_in_one_process(rank: int, num_ranks: int, steps: int = 2) -> dict[str, Tensor]:
    model = make(Net)
    matrices, rest = split_groups(model)
    optimizers = [
        torch.optim.Muon(matrices, **MUON),
        torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.0, foreach=False),
    ]
    for step in range(steps):
        total: dict[nn.Parameter, Tensor] = {}
        for of_rank in range(num_ranks):
            loss_of_tokens(model, of_rank, 0, step).backward()
            for p in model.parameters():
                total[p] = p.grad if p not in total else total[p] + p.grad
                p.grad = None
        for p, grad in total.items():
            divide(grad, num_ranks)  # on a GPU `/ 3` is a product with a third
            p.grad = grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_muon_for_matrices_and_adamw_for_the_rest_in_one_optimizer() -> None:
    num_ranks, precisions = 3, ["fp32", "bf16-remainder"]
    expected, found = beside_one_process(
        lambda: both_in_one_process(0, num_ranks),
        lambda rank: [[train_both(rank, plan, p) for plan in plans_of(1)] for p in precisions],
        num_ranks,
    )
    for by_precision in found:
        for precision, by_plan in zip(precisions, by_precision, strict=True):
            assert same_bits(by_plan[0].weights, by_plan[-1].weights), precision
            assert same_bits(by_plan[0].main, by_plan[-1].main), precision
            assert by_plan[0].losses == by_plan[-1].losses, precision
            assert precision != "fp32" or same_bits(by_plan[0].weights, expected)
    expect_logs_of_ranks(found)


# What it costs --------------------------------------------------------------------------------------------------------


def test_owners_are_balanced_longest_first() -> None:
    """Graham's bound: no rank has more than 4/3 of the smallest possible maximum, found by trying all assignments."""
    for costs in ([7, 5, 4, 3, 3, 2], [9, 9, 1, 1, 1], [5], [2, 2, 2, 2], [8, 7, 6, 5, 4]):
        for ranks in (1, 2, 3):
            owners = balance(costs, ranks)
            found = max(sum(c for c, owner in zip(costs, owners, strict=True) if owner == r) for r in range(ranks))
            best = min(
                max(sum(c for c, owner in zip(costs, of, strict=True) if owner == r) for r in range(ranks))
                for of in itertools.product(range(ranks), repeat=len(costs))
            )
            assert best <= found <= 4 / 3 * best
    costs = [5, 1, 5, 1, 5, 1]  # the negative control: round-robin gives one rank all large ones
    owners = balance(costs, 2)
    assert sum(costs[0::2]) > max(sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(2))


def big_matrices(count: int = 6) -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(count)])


def measure(rank: int, plan: Any, precision: Any, optimizer: Any, **defaults: Any) -> dict[str, float]:
    model = make(big_matrices)
    handle = zeroshard.shard(model, plan, precision=precision)
    stepped = zeroshard.ShardedOptimizer(handle, optimizer, **defaults)
    extra = []
    for _ in range(3):
        handle.comm_log.clear()
        stepped.backward(model(torch.randn(3, 64)).float().square().sum())
        stepped.step()
        extra.append(handle.comm_log.bytes("all_to_all"))
    assert extra[2] == extra[1]
    handle.engine.gatherer.settle()
    memory = handle.memory()
    owned = [s for s in stepped.steppers if isinstance(s, OwnerStep)]
    load = sum(cost(w.slot.shape) for s in owned for w in s.state.wholes if w.owner == rank)
    return {
        "first": extra[0],
        "extra": extra[1],
        "rest": handle.comm_log.bytes() - handle.comm_log.bytes("all_to_all") - handle.comm_log.bytes("exchange"),
        "state": memory["state"],
        "scratch": memory["scratch"],
        "load": load,
        "numel": sum(p.numel() for p in model.parameters()),
    }


def test_extra_communication_and_state() -> None:
    """With Ψ elements, d ranks, balanced owners and fp32 on the wire, each rank sends the gradients of fragments that
    it does not own to their owners, and owners send stepped values back: 2 Ψ/d (d-1)/d. Before the first step the
    values of the fragments are sent, too. State is stored once: all ranks together hold as much as one process."""
    num_ranks = 3
    cases = [(plan, precision) for precision, plan in with_plans(("fp32", "bf16", "bf16-remainder"))]
    sgd = {"lr": 0.01, "momentum": 0.9}

    def check(rank: int) -> list[tuple[dict[str, float], dict[str, float]]]:
        return [
            (measure(rank, *case, torch.optim.Muon, lr=0.01), measure(rank, *case, torch.optim.SGD, **sgd))
            for case in cases
        ]

    for case, measured in zip(cases, zip(*run_ranks(check, num_ranks), strict=True), strict=True):
        ranks, elementwise = zip(*measured, strict=True)
        psi = ranks[0]["numel"]
        total = sum(of_rank["extra"] for of_rank in ranks) / num_ranks
        if case[0] is zeroshard.DDP:
            assert total == 0 and all(of_rank["state"] == 4 * psi for of_rank in ranks), case
            continue
        factor = total / (4 * psi / num_ranks)  # of Ψ/d, Ψ in bytes of fp32
        assert 1.0 <= factor <= 2 * (num_ranks - 1) / num_ranks, case
        assert sum(of_rank["first"] for of_rank in ranks) == 1.5 * total * num_ranks, case
        assert sum(of_rank["state"] for of_rank in ranks) == 4 * psi, case
        assert max(of_rank["load"] for of_rank in ranks) == min(of_rank["load"] for of_rank in ranks), case
        assert [of_rank["rest"] for of_rank in ranks] == [of_rank["rest"] for of_rank in elementwise], case


OWNED_CASES = grid(PLANS, ("fp32", "bf16", "bf16-remainder"), (1, 2, 3))


@pytest.mark.by_gloo
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_bytes_of_owners_are_exact_and_planned(num_ranks: int) -> None:
    """Muon for matrices, AdamW for the rest: main and state of owned parameters, and the scratch of their exchange."""

    def check(rank: int) -> None:
        for plan, precision in at(OWNED_CASES, num_ranks):
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block, precision=precision)
            matrices, rest = split_groups(model)
            names = {name for name, p in model.named_parameters() if any(p is m for m in matrices)}
            adamw = {"optimizer_class": torch.optim.AdamW, "lr": 3e-3, "foreach": False}
            groups = [{"params": matrices, **MUON}, {"params": rest, **adamw}]
            optimizer = zeroshard.ShardedOptimizer(groups, torch.optim.Muon)
            for step in range(2):
                optimizer.backward(loss_of_tokens(model, rank, 0, step))
                optimizer.step()
            handle.engine.gatherer.settle()
            planned = plan_memory(
                make(Net),
                plan,
                num_ranks,
                units=Block,
                precision=precision,
                rank=rank,
                group_of=lambda name, names=names: int(name not in names),
                whole_state_bytes=lambda name, names=names: 4 if name in names else None,
            )
            assert handle.memory() == planned, (plan, precision)

    run_ranks(check, num_ranks)


@on_ranks(2)
def test_weights_set_from_outside_reach_the_owners(rank: int) -> None:
    """Owners keep main from step to step: values that are loaded or written between two steps must replace it."""
    few_matrices = partial(big_matrices, 3)  # on two ranks one of them is cut

    def run(rank: int, plan: Any, precision: Any, change: bool) -> tuple[State, int]:
        model = make(few_matrices)
        handle = zeroshard.shard(model, plan, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Muon, lr=0.01)
        other = {name: value * 2 for name, value in make(few_matrices).state_dict().items()}
        for step in range(3):
            if step == 2 and change:
                handle.load_full_state_dict(other)
            elif step == 1 and change:
                with handle.unsharded(write=True), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1.0)
            handle.comm_log.clear()
            optimizer.backward(model(torch.ones(1, 64)).float().sum())  # the same gradient direction at any weights
            optimizer.step()
        return handle.full_state_dict(main=True), handle.comm_log.bytes("all_to_all")

    start = make(few_matrices).state_dict()
    for precision, plan in with_plans(("fp32", "bf16", "bf16-remainder")):
        changed, sent = run(rank, plan, precision, True)
        unchanged, sent_less = run(rank, plan, precision, False)
        assert sent >= sent_less if plan is zeroshard.DDP else sent > sent_less
        for name, value in start.items():  # Muon's steps are small: each run stays near its start
            step = (changed[name] - 2 * value).abs().max()
            assert step < 0.05 < (unchanged[name] - 2 * value).abs().max(), (plan, precision, name)


# State in torch's layout ----------------------------------------------------------------------------------------------


STATE_CASES = grid(WHOLE, ("to a plain one", "from a plain one"), PLANS)


def test_state_goes_to_a_plain_optimizer_and_back() -> None:
    """A step of a sharded run, continued by a plain optimizer, and the reverse, give the same bits after step 2."""

    def batch(model: nn.Module, step: int) -> Tensor:
        return loss_of_tokens(model, 0, 0, step)  # the same batch on all ranks: the mean over two is exact

    def plain(name: str, model: nn.Module, state: Any, steps: range) -> dict[str, Any]:
        optimizer_class, defaults = WHOLE[name]
        optimizer = optimizer_class(model.parameters(), **defaults)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in steps:
            optimizer.zero_grad()
            batch(model, step).backward()
            optimizer.step()
        return optimizer.state_dict()

    def sharded(name: str, model: nn.Module, plan: Plan, weights: Any, state: Any, steps: range) -> tuple[Any, Any]:
        optimizer_class, defaults = WHOLE[name]
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(list(model.parameters()), optimizer_class, **defaults)
        if state is not None:
            handle.load_full_state_dict(weights)
            optimizer.load_state_dict(state)
        for step in steps:
            optimizer.backward(batch(model, step))
            optimizer.step()
        return handle, optimizer.state_dict()

    def check(rank: int) -> list[Any]:
        logs = []
        for name, direction, plan in STATE_CASES:
            model_of = Matrices if name == "muon" else partial(Net, blocks=1)
            truth, first = make(model_of), make(model_of)
            plain(name, truth, None, range(2))
            if direction == "to a plain one":
                handle, state = sharded(name, first, plan, None, None, range(1))
                other = make(model_of)
                other.load_state_dict(handle.full_state_dict())
                plain(name, other, state, range(1, 2))
                found = other.state_dict()
            else:
                state = plain(name, first, None, range(1))
                handle, _ = sharded(name, make(model_of, seed=5), plan, first.state_dict(), state, range(1, 2))
                found = handle.full_state_dict()
            assert same_bits(found, truth.state_dict()), (name, plan, direction)
            logs.append(handle.comm_log)
        return logs

    for logs in zip(*run_ranks(check, 2), strict=True):
        expect_equal_logs(logs)


# Refusals -------------------------------------------------------------------------------------------------------------


def test_what_the_class_refuses_it_refuses_on_every_rank() -> None:
    """Once Muon refused a vector only on the rank that would have owned it, and the other ranks waited for that
    rank."""

    def check(rank: int) -> str:
        model = make(lambda: nn.Linear(40, 40))
        zeroshard.shard(model, "zero2")
        with pytest.raises(ValueError, match="2D") as error:
            zeroshard.ShardedOptimizer(model.parameters(), torch.optim.Muon, lr=0.1)
        return str(error.value)

    assert len(set(run_ranks(check, 3))) == 1
