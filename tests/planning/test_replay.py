"""With a batch, the gathers of ZeRO-3 are planned as the model calls its modules, and not in the order of registration:
each gather of a step, and the bytes that are held, are those of the engine."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import make
from tests.planning.test_dry_run import alone
from tests.planning.test_plan import without_phase
from zeroshard.model import units as units_module
from zeroshard.planning import Configuration, Forecast, Workload, dry_run
from zeroshard.step import agreement
from zeroshard.testing import run_ranks

WIDTH = 24
SETTINGS: tuple[Any, ...] = (
    (1, False, "fp32"),
    (2, True, {nn.LayerNorm: "fp32", "*": "bf16"}),
    (2, False, "fp32"),
)
"""Number of micro-batches, whether each is reduced, precision."""


class Late(nn.Module):
    """Parts that are registered in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y


class Stack(nn.Module):
    """Blocks between an embedding and a head. `reentrant`: of checkpoints around each block; None: there are none."""

    def __init__(self, blocks: int = 3, reentrant: bool | None = None, frozen: int = 0, tied: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.blocks = nn.ModuleList(Late() for _ in range(blocks))
        self.embed = nn.Embedding(50, WIDTH)
        self.reentrant = reentrant
        if tied:
            self.head.weight = self.embed.weight
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)
        if frozen:
            self.embed.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(x)
        return logits.float().square().mean()


class Again(Stack):
    """The first block runs between the others, too, and all of them twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, *self.blocks[::2], self.blocks[0], *reversed(self.blocks)):
            x = block(x)
        logits: Tensor = self.head(x)
        return logits.float().square().mean()


class Inside(Stack):
    """Each block runs the next one inside of its own forward, and is not registered around it."""

    def __init__(self) -> None:
        super().__init__()
        for block, following in itertools.pairwise(self.blocks):
            vars(block)["following"] = following

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks[0](self.embed(tokens)))
        return logits.float().square().mean()


class Nested(Late):
    def forward(self, x: Tensor) -> Tensor:
        following = vars(self).get("following")
        y = super().forward(x if following is None else following(x))
        return y


def inside() -> nn.Module:
    model = Inside()
    for block in model.blocks:
        block.__class__ = Nested
    return model


def tokens() -> Tensor:
    return torch.arange(12).view(3, 4)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs)
    return loss


def llama() -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def loss_of_llama(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=inputs, labels=inputs).loss
    return loss


UNITS = Late, 1, 11_000, *[6_000] * EVERYTHING
MODELS: dict[str, Callable[[], nn.Module]] = {
    "late": Stack,
    "checkpoints": partial(Stack, reentrant=False),
    "reentrant": partial(Stack, reentrant=True),
    "frozen": partial(Stack, frozen=2),
    "tied": partial(Stack, tied=True),
    "again": Again,
    "inside": inside,
}


def expect_gathered(
    build: Callable[[], nn.Module], options: Configuration, loss: Callable[..., Tensor] = loss_of
) -> Forecast:
    """In a dry run the gathers of the last step, and the bytes held, are as planned."""
    with torch.device("meta"):
        planned = zeroshard.plan(build(), replace(options, workload=Workload(tokens, loss)))
    with dry_run(options.ranks) as mesh:
        model = make(build)
        handle = zeroshard.shard(
            model, "zero3", units=options.units, precision=options.precision, mesh=mesh,
            keep_gathered=options.keep_gathered,
        )  # fmt: skip
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.0, non_finite="ignore")
        logs = []
        for _ in range(4):  # as after 8, but sooner
            handle.comm_log.clear()
            for number in range(options.micro_batches):
                is_last = number == options.micro_batches - 1
                with handle.no_sync() if options.accumulates_locally and not is_last else nullcontext():
                    optimizer.backward(loss(model, tokens()))
            optimizer.step()
            logs.append(without_phase(handle.comm_log.entries))
        assert logs[-1] == without_phase(planned.events)
        assert handle.memory() == vars(planned.at_rest)
        assert handle.memory(peak=True) == vars(planned.phases["backward"].held)
        handle.close()
    return planned


@pytest.mark.parametrize("name", MODELS)
def test_what_a_step_gathers_is_planned_as_the_model_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with a batch had the gathers of the order of registration: of a Llama in small units some were missing."""
    monkeypatch.setattr(agreement, "exchange_norms", lambda collectives, control, norms: control)
    monkeypatch.setattr(units_module, "PART_BYTES", 4000)  # embedding and head are units of their own
    build = MODELS[name]

    def check() -> None:
        differ = 0
        for units, (micro_batches, every, precision) in itertools.product(
            UNITS, SETTINGS if EVERYTHING else SETTINGS[1:]
        ):
            if name == "reentrant" and units in (6_000, 11_000):
                continue  # a unit of parts of two blocks would run in two checkpoints, which is refused
            options = Configuration(
                ranks=2,
                units=Nested if name == "inside" and units is Late else units,
                precision=precision,
                optimizer="SGD",
                micro_batches=micro_batches,
                reduce_every_micro_batch=every,
                device="cpu",
                transport="native",
                keep_gathered=["blocks.1"] if units is Late and micro_batches == 2 else (),
            )
            planned = expect_gathered(build, options)
            in_order = zeroshard.plan(make(build), options)
            differ += without_phase(in_order.events) != without_phase(planned.events)
        assert differ, "in the order of registration it would be others"

    alone(check)


def test_an_ignored_module_in_a_batch_of_several_passes() -> None:
    """A KeyError: its gradients are in the trace, too."""
    options = Configuration(plan="zero2", ranks=2, units=1, micro_batches=2, workload=Workload(tokens, loss_of))
    with torch.device("meta"):
        planned = zeroshard.plan(Stack(), replace(options, ignored=["blocks.1"]))
        assert 0 < planned.peak < zeroshard.plan(Stack(), options).peak


def test_a_llama_in_small_units_and_what_runs_inside_of_another_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(agreement, "exchange_norms", lambda collectives, control, norms: control)

    def check() -> None:
        for units in (1, 3_000, 8_000):
            options = Configuration(ranks=2, units=units, optimizer="SGD", device="cpu", transport="native")
            expect_gathered(llama, options, loss_of_llama)
        nested = expect_gathered(inside, replace(options, units=Nested))
        assert nested.training.gathered_apart, "a unit that runs inside of another one has a buffer of its own"

    alone(check)


@pytest.mark.by_gloo
def test_ranks_gather_what_is_planned() -> None:
    def check(rank: int) -> None:
        for build, units in ((Stack, 6_000), (Again, 1)):
            options = Configuration(ranks=2, units=units, optimizer="SGD", device="cpu", rank=rank)
            planned = zeroshard.plan(build(), replace(options, workload=Workload(tokens, loss_of)))
            model = make(build)
            handle = zeroshard.shard(model, "zero3", units=units)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            for _ in range(4):
                handle.comm_log.clear()
                optimizer.backward(loss_of(model, tokens() + rank))
                optimizer.step()
            assert Counter(without_phase(handle.comm_log.entries)) == without_phase(planned.events)

    run_ranks(check, 2)
