"""The wrapped optimizer class: its methods (`train()` and `eval()` of schedule-free optimizers) and extra arguments of
`step` work, and torch's global step hooks run once for a step. (They once also ran for each batch of pieces of the
inner optimizer.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, Block, Net, largest_difference, loss_of_tokens, make, plans_of, same_bits
from tests.together import in_turn, on_ranks
from zeroshard.placement import Plan
from zeroshard.reference import nearest_bf16_ties_away
from zeroshard.testing import expect_same_logs, run_ranks


class ScheduleFree(torch.optim.Optimizer):
    """Like schedulefree.SGDScheduleFree: weights differ between training and evaluation mode."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})
        self.temperature = 1.0

    def train(self) -> None:
        self._move(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._move(False, lambda beta: 1 - 1 / beta)

    def answer(self, *, twice: bool = False) -> int:
        return 84 if twice else 42

    @property
    def mode(self) -> str:
        return "mine"

    @torch.no_grad()
    def _move(self, train: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                group["train_mode"] = train
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))

    @torch.no_grad()
    def step(self, closure: Any = None, *, boost: float = 1.0) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            share, lr = 1 / (group["k"] + 1), group["lr"] * boost
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, share).add_(p.grad, alpha=lr * (group["beta"] * (1 - share) - 1))
                    z.sub_(p.grad, alpha=lr)
            group["k"] += 1


class WholeScheduleFree(ScheduleFree):
    """The same class, for use at owners."""


def train(model: Any, optimizer: Any, weights: Callable[[], Any], loss_of: Callable[[int], Tensor]) -> list[Any]:
    """Train; returns the weights after each change of mode. `train()` is called in every micro-batch, as the Trainer of
    transformers does it, and in one step the mode changes while gradients wait."""
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        for micro_batch in range(2):
            optimizer.train()
            loss_of(2 * step + micro_batch).backward()
        if step == 2:
            optimizer.eval()
            seen.append(weights())
            optimizer.train()
        optimizer.step(boost=0.5) if step == 1 else optimizer.step()
        if step % 2:
            optimizer.eval()
            seen.append(weights())
            optimizer.train()
            seen.append(weights())
    return seen


def test_methods_of_the_class_reach_the_weights() -> None:
    """With pieces of parameters, and (`elementwise=False`) with whole ones. By default each case under ZERO3 and one
    other plan, and pieces in bf16 or whole ones with a remainder."""

    def check(rank: int, precision: str | None, elementwise: bool | None, plans: Sequence[Plan]) -> Any:
        logs, found = [], []
        for plan in plans:
            model = make(partial(Net, blocks=1))
            handle = zeroshard.shard(model, plan, units=Block, precision=precision)
            optimizer = zeroshard.ShardedOptimizer(handle, ScheduleFree, elementwise=elementwise)

            def weights(handle: Any = handle) -> Any:
                full, main = handle.full_state_dict(), handle.full_state_dict(main=True)
                dtype = full["norm.weight"].dtype
                rounded = nearest_bf16_ties_away if precision == "bf16-remainder" else partial(Tensor.to, dtype=dtype)
                assert same_bits(full, {name: rounded(value) for name, value in main.items()})
                return main

            loss_of = lambda step, model=model: loss_of_tokens(model, rank, 0, step)  # noqa: E731
            found.append(train(model, optimizer, weights, loss_of))
            assert optimizer.param_groups[0]["k"] == 4 and optimizer.param_groups[0]["train_mode"]
            logs.append(handle.comm_log)
        for others in found[1:]:
            assert all(same_bits(a, b) for a, b in zip(found[0], others, strict=True))
        assert not same_bits(found[0][0], found[0][1])
        if precision is None:
            model = make(partial(Net, blocks=1))
            plain = ScheduleFree(model.parameters())
            loss_of = lambda step: sum(loss_of_tokens(model, r, 0, step) for r in range(3)) / 3  # noqa: E731
            state = lambda: {name: value.clone() for name, value in model.state_dict().items()}  # noqa: E731
            for a, b in zip(found[0], train(model, plain, state, loss_of), strict=True):
                assert largest_difference(a, b) < 1e-5
        return logs

    turns = PLANS[:3]  # one for each precision
    cases = [
        (precision, elementwise, PLANS if EVERYTHING else (turns[index], PLANS[3]))
        for index, precision in enumerate((None, "bf16", "bf16-remainder"))
        for elementwise in (None, False)
        if EVERYTHING or (precision, elementwise) not in (("bf16", False), ("bf16-remainder", None))
    ]
    for (_, elementwise, _), *of_ranks in zip(cases, *run_ranks(in_turn(check, cases), 3), strict=True):
        for logs in zip(*of_ranks, strict=True):
            if elementwise is None:
                expect_same_logs(logs)


class Extragradient(torch.optim.Optimizer):
    """Like cooper's ExtraSGD: a method moves the weights by their gradients, before the step that counts."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.start: list[Tensor] = []

    def extrapolation(self) -> int:
        moved = 0
        for group in self.param_groups:
            for p in group["params"]:
                self.start.append(p.data.clone())
                if p.grad is not None and p.grad.shape == p.shape:
                    p.data.add_(p.grad, alpha=-group["lr"])
                    moved += 1
        return moved

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


@on_ranks(2)
def test_a_method_that_reads_gradients_raises(rank: int) -> None:
    """It found None in their place, and did nothing. Without gradients it does nothing in plain torch, either."""
    for plan in (*PLANS, None):
        for elementwise in (True, False):
            model = make(partial(Net, blocks=1))
            params: Any = zeroshard.shard(model, plan, units=Block) if plan else model.parameters()
            optimizer = zeroshard.ShardedOptimizer(params, Extragradient, elementwise=elementwise)
            found = optimizer.extrapolation()
            assert set(found if isinstance(found, tuple) else [found]) == {0}
            loss_of_tokens(model, 0, 0, 0).backward()
            with pytest.raises(RuntimeError, match="extrapolation of Extragradient reads a gradient"):
                optimizer.extrapolation()


@on_ranks(2)
def test_what_is_not_a_method_or_an_argument(rank: int) -> None:
    for plan in (*PLANS, None):
        model = make(Net)
        params: Any = zeroshard.shard(model, plan, units=Block) if plan else model.parameters()
        optimizer = zeroshard.ShardedOptimizer(params, ScheduleFree)
        assert optimizer.answer() == 42 and optimizer.answer(twice=True) == 84
        assert hasattr(optimizer, "train") and not hasattr(optimizer, "mode")
        with pytest.raises(AttributeError, match=r"no attribute 'mode'. ScheduleFree has.*optimizer.steppers"):
            optimizer.mode  # noqa: B018
        for name in ("mode", "temperature"):  # setting one had no effect, in silence
            with pytest.raises(AttributeError, match=f"no attribute '{name}'. ScheduleFree has.*optimizer.steppers"):
                setattr(optimizer, name, 2.0)
        optimizer.note = "of the user"
        assert optimizer.note == "of the user"
        with pytest.raises(AttributeError, match="'ShardedOptimizer' object has no attribute 'first_step'"):
            optimizer.first_step()
        optimizer.train()
        for name in ("nothing", "grads"):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}', which ScheduleFree"):
                optimizer.step(**{name: 1})
        with pytest.raises(ValueError, match=r"step\(boost=...\) holds tensors of many elements"):
            optimizer.step(boost=[torch.zeros(3)])
    plain = zeroshard.ShardedOptimizer(zeroshard.shard(make(Net), "zero2"), torch.optim.SGD)
    assert not hasattr(plain, "train")


@on_ranks(2)
def test_hooks_run_once_around_the_whole_step(rank: int) -> None:
    """Also for an optimizer class that inherits `step`."""

    class Child(torch.optim.AdamW):
        pass

    seen: list[tuple[str, str]] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda o, args, kwargs: seen.append(("before", type(o).__name__))),
        register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(("after", type(o).__name__))),
    ]
    try:
        for plan in (*PLANS, None):
            for of_class in (Child, zeroshard.optim.Lamb):
                model = make(Net)
                params: Any = zeroshard.shard(model, plan, units=Block) if plan else model.parameters()
                optimizer = zeroshard.ShardedOptimizer(params, of_class)
                optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("mine", type(o).__name__)))
                loss_of_tokens(model, 0, 0, 0).backward()
                assert not seen  # no hook ran in a trial step either
                optimizer.step()
                names = ["before", "mine", "after"]
                assert seen == [(name, "ShardedOptimizer") for name in names]
                assert optimizer.load_state_dict(optimizer.state_dict()) is None
                assert len(seen) == 3
                seen.clear()
    finally:
        for hook in hooks:
            hook.remove()


@on_ranks(2)
def test_a_class_that_evaluates_the_loss_while_it_steps_is_refused(rank: int) -> None:
    class Sharpness(torch.optim.SGD):
        def step(self, closure: Callable[[], Any]) -> None:
            closure()

    handle = zeroshard.shard(make(Net), "zero1")
    for elementwise in (None, True, False):
        with pytest.raises(ValueError, match=r"Sharpness cannot be sharded: its step\(\) needs arguments"):
            zeroshard.ShardedOptimizer(handle, Sharpness, elementwise=elementwise)

    class Optional(torch.optim.SGD):  # as the SAM that is in use
        def step(self, closure: Any = None) -> None:
            assert closure is not None, "requires closure"
            with torch.enable_grad():
                closure()
            super().step()

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError("always")

    for elementwise in (None, True, False):
        with pytest.raises(
            ValueError, match=r"Optional cannot be sharded: its step\(\) calls a closure by itself.*requires"
        ):
            zeroshard.ShardedOptimizer(handle, Optional, lr=0.1, elementwise=elementwise)
    with pytest.raises(ValueError, match=r"Broken is unknown, .*always"):
        zeroshard.ShardedOptimizer(handle, Broken, lr=0.1)
    zeroshard.ShardedOptimizer(handle, Broken, lr=0.1, elementwise=True)  # it may step elsewhere

    class Later(torch.optim.SGD):  # what it raises has nothing to do with the closure, which it calls
        steps = 0

        def step(self, closure: Any = None) -> None:
            if closure is not None:
                closure()
            self.steps += 1
            if self.steps > 3:
                raise ArithmeticError("too many steps")
            super().step()

    with pytest.raises(ValueError, match=r"Later is unknown, .*too many steps") as refused:
        zeroshard.ShardedOptimizer(handle, Later, lr=0.1)
    assert isinstance(refused.value.__cause__, ArithmeticError)


@on_ranks(2)
def test_a_closure_may_be_called_again_and_again(rank: int) -> None:
    """`step(closure)` may be called repeatedly; the closure computes the gradients."""
    found = []
    for plan in plans_of(0):
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)

        def closure(optimizer: Any = optimizer, model: Any = model) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of_tokens(model, rank, 0, 0)
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        found.append(handle.full_state_dict())
    assert all(same_bits(one, found[0]) for one in found)
