"""Jobs that share their ranks: starting and ending a rank takes as long as a small job.

    JOBS = {"shared": Job(model=Shared), ...}
    AWKWARD = Together(JOBS)

    @pytest.mark.parametrize("name", JOBS)
    def test_it_trains_as_in_one_process(name):
        AWKWARD.expect_reference(name)

A failed comparison fails only the test of its own job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.grids import EVERYTHING
from tests.kit import PLANS, Job, Outcome, beside_one_process, logs, same_bits, train, train_reference
from zeroshard.placement import Plan
from zeroshard.testing import expect_same_logs

AT_ONCE = 16
"""The number of jobs that one start of ranks trains: few enough that a test that is run alone need not wait long."""


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
