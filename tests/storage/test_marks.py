"""Marks tell written values from those that a step has left, as a comparison of all bits does."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

import zeroshard
from tests.garbage import collected_at
from tests.kit import Block, Net, loss_of_tokens, make, same_bits
from zeroshard.layout.interval import Interval
from zeroshard.precision import NAMED
from zeroshard.storage import main_weights, marks
from zeroshard.storage.main_weights import MainWeights
from zeroshard.storage.marks import COLUMNS, Marks, mark_of
from zeroshard.testing import run_ranks

Change = Callable[[Tensor], object]


def exchange(first: int, second: int) -> Change:
    def change(values: Tensor) -> None:
        values[[first, second]] = values[[second, first]]

    return change


def rows(width: int, change: Change) -> Change:
    return lambda values: change(values[: values.numel() // width * width].view(-1, width))


def changes(numel: int, per_row: int) -> Iterator[tuple[str, Change]]:
    """What users do to weights, and the smallest changes."""
    for at in (0, 1, per_row - 1, per_row, 2 * per_row + 5, numel - 1):
        yield f"one element, {at}", lambda values, at=at: values[at : at + 1].view(torch.uint8)[0].add_(1)
    for step in (1, 4, 7, per_row - 1, per_row + 1, 2 * per_row - 4, 2 * per_row + 4):
        yield f"two elements, {step} apart", exchange(3, 3 + step)
    yield "the order", lambda values: values.copy_(values.flip(0))
    yield "shifted", lambda values: values.copy_(values.roll(1))
    for width in (64, 384, 1024, 4096):
        yield f"rows exchanged, of {width}", rows(width, exchange(0, 2))
        yield f"rows shifted, of {width}", rows(width, lambda matrix: matrix.copy_(matrix.roll(1, 0)))
        yield f"columns exchanged, of {width}", rows(width, lambda matrix: matrix.copy_(matrix.roll(8, 1)))
        yield f"transposed, of {width}", rows(width, lambda matrix: matrix.copy_(matrix.t().reshape(matrix.shape)))
    yield "signs", lambda values: values.neg_()
    per_word = per_row // COLUMNS
    for count in (2, 4, 5, 100):  # of the last numbers of words: their signs are the highest bits
        last = slice(per_word - 1, count * per_word, per_word)
        yield f"{count} signs", lambda values, last=last: values[last].neg_()
        yield f"{count} doubled", lambda values, last=last: values[last].mul_(2)
        yield f"{count} signs at the end", lambda values, last=last: values[2 * per_row :][last].neg_()
    yield "signs of two words, behind the rows", lambda values: values[3 * per_row :][per_word - 1 :: per_word].neg_()
    yield "clipped", lambda values: values.clamp_(-0.5, 0.5)
    yield "zeros", lambda values: values.zero_()
    yield "scaled", lambda values: values.mul_(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_change_is_seen(dtype: torch.dtype) -> None:
    per_row = COLUMNS * 8 // dtype.itemsize
    values = torch.randn(3 * per_row + 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, mark = values.clone(), mark_of(values)
    for what, change in changes(values.numel(), per_row):
        change(values)
        assert not torch.equal(values, before), what
        assert mark_of(values) != mark, what
        values.copy_(before)
        assert mark_of(values) == mark


def test_one_sum_of_all_words_does_not_see_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "mark_of", lambda values: int(values.view(torch.int32).sum()))
    monkeypatch.setitem(globals(), "mark_of", marks.mark_of)
    monkeypatch.setitem(globals(), "changes", lambda *sizes: [("exchanged", exchange(0, 1))])
    with pytest.raises(AssertionError, match="exchanged"):
        test_each_change_is_seen(torch.float32)


def test_nothing_is_said_of_values_that_do_not_begin_at_a_word() -> None:
    values = torch.zeros(100, dtype=torch.bfloat16)
    assert mark_of(values[1:]) is None and mark_of(values[4:]) is not None
    known = Marks()
    for _ in range(3):
        known.set(Interval(1, 100), values[1:])
        assert not known.are_same(Interval(1, 100), values[1:])


def test_a_mark_holds_until_something_else_is_written() -> None:
    values = torch.arange(100.0)
    first, second = Interval(0, 50), Interval(50, 100)
    known = Marks()
    assert not known.are_same(first, values[:50])
    for _ in range(2):  # in the first round each piece is new, and may overlap with those before it
        for piece in (first, second):
            known.set(piece, values[piece.slice])
    assert known.are_same(first, values[:50]) and known.are_same(second, values[50:])
    assert not known.are_same(first, values[50:])
    known.forget()
    assert not known.are_same(first, values[:50])
    known.set(first, values[:50])
    assert known.are_same(first, values[:50]) and not known.are_same(second, values[50:])
    known.set(Interval(20, 70), values[20:70])
    assert not known.are_same(first, values[:50])


def looks(num_steps: int, written: int) -> list[int]:
    """For each step, the number of pieces that are compared; weights are written before step number `written`."""

    def counted(*arguments: object) -> bool:
        found[-1] += 1
        return compare(*arguments)  # type: ignore[arg-type]

    compare, found = main_weights.follow_weights, [0]
    main_weights.follow_weights = counted  # type: ignore[assignment]
    try:
        model = make(Net)
        handle = zeroshard.shard(model, "ddp", units=Block, precision="bf16")
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.01)
        for step in range(num_steps):
            found.append(0)
            if step == written:
                next(model.parameters()).data.zero_()
            loss_of_tokens(model, 0, 0, step).backward()
            optimizer.step()
    finally:
        main_weights.follow_weights = compare
    return found[1:]


@pytest.mark.by_cpu
@pytest.mark.parametrize("way", ["set", "written"])
def test_the_weights_of_the_last_step_may_be_put_back_over_others(way: str) -> None:
    """The mark of the step is that of weights which are not those of main any more."""
    whole = Interval(0, 8)
    main = MainWeights(whole, torch.zeros(8, dtype=torch.bfloat16), NAMED["bf16"], exposed=True)
    for _ in range(2):
        main.read(whole).fill_(1.001)
        main.write(whole, in_step=True)
    of_step = main.weights.clone()
    if way == "set":
        main.set(whole, torch.full((8,), 2.0))
    else:
        main.read(whole).fill_(2.0)
        main.write(whole)
    main.weights.copy_(of_step)
    assert torch.equal(main.read(whole), of_step.float())


def test_weights_are_compared_only_where_something_was_written() -> None:
    first, second, third, fourth, fifth, sixth = run_ranks(lambda rank: looks(6, 3), 2)[0]
    assert first >= second and third == 0  # pieces are new in the first step
    assert fourth > 0 and fourth >= fifth and sixth == 0


KINDS = ["step", "step", "step", "write", "write", "signs", "read", "load"]
AND_BACK = [*["step"] * 3, "write the first", "read", "write the last", "step"]
"""Main follows the first write, so the weights that a step has left are new to it when they come back."""


def after(rank: int, seed: int, plan: str, *, with_marks: bool) -> dict[str, Tensor]:
    """Main after a random order (seed 0 and 1: `AND_BACK`) of steps, writes, and everything that reads or sets main."""
    rng = random.Random(seed)
    model = make(partial(Net, blocks=1))
    handle = zeroshard.shard(model, plan, units=Block, precision="bf16")
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.05)
    are_same = Marks.are_same
    if not with_marks:
        Marks.are_same = lambda *arguments: False  # type: ignore[method-assign]
    try:
        seen: list[dict[str, Tensor]] = [handle.full_state_dict(main=True)]
        for number, kind in enumerate(AND_BACK if seed < 2 else rng.choices(KINDS, k=14)):
            if kind == "step":
                optimizer.zero_grad()
                loss_of_tokens(model, rank, 0, number).backward()
                optimizer.step()
                seen.append({name: value.detach().clone() for name, value in model.state_dict().items()})
            elif kind.startswith("write"):  # weights of earlier, as an average is exchanged for the weights and back
                values = {"write the first": seen[0], "write the last": seen[-1]}.get(kind) or rng.choice(seen)
                for name, parameter in model.named_parameters():
                    parameter.data.copy_(values[name])
            elif kind == "signs":
                for parameter in model.parameters():
                    parameter.data.view(-1)[3::4].neg_()
            elif kind == "read":
                handle.full_state_dict(main=True)
            else:
                handle.load_full_state_dict(rng.choice(seen))
        return handle.full_state_dict(main=True)
    finally:
        Marks.are_same = are_same  # type: ignore[method-assign]


def test_main_is_the_same_with_marks_and_without() -> None:
    def check(rank: int) -> None:
        for seed in range(12):
            plan = ("ddp", "zero1")[seed % 2]
            expected = after(rank, seed, plan, with_marks=False)
            assert same_bits(after(rank, seed, plan, with_marks=True), expected), (seed, plan)

    run_ranks(check, 2)


@pytest.mark.by_cpu
def test_marks_that_are_never_forgotten_miss_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Marks, "forget", lambda self: None)
    with pytest.raises(zeroshard.testing.RankError, match=r"AssertionError: \(\d+, '(ddp|zero1)'\)"):
        test_main_is_the_same_with_marks_and_without()


def test_a_finalizer_makes_marks_in_the_middle_of_another_one() -> None:
    """That of another model: it waited for a lock that its own thread held, for ever."""
    values, others = torch.arange(100.0), torch.arange(70.0).flip(0)
    expected, of_others = mark_of(values), mark_of(others)
    found: list[object] = []

    def make_marks() -> None:
        for made in range(1, 40):
            with collected_at(made, lambda: found.append(mark_of(others))):
                assert mark_of(values) == expected

    thread = threading.Thread(target=make_marks, daemon=True)
    thread.start()
    thread.join(100)
    assert not thread.is_alive()
    assert len(found) > 5 and set(found) == {of_others}


def test_memory_for_marks_that_is_made_in_inference_serves_later(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(100.0)
    expected = mark_of(values)
    monkeypatch.setattr(marks, "_SPARE", [])
    with torch.inference_mode():
        assert mark_of(values) == expected
    assert len(marks._SPARE) == 1 and mark_of(values) == expected and len(marks._SPARE) == 1
