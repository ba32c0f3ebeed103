"""A third kind of stepper, defined here: `state_dict`, `optimizer.state` and checkpoints support it like the two that
are built in.

It keeps momentum as one tensor for a unit's own shard, without pieces, owners or an inner optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import Net, make, same_bits
from zeroshard.checkpoint import Reader
from zeroshard.full_model.full_state import EVERYWHERE, Destination
from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import Slot
from zeroshard.step.assignment import Assignment
from zeroshard.step.granularity import Granularity
from zeroshard.step.stepper import (
    FullState,
    Need,
    SavedState,
    StateChunk,
    StateEntry,
    StateValue,
    Stepper,
    Update,
)
from zeroshard.step.steppers import STEPPERS
from zeroshard.storage.unit import Unit
from zeroshard.testing import run_ranks


class MomentumClass(torch.optim.SGD):
    """Defines the hyper-parameters; its own `step` is never called."""


class ShardState:
    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self.momentum: dict[Unit, Tensor] = {}
        self.counts: dict[Unit, int] = {}

    def _slots(self, unit: Unit) -> Iterator[tuple[Tensor, Slot, Interval]]:
        """Parameter, slot, and the part of the slot in this rank's shard."""
        for member in self._assignment.members():
            if member.unit is unit and (held := member.slot.world & unit.own_shard()):
                yield member.parameter, member.slot, held

    def _local(self, unit: Unit, world: Interval) -> Tensor:
        return self.momentum[unit][world.relative_to(unit.own_shard().start).slice]

    def entries(self) -> Iterator[StateEntry]:
        for unit in self.momentum:
            for _, slot, held in self._slots(unit):

                def read(part: Interval, unit: Unit = unit, origin: int = slot.world.start) -> Tensor:
                    return self._local(unit, Interval(origin + part.start, origin + part.stop))

                param = held.relative_to(slot.world.start)
                yield StateChunk(slot.name, "momentum", slot.shape, torch.float32, param, False, read)
                if param.start == 0:
                    yield StateValue(slot.name, "count", self.counts[unit])

    def needs(self) -> Iterator[Need]:
        for unit in self._assignment.groups:
            for parameter, slot, held in self._slots(unit):
                yield Need(parameter, slot, held.relative_to(slot.world.start))

    def fits(self, slot: Slot, shape: tuple[int, ...]) -> bool:
        return shape == slot.shape

    def elementwise(self, group: int) -> Mapping[str, bool]:
        return {"momentum": True}

    def load(self, state: SavedState, only: Collection[Tensor] | None = None) -> None:
        for unit in self._assignment.groups:
            for parameter, slot, held in self._slots(unit):
                if only is None or parameter in only:
                    items = state.get(parameter) or {"count": 0}
                    self.counts[unit] = items["count"]
                    self.momentum.setdefault(unit, torch.zeros(unit.own_shard().numel))
                    self._local(unit, held).zero_()
                    if "momentum" in items:
                        items["momentum"].read(held.relative_to(slot.world.start), self._local(unit, held))

    def gather(self, only: Collection[Tensor] | None = None, destination: Destination = EVERYWHERE) -> FullState:
        state: FullState = {}
        for unit, momentum in self.momentum.items():
            full = torch.zeros(unit.layout.numel)
            full[unit.own_shard().slice] = momentum
            self._assignment.collectives.all_gather(full, unit=unit.name, phase="state").wait()
            for member in self._assignment.members():
                if member.unit is unit and (only is None or member.parameter in only):
                    value = destination.copy(full[member.slot.world.slice].view(member.slot.shape))
                    state[member.parameter] = {"momentum": value, "count": self.counts[unit]}
        return state

    def parameters(self) -> Collection[Tensor]:
        return self.gather().keys()


class ShardStep:
    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.optimizer = assignment.optimizer_class([torch.zeros(1)], **assignment.defaults)
        self.state = ShardState(assignment)

    def own_gradients(self) -> Iterator[tuple[int, Tensor]]:
        for unit in self.assignment.groups:
            for tensor in unit.grads.views(unit.own_shard()):
                yield 0, tensor

    def step(
        self,
        options: Sequence[dict[str, Any]],
        active: dict[Unit, list[bool]],
        update: Update,
        updated: Callable[[Unit], None],
        arguments: dict[str, Any],
    ) -> None:
        assert all(all(flags) for flags in active.values()), "all parameters train in this test"
        for unit in self.assignment.groups:
            own, main = unit.own_shard(), unit.main
            assert main is not None
            gradient = torch.empty(own.numel)
            unit.grads.read(own, gradient)
            momentum = self.state.momentum.setdefault(unit, torch.zeros(own.numel))
            update.apply([gradient])
            momentum.mul_(0.9).add_(gradient)
            self.state.counts[unit] = self.state.counts.get(unit, 0) + 1
            value = main.read(own, None)
            main.write(own, value.sub_(momentum, alpha=options[0]["lr"]))
            updated(unit)

    def call(self, name: str, arguments: Any, options: Sequence[dict[str, Any]]) -> Any:
        raise NotImplementedError

    def tensors(self) -> dict[str, list[Tensor]]:
        return {"state": list(self.state.momentum.values())}


class Run:
    def __init__(self, rank: int, plan: Any, seed: int = 0) -> None:
        self.rank, self.model = rank, make(lambda: Net(blocks=1), seed)
        self.handle = zeroshard.shard(self.model, plan)
        self.optimizer = zeroshard.ShardedOptimizer(self.handle, MomentumClass, lr=0.1, elementwise=False)
        stepper: Stepper = self.optimizer.steppers[0]  # the annotation is for mypy
        assert isinstance(stepper, ShardStep)

    def train(self, steps: range) -> Run:
        for step in steps:
            tokens = torch.randint(0, 7, (2, 4), generator=torch.Generator().manual_seed(step))
            self.optimizer.backward(self.model(tokens).square().mean())
            self.optimizer.step()
        return self

    def state(self) -> dict[str, Any]:
        """Full main and momentum. Collective."""
        state = {f"main {name}": value for name, value in self.handle.full_state_dict(main=True).items()}
        for number, items in self.optimizer.state_dict()["state"].items():
            state |= {f"{key} {number}": torch.as_tensor(value) for key, value in items.items()}
        return state


@pytest.fixture(autouse=True)
def third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPPERS, Granularity.PARAMETER, ShardStep)


def test_saved_on_three_ranks_loaded_on_others(tmp_path: Path) -> None:
    """All ranks have the same batch, so gradients do not depend on the number of ranks, and later states are
    comparable."""

    def save(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        run = Run(rank, "zero3").train(range(2))
        zeroshard.save(tmp_path, run.handle, run.optimizer, step=2)
        before = run.state()
        return before, run.train(range(2, 3)).state()

    def load(rank: int, plan: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        run = Run(rank, plan, seed=3)
        zeroshard.load(tmp_path, run.handle, run.optimizer)
        before = run.state()
        return before, run.train(range(2, 3)).state()

    before, after = run_ranks(save, 3)[0]
    assert any("momentum" in key for key in before) and before["count 0"] == 2
    with Reader(tmp_path / "step-2") as reader:
        names = [name for name in reader.manifest.tensors if name.startswith("optimizer/momentum/")]
        assert len(names) == len(list(Net(blocks=1).parameters()))
        assert any(reader.manifest.tensors[name].num_parts > 1 for name in names), "cut between ranks"
    for ranks, plan in [(1, "zero3"), (2, "zero1"), (4, "zero2"), (3, "zero3")]:
        for loaded, trained in run_ranks(load, ranks, plan):
            assert same_bits(loaded, before), (ranks, plan)
            assert trained.keys() == after.keys()
            assert all(torch.allclose(value.float(), after[name].float()) for name, value in trained.items())
            assert ranks != 3 or same_bits(trained, after)


def test_a_shape_that_does_not_fit_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        run = Run(rank, "zero2").train(range(1))
        full = run.optimizer.state_dict()
        full["state"][0]["momentum"] = torch.zeros(5)
        before = run.state()
        with pytest.raises(ValueError, match=r"state 'momentum' of .*: expected .* found \(5,\)"):
            run.optimizer.load_state_dict(full)
        assert same_bits(run.state(), before)

    run_ranks(check, 2)


def test_the_view_reads_and_replaces_the_state_of_one_parameter() -> None:
    def check(rank: int) -> None:
        run = Run(rank, "zero3").train(range(1))
        parameter = run.optimizer.param_groups[0]["params"][0]
        state = run.optimizer.state[parameter]
        assert state["count"] == 1 and state["momentum"].any()
        run.optimizer.state[parameter]["momentum"] = torch.ones(parameter.shape)
        assert torch.equal(run.optimizer.state[parameter]["momentum"], torch.ones(parameter.shape))

    run_ranks(check, 2)


def test_steppers_of_two_kinds_may_share_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adafactor's state has rows and columns of its matrices. A load once asked the elementwise stepper of the same
    unit whether these shapes fit, and refused them."""
    monkeypatch.undo()

    def build(rank: int) -> tuple[nn.Module, Any, Any]:
        model = make(lambda: nn.Sequential(nn.Linear(8, 8)), 0)
        handle = zeroshard.shard(model, "zero2")
        groups: list[dict[str, Any]] = [
            {"params": [model[0].weight], "optimizer_class": torch.optim.Adafactor},
            {"params": [model[0].bias]},
        ]
        return model, handle, zeroshard.ShardedOptimizer(groups, torch.optim.AdamW, lr=1e-2)

    def check(rank: int) -> None:
        model, handle, optimizer = build(rank)
        optimizer.backward(model(torch.ones(2, 8)).square().sum())
        optimizer.step()
        zeroshard.save(tmp_path, handle, optimizer, step=1)
        expected = optimizer.state_dict()["state"]
        _, again, loaded = build(rank)
        zeroshard.load(tmp_path, again, loaded)
        for number, items in loaded.state_dict()["state"].items():
            assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(expected[number][k])) for k, v in items.items())

    run_ranks(check, 2)
