"""Tests that share ranks: each gets its own outcome, whatever the others do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import together
from zeroshard.comm.comm_log import CommLog
from zeroshard.testing import RankError


def passes(rank: int) -> None:
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.float64)
    dist.barrier()


def fails(rank: int) -> None:
    if rank == 1:
        raise ValueError("on purpose")
    dist.barrier()


def differs(rank: int, number: int) -> None:
    dist.barrier()
    if number == 2:
        raise ValueError("two")


def logs(rank: int, different: bool) -> list[CommLog]:
    log = CommLog()
    log.record("all_gather", f"unit {different * rank}", "forward", 4)
    return [CommLog(), log]


def starts_of(monkeypatch: pytest.MonkeyPatch, items: list[Any]) -> tuple[list[int], dict[str, str | None]]:
    """How many tests each start has begun with, and the outcome of each test; they are asked for in order."""
    starts: list[int] = []
    run_ranks = together.run_ranks

    def counted(fn: Any, num_ranks: int) -> Any:
        starts.append(len(fn.__closure__[fn.__code__.co_freevars.index("items")].cell_contents))
        return run_ranks(fn, num_ranks)

    monkeypatch.setattr(together, "run_ranks", counted)
    start = together._Starts({item.function: (item.function, 2) for item in items})
    outcomes: dict[str, str | None] = {}
    for item in items:
        try:
            start.expect(item, items)
            outcomes[item.nodeid] = None
        except (RankError, AssertionError) as error:
            outcomes[item.nodeid] = getattr(error, "text", str(error)).splitlines()[-1]
    return starts, outcomes


def item(name: str, function: Any, skipped: bool = False, **parameters: Any) -> Any:
    marker = lambda mark: object() if skipped else None  # noqa: E731
    callspec = {"callspec": SimpleNamespace(params=parameters)} if parameters else {}
    return SimpleNamespace(nodeid=name, function=function, get_closest_marker=marker, **callspec)


def test_they_share_one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item("a", passes), item("b", passes), item("c", differs, number=1)]
    assert starts_of(monkeypatch, items) == ([3], {"a": None, "b": None, "c": None})


def test_one_fails_and_the_others_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure, a new start runs the others."""
    items = [item("a", passes), item("b", fails), *(item(f"c{n}", differs, number=n) for n in (1, 2, 3))]
    starts, outcomes = starts_of(monkeypatch, items)
    assert starts == [5, 4, 3]
    assert outcomes.pop("b") == "ValueError: on purpose" and outcomes.pop("c2") == "ValueError: two"
    assert set(outcomes) == {"a", "c1", "c3"} and not any(outcomes.values())


def test_returned_logs_must_be_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item("same", logs, different=False), item("other", logs, different=True), item("a", passes)]
    starts, outcomes = starts_of(monkeypatch, items)
    assert starts == [3]
    assert outcomes == {"same": None, "other": "rank 1 differs from rank 0 in all_gather number 0", "a": None}


def test_the_number_of_ranks_may_be_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    def has(rank: int, number: int) -> None:
        assert dist.get_world_size() == number

    start = together._Starts({has: (has, "number"), passes: (passes, 2)})
    items = [item("two", has, number=2), item("three", has, number=3), item("a", passes)]
    start.expect(items[0], items)
    assert start.outcomes == {"two": None, "a": None}
    start.expect(items[1], items)
    assert start.outcomes == {"two": None, "a": None, "three": None}


def test_what_is_skipped_is_left_out_and_a_start_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "AT_ONCE", 2)
    items = [item("a", passes), item("b", passes), item("c", passes)]
    assert starts_of(monkeypatch, items) == ([2, 1], {"a": None, "b": None, "c": None})
    start = together._Starts({passes: (passes, 2), fails: (fails, 2)})
    start.expect(items[0], [items[0], item("skipped", fails, skipped=True), items[1]])
    assert start.outcomes == {"a": None, "b": None}
