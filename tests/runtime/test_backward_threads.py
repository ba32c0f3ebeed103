"""Backward on a separate thread, as torch's engine runs it for CUDA.

Each thread numbers the nodes of the graph for itself, so nodes that the backward thread creates in a recomputation have
low numbers. The engine once took the input of a recomputed block for the block's own output, and gathered the block
into the pool buffer of the unit that was just computing. With ZERO3 and non-reentrant checkpoints around blocks that
return their input, weights were off by 0.07 to 0.88 after a few steps, without an error.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.backward_threads import backward_on_threads
from tests.grids import EVERYTHING
from tests.kit import PLANS, Block, Job, Net, Outcome, plans_of, same_bits, train, train_reference
from tests.model.test_graphs import Skips, one_loss
from zeroshard.model import units
from zeroshard.placement import Plan
from zeroshard.runtime.calls import Entry
from zeroshard.testing import RankError, run_ranks


class SkipsCheckpointed(Skips):
    """Recomputed blocks that return their input."""

    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            block.open = (self.step + index) % 3 == 0
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class SkipsReentrant(SkipsCheckpointed):
    reentrant = True


class Segments(Net):
    """A plain trunk; then checkpoints around three blocks each, of which the first two return their input. For the
    first checkpoint that is the output of the last plain block: when backward reaches it, it needs that block's
    weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Skips.Inner() for _ in range(9))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            block.open = index < 3 or index % 3 == 2
        for block in self.blocks[:3]:
            x = block(x)
        for first in (3, 6):
            x = checkpoint(nn.Sequential(*self.blocks[first : first + 3]), x, use_reentrant=False)
        return self.head(self.norm(x))


class Passes(Net):
    """Blocks return a keyword argument next to their output."""

    class Inner(Block):
        def forward(self, x: Tensor, *, first: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            return super().forward(x) + first["x"], first

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(6))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        first = {"x": x * 2}
        for block in self.blocks:
            x, first = checkpoint(block, x, first=first, use_reentrant=False)
        return self.head(self.norm(x + first["x"]))


class Reads(Net):
    """Reads the weights of two modules that it does not call."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.embedding(tokens, self.embed.weight)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.head.weight)


def recomputed(model: nn.Module, *place: int) -> Tensor:
    """The loss of a model that a reentrant checkpoint calls again in backward."""
    anchor = torch.ones(1, requires_grad=True)

    def call(tokens: Tensor) -> Tensor:
        output: Tensor = checkpoint(lambda tokens, anchor: model(tokens), tokens, anchor, use_reentrant=True)
        return output

    return one_loss(call, *place)


PARTS = "root parts that are read"
JOBS: dict[str, Job] = {
    "segments": Job(model=Segments, loss_of=one_loss, micro_batches=2),
    "skipped blocks": Job(model=SkipsCheckpointed, loss_of=one_loss, steps=4, micro_batches=2),
    "skipped blocks, reentrant": Job(model=SkipsReentrant, loss_of=one_loss, steps=4),
    "passed by name": Job(model=Passes, loss_of=one_loss, precision="bf16"),
    PARTS: Job(model=Reads, loss_of=recomputed),
}


PLANS_OF: dict[str, tuple[Plan, ...]] = {
    name: PLANS if EVERYTHING else (plans_of(number)[0], PLANS[3]) for number, name in enumerate(JOBS)
}
"""Each job with ZERO3: only there do units take over pool buffers in backward."""


@functools.cache
def run_all() -> tuple[dict[str, list[Outcome]], list[dict[str, list[Outcome]]]]:
    """The outcomes of one process by job, and those of each rank by job and plan."""
    expected = run_ranks(lambda rank: {name: train_reference(job, 2) for name, job in JOBS.items()}, 1)[0]
    return expected, run_on_threads(PLANS_OF)


def run_on_threads(plans: Mapping[str, Sequence[Plan]]) -> list[dict[str, list[Outcome]]]:
    def run(rank: int) -> dict[str, list[Outcome]]:
        found = {}
        for name, of_job in plans.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(units, "PART_BYTES", 0 if name == PARTS else units.PART_BYTES)
                found[name] = [train(JOBS[name], plan, rank) for plan in of_job]
        return found

    with backward_on_threads():
        return run_ranks(run, 2)


@pytest.mark.parametrize("name", JOBS)
def test_backward_on_a_thread_of_its_own_is_that_of_one_process(name: str) -> None:
    expected, found = run_all()
    for outcomes, truth in zip((of_rank[name] for of_rank in found), expected[name], strict=True):
        for plan, outcome in zip(PLANS_OF[name], outcomes, strict=True):
            assert outcome.losses == truth.losses, plan
            assert same_bits(outcome.weights, truth.weights), plan


def test_numbers_of_nodes_alone_do_not_say_who_made_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the engine once did. Today autograd finds that the weights are gone."""
    monkeypatch.setattr(Entry, "has_made", lambda self, output: output.grad_fn._sequence_nr() >= self.next_node)
    with pytest.raises(RankError, match="modified by an inplace operation"):
        run_on_threads({"segments": PLANS[3:]})


def test_it_is_another_thread_and_knows_what_the_engine_hands_over() -> None:
    """The control: on the new thread numbers of nodes start again; grad mode and autocast are passed on."""
    seen: list[tuple[int, bool, bool]] = []

    def look(grad: Tensor) -> None:
        number = torch._C._autograd._get_sequence_nr()
        seen.append((number, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    x = torch.ones(3, requires_grad=True)
    y = x
    for _ in range(10):
        y = y * 2
    y.register_hook(look)
    with backward_on_threads(), torch.autocast("cpu"):
        y.sum().backward()
    assert x.grad is not None and x.grad[0] == 2**10
    with backward_on_threads(), pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(1).backward()
    assert seen[0][0] < 10
    assert seen[0][1:] == (False, True)
