"""torchao's optimizers hold moments in 8 or 4 bits. A checkpoint has their fp32 values, which a load quantises
again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.checkpoint.common import read_all
from tests.grids import EVERYTHING
from tests.kit import PLANS, State, make, plans_of, same_bits
from zeroshard.step.low_bit import dense, quantise
from zeroshard.storage.buffer import plain_parts
from zeroshard.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


@pytest.fixture
def low_bit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchao's classes; their kernel is not compiled (compiling takes a minute)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own
        module = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return module


class Run:
    def __init__(self, rank: int, plan: Any, optimizer: Any, seed: int = 0) -> None:
        self.rank = rank
        self.model = make(lambda: nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)), seed)
        self.handle = zeroshard.shard(self.model, plan, units=nn.Linear)
        self.optimizer = zeroshard.ShardedOptimizer(self.handle, optimizer, lr=1e-2)

    def train(self, steps: range) -> Run:
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + self.rank)
            self.optimizer.backward(self.model(torch.randn(4, 128, generator=generator)).square().mean())
            self.optimizer.step()
        return self

    def save(self, directory: Path, **options: Any) -> Run:
        zeroshard.save(directory, self.handle, self.optimizer, step=3, **options)
        return self

    def load(self, directory: Path, **options: Any) -> Run:
        zeroshard.load(directory, self.handle, self.optimizer, **options)
        return self

    def moments(self) -> State:
        """Full moments in fp32. Collective."""
        states = self.optimizer.state_dict()["state"]
        return {f"{key} {n}": value for n, state in states.items() for key, value in state.items() if key != "step"}

    def codes(self) -> list[Tensor]:
        states = [state for stepper in self.optimizer.steppers for state in stepper.optimizer.state.values()]
        parts = plain_parts(value for state in states for value in state.values())
        return [part for part in parts if part.element_size() == 1]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_quantised_once_has_the_same_values_again(low_bit: Any, name: str) -> None:
    """The control is torchao's own `copy_`: where the largest value of a block is negative, the block shrinks."""
    optimizer = getattr(low_bit, name)([nn.Parameter(torch.zeros(4096))])
    for signed in (True, False):
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            value = torch.randn(4096, generator=generator) * 10.0 ** (seed - 10)
            value[seed * 128 : (seed + 1) * 128] = 0
            value = value if signed else value.abs()
            new = lambda: optimizer._new_buffer(torch.zeros(4096), signed)  # noqa: B023, E731
            once = dense(quantise(new(), value))
            assert torch.equal(once, dense(new().copy_(value)))
            assert torch.equal(dense(quantise(new(), once)), once)
            shrinks = not torch.equal(dense(new().copy_(once)), once)
            assert shrinks is (signed and "Fp8" not in name)


@pytest.mark.parametrize("name", NAMES[:2])
def test_what_another_processor_has_quantised_has_the_same_codes(low_bit: Any, name: str) -> None:
    """Codebooks computed on another processor may differ in the last bit: the codes are the same. The control: with
    larger differences they are not."""
    optimizer = getattr(low_bit, name)([nn.Parameter(torch.zeros(4096))])
    value = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    here = quantise(optimizer._new_buffer(torch.zeros(4096), True), value)
    for relative, same in ((2e-7, True), (1e-4, False)):
        there = optimizer._new_buffer(torch.zeros(4096), True)
        there.qmap = there.qmap * (1 + relative * (torch.arange(len(there.qmap)) % 3 - 1))
        quantise(there, value)
        assert torch.equal(quantise(optimizer._new_buffer(value, True), dense(there)).codes, here.codes) is same


def test_a_run_goes_on_bit_for_bit(low_bit: Any, tmp_path: Path) -> None:
    """Saved by two ranks under two plans of each class, and loaded by three under the other two."""
    plans = {name: plans_of(index) for index, name in enumerate(NAMES)}

    def of_class(rank: int, name: str) -> State:
        optimizer, folder = getattr(low_bit, name), tmp_path / name
        for plan in plans[name]:
            run = Run(rank, plan, optimizer).train(range(2)).save(folder / str(plan), background=True)
            codes = [code.clone() for code in run.codes()]
            run.train(range(2, 3))
            run.handle.finish_background()  # a load by another handle would not wait for it
            again = Run(rank, plan, optimizer, seed=1).load(folder / str(plan))
            assert codes and all(torch.equal(a, b) for a, b in zip(again.codes(), codes, strict=True)), (name, plan)
            moments = again.moments()
            again.train(range(2, 3))
            assert same_bits(again.moments(), run.moments()), (name, plan)
            assert not same_bits(moments, run.moments()), (name, plan)
            assert same_bits(again.handle.full_state_dict(), run.handle.full_state_dict()), (name, plan)
        return moments

    def on_two(rank: int) -> dict[str, State]:
        return {name: of_class(rank, name) for name in NAMES}

    expected = run_ranks(on_two, 2)[0]
    for name in NAMES:
        saved = [read_all(tmp_path / name / str(plan) / "step-3") for plan in plans[name]]
        assert all(same_bits(saved[0], other) for other in saved), name

    def on_three(rank: int) -> None:
        for name in NAMES:
            for plan in PLANS if EVERYTHING else set(PLANS).difference(plans[name]):
                run = Run(rank, plan, getattr(low_bit, name), seed=1).load(tmp_path / name / str(plans[name][-1]))
                assert same_bits(run.moments(), expected[name]), (name, plan)

    run_ranks(on_three, 3)


def test_to_a_plain_class_and_back(low_bit: Any, tmp_path: Path) -> None:
    def check(rank: int) -> None:
        run = Run(rank, "zero3", low_bit.AdamW8bit).train(range(3)).save(tmp_path / "8")
        plain = Run(rank, "zero2", torch.optim.AdamW, seed=1)
        with pytest.raises(zeroshard.CheckpointError, match="state of AdamW8bit for AdamW"):
            plain.load(tmp_path / "8")
        plain.load(tmp_path / "8", strict=False).save(tmp_path / "32")
        assert same_bits(plain.moments(), run.moments()) and not plain.codes()
        back = Run(rank, "zero1", low_bit.AdamW8bit, seed=2).load(tmp_path / "32", strict=False)
        assert same_bits(back.moments(), run.moments()) and back.codes()
        for one in (run, plain, back):
            one.train(range(3, 5))
        assert same_bits(back.moments(), run.moments()) and not same_bits(plain.moments(), run.moments())
        assert same_bits(back.handle.full_state_dict(), run.handle.full_state_dict())

    run_ranks(check, 2)


def test_a_class_that_does_not_say_how_it_quantises_is_refused(low_bit: Any, tmp_path: Path) -> None:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["average"] = low_bit.AdamW8bit([nn.Parameter(p.detach())])._new_buffer(p, True)

    def check(rank: int) -> None:
        with pytest.raises(ValueError, match=r"average of .* is a OptimState8bit, made of several tensors"):
            Run(rank, "zero3", Own).train(range(1)).save(tmp_path)

    run_ranks(check, 2)
