"""Who reads a parameter whose values are not here?

What users saw: NaN. In a loss, where `step()` could only guess at the reason; in evaluation, where nothing was said at
all; in an average of the weights (`AveragedModel`), in a `DataLoader` worker or a thread, for good. Now the first
forward of a model in a new way raises at the line that reads, and `handle.find_reads()` finds all others.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

import zeroshard
from tests.core.models import PLANS, Block, Job, Net, State, loss_of_tokens, make, same_bits, train
from zeroshard.testing import run_ranks


class Reads(Net):
    """Reads a weight of another part, if it is told to."""

    reads: Callable[[Any], Any] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        if self.reads is not None:
            out = out + self.reads(self)
        return out


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda model: model.blocks[1].up.weight.norm(),
    "data": lambda model: model.blocks[1].up.weight.data.mean(),
    "view": lambda model: model.blocks[1].up.weight.t()[3].detach().sum(),
    "function": lambda model: nn.functional.linear(torch.ones(19), model.blocks[1].up.weight).sum(),
    "list": lambda model: torch._foreach_norm([model.blocks[1].up.weight])[0],
    "clone": lambda model: model.blocks[1].up.weight.clone().sum(),
    "write": lambda model: model.blocks[1].up.weight.detach().zero_().sum(),
}
SHAPES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda model: model.blocks[1].up.weight.shape[0],
    "like": lambda model: torch.zeros_like(model.blocks[1].up.weight).sum(),
    "new": lambda model: model.blocks[1].up.weight.new_ones(1),
    "view": lambda model: model.blocks[1].up.weight.t().numel(),
    "printing": lambda model: len(repr(model)),
}
MESSAGE = r"parameter blocks.1.up.weight is used while no module of its unit runs \(unit blocks.1\)"
TOKENS = torch.zeros(1, 2, dtype=torch.long)


def line_of(error: BaseException) -> str:
    """The last line of this file that was on the way."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
    return frames[-1].line or ""


@pytest.mark.parametrize("how", ["training", "evaluation", "inference"])
def test_a_forward_that_reads_what_is_not_there_raises_at_its_line(how: str) -> None:
    def check(rank: int) -> None:
        for name, reads in READS.items():
            model = make(Reads)
            handle = zeroshard.shard(model.train(how == "training"), "zero3", units=Block)
            before = handle.full_state_dict()
            model.reads = reads
            with {"training": torch.enable_grad, "evaluation": torch.no_grad, "inference": torch.inference_mode}[how]():
                with pytest.raises(RuntimeError, match=MESSAGE) as error:
                    model(TOKENS)
                assert "model.blocks[1].up.weight" in line_of(error.value), name
                model.reads = None
                assert model(TOKENS).isfinite().all()
            assert same_bits(handle.full_state_dict(), before), name

    run_ranks(check, 2)


def test_shapes_may_be_read_and_nan_is_not_taken_for_a_read() -> None:
    def check(rank: int) -> None:
        model = make(Reads)
        handle = zeroshard.shard(model.eval(), "zero3", units=Block)
        with torch.no_grad(), handle.find_reads():
            for reads in SHAPES.values():
                model.reads = reads
                assert model(TOKENS).isfinite().all()
            model.reads = lambda model: torch.tensor(torch.nan)  # numbers that are NaN are the user's
            assert model(TOKENS).isnan().all()

    run_ranks(check, 2)


def test_between_step_and_forward_too() -> None:
    """ZERO2: the weights of the step are still arriving, unit by unit."""

    def check(rank: int) -> None:
        model = make(Reads)
        handle = zeroshard.shard(model, "zero2", units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        model.reads = lambda model: torch.zeros(())
        loss_of_tokens(model, rank, 0, 0).backward()
        optimizer.step()
        model.register_forward_pre_hook(lambda module, args: READS["norm"](module) and None)
        with pytest.raises(RuntimeError, match=MESSAGE):
            model(TOKENS)

    run_ranks(check, 2)


class Weights(Dataset[Tensor]):
    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        weight: Tensor = self.model.blocks[1].up.weight
        return weight.detach().mean()


def test_readers_outside_of_forward_are_found() -> None:
    """An average of the weights, a thread, a loader's worker: NaN without, and a name and a line with `find_reads`."""

    def check(rank: int) -> None:
        model = make(Net)
        averaged = AveragedModel(model)
        handle = zeroshard.shard(model, "zero3", units=Block)
        with (
            handle.find_reads(),
            pytest.raises(RuntimeError, match=r"parameter .* is used while no module of its unit"),
        ):
            averaged.update_parameters(model)
        assert averaged.module.head.bias.isfinite().all()
        with handle.unsharded(), handle.find_reads():
            averaged.update_parameters(model)
        assert averaged.module.head.bias.isfinite().all()

        errors: list[BaseException] = []

        def watch() -> None:
            try:
                with handle.find_reads():
                    READS["norm"](model)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=watch)
        thread.start()
        thread.join()
        assert "parameter blocks.1.up.weight" in str(errors[0])

        assert Weights(model)[0].isnan()
        for workers in (0, 1):
            with handle.find_reads(), pytest.raises(RuntimeError, match=r"parameter blocks\.1\.up\.weight"):
                list(DataLoader(Weights(model), num_workers=workers))
        with pytest.raises(TypeError, match="cannot be copied"):
            AveragedModel(model)

    run_ranks(check, 2)


def test_being_watched_changes_nothing() -> None:
    def check(rank: int) -> Any:
        results: list[State] = []
        for plan in PLANS:
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
            for step in range(3):
                with handle.find_reads():
                    loss = loss_of_tokens(model, rank, 0, step)
                    loss.backward()
                optimizer.step()
            results.append(handle.full_state_dict())
            assert same_bits(results[-1], train(Job(), plan, rank).weights)
            assert not torch.utils._python_dispatch._len_torch_dispatch_stack()

    run_ranks(check, 2)
