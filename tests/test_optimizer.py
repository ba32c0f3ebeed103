"""`ShardedOptimizer` is a torch optimizer: groups, schedulers, closures and state work as they do for a plain one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS, Block, Job, Net, State, loss_of_tokens, make, same_bits, train, train_reference
from zeroshard.reference import Reference
from zeroshard.testing import expect_same_logs, run_ranks

ADAMW = {"lr": 1e-2, "foreach": False}
STEPS = 6

Groups = Callable[[nn.Module], Any]


def by_dim(model: nn.Module) -> list[dict[str, Any]]:
    """The usual split: matrices decay, and learn at a rate of their own; the rest does not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.3, "lr": 3e-2}, {"params": others, "weight_decay": 0.0}]


def everything(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def sharded(model: nn.Module, plan: Any, groups: Groups = everything, **options: Any) -> zeroshard.ShardedOptimizer:
    zeroshard.shard(model, plan, units=Block, precision=options.pop("precision", None))
    return zeroshard.ShardedOptimizer(groups(model), torch.optim.AdamW, **{**ADAMW, **options})


def step(optimizer: zeroshard.ShardedOptimizer, model: nn.Module, rank: int, number: int) -> None:
    optimizer.zero_grad()
    optimizer.backward(loss_of_tokens(model, rank, 0, number))
    optimizer.step()


def reference_weights(num_ranks: int, groups: Groups = everything, between: Any = None, **options: Any) -> State:
    """Trained by one process; `between(optimizer)` gives what to call after each step."""

    def run(rank: int) -> State:
        model = make(Net)
        precision = options.pop("precision", None)
        reference = Reference(
            model, torch.optim.AdamW, num_ranks=num_ranks, params=groups(model), precision=precision, **ADAMW, **options
        )
        after = between(reference.optimizer) if between else lambda: None
        for number in range(STEPS):
            reference.step(lambda model, rank, _, number=number: loss_of_tokens(model, rank, 0, number))
            after()
        return reference.state_dict()

    return run_ranks(run, 1)[0]


def expect_everywhere(
    num_ranks: int, expected: State, groups: Groups = everything, between: Any = None, **o: Any
) -> None:
    """Every plan on every rank ends with these bits."""

    def check(rank: int) -> list[Any]:
        logs = []
        for plan in PLANS:
            model = make(Net)
            optimizer = sharded(model, plan, groups, **o)
            after = between(optimizer) if between else lambda: None
            for number in range(STEPS):
                step(optimizer, model, rank, number)
                after()
            assert same_bits(optimizer.handle.full_state_dict(), expected), plan
            logs.append(optimizer.handle.comm_log)
        return logs

    for logs in zip(*run_ranks(check, num_ranks), strict=True):
        expect_same_logs(logs)


# It is one ------------------------------------------------------------------------------------------------------------


def test_it_is_a_torch_optimizer_over_the_users_own_parameters() -> None:
    def check(rank: int) -> None:
        for plan in PLANS:
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, **ADAMW)
            plain = torch.optim.AdamW(model.parameters(), **ADAMW)
            assert isinstance(optimizer, torch.optim.Optimizer)
            (group,) = optimizer.param_groups
            assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))
            for mine, theirs in zip(optimizer.param_groups, plain.param_groups, strict=True):
                assert {k: v for k, v in mine.items() if k != "params"} == {
                    k: v for k, v in theirs.items() if k != "params"
                }
            assert optimizer.defaults == plain.defaults

    run_ranks(check, 2)


def test_hooks_of_torch_optimizers_run() -> None:
    def check(rank: int) -> None:
        model = make(Net)
        optimizer = sharded(model, "zero2")
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        step(optimizer, model, rank, 0)
        assert seen == ["before", "after"]

    run_ranks(check, 2)


# Hyper-parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_param_groups_with_hyper_parameters_of_their_own(precision: Any) -> None:
    expected = reference_weights(3, by_dim, precision=precision)
    expect_everywhere(3, expected, by_dim, precision=precision)
    assert not same_bits(expected, reference_weights(3, precision=precision))


def cosine(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 2)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[2]).step


def one_cycle(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Changes lr and betas of each group."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.01], total_steps=STEPS + 1).step


def test_lr_schedulers_work_unchanged() -> None:
    for schedule, groups in ((cosine, everything), (one_cycle, by_dim)):
        expected = reference_weights(2, groups, schedule)
        expect_everywhere(2, expected, groups, schedule)
        assert not same_bits(expected, reference_weights(2, groups))


def test_hyper_parameters_changed_by_hand_take_effect() -> None:
    def changing(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def change() -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["betas"] = (group["betas"][0] * 0.9, 0.9)
                group["weight_decay"] += 0.25

        return change

    expected = reference_weights(3, by_dim, changing)
    expect_everywhere(3, expected, by_dim, changing)
    assert not same_bits(expected, reference_weights(3, by_dim))


def test_a_param_group_added_later_joins() -> None:
    """Fine-tuning's usual way: the head first, the rest from the third step on."""

    def run(optimizer: Any, model: nn.Module, after_step: Callable[[int], None]) -> None:
        for number in range(STEPS):
            if number == 2:
                optimizer.add_param_group({"params": list(model.blocks.parameters()), "lr": 1e-3})
            after_step(number)

    def plain(rank: int) -> State:
        model = make(Net)
        optimizer = torch.optim.AdamW(model.head.parameters(), **ADAMW)

        def after_step(number: int) -> None:
            model.zero_grad()
            for of_rank in range(2):
                loss_of_tokens(model, of_rank, 0, number).backward()
            for parameter in model.parameters():
                parameter.grad /= 2
            optimizer.step()

        run(optimizer, model, after_step)
        return model.state_dict()

    expected = run_ranks(plain, 1)[0]

    def check(rank: int) -> None:
        for plan in PLANS:
            model = make(Net)
            optimizer = sharded(model, plan, lambda model: [{"params": list(model.head.parameters())}])
            run(optimizer, model, lambda number, o=optimizer, m=model: step(o, m, rank, number))
            assert same_bits(optimizer.handle.full_state_dict(), expected), plan

    run_ranks(check, 2)


def test_closures() -> None:
    expected = run_ranks(lambda rank: train_reference(Job(steps=STEPS), 3)[0].weights, 1)[0]

    def check(rank: int) -> None:
        for plan in PLANS:
            model = make(Net)
            optimizer = sharded(model, plan)
            for number in range(STEPS):

                def closure(number: int = number, model: Any = model, optimizer: Any = optimizer) -> Tensor:
                    optimizer.zero_grad()
                    loss = loss_of_tokens(model, rank, 0, number)
                    optimizer.backward(loss)
                    return loss

                with torch.no_grad():
                    result = optimizer.step(closure)
                assert result.applied and result.loss.item() > 0
            assert same_bits(optimizer.handle.full_state_dict(), expected)

    run_ranks(check, 3)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_the_norm_and_clipping_are_torchs(norm_type: float) -> None:
    """Global over shards and over both uses of a tied parameter; equal bits on all ranks and plans."""

    def plain(rank: int) -> tuple[float, State]:
        model = make(partial(Net, tied=True))
        for of_rank in range(3):
            loss_of_tokens(model, of_rank, 0, 0).backward()
        for parameter in model.parameters():
            parameter.grad /= 3
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return norm.item(), model.state_dict()

    norm, expected = run_ranks(plain, 1)[0]

    def check(rank: int) -> list[Any]:
        found = []
        for plan in PLANS:
            model = make(partial(Net, tied=True))
            handle = zeroshard.shard(model, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
            loss_of_tokens(model, rank, 0, 0).backward()
            clipped = optimizer.clip_grad_norm_(0.05, norm_type)
            assert clipped.dtype == torch.float64 and clipped.shape == ()
            assert clipped.item() == pytest.approx(norm, rel=1e-6)
            assert optimizer.step().grad_norm == clipped.item()
            weights = handle.full_state_dict()
            assert all(torch.allclose(weights[name], expected[name], rtol=1e-5, atol=1e-7) for name in expected)
            found.append((clipped.item(), weights))
        return found

    by_rank = run_ranks(check, 3)
    for of_rank in by_rank:
        for found_norm, weights in of_rank:
            assert found_norm == by_rank[0][0][0]
            assert same_bits(weights, by_rank[0][0][1])


def test_clipping_scales_one_step_alone() -> None:
    def check(rank: int) -> None:
        weights = {}
        for name, max_norms in {"never": (None, None), "first": (1e-3, None), "loose": (1e6, 1e6)}.items():
            model = make(Net)
            handle = zeroshard.shard(model, "zero2", units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0, foreach=False)
            sizes = []
            for number, max_norm in enumerate(max_norms):
                before = handle.full_state_dict()
                optimizer.backward(loss_of_tokens(model, rank, 0, number))
                if max_norm:
                    optimizer.clip_grad_norm_(max_norm)
                optimizer.step()
                after = handle.full_state_dict()
                sizes.append(sum((after[n] - before[n]).square().sum() for n in after).sqrt().item())
            weights[name] = after
            if name == "first":
                assert sizes[0] == pytest.approx(1e-3, rel=1e-3) and sizes[1] > 0.1
        assert same_bits(weights["never"], weights["loose"])
        assert not same_bits(weights["never"], weights["first"])

    run_ranks(check, 3)


# State ----------------------------------------------------------------------------------------------------------------


def first_half(num_ranks: int, precision: Any) -> dict[str, Any]:
    """Three steps by one process: weights, main, the plain optimizer's state; and where three more lead."""

    def run(rank: int) -> dict[str, Any]:
        model = make(Net)
        reference = Reference(
            model, torch.optim.AdamW, num_ranks=num_ranks, params=by_dim(model), precision=precision, **ADAMW
        )
        result: dict[str, Any] = {}
        for number in range(6):
            reference.step(lambda model, rank, _, number=number: loss_of_tokens(model, rank, 0, number))
            if number == 2:
                names = {p: name for name, p in model.named_parameters()}
                result["main"] = {names[p]: main.detach().clone() for p, main in reference.main.items()}
                result["state"] = torch.utils._pytree.tree_map(
                    lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, reference.optimizer.state_dict()
                )
        return {**result, "end": reference.state_dict(), "end state": reference.optimizer.state_dict()}

    return run_ranks(run, 1)[0]


def expect_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert same_bits(found["state"][index], state)


@pytest.mark.parametrize("precision", [None, "bf16", "bf16-remainder"])
def test_a_plain_optimizers_state_goes_in_and_comes_out(precision: Any) -> None:
    """Training goes on bit for bit: from a plain run to a sharded one, and on to another plan."""
    half = first_half(3, precision)

    def check(rank: int) -> list[Any]:
        logs = []
        for plan in PLANS:
            model = make(Net, 1)
            optimizer = sharded(model, plan, by_dim, precision=precision)
            optimizer.handle.load_full_state_dict(half["main"])
            optimizer.load_state_dict(half["state"])
            expect_same_state(optimizer.state_dict(), half["state"])
            for number in (3, 4):
                step(optimizer, model, rank, number)
            # and once more, through another plan
            second = make(Net, 2)
            other = sharded(
                second, zeroshard.ZERO3 if plan is zeroshard.DDP else zeroshard.DDP, by_dim, precision=precision
            )
            other.handle.load_full_state_dict(optimizer.handle.full_state_dict(main=True))
            other.load_state_dict(optimizer.state_dict())
            step(other, second, rank, 5)
            assert same_bits(other.handle.full_state_dict(), half["end"]), plan
            expect_same_state(other.state_dict(), half["end state"])
            logs += [optimizer.handle.comm_log, other.handle.comm_log]
        return logs

    for logs in zip(*run_ranks(check, 3), strict=True):
        expect_same_logs(logs)


def test_a_sharded_state_goes_into_a_plain_optimizer() -> None:
    """Three steps sharded over one rank, three more by torch alone: the same bits as six by torch."""

    def check(rank: int) -> None:
        for plan in PLANS:
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(
                handle, torch.optim.AdamW, **ADAMW
            )  # over the handle: all parameters
            for number in range(3):
                step(optimizer, model, rank, number)
            state = optimizer.state_dict()
            handle.close()
            alone = torch.optim.AdamW(model.parameters(), **ADAMW)
            alone.load_state_dict(state)
            for number in range(3, 6):
                alone.zero_grad()
                loss_of_tokens(model, rank, 0, number).backward()
                alone.step()
            assert same_bits(model.state_dict(), train_reference(Job(steps=6), 1)[0].weights)

    run_ranks(check, 1)


def test_without_the_moments_training_goes_another_way() -> None:
    half = first_half(2, None)

    def check(rank: int) -> None:
        model = make(Net, 1)
        optimizer = sharded(model, "zero2", by_dim)
        optimizer.handle.load_full_state_dict(half["main"])
        for number in (3, 4, 5):
            step(optimizer, model, rank, number)
        assert not same_bits(optimizer.handle.full_state_dict(), half["end"])

    run_ranks(check, 2)


def test_an_optimizer_without_state() -> None:
    """Those with state are in the table of `tests/parity/test_precisions.py`."""
    job = Job(optimizer=torch.optim.SGD, defaults={"lr": 0.1, "foreach": False}, steps=4)
    expected = run_ranks(lambda rank: train_reference(job, 3)[0].weights, 1)[0]

    def check(rank: int) -> list[Any]:
        outcomes = [train(job, plan, rank) for plan in PLANS]
        assert all(same_bits(outcome.weights, expected) for outcome in outcomes)
        return [outcome.log for outcome in outcomes]

    for logs in zip(*run_ranks(check, 3), strict=True):
        expect_same_logs(logs)
