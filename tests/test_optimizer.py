"""`ShardedOptimizer` is a torch optimizer: groups, schedulers, closures and state work as they do for a plain one."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zeroshard
from tests.kit import (
    PLANS,
    Block,
    Job,
    Net,
    State,
    loss_of_tokens,
    make,
    plans_of,
    same_bits,
    train,
    train_reference,
    with_plans,
)
from tests.patience import HANG
from zeroshard.reference import Reference
from zeroshard.testing import expect_same_logs, run_ranks

ADAMW = {"lr": 1e-2, "foreach": False}
STEPS = 4

Groups = Callable[[nn.Module], Any]


def small() -> Net:
    return Net(blocks=1)


def by_dim(model: nn.Module) -> list[dict[str, Any]]:
    """The usual split: matrices have weight decay and their own learning rate; vectors have no weight decay."""
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


Between = Callable[[Any], Callable[[], None]]
"""Takes an optimizer; returns a function to call after each step."""


def reference_weights(num_ranks: int, groups: Groups = everything, between: Between | None = None, **o: Any) -> State:
    """The weights after training in one process."""
    model = make(small)
    reference = Reference(model, torch.optim.AdamW, num_ranks=num_ranks, params=groups(model), **ADAMW, **o)
    after = between(reference.optimizer) if between else lambda: None
    for number in range(STEPS):
        reference.step(lambda model, rank, _, number=number: loss_of_tokens(model, rank, 0, number))
        after()
    return reference.state_dict()


# It is one ------------------------------------------------------------------------------------------------------------


def test_a_model_keeps_nothing_of_optimizers_that_are_gone() -> None:
    def check(rank: int) -> None:
        handle = zeroshard.shard(small(), "zero2")
        for _ in range(3):
            zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
            gc.collect()
        assert len(handle.engine.claims._owners) == 1

    run_ranks(check, 1)


def test_it_is_a_torch_optimizer_over_the_users_own_parameters() -> None:
    def check(rank: int) -> None:
        for plan in plans_of(0):
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


# Hyper-parameters -----------------------------------------------------------------------------------------------------


def cosine(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 2)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[2]).step


def one_cycle(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Changes lr and betas of each group."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.01], total_steps=STEPS + 1).step


def by_hand(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def change() -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["betas"] = (group["betas"][0] * 0.9, 0.9)
            group["weight_decay"] += 0.25

    return change


RATES: dict[str, tuple[Groups, Between | None, Any]] = {
    "one group": (everything, None, None),
    "one group, bf16": (everything, None, "bf16"),
    "groups": (by_dim, None, None),
    "groups, bf16": (by_dim, None, "bf16"),
    "scheduler": (everything, cosine, None),
    "scheduler of groups": (by_dim, one_cycle, None),
    "by hand": (by_dim, by_hand, None),
}


def test_param_groups_schedulers_and_changed_hyper_parameters_take_effect() -> None:
    """Every plan on every rank ends with the bits of one process; and the results of the cases all differ."""

    def references(rank: int) -> dict[str, State]:
        return {name: reference_weights(3, *of[:2], precision=of[2]) for name, of in RATES.items()}

    expected = run_ranks(references, 1)[0]
    for one, other in itertools.combinations(expected, 2):
        assert not same_bits(expected[one], expected[other]), (one, other)

    def check(rank: int) -> list[Any]:
        logs = []
        for name, plan in with_plans(list(RATES)[2:]):
            groups, between, precision = RATES[name]
            model = make(small)
            optimizer = sharded(model, plan, groups, precision=precision)
            after = between(optimizer) if between else lambda: None
            for number in range(STEPS):
                step(optimizer, model, rank, number)
                after()
            assert same_bits(optimizer.handle.full_state_dict(), expected[name]), (plan, name)
            logs.append(optimizer.handle.comm_log)
        return logs

    for logs in zip(*run_ranks(check, 3), strict=True):
        expect_same_logs(logs)


def test_param_groups_may_be_assigned_with_more_behind() -> None:
    """As callbacks do that resume after they have added groups. The list was replaced, and the step knew nothing."""

    def check(rank: int) -> None:
        found = []
        for shards in (False, True):
            model = make(small)
            head, rest = list(model.head.parameters()), list(model.blocks.parameters())
            optimizer: Any = torch.optim.SGD(head, lr=0.5)
            if shards:
                optimizer = zeroshard.ShardedOptimizer.from_optimizer(zeroshard.shard(model, "zero3"), optimizer)
            optimizer.param_groups = [
                {**optimizer.param_groups[0], "lr": 0.1},
                {**optimizer.param_groups[0], "lr": 0.2, "params": rest},
            ]
            if shards:
                for wrong in ([{"params": rest}], [{"params": head[:1]}, {"params": rest}], []):
                    with pytest.raises(RuntimeError, match="the parameters of param group 0 have been edited"):
                        optimizer.param_groups = wrong
            assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
            loss_of_tokens(model, rank=0, micro_batch=0, step=0).backward()
            optimizer.step()
            found.append(optimizer.handle.full_state_dict() if shards else dict(model.state_dict()))
        assert same_bits(*found)

    run_ranks(check, 2)


def test_closures() -> None:
    """`step` calls the closure once, with gradients enabled."""
    expected = run_ranks(lambda rank: train_reference(Job(model=small, steps=2), 3), 1)[0]

    def check(rank: int) -> None:
        for plan in plans_of(1):
            model = make(small)
            optimizer = sharded(model, plan)
            evaluated = []
            for number in range(2):

                def closure(number: int = number, m: Any = model, o: Any = optimizer, seen: Any = evaluated) -> Tensor:
                    assert torch.is_grad_enabled()
                    o.zero_grad()
                    loss = loss_of_tokens(m, rank, 0, number)
                    o.backward(loss)
                    seen.append(loss.item())
                    return loss

                with torch.no_grad():
                    result = optimizer.step(closure)
                assert result.applied and result.loss.item() == evaluated[-1]
            assert evaluated == expected[rank].losses, "once in each step"
            assert same_bits(optimizer.handle.full_state_dict(), expected[rank].weights)

    run_ranks(check, 3)


def test_the_norm_and_clipping_are_torchs() -> None:
    """The norm is over all shards; a tied parameter has one gradient from both uses; equal bits on all ranks and
    plans."""
    norm_types = (1.0, 2.0, 3.0, float("inf"))

    def plain(norm_type: float) -> tuple[float, State]:
        model = make(partial(Net, blocks=1, tied=True))
        for of_rank in range(3):
            loss_of_tokens(model, of_rank, 0, 0).backward()
        for parameter in model.parameters():
            parameter.grad /= 3
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return norm.item(), model.state_dict()

    truths = run_ranks(lambda rank: [plain(norm_type) for norm_type in norm_types], 1)[0]

    def check(rank: int) -> list[Any]:
        found = []
        for (norm_type, (norm, expected)), plan in with_plans(zip(norm_types, truths, strict=True)):
            model = make(partial(Net, blocks=1, tied=True))
            handle = zeroshard.shard(model, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
            loss_of_tokens(model, rank, 0, 0).backward()
            clipped = optimizer.clip_grad_norm_(0.05, norm_type)
            assert clipped.dtype == torch.float64 and clipped.shape == ()
            assert clipped.item() == pytest.approx(norm, rel=1e-6), (norm_type, plan)
            assert optimizer.step().grad_norm == clipped.item()
            weights = {name: value.cpu() for name, value in handle.full_state_dict().items()}
            assert all(torch.allclose(weights[name], expected[name], rtol=1e-5, atol=1e-7) for name in expected)
            found.append((norm_type, clipped.item(), weights))
        return found

    by_rank = run_ranks(check, 3)
    first = {norm_type: (norm, weights) for norm_type, norm, weights in reversed(by_rank[0])}
    for norm_type, norm, weights in itertools.chain(*by_rank):
        assert norm == first[norm_type][0], norm_type
        assert same_bits(weights, first[norm_type][1]), norm_type


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
    """Main and the plain optimizer's state after two steps in one process, and weights and state after two more."""
    model = make(small)
    reference = Reference(
        model, torch.optim.AdamW, num_ranks=num_ranks, params=by_dim(model), precision=precision, **ADAMW
    )
    result: dict[str, Any] = {}
    for number in range(4):
        reference.step(lambda model, rank, _, number=number: loss_of_tokens(model, rank, 0, number))
        if number == 1:
            names = {p: name for name, p in model.named_parameters()}
            result["main"] = {names[p]: main.detach().clone() for p, main in reference.main.items()}
            result["state"] = torch.utils._pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, reference.optimizer.state_dict()
            )
    return {**result, "end": reference.state_dict(), "end state": reference.optimizer.state_dict()}


def expect_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert same_bits(found["state"][index], state)


def test_a_plain_optimizers_state_goes_in_and_comes_out() -> None:
    """Training continues with the same bits from a plain run to a sharded one, and from there to another plan. Without
    the moments the result differs."""
    precisions = (None, "bf16", "bf16-remainder")
    halves = run_ranks(lambda rank: {precision: first_half(2, precision) for precision in precisions}, 1)[0]

    def check(rank: int) -> list[Any]:
        logs = []
        for precision, plan in with_plans(precisions):
            half = halves[precision]
            model = make(small, 1)
            optimizer = sharded(model, plan, by_dim, precision=precision)
            optimizer.handle.load_full_state_dict(half["main"])
            optimizer.load_state_dict(half["state"])
            expect_same_state(optimizer.state_dict(), half["state"])
            step(optimizer, model, rank, 2)
            # and once more, through another plan
            second = make(small, 2)
            other = sharded(
                second, zeroshard.ZERO3 if plan is zeroshard.DDP else zeroshard.DDP, by_dim, precision=precision
            )
            other.handle.load_full_state_dict(optimizer.handle.full_state_dict(main=True))
            other.load_state_dict(optimizer.state_dict())
            step(other, second, rank, 3)
            assert same_bits(other.handle.full_state_dict(), half["end"]), (plan, precision)
            expect_same_state(other.state_dict(), half["end state"])
            logs += [optimizer.handle.comm_log, other.handle.comm_log]
        forgetful = make(small, 1)
        optimizer = sharded(forgetful, "zero2", by_dim)
        optimizer.handle.load_full_state_dict(halves[None]["main"])
        for number in (2, 3):
            step(optimizer, forgetful, rank, number)
        assert not same_bits(optimizer.handle.full_state_dict(), halves[None]["end"])
        return logs

    for logs in zip(*run_ranks(check, 2), strict=True):
        expect_same_logs(logs)


def test_a_sharded_state_goes_into_a_plain_optimizer() -> None:
    """Two steps sharded over one rank and two by plain torch give the same bits as four in the reference."""

    def check(rank: int) -> None:
        expected = train_reference(Job(steps=4), 1)[0].weights
        for plan in plans_of(0):
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block)
            # over the handle: all parameters
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, **ADAMW)
            for number in range(2):
                step(optimizer, model, rank, number)
            state = optimizer.state_dict()
            handle.close()
            alone = torch.optim.AdamW(model.parameters(), **ADAMW)
            alone.load_state_dict(state)
            for number in range(2, 4):
                alone.zero_grad()
                loss_of_tokens(model, rank, 0, number).backward()
                alone.step()
            assert same_bits(model.state_dict(), expected), plan

    run_ranks(check, 1)


def test_an_optimizer_without_state() -> None:
    """Optimizers with state are covered by `tests/parity/test_precisions.py`."""
    job = Job(optimizer=torch.optim.SGD, defaults={"lr": 0.1, "foreach": False}, model=small, steps=2)
    expected = run_ranks(lambda rank: train_reference(job, 3)[0].weights, 1)[0]

    def check(rank: int) -> list[Any]:
        outcomes = [train(job, plan, rank) for plan in plans_of(1)]
        assert all(same_bits(outcome.weights, expected) for outcome in outcomes)
        return [outcome.log for outcome in outcomes]

    for logs in zip(*run_ranks(check, 3), strict=True):
        expect_same_logs(logs)


def test_a_profiler_with_stacks_on_one_rank_reads_no_state() -> None:
    """Behind a step torch's reads the state of every parameter, if that is a plain one: a gather under DDP."""

    def check(rank: int) -> int:
        model = make(small)
        optimizer = sharded(model, "ddp")
        step(optimizer, model, rank, 0)
        with profile(activities=[ProfilerActivity.CPU], with_stack=True) if rank == 0 else nullcontext():
            step(optimizer, model, rank, 1)
        return len(optimizer.state)

    assert len(set(run_ranks(check, 2, collective_timeout=HANG))) == 1


def test_after_an_update_that_raised_weights_and_state_are_loaded_anew() -> None:
    """Where it raises on one rank alone (a state set by hand lacks an item, say), the other rank takes its step, and
    hears of it at the next one. It waited in the gathers of the step, and of whole parameters, without end."""

    class Breaks(torch.optim.AdamW):
        breaks = False

        def step(self, closure: Any = None) -> Any:
            if Breaks.breaks:
                raise KeyError("on the way")
            return super().step(closure)

    def check(rank: int) -> None:
        for number, plan in enumerate(PLANS):  # DDP on both ranks
            model = make(small)
            handle = zeroshard.shard(model, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, Breaks, elementwise=number < 3, **ADAMW)
            step(optimizer, model, rank, 0)
            weights, state = handle.full_state_dict(), optimizer.state_dict()
            step(optimizer, model, rank, 1)
            expected = handle.full_state_dict()
            Breaks.breaks = number == 0 or rank == 1
            with pytest.raises(KeyError, match="on the way") if Breaks.breaks else nullcontext():
                step(optimizer, model, rank, 2)
            Breaks.breaks = False
            with pytest.raises(RuntimeError, match="an earlier update raised half way"):
                step(optimizer, model, rank, 2)
            optimizer.zero_grad()
            handle.load_full_state_dict(weights)
            optimizer.load_state_dict(state)
            step(optimizer, model, rank, 1)
            assert same_bits(handle.full_state_dict(), expected), plan
            set_by_hand(optimizer, model, rank)

    def set_by_hand(optimizer: zeroshard.ShardedOptimizer, model: nn.Module, rank: int) -> None:
        """A state without a step count, of a parameter that one rank alone may have."""
        *_, last = model.parameters()
        optimizer.state[last] = {key: torch.zeros(last.shape) for key in ("exp_avg", "exp_avg_sq")}
        raised = []
        for number in (2, 3):
            try:
                step(optimizer, model, rank, number)
            except (KeyError, RuntimeError) as error:
                raised.append(str(error))
        *of_class, of_ranks = raised
        assert of_class in ([], ["'step'"]) and "an earlier update raised half way" in of_ranks

    run_ranks(check, 2, collective_timeout=HANG)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_learning_rate_of_one_group_leaves_the_others(num_ranks: int) -> None:
    """torch gives the tensor of the defaults to every group. A number in one of them was written into that tensor, so
    all groups had it; also another optimizer that was built with the tensor."""

    def check(rank: int) -> None:
        lr = torch.tensor(1e-2)
        ends = []
        for is_plain in (True, False):
            model = make(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
            groups = [{"params": list(layer.parameters())} for layer in model]
            if is_plain:
                optimizer: Any = torch.optim.AdamW(groups, lr=lr)
            else:
                zeroshard.shard(model, "zero1")
                optimizer = zeroshard.ShardedOptimizer(groups, torch.optim.AdamW, lr=lr)
            optimizer.param_groups[0]["lr"] = 0.5
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            ends.append([p.detach().clone() for p in model.parameters()])
            assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.5, 1e-2])
        assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True)) and lr == 1e-2

    run_ranks(check, num_ranks)


class OwnRate(torch.optim.SGD):
    """Finds a learning rate by itself if none is given, as Adafactor of transformers."""

    def __init__(self, params: Any, lr: float | None = None) -> None:
        super().__init__(params, lr=0.1)
        for group in (self.defaults, *self.param_groups):
            group["lr"] = lr

    def step(self, closure: Any = None) -> None:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.25 if group["lr"] is None else group["lr"]
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


def test_a_class_may_have_no_learning_rate() -> None:
    """It raised "float() argument must be a string or a real number"."""

    def check(rank: int) -> None:
        model = make(lambda: nn.Linear(2, 1, bias=False))
        optimizer = zeroshard.ShardedOptimizer(zeroshard.shard(model, "zero1"), OwnRate)
        before = model.weight.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert torch.equal(before - model.weight, torch.full((1, 2), 0.25)) and optimizer.param_groups[0]["lr"] is None

    run_ranks(check, 2)
