"""A KeyboardInterrupt (a notebook's "stop") in the middle of a call: what its next cells do has the same results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS, same_bits
from tests.together import in_turn, on_ranks
from zeroshard import handle as of_handle
from zeroshard.comm.pending import Pending
from zeroshard.full_model import give_back
from zeroshard.layout.layout import BufferLayout
from zeroshard.placement import SHARDED
from zeroshard.runtime import hooks, needs, schedule
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.life import Life
from zeroshard.runtime.plain_model import PlainModel
from zeroshard.step.flat_state import FlatState
from zeroshard.storage.buffer import FlatBuffer
from zeroshard.storage.gradient_buffer import GradientBuffer
from zeroshard.storage.gradients import Gradients
from zeroshard.storage.main_weights import MainWeights
from zeroshard.storage.pool import Kind, Pool, PoolBuffer
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Weights
from zeroshard.testing import run_ranks

WIDTH = 6


def make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    model[1][0].weight.requires_grad_(False)
    return model


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))).float().square().mean()


def train(handle: zeroshard.Handle, optimizer: zeroshard.ShardedOptimizer) -> dict[str, Tensor]:
    for step in range(2):
        optimizer.zero_grad()
        loss_of(handle.model, step).backward()
        optimizer.step()
    return handle.full_state_dict(main=True)


def interrupt(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    number: int = 1,
    error: type[BaseException] = KeyboardInterrupt,
) -> None:
    """Call number `number` of this function is interrupted before it begins."""
    method, count = getattr(owner, name), [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == number:
            raise error
        return method(*args, **kwargs)

    patch.setattr(owner, name, interrupted)


IN_SHARD: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a unit is made": lambda patch: interrupt(patch, Unit, "write_slots", 2),
    "its parameters are given up": lambda patch: interrupt(patch, Unit, "take_over", 2),
    "casts are there": lambda patch: interrupt(patch, hooks, "_around_lookers"),
    "some modules have hooks": lambda patch: interrupt(patch, needs.Around, "attach", 3),
    "a module has one of two hooks": lambda patch: interrupt(patch, nn.Module, "register_forward_hook", 6),
    "a frozen parameter has hooks": lambda patch: interrupt(patch, hooks, "_before_gradient", 4),
    "all is there": lambda patch: interrupt(patch, of_handle, "claim_parameters"),
    "the handle has its parameters": lambda patch: interrupt(patch, PlainModel, "guard"),
}


@on_ranks(1)
def test_after_an_interrupt_in_shard_the_model_is_as_before(rank: int) -> None:
    """It had values that were rounded to 16 bits, or hooks of a handle that nobody had: the next `shard` trained from
    other weights, or the forwards after it raised."""

    def check(rank: int, plan: Any, precision: str) -> None:
        def shard(model: nn.Module) -> zeroshard.Handle:
            mixed = {"0.*": precision, "*": "fp32"}
            return zeroshard.shard(model, plan, units=nn.Linear, precision=mixed)

        plain = make()
        handle = shard(make())
        expected = train(handle, zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1))
        for place, begin in IN_SHARD.items():
            model = make()
            with pytest.MonkeyPatch.context() as patch:
                begin(patch)
                with pytest.raises(KeyboardInterrupt) as kept:  # as a notebook keeps the last error
                    shard(model)
            assert kept.value is not None
            assert same_bits(dict(model.state_dict()), dict(plain.state_dict())), place
            assert torch.equal(loss_of(model, 0), loss_of(plain, 0)), place
            trained = [parameter.requires_grad for parameter in model.parameters()]
            assert trained == [parameter.requires_grad for parameter in plain.parameters()], place
            handle = shard(model)
            found = train(handle, zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1))
            assert same_bits(found, expected), place

    in_turn(check, [("ddp", "fp32"), ("zero1", "bf16"), ("zero3", "bf16")])(rank)


IN_CLOSE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a unit is not free": lambda patch: interrupt(patch, Unit, "free", 2),
    "its weights are free": lambda patch: interrupt(patch, Gradients, "free", 2),
    "its main is free": lambda patch: interrupt(patch, MainWeights, "free", 2),
    "one of its parameters has its values": lambda patch: interrupt(patch, give_back, "give", 4),
    "a module has lost its hooks": lambda patch: interrupt(patch, needs.Around, "_reset_call", 2),
    "no unit is left": lambda patch: interrupt(patch, Engine, "_hold"),
}


def test_an_interrupted_close_goes_on_when_it_is_called_again() -> None:
    """The handle was abandoned, and values of parameters were lost, or it was taken for closed, with hooks left."""

    def check(rank: int, plan: Any, precision: str) -> None:
        def begin() -> zeroshard.Handle:
            handle = zeroshard.shard(make(), plan, units=nn.Linear, precision=precision)
            train(handle, zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1))
            return handle

        handle = begin()
        plain = handle.model
        handle.close()
        for place, interrupted in IN_CLOSE.items():
            for abandons in (False, True):
                handle = begin()
                model = handle.model
                with pytest.MonkeyPatch.context() as patch:
                    interrupted(patch)
                    with pytest.raises(KeyboardInterrupt):
                        handle.close()
                with pytest.raises(RuntimeError, match=r"full_state_dict: close.* has been interrupted"):
                    handle.full_state_dict()
                with pytest.raises(ValueError, match="shard"):
                    zeroshard.shard(model, plan)
                if not abandons:
                    handle.close()
                    assert same_bits(dict(model.state_dict()), dict(plain.state_dict())), place
                    assert torch.equal(loss_of(model, 3), loss_of(plain, 3)), place
                    zeroshard.shard(model, plan).close()
                    continue
                handle.abandon()
                for name, parameter in model.named_parameters():
                    try:
                        difference = (parameter.detach().float() - plain.get_parameter(name).detach()).abs().max()
                    except RuntimeError as error:  # "... are lost"
                        difference = torch.tensor(0.0 if "are lost" in str(error) else 1.0)
                    assert difference < 0.01, (place, name)

    run_ranks(in_turn(check, [("zero1", "bf16"), ("zero3", "bf16"), ("ddp", "fp32")]), 1)


def interrupted_at(number: int, work: Callable[[], object], *files: str) -> bool:
    """Whether the work has come to line `number` of the engine's, where it is interrupted. `files`: to count in."""
    files = files or ("parking.py", "weights.py", "buffer.py", "absent.py", "engine.py")
    count = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line" and number == (count := count + 1):
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


class Vacates:
    def vacate(self, buffer: PoolBuffer) -> bool:
        return True


def new_pool() -> Pool:
    return Pool(SimpleNamespace(device=torch.device("cpu"), transport=SimpleNamespace(memory=None)), None)  # type: ignore[arg-type]


def test_an_exchange_that_is_interrupted_while_it_is_made_says_nothing_when_it_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An AttributeError of `__del__` was shown, "Exception ignored in"."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    owner = SimpleNamespace(messages=SimpleNamespace(failed=False, keep=lambda works: None))
    for at in range(1, 20):
        made: list[Pending] = []
        if not interrupted_at(at, lambda made=made: made.append(Pending(owner)), "pending.py"):  # type: ignore[misc]
            break
    made.clear()
    assert 5 < at < 19 and not ignored


@pytest.mark.parametrize("kind", ["ring", "scratch"])
def test_a_pool_buffer_that_is_given_back_by_half_has_memory_when_it_is_used(kind: Kind) -> None:
    """One of gathered weights was held without memory: the next gather wrote to address 0."""
    pool = new_pool()
    buffer = pool.buffer(kind, 64, Vacates())
    for at in range(1, 100):
        buffer.tensor(16, torch.float32)
        is_over = not interrupted_at(at, buffer.give_back, "pool.py")
        assert buffer.tensor(16, torch.float32).untyped_storage().nbytes() == 64, at
        if is_over:
            break
    assert 3 < at < 20


@pytest.mark.parametrize("way", ["in", "out"])
def test_gradients_that_have_moved_by_half_are_still_theirs(way: str) -> None:
    """Into an idle pool buffer, or out of it: then another unit takes the buffer."""
    layout = BufferLayout.pack([("weight", (400,))], 2)
    for at in range(1, 100):
        shard = GradientBuffer(layout, 0, torch.float32, SHARDED, partial(torch.empty, dtype=torch.uint8))
        shard.hold()
        expected = shard.shard.copy_(torch.arange(layout.shard_numel).float()).clone()
        pool = new_pool()
        buffer = pool.buffer("buckets", 4096, Vacates())
        lodge = partial(buffer.lodge, shard, 64)
        if way == "out":
            lodge()
        work = lodge if way == "in" else buffer.send_away
        is_over = not interrupted_at(at, work, "pool.py", "gradient_buffer.py")
        buffer.occupy("another")
        buffer.storage.fill_(255)
        assert torch.equal(shard.shard, expected), at
        if is_over:
            break
    assert 8 < at < 40


@on_ranks(1)
def test_after_an_interrupt_in_park_or_unpark_the_handle_is_as_before_or_parked(rank: int) -> None:
    """It was open or parked by half: what had been emptied had lost its values, and neither call was possible."""

    def check(rank: int, plan: Any, precision: str) -> None:
        def begin() -> tuple[zeroshard.Handle, zeroshard.ShardedOptimizer]:
            handle = zeroshard.shard(make(), plan, units=nn.Linear, precision=precision)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
            train(handle, optimizer)
            return handle, optimizer

        handle, optimizer = begin()
        state, full = handle.full_state_dict(main=True), 0
        for at in range(1, 2000, 5):
            if interrupted_at(at, handle.park) and handle.engine.life is Life.OPEN:
                loss_of(handle.model, 0)
                handle.park()
            full += bool(handle.memory()["grads"])
            done = not interrupted_at(at, handle.unpark)
            if handle.engine.life is Life.PARKED:
                handle.unpark()
            assert same_bits(handle.full_state_dict(main=True), state), at
            if done and at > 600:
                break
        assert full <= 3  # parked, and not emptied: where it is interrupted before the first line of `empty`
        assert same_bits(train(handle, optimizer), train(*begin()))

    in_turn(check, [("ddp", "fp32"), ("zero1", "bf16"), ("zero2", "bf16-remainder"), ("zero3", "bf16")])(rank)


@on_ranks(2)
def test_park_and_unpark_without_memory_on_one_rank_raise_on_all_and_can_be_repeated(rank: int) -> None:
    """The other rank had parked, or waited for it."""
    for plan in PLANS[:3]:
        handle = zeroshard.shard(make(), plan, units=nn.Linear, precision="bf16")
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
        train(handle, optimizer)
        state = handle.full_state_dict(main=True)
        for call in handle.park, handle.unpark:
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    interrupt(patch, Weights, "own", error=MemoryError)
                with pytest.raises(RuntimeError, match=r"park \(on rank 1\): MemoryError"):
                    call()
            call()
        assert same_bits(handle.full_state_dict(main=True), state)


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_after_an_interrupt_at_the_end_of_backward_its_gradients_are_discarded(rank: int, ranks: int) -> None:
    """The engine took that backward for one that had ended: the next one raised that a unit ran in several reentrant
    checkpoints. Nor does it matter if `zero_grad` is interrupted while it discards them."""

    def check(rank: int, plan: Any) -> None:
        results = []
        for interrupted in (False, True):
            handle = zeroshard.shard(make(), plan, units=nn.Linear)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
            train(handle, optimizer)
            if interrupted:
                with pytest.MonkeyPatch.context() as patch:
                    interrupt(patch, schedule, "_forget_autocasts")
                    with pytest.raises(KeyboardInterrupt):
                        loss_of(handle.model, 7).backward()
                with pytest.MonkeyPatch.context() as patch:
                    interrupt(patch, handle.engine.schedule.reducer, "abandon_backward")
                    with pytest.raises(KeyboardInterrupt):
                        optimizer.zero_grad()
            results.append(train(handle, optimizer))
        assert same_bits(*results)

    in_turn(check, PLANS)(rank)


@on_ranks(1)
def test_after_an_interrupt_where_other_parameters_begin_to_take_part_they_do(rank: int) -> None:
    """The next steps took the pieces for planned, and left them out, in silence, also after a load."""
    results = []
    for interrupted in (False, True):
        handle = zeroshard.shard(make(), "zero1", units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
        model = handle.model
        model[:2](torch.ones(5, WIDTH)).square().mean().backward()  # the last layer has no gradient
        optimizer.step()
        optimizer.zero_grad()
        if interrupted:
            weights, state = handle.full_state_dict(), optimizer.state_dict()

            def refused(*_: object) -> None:
                raise KeyboardInterrupt

            loss_of(model, 7).backward()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(FlatState, "of_unit", refused)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
            optimizer.zero_grad()
            handle.load_full_state_dict(weights)
            optimizer.load_state_dict(state)
        results.append(train(handle, optimizer))
    assert same_bits(*results)


@pytest.mark.parametrize("place", [1, 2])
@on_ranks(1)
def test_after_an_interrupt_while_a_bucket_is_allocated_backward_works(rank: int, place: int) -> None:
    """The bucket had memory, and was not there: the next backward raised "the full buffer is not here"."""
    results = []
    for interrupted in (False, True):
        handle = zeroshard.shard(make(), "zero2", units=nn.Linear, precision="bf16")
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
        train(handle, optimizer)
        if interrupted:
            reads = [0]

            def dtype(buffer: FlatBuffer, reads: list[int] = reads) -> torch.dtype:
                reads[0] += sys._getframe(1).f_code is FlatBuffer.hold.__code__
                if reads[0] == place:
                    raise KeyboardInterrupt
                return buffer.shard.dtype

            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(FlatBuffer, "dtype", property(dtype), raising=False)
                loss_of(handle.model, 7).backward()
            assert reads[0] >= place
            optimizer.zero_grad()
        results.append(train(handle, optimizer))
    assert same_bits(*results)


@on_ranks(1)
def test_an_interrupt_where_the_engine_switches_gradients_off_leaves_them_on(rank: int) -> None:
    """`torch.no_grad` leaves them off if a signal arrives between its `__enter__` and the block: every later backward
    said that its loss does not require grad."""
    enter, places = torch.no_grad.__enter__, 0
    for plan in PLANS:
        model = make()
        handle = zeroshard.shard(model, plan, units=nn.Sequential)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        for number in range(1, 100):
            left = [number]

            def interrupted(mode: Any, left: list[int] = left) -> None:
                enter(mode)
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt

            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(torch.no_grad, "__enter__", interrupted)
                loss_of(model, 0)
            if left[0] > 0:
                break
            assert torch.is_grad_enabled(), (plan, number)
            places += 1
        train(handle, optimizer)
    assert places
