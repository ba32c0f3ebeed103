"""Several threads that call one model.

Under ZeRO-3 they took each other's weights away: an AssertionError, or ranks that waited for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS, same_bits
from tests.together import in_turn, on_ranks
from zeroshard.storage.weights import Weights

WIDTH, CALLS = 6, 30


class Pausing(nn.Module):
    """`pause` is called in the middle of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.pause: Callable[[], object] = int

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.pause()
        for layer in self.layers[1:]:
            x = layer(x)
        return x


def start(
    plan: Any, of: type[torch.optim.SGD] = torch.optim.SGD, **options: Any
) -> tuple[Pausing, zeroshard.Handle, zeroshard.ShardedOptimizer]:
    torch.manual_seed(0)
    model = Pausing()
    handle = zeroshard.shard(model, plan, units=nn.Linear)
    return model, handle, zeroshard.ShardedOptimizer(handle, of, lr=0.1, **options)


def data(rank: int, number: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1 + rank + 10 * number))


def train(model: nn.Module, optimizer: zeroshard.ShardedOptimizer, rank: int, step: int) -> None:
    model(data(rank, step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        return error


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The result, or the error, of each call, on threads of their own."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        found[number] = outcome(calls[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(x)
    return out


@pytest.mark.by_cpu
@pytest.mark.parametrize("plan", ["zero1", "zero2"])
@on_ranks(2)
def test_no_thread_evaluates_while_another_one_shows_weights(rank: int, plan: str) -> None:
    """An evaluation looked at the weights while a state dict, or a read, showed them: it raised that their data have
    been replaced."""
    model, handle, optimizer = start(plan)
    lock, own, may_evaluate = handle.engine.schedule.running.lock, Weights.show, list[bool]()

    def look() -> bool:
        if not lock.acquire(blocking=False):
            return False
        lock.release()
        return True

    def show(weights: Weights) -> None:
        if not weights.shown:
            may_evaluate.extend(at_once(look))
        own(weights)

    for read in (model.state_dict, handle.full_state_dict, lambda: model.layers[0][0].weight.sum()):
        train(model, optimizer, rank, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Weights, "show", show)
            read()
        assert may_evaluate and not any(may_evaluate), read
        may_evaluate.clear()


@on_ranks(2)
def test_a_second_thread_is_refused_where_weights_are_gathered_for_a_forward(rank: int) -> None:
    model, handle, optimizer = start("zero3")
    x = data(rank, 0)
    with handle.unsharded():
        expected = evaluated(model, x)
    inside, refused = threading.Event(), threading.Event()
    model.pause = lambda: (inside.set(), refused.wait())

    def second(call: Callable[[Tensor], Tensor]) -> Tensor:
        inside.wait()
        try:
            return call(x)
        finally:
            refused.set()

    for call in (model, model.layers[3][0]):
        inside.clear()
        refused.clear()
        first, error = at_once(lambda: evaluated(model, x), lambda call=call: second(call))
        assert torch.equal(first, expected)
        assert "another thread runs this model" in str(error), error
    model.pause = int
    train(model, optimizer, rank, 1)
    assert all(unit.weights.in_use == 0 for unit in handle.engine.units)


@pytest.mark.by_cpu
@on_ranks(2)
def test_threads_may_evaluate_where_weights_are_there(rank: int) -> None:
    """Also while they arrive after a step."""

    def check(rank: int, plan: Any) -> None:
        model, handle, optimizer = start(plan)
        for step in range(CALLS):
            train(model, optimizer, rank, step)
            found = at_once(*[lambda number=number: evaluated(model, data(rank, number)) for number in range(3)])
            for number, out in enumerate(found):
                assert torch.equal(out, evaluated(model, data(rank, number)))
        assert all(unit.weights.in_use == 0 for unit in handle.engine.units)

    in_turn(check, PLANS[:3])(rank)


@pytest.mark.by_cpu
@on_ranks(2)
def test_under_zero3_threads_may_evaluate_in_a_scope_and_take_turns_with_a_lock(rank: int) -> None:
    model, handle, optimizer = start("zero3")
    plain, _, of_plain = start("ddp")
    turn = threading.Lock()

    def locked(number: int) -> Tensor:
        with turn:
            out: Tensor = model(data(rank, number))
        return out

    for _ in range(CALLS):
        with handle.unsharded():
            for number, out in enumerate(at_once(*[lambda n=n: evaluated(model, data(rank, n)) for n in range(2)])):
                assert torch.equal(out, evaluated(plain, data(rank, number)))
        outputs = at_once(lambda: locked(0), lambda: locked(1))
        sum(out.square().mean() for out in outputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        sum(plain(data(rank, number)).square().mean() for number in range(2)).backward()
        of_plain.step()
        of_plain.zero_grad()
        assert same_bits(handle.full_state_dict(), plain.state_dict())
    assert all(unit.weights.in_use == 0 for unit in handle.engine.units)


@on_ranks(2)
def test_a_forward_may_start_threads_where_weights_are_there(rank: int) -> None:
    model, _, _ = start("zero2")
    x = data(rank, 0)
    expected = evaluated(model.layers[1], x)
    model.pause = lambda: found.extend(at_once(*[lambda: evaluated(model.layers[1], x)] * 2))
    found: list[Any] = []
    evaluated(model, x)
    assert all(torch.equal(out, expected) for out in found)
    assert len(found) == 2


def trained(
    plan: Any, rank: int, evaluate: Callable[[nn.Module], object], *, swapped: bool = False
) -> tuple[dict[str, Tensor], list[Any]]:
    """Weights after three steps. `evaluate` runs in the middle of each backward, on another thread; `swapped`: on this
    one, and the backward on another one."""
    model, handle, optimizer = start(plan)
    found = list[Any]()
    inside, done = threading.Event(), threading.Event()

    def pause(grad: Tensor) -> None:
        inside.set()
        done.wait()

    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(pause)

    def beside() -> None:
        inside.wait()
        found.append(outcome(lambda: evaluate(model)))
        done.set()

    removable = model.layers[1].register_forward_hook(hook)
    for step in range(3):
        inside.clear()
        done.clear()
        loss = model(data(rank, step)).square().mean()
        here, there = (beside, loss.backward) if swapped else (loss.backward, beside)
        thread = threading.Thread(target=there)
        thread.start()
        here()
        thread.join()
        optimizer.step()
        optimizer.zero_grad()
    removable.remove()
    return handle.full_state_dict(), found


@on_ranks(2)
def test_another_thread_in_the_middle_of_a_backward(rank: int) -> None:
    """Its call ended the backward, as one that has raised, and gradients were lost in silence."""

    def check(rank: int, plan: Any) -> None:
        x = data(rank, 9)
        expected, _ = trained(plan, rank, lambda model: None)
        for swapped in (False, True):
            weights, found = trained(plan, rank, lambda model: evaluated(model, x), swapped=swapped)
            assert same_bits(weights, expected)
            if plan is zeroshard.ZERO3:
                assert all("another thread runs a backward" in str(error) for error in found), found
            else:
                assert all(isinstance(out, Tensor) for out in found), found
            weights, found = trained(plan, rank, lambda model: model(x), swapped=swapped)
            assert same_bits(weights, expected)
            assert all("another thread runs a backward" in str(error) for error in found), found
            assert len(found) == 3

    in_turn(check, PLANS)(rank)


@on_ranks(2)
def test_another_thread_evaluates_all_the_time(rank: int) -> None:
    """It met buffers in the middle of a step."""

    def check(rank: int, plan: Any) -> None:
        weights = []
        for evaluates in (False, True):
            model, _, optimizer = start(plan)
            ends = threading.Event()

            def evaluate(model: nn.Module = model, ends: threading.Event = ends) -> int:
                count = 0
                while not ends.is_set():
                    evaluated(model, data(rank, 0))
                    count += 1
                    ends.wait(0.001)
                return count

            def steps(model: nn.Module = model, optimizer: Any = optimizer, ends: threading.Event = ends) -> None:
                try:
                    for step in range(CALLS // 3):
                        train(model, optimizer, rank, step)
                finally:
                    ends.set()

            found = at_once(steps, *([evaluate] if evaluates else []))
            assert found[0] is None, found
            assert not evaluates or isinstance(found[1], int), found
            weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        assert same_bits(*weights)

    in_turn(check, PLANS[:3])(rank)


@on_ranks(2)
def test_another_thread_waits_for_the_end_of_a_step(rank: int) -> None:
    """Here it surely comes in the middle of one."""

    class Amid(torch.optim.SGD):
        call: Callable[[], object] = int

        def step(self, closure: Any = None) -> Any:
            type(self).call()
            return super().step(closure)

    def check(rank: int, plan: Any) -> None:
        model, _, optimizer = start(plan, Amid, elementwise=True)
        x, found = data(rank, 9), list[Any]()
        thread = threading.Thread(target=lambda: found.append(outcome(lambda: evaluated(model, x))))

        def call() -> None:
            if not thread.ident:
                thread.start()
                thread.join(0.2)  # without the lock it has ended by then, usually

        Amid.call = staticmethod(call)
        train(model, optimizer, rank, 0)
        Amid.call = int
        thread.join()
        assert torch.equal(found[0], evaluated(model, x))  # with the new weights

    in_turn(check, PLANS[:3])(rank)
