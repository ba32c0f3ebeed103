"""Code that runs in the middle of a call (a signal handler, a `__del__`, a weakref callback) and makes another call.

Such a call met internal errors ("`ask` was called", a KeyError), or got weights of which some were updated, in silence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS, same_bits
from tests.together import in_turn, on_ranks
from zeroshard.gradients.visible import VisibleGradients
from zeroshard.runtime import schedule
from zeroshard.step.agreement import Agreement
from zeroshard.step.steppers import Steppers

WIDTH = 6
PLACES = {"agreement": (Agreement, "answer"), "update": (Steppers, "step"), "end": (VisibleGradients, "forget")}


class Loop:
    def __init__(self, plan: Any) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, WIDTH))
        self.handle = zeroshard.shard(self.model, plan, units=nn.Sequential)
        self.optimizer = zeroshard.ShardedOptimizer(self.handle, torch.optim.AdamW, lr=0.1)

    def loss(self, step: int) -> Tensor:
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        loss: Tensor = self.model(x).square().mean()
        return loss

    def evaluate(self) -> Tensor:
        with torch.no_grad():
            return self.loss(9)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.loss(step).backward()
            self.optimizer.clip_grad_norm_(0.1)
            self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        return self.handle.full_state_dict(main=True)


def call_in(patch: pytest.MonkeyPatch, place: tuple[Any, str], call: Callable[[], object]) -> None:
    """The next call of the function at this place begins with this call."""
    owner, name = place
    function, calls = getattr(owner, name), [call]

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        while calls:
            calls.pop()()
        return function(*args, **kwargs)

    patch.setattr(owner, name, disturbed)


def calls_of(loop: Loop) -> dict[str, Callable[[], object]]:
    return {
        "zero_grad": loop.optimizer.zero_grad,
        "model.zero_grad": loop.model.zero_grad,
        "optimizer.step": loop.optimizer.step,
        "clip_grad_norm_": lambda: loop.optimizer.clip_grad_norm_(1.0),
        "forward": loop.evaluate,
        "full_state_dict": loop.handle.full_state_dict,
        "model.state_dict": loop.model.state_dict,
        "state_dict": loop.optimizer.state_dict,
        "save": lambda: zeroshard.save("nowhere", loop.handle, loop.optimizer, step=1),
        "close": loop.handle.close,
    }


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_a_call_in_the_middle_of_a_step_is_refused(rank: int, ranks: int) -> None:
    """And if the handler catches the error, the step goes on as if nothing had been."""

    def check(rank: int, plan: Any) -> None:
        expected = Loop(plan)
        expected.train(0, 1, 2)
        for place in PLACES.values():
            loop, seen = Loop(plan), []
            loop.train(0)

            def disturb(loop: Loop = loop, seen: list[str] = seen) -> None:
                for name, call in calls_of(loop).items():
                    with pytest.raises(RuntimeError, match=rf"^{name} in the middle of (optimizer.step|clip_grad_)"):
                        call()
                    seen.append(name)
                assert loop.handle.memory() and loop.handle.summary()

            with pytest.MonkeyPatch.context() as patch:
                call_in(patch, place, disturb)
                loop.train(1)
            loop.train(2)
            assert seen and same_bits(loop.state(), expected.state()), place

    in_turn(check, PLANS)(rank)


@on_ranks(2)
def test_what_an_interrupt_leaves_is_not_taken_for_a_call(rank: int) -> None:
    def check(rank: int, plan: Any) -> None:
        def stop() -> None:
            raise KeyboardInterrupt

        loop = Loop(plan)
        with pytest.MonkeyPatch.context() as patch:
            call_in(patch, PLACES["agreement"], stop)
            with pytest.raises(KeyboardInterrupt):
                loop.train(0)
        loop.train(1)

    in_turn(check, PLANS)(rank)


@on_ranks(2)
def test_zero_grad_is_refused_until_a_backward_has_ended(rank: int) -> None:
    """At its end, some gradients were discarded and others not."""

    def check(rank: int, plan: Any) -> None:
        expected, loop = Loop(plan), Loop(plan)
        expected.train(0)

        def disturb() -> None:
            for call in (loop.optimizer.zero_grad, loop.model.zero_grad, loop.optimizer.step):
                with pytest.raises(RuntimeError, match="inside of a backward"):
                    call()

        with pytest.MonkeyPatch.context() as patch:
            call_in(patch, (schedule, "_forget_autocasts"), disturb)
            loop.train(0)
        assert same_bits(loop.state(), expected.state())

    in_turn(check, PLANS)(rank)


class AtReturn:
    """A profiler that calls something when built-in function number `number` of the hooks' order has returned."""

    def __init__(self, number: int, call: Callable[[], object]) -> None:
        self.number, self.call = number, call

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "c_return" and frame.f_code.co_name in ("come_first", "gather_first", "hide_last"):
            self.number -= 1
            if self.number == 0:
                sys.setprofile(None)
                self.call()


@on_ranks(1)
def test_an_evaluation_in_the_hooks_of_a_forward(rank: int) -> None:
    """Those that look at the order of hooks raised "OrderedDict mutated during iteration"."""
    loop = Loop(zeroshard.ZERO3)
    expected, number, done = loop.evaluate(), 0, False
    while not done:
        number += 1
        profile = AtReturn(number, loop.evaluate)
        sys.setprofile(profile)
        try:
            assert torch.equal(loop.evaluate(), expected)
        finally:
            sys.setprofile(None)
        done = profile.number > 0
    assert number > 5


@on_ranks(2)
def test_gradients_are_neither_read_nor_set_until_a_backward_has_ended(rank: int) -> None:
    """Whether a reduction was over decided, and so each rank for itself: under ZeRO-3 the calls went on."""

    def check(rank: int, plan: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        handle, seen = zeroshard.shard(model, plan, units=nn.Linear), list[bool]()

        def look(*_: Any) -> None:
            with pytest.raises(RuntimeError, match=r"^gradient inside of a backward"):
                handle.gradient("2.weight")
            with pytest.raises(RuntimeError, match=r"^set_gradient inside of a backward"):
                handle.set_gradient("2.weight", torch.ones(4, 4))
            seen.append(True)

        model[0].register_full_backward_hook(look)
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        assert seen
        assert handle.gradient("2.weight").isfinite().all()

    in_turn(check, PLANS)(rank)
