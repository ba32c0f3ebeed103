"""`ShardedOptimizer.from_optimizer` takes over a plain optimizer's arguments, changed hyper-parameters and state.

Trainers create the optimizer and its scheduler first. Creating both again loses changes made since, and an old
scheduler sets the learning rate of an optimizer that is no longer stepped.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import Block, Net, loss_of_tokens, make, same_bits
from zeroshard.step.param_groups import defaults_of
from zeroshard.step.taken_over import arguments_of
from zeroshard.testing import expect_same_logs, run_ranks

ShardedOptimizer: Any = zeroshard.ShardedOptimizer
RANKS = 2


class Decaying(torch.optim.SGD):
    """Has one argument of its own, which it stores as an attribute."""

    def __init__(self, params: Any, *, factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.factor = factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(self.factor)
        return super().step(closure)


class Numbered(torch.optim.Optimizer):
    """As StableAdamW of optimi: it keeps `betas` as two numbers."""

    def __init__(self, params: Any, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"beta1": betas[0], "beta2": betas[1]})


class OfModel(torch.optim.Optimizer):
    """As LOMO."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters(), {})
        self.model = None


class Silent(torch.optim.SGD):
    """Stores none of its arguments under their names."""

    def __init__(self, params: Any, lr: float, rule: float = 1.0, *, must: float) -> None:
        super().__init__(params, lr=lr * rule * must)
        self.tables = {"signed": torch.zeros(256)} if rule == 8.0 else {}


MADE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.9), "foreach": False}),
    "AdamW, a tensor": (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "amsgrad": True, "foreach": False}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": False}),
    "its own": (Decaying, {"lr": 0.1, "momentum": 0.9, "foreach": False, "factor": 0.9}),
}
PLANS = {"AdamW": "zero3", "AdamW, a tensor": "zero1", "SGD": "ddp", "its own": "zero2"}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": matrices, "weight_decay": 0.2}, {"params": [p for p in model.parameters() if p.ndim <= 1]}]


def plain_step(model: nn.Module, optimizer: Any, scheduler: Any, number: int) -> None:
    """A step with the mean of all ranks' gradients, added up in rank order."""
    sums: dict[nn.Parameter, Tensor] = {}
    for rank in range(RANKS):
        optimizer.zero_grad()
        loss_of_tokens(model, rank, 0, number).backward()
        for p in model.parameters():
            assert p.grad is not None
            sums[p] = sums[p] + p.grad if p in sums else p.grad.clone()
    for p, total in sums.items():
        p.grad = total / RANKS
    optimizer.step()
    scheduler.step()


def begin(name: str, before: int) -> tuple[nn.Module, Any, Any]:
    """A plain run after `before` steps, with a hyper-parameter changed since."""
    of_class, options = MADE[name]
    model = make(lambda: Net(blocks=1))
    optimizer: Any = of_class(groups_of(model), **copy.deepcopy(options))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for number in range(before):
        plain_step(model, optimizer, scheduler, number)
    optimizer.param_groups[1]["weight_decay"] = 0.3
    return model, optimizer, scheduler


@pytest.mark.filterwarnings("error")  # schedulers warn if their optimizer has not stepped
def test_it_goes_on_as_the_plain_one_with_the_scheduler_that_there_was() -> None:
    def check(rank: int) -> list[Any]:
        found = []
        for name, before in [(name, 2) for name in MADE] + [("AdamW", 0)]:
            model, optimizer, scheduler = begin(name, before)
            twin, plain, of_twin = begin(name, before)
            seen: list[str] = []
            optimizer.register_step_pre_hook(lambda made, *_, seen=seen: seen.append(type(made).__name__))
            handle = zeroshard.shard(model, PLANS[name], units=Block)
            sharded = ShardedOptimizer.from_optimizer(handle, optimizer)
            assert not optimizer.state and optimizer.param_groups is sharded.param_groups
            for number in range(before, before + 2):
                sharded.zero_grad()
                loss_of_tokens(model, rank, 0, number).backward()
                sharded.step()
                scheduler.step()
                plain_step(twin, plain, of_twin, number)
            assert seen == ["ShardedOptimizer"] * 2
            assert same_bits(handle.full_state_dict(), twin.state_dict()), (name, before)
            mine, theirs = sharded.state_dict(), plain.state_dict()
            assert repr(mine["param_groups"]) == repr(theirs["param_groups"]), name
            assert mine["param_groups"][1]["weight_decay"] == 0.3
            assert float(mine["param_groups"][0]["lr"]) == pytest.approx(MADE[name][1]["lr"] / (3 + before))
            for number, items in theirs["state"].items():
                assert all(torch.equal(mine["state"][number][key], v) for key, v in items.items() if v is not None)
            for call in (optimizer.step, optimizer.state_dict, lambda made=optimizer: made.add_param_group({})):
                with pytest.raises(RuntimeError, match=r"has been taken over: call .* of what from_optimizer"):
                    call()
            found.append(handle.comm_log)
        return found

    for logs in zip(*run_ranks(check, RANKS), strict=True):
        expect_same_logs(logs)


def test_zero_grad_of_the_optimizer_taken_over_discards_all_that_the_new_one_discards() -> None:
    """It cleared `p.grad` alone: the weights of discarded losses still counted, in silence."""

    def check(rank: int) -> None:
        for plan in ("ddp", "zero3"):
            weights = []
            for zero_grad_of_old in (True, False):
                model, old, _ = begin("SGD", 0)
                handle = zeroshard.shard(model, plan, units=Block)
                optimizer = ShardedOptimizer.from_optimizer(handle, old)
                zero_grad = old.zero_grad if zero_grad_of_old else optimizer.zero_grad
                optimizer.backward(loss_of_tokens(model, rank, 0, 0), weight=3.0)
                zero_grad(set_to_none=False)
                hook = next(model.parameters()).register_hook(lambda grad, zero_grad=zero_grad: zero_grad())
                with pytest.raises(RuntimeError, match=r"zero_grad.* inside of a backward"):
                    loss_of_tokens(model, rank, 0, 1).backward()
                hook.remove(), zero_grad()
                optimizer.backward(loss_of_tokens(model, rank, 0, 2), weight=1.0)
                optimizer.step()
                weights.append(handle.full_state_dict())
                handle.close()
            assert same_bits(*weights), plan
            del optimizer, zero_grad
            with pytest.raises(RuntimeError, match=r"zero_grad: this .* taken over: call zero_grad\(\)"):
                old.zero_grad()

    run_ranks(check, RANKS)


def test_state_of_16_bit_weights_gets_the_dtype_of_main() -> None:
    """A plain optimizer keeps its state in the dtype of its parameters. Main is fp32: so is its state."""

    def check(rank: int) -> None:
        for cls, options, plan in (
            (torch.optim.AdamW, {"lr": 0.1}, "zero1"),
            (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "zero3"),
            (torch.optim.Muon, {"lr": 0.1}, "zero2"),
        ):
            for way in ("take over", "load", "load from rank 0"):
                torch.manual_seed(0)
                model = torch.nn.Linear(8, 8, bias=False).bfloat16()
                plain = cls(model.parameters(), **options)
                model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
                plain.step()
                plain.zero_grad()
                state_dict = plain.state_dict()
                before = {k: v.clone() for k, v in state_dict["state"][0].items() if v.dtype == torch.bfloat16}
                handle = zeroshard.shard(model, plan)
                if way == "take over":
                    optimizer = ShardedOptimizer.from_optimizer(handle, plain)
                else:
                    optimizer = ShardedOptimizer(handle, cls, **options)
                    optimizer.load_state_dict(state_dict, broadcast_from_rank0=way == "load from rank 0")
                after = optimizer.state_dict()["state"][0]
                assert before
                for key, value in before.items():
                    assert after[key].dtype == torch.float32 and torch.equal(after[key], value.float()), (cls, way, key)
                model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
                assert optimizer.step().applied
                handle.close()

    run_ranks(check, 2)


def test_controls() -> None:
    """Controls: a new optimizer from the same groups has no scheduler; arguments that cannot be recovered are
    refused."""

    def check(rank: int) -> None:
        model, optimizer, scheduler = begin("AdamW", 0)
        handle = zeroshard.shard(model, "zero3", units=Block)
        sharded = ShardedOptimizer(optimizer.param_groups, torch.optim.AdamW, lr=1e-2)
        model(torch.ones(1, 3, dtype=torch.long)).sum().backward()
        sharded.step()
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            scheduler.step()
        assert sharded.param_groups[0]["lr"] == 1e-2 != optimizer.param_groups[0]["lr"]
        del handle

    run_ranks(check, 1)
    model = make(lambda: Net(blocks=1))
    optimizer = Decaying(model.parameters(), lr=0.1, momentum=0.5, factor=0.9)
    assert {"lr": 0.1, "momentum": 0.5, "factor": 0.9}.items() <= arguments_of(optimizer, {}).items()
    silent: Any = Silent(model.parameters(), 0.1, 3.0, must=1.0)
    with pytest.raises(ValueError, match=r"Silent does not tell with which must it was made: .*must=\.\.\.\)"):
        arguments_of(silent, {})
    with pytest.raises(ValueError, match=r"the default lr is 0\.3\d*, and 0\.9\d* in a Silent that is made anew"):
        arguments_of(silent, {"must": 1.0, "rule": 3.0})
    assert arguments_of(silent, {"lr": 0.1, "must": 1.0, "rule": 3.0}) == {"lr": 0.1, "must": 1.0, "rule": 3.0}
    table: Any = Silent(model.parameters(), 0.1, 8.0, must=0.125)
    with pytest.raises(ValueError, match=r"tables is \{'signed': a tensor of shape \(256,\)\}, and \{\} in a Silent"):
        arguments_of(table, {"lr": 0.1, "must": 1.0, "rule": 1.0})
    silent.must, silent.rule, silent.lr = 1.0, 3.0, 0.1
    del silent.defaults["lr"]  # an attribute tells as well, where no argument can be passed: in a Trainer
    assert arguments_of(silent, {}) == {"lr": 0.1, "must": 1.0, "rule": 3.0}
    assert arguments_of(Numbered(model.parameters(), betas=(0.8, 0.7)), {}) == {"betas": (0.8, 0.7)}
    found = (
        r"OfModel cannot be made anew \('list' object has no attribute 'parameters'\): .* takes parameters, and not the"
    )
    with pytest.raises(ValueError, match=found):
        arguments_of(OfModel(model), {})
    with pytest.raises(ValueError, match=r"OfModel cannot be sharded: .* that takes the model .* cannot be"):
        defaults_of(OfModel, {})


def test_what_cannot_be_taken_over_is_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.distributed.optim compiles functions
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow: once, before ranks are forked

    def check(rank: int) -> None:
        def refused(kind: type[Exception], told: str, *args: Any, **kwargs: Any) -> None:
            with pytest.raises(kind, match=told):
                ShardedOptimizer.from_optimizer(*args, **kwargs)

        model, other = make(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), make(lambda: nn.Linear(4, 4))
        adam, of_other = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(other.parameters())
        handle = zeroshard.shard(model, "zero2", ignored=["1"])
        refused(TypeError, r"that shard\(\) has returned, found a module .*from_optimizer\(handle", model, adam)
        refused(TypeError, r"found the class AdamW: write ShardedOptimizer\(handle, AdamW", handle, torch.optim.AdamW)
        refused(TypeError, "found an object of type Handle: the handle comes first", handle, handle)
        refused(TypeError, r"found an object of type list: make it over model\.parameters", handle, [adam])
        told = r"param group 0 has a parameter of shape \(4, 4\) that this handle does not manage"
        refused(ValueError, told, handle, of_other)
        refused(ValueError, told, handle, torch.optim.SGD(model[1].parameters()))
        with pytest.warns(UserWarning, match="duplicate parameters"):
            twice = torch.optim.SGD([*model[0].parameters(), model[0].weight])
        told = r"same parameter twice, as numbers 0 and 2 \(of shape \(4, 4\)\).*pass it once"  # it once stepped once
        refused(ValueError, told, handle, twice)
        for params in ([*model[0].parameters(), model[0].weight], [("a", model[0].bias), ("b", model[0].bias)]):
            with pytest.raises(ValueError, match=told.replace("0 and 2", r"0 and \d").replace("4, 4", "4.*")):
                ShardedOptimizer(params, torch.optim.SGD)
        second = zeroshard.shard(other, "zero1")
        refused(ValueError, r"of another handle, Handle\(zero1.*: pass that one", handle, of_other)
        adam.param_groups[0]["lr"] = 0.1 * (1 + rank)
        refused(ValueError, "other values than on rank 0 in 'lr' of param group 0", handle, adam)
        adam.param_groups[0]["lr"] = 0.1
        sharded = ShardedOptimizer.from_optimizer(handle, adam)  # the refused calls claimed no parameters
        refused(TypeError, "found an optimizer that is made already .ShardedOptimizer.: it is what", handle, sharded)
        wrapped: Any = torch.optim.SGD(other.parameters())
        wrapped.step = lambda: None
        refused(ValueError, r"the step\(\) of this SGD has been replaced", second, wrapped)
        dividing = ZeroRedundancyOptimizer(other.parameters(), torch.optim.SGD, lr=0.1)
        refused(ValueError, r"ZeroRedundancyOptimizer divides its state .* in its place, SGD\(params", second, dividing)

    run_ranks(check, RANKS)
