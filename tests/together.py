"""Jobs and tests that share their ranks: starting and ending a rank takes as long as a small job.

    JOBS = {"shared": Job(model=Shared), ...}
    AWKWARD = Together(JOBS)

    @pytest.mark.parametrize("name", JOBS)
    def test_it_trains_as_in_one_process(name):
        AWKWARD.expect_reference(name)

A failed comparison fails only the test of its own job.

    @on_ranks(2)
    def test_it_trains(rank: int) -> None:
        ...
"""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import pytest
import torch

from tests.grids import EVERYTHING
from tests.kit import PLANS, Job, Outcome, beside_one_process, logs, same_bits, train, train_reference
from zeroshard.placement import Plan
from zeroshard.testing import RankError, expect_same_logs, run_ranks

AT_ONCE = 16
"""The number of jobs, or of tests, that share one start of ranks: few enough that the first need not wait long."""


class Together:
    """Jobs by name, each with two micro-batches. The first request for a job starts ranks and trains a group of
    `AT_ONCE` jobs.

    `on_three`: names of jobs that run on three ranks, because their sizes, or which rank leaves out what, make a
    difference there; the others run on two. `plans`: for all jobs; if empty, each job runs under ZERO3, where weights
    come and go, and every third job under one of the other plans as well, in turn. With `make test-everything` all
    jobs run on both numbers of ranks and under all plans."""

    def __init__(self, jobs: Mapping[str, Job], *, on_three: Sequence[str] = (), plans: Sequence[Plan] = ()) -> None:
        assert set(on_three) <= jobs.keys(), on_three
        self.jobs = {name: replace(job, micro_batches=2) for name, job in jobs.items()}
        self.ranks = {name: (2, 3) if EVERYTHING else (3,) if name in on_three else (2,) for name in jobs}
        others = [(PLANS[index // 3 % 3],) if index % 3 == 0 else () for index in range(len(jobs))]
        turns = [PLANS if EVERYTHING else (*of_turn, PLANS[3]) for of_turn in others]
        self.plans = {name: plans or of_turn for name, of_turn in zip(jobs, turns, strict=True)}
        self._errors: dict[tuple[str, int], AssertionError | None] = {}

    def expect_reference(self, name: str) -> None:
        """Under its plans, losses and weights of the job equal those of one process to the bit, and all ranks' logs
        agree."""
        for num_ranks in self.ranks[name]:
            if (name, num_ranks) not in self._errors:
                names = [other for other, ranks in self.ranks.items() if num_ranks in ranks]
                start = names.index(name) // AT_ONCE * AT_ONCE
                self._train(names[start : start + AT_ONCE], num_ranks)
            error = self._errors[name, num_ranks]
            if error is not None:
                raise error

    def _train(self, names: Sequence[str], num_ranks: int) -> None:
        expected, by_rank = beside_one_process(
            lambda: [train_reference(self.jobs[name], num_ranks) for name in names],
            lambda rank: [self._under_its_plans(name, rank) for name in names],
            num_ranks,
        )
        for name, truth, *found in zip(names, expected, *by_rank, strict=True):
            try:
                _compare(self.plans[name], found, truth)
                self._errors[name, num_ranks] = None
            except AssertionError as error:
                self._errors[name, num_ranks] = error

    def _under_its_plans(self, name: str, rank: int) -> list[Outcome]:
        try:
            return [train(self.jobs[name], plan, rank) for plan in self.plans[name]]
        except BaseException as error:
            error.add_note(f"in the job {name!r}, which runs with others")
            raise


def _compare(plans: Sequence[Plan], found: Sequence[Sequence[Outcome]], truth: Sequence[Outcome]) -> None:
    """`found` by rank and plan, `truth` by rank."""
    for plan, *of_plan in zip(plans, *found, strict=True):
        for outcome, expected in zip(of_plan, truth, strict=True):
            assert outcome.losses == expected.losses, (plan, len(truth))
            assert same_bits(outcome.weights, expected.weights), (plan, len(truth))
        assert [one.norms for one in of_plan] == [of_rank[0].norms for of_rank in found], (plan, len(truth))
        expect_same_logs(logs(of_plan))


def in_turn(check: Callable[..., Any], cases: Iterable[Any]) -> Callable[[int], list[Any]]:
    """For `run_ranks`: a function that calls `check(rank, case)` for one case after the other, on the same ranks, and
    returns the results. A case that is a tuple is several arguments. Errors name their case. (A start of ranks takes as
    long as ten to twenty steps of a small model.)"""
    every = [case if isinstance(case, tuple) else (case,) for case in cases]

    def run(rank: int) -> list[Any]:
        results = []
        for case in every:
            try:
                results.append(check(rank, *case))
            except BaseException as error:
                error.add_note(f"in the case {case}")
                raise
        return results

    return run


def on_ranks(num_ranks: int | str) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """A test that is a function of the rank, and of its parameters if it is parametrized; it is called on each of the
    ranks. If it returns communication logs, those of all ranks must be the same. The tests of a file that follow it,
    that are selected and that have the same number of ranks are run by the same start. A test that needs ranks of its
    own (it ends one, destroys the group, or measures what there is in the process) calls `run_ranks`.

    Args:
        num_ranks: their number, or the name of the parameter that is the number.
    """

    def decorate(check: Callable[..., object]) -> Callable[..., None]:
        start = _STARTS.setdefault(check.__module__, _Starts())
        parameters = [*inspect.signature(check).parameters.values()][1:]

        @wraps(check)
        def test(request: pytest.FixtureRequest, **_: Any) -> None:
            start.expect(request.node, request.session.items)

        request = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([request, *parameters])  # type: ignore[attr-defined]
        start.tests[test] = check, num_ranks
        return test

    return decorate


@dataclass
class _Starts:
    """The tests of a file, with the numbers of their ranks. `outcomes`: by test, its error, or None."""

    tests: dict[object, tuple[Callable[..., object], int | str]] = field(default_factory=dict)
    outcomes: dict[str, Exception | None] = field(default_factory=dict)

    def expect(self, item: pytest.Item, every: Sequence[Any]) -> None:
        if item.nodeid not in self.outcomes:
            ours = [one for one in every if one.function in self.tests and not one.get_closest_marker("skip")]
            alike = [one for one in ours if self._ranks_of(one) == self._ranks_of(item)]
            first = alike.index(item)
            self._run(alike[first : first + AT_ONCE], self._ranks_of(item))
        error = self.outcomes[item.nodeid]
        if error is not None:
            raise error

    def _run(self, items: Sequence[Any], num_ranks: int) -> None:
        """After a failure, a new start runs the others."""
        passed = mmap.mmap(-1, num_ranks)  # shared with the ranks: the number of tests that each has passed

        def in_turn(rank: int) -> list[Any]:
            found = []
            for item in items:
                found.append(self.tests[item.function][0](rank, **_parameters_of(item)))
                torch.set_default_dtype(torch.float32)
                passed[rank] += 1
            return found

        try:
            results = run_ranks(in_turn, num_ranks)
        except RankError as error:
            failed = items[passed[error.rank]]
            self.outcomes[failed.nodeid] = error
            others = [item for item in items if item is not failed]
            if others:
                self._run(others, num_ranks)
            return
        for item, of_ranks in zip(items, zip(*results, strict=True), strict=True):
            try:
                _expect_same(of_ranks)
                self.outcomes[item.nodeid] = None
            except AssertionError as error:
                self.outcomes[item.nodeid] = error

    def _ranks_of(self, item: Any) -> int:
        number = self.tests[item.function][1]
        return _parameters_of(item)[number] if isinstance(number, str) else number


_STARTS: dict[str, _Starts] = {}


def _parameters_of(item: Any) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _expect_same(of_ranks: Sequence[Any]) -> None:
    """What a test returned on each rank: a log, or several, or nothing."""
    if isinstance(of_ranks[0], list):
        for logs in zip(*of_ranks, strict=True):
            expect_same_logs(logs)
    elif of_ranks[0] is not None:
        expect_same_logs(of_ranks)
