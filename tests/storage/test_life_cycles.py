"""Every transition of the state machines of a unit's weights and gradients (a handle's: `test_life.py`). Those in the
tables succeed. All others raise an error that names the unit, its state and the states that allow the operation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.together import in_turn
from zeroshard.placement import PARTIAL as TERMS
from zeroshard.placement import REPLICATED, SHARDED
from zeroshard.storage.gradients import Gradients, GradState
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency, Weights
from zeroshard.testing import run_ranks

Verb = Callable[[Unit, Any], None]


def _gather(unit: Unit, collectives: Any) -> None:
    full = None if unit.weights.buffer.rests_in_full else torch.zeros(unit.layout.numel)
    unit.weights.gather(collectives, "forward", full)


WEIGHTS: dict[str, tuple[Verb, dict[Residency, Residency]]] = {
    "gather": (_gather, {Residency.SHARDED: Residency.GATHERING}),
    "wait for": (
        lambda unit, _: unit.weights.arrive(),
        {Residency.GATHERING: Residency.RESIDENT, Residency.RESIDENT: Residency.RESIDENT},
    ),
    "show": (lambda unit, _: unit.weights.show(), {Residency.RESIDENT: Residency.RESIDENT}),
    "drop": (lambda unit, _: unit.weights.drop(), dict.fromkeys(Residency, Residency.SHARDED)),
}
TO_WEIGHTS: dict[Residency, tuple[str, ...]] = {
    Residency.SHARDED: (),
    Residency.GATHERING: ("gather",),
    Residency.RESIDENT: ("gather", "wait for"),
}


def _open(unit: Unit, collectives: Any) -> None:
    assert unit.grads is not None
    unit.grads.open(torch.zeros(unit.layout.numel) if unit.grads.needs_bucket else None)


def _reduce(unit: Unit, collectives: Any) -> None:
    assert unit.grads is not None
    unit.grads.reduce(collectives, torch.zeros(unit.layout.numel * 4, dtype=torch.uint8))


def _assign(unit: Unit, collectives: Any) -> None:
    assert unit.grads is not None
    unit.grads.assign(0, torch.zeros((unit.layout.slots[0].world & unit.grads.held_interval).numel))


def _grads(unit: Unit) -> Gradients:
    assert unit.grads is not None
    return unit.grads


EMPTY, PARTIAL, REDUCING, REDUCED = GradState.EMPTY, GradState.PARTIAL, GradState.REDUCING, GradState.REDUCED
GRADIENTS: dict[str, tuple[Verb, dict[GradState, GradState]]] = {
    "accumulate into": (_open, {EMPTY: PARTIAL, REDUCED: PARTIAL}),
    "reduce": (_reduce, {PARTIAL: REDUCING}),
    "wait for": (lambda unit, _: _grads(unit).arrive(), {REDUCING: REDUCED}),
    "assign": (_assign, {EMPTY: REDUCED, REDUCED: REDUCED}),
}
TO_GRADIENTS: dict[GradState, tuple[str, ...]] = {
    EMPTY: (),
    PARTIAL: ("accumulate into",),
    REDUCING: ("accumulate into", "reduce"),
    REDUCED: ("accumulate into", "reduce", "wait for"),
}


def edges(rank: int, plan: str, of: str) -> list[tuple[str, str, str]]:
    """(state, operation, the state after it or the error message)."""
    found = []
    verbs: Any = WEIGHTS if of == "weights" else GRADIENTS
    ways: Any = TO_WEIGHTS if of == "weights" else TO_GRADIENTS
    for state, way in ways.items():
        for verb in verbs:
            handle = zeroshard.shard(nn.Linear(8, 8), plan)
            unit, collectives = handle.engine.units[0], handle.engine.collectives
            who: Weights | Gradients = unit.weights if of == "weights" else _grads(unit)
            if of == "weights":
                unit.weights.drop()
            for step in way:
                verbs[step][0](unit, collectives)
            assert who.state is state, (who.state, state)
            try:
                verbs[verb][0](unit, collectives)
                found.append((state.value, verb, who.state.value))
            except RuntimeError as error:
                assert who.state is state, "a refusal changes nothing"
                found.append((state.value, verb, str(error)))
    return found


@pytest.mark.parametrize("of", ["weights", "gradients"])
def test_every_edge(of: str) -> None:
    table: Any = WEIGHTS if of == "weights" else GRADIENTS
    of_plans = run_ranks(in_turn(edges, [(plan, of) for plan in ("ddp", "zero2", "zero3")]), 2)[0]
    for state, verb, outcome in itertools.chain(*of_plans):
        legal = {before.value: after.value for before, after in table[verb][1].items()}
        if state in legal:
            assert outcome == legal[state], (state, verb, outcome)
        else:
            assert outcome.startswith(f"unit root: cannot {verb} {of} that are {state}: "), outcome
            assert any(needed in outcome for needed in legal), outcome


def test_a_state_is_a_name_for_where_values_are() -> None:
    """States are derived from the placement of the buffer. (They once were stored separately, and could contradict it.)
    Placements that no state corresponds to are refused."""

    def check(rank: int) -> None:
        unit, collectives = _unit_and_collectives()
        weights, grads = unit.weights.buffer, _grads(unit).buffer
        assert (weights.placement, weights.is_arriving, unit.weights.state) == (REPLICATED, False, Residency.RESIDENT)
        assert (grads.placement, unit.grads.state) == (None, EMPTY)
        with pytest.raises(RuntimeError, match="a buffer of unit root has no values: it cannot be redistributed"):
            grads.redistribute(SHARDED, collectives, unit="root", phase="test")
        weights.become(SHARDED)
        assert unit.weights.state is Residency.SHARDED
        weights.redistribute(REPLICATED, collectives, unit="root", phase="test")
        assert unit.weights.state is Residency.GATHERING
        with pytest.raises(RuntimeError, match="the values of this buffer are arriving"):
            weights.become(SHARDED)
        with pytest.raises(RuntimeError, match=r"that are arriving: it cannot be redistributed .*another thread"):
            weights.redistribute(SHARDED, collectives, unit="root", phase="test")
        weights.arrive()
        with pytest.raises(ValueError, match="replicated values cannot become partial"):
            weights.redistribute(TERMS, collectives, unit="root", phase="test")
        assert unit.weights.state is Residency.RESIDENT, "a refusal changes nothing"
        weights.become(TERMS)
        with pytest.raises(RuntimeError, match="unit root: weights cannot be partial"):
            unit.weights.arrive()
        grads.become(TERMS)
        assert unit.grads.state is PARTIAL

    run_ranks(check, 2)


def test_a_gather_that_raises_as_it_begins_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward failed in an assertion ("not a borrower"), which hid the error of the connection."""

    def check(rank: int) -> None:
        handle = zeroshard.shard(model := nn.Linear(8, 8), "zero3")
        unit, collectives = handle.engine.units[0], handle.engine.collectives

        def fails(*_: Any, **__: Any) -> None:
            raise RuntimeError("connection closed by rank 1")

        with monkeypatch.context() as patched:
            patched.setattr(collectives, "all_gather", fails)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="connection closed by rank 1"):
                    model(torch.ones(2, 8))
        assert unit.weights.state is Residency.SHARDED
        model(torch.ones(2, 8))

    run_ranks(check, 2)


def test_gradients_that_are_discarded_while_they_arrive_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may leave a reduction that no list has. Peers read the bucket, and a late mean would overwrite what
    comes next."""

    def check(rank: int) -> None:
        unit, collectives = _unit_and_collectives()
        grads, done = _grads(unit), list[object]()
        _open(unit, collectives), _reduce(unit, collectives)
        release = grads.buffer.pending.release
        monkeypatch.setattr(grads.buffer.pending, "release", lambda: done.append(release()))
        grads.consume()
        assert done == [None] and grads.state is EMPTY and not grads.buffer.is_arriving

    run_ranks(check, 2)


def _unit_and_collectives() -> tuple[Unit, Any]:
    handle = zeroshard.shard(nn.Linear(8, 8), "zero1")
    return handle.engine.units[0], handle.engine.collectives
