"""Compares the step times that the planner's model predicts to measured ones.

    python benchmarks/time_model.py --ranks 2 4

The rates of this machine are measured first, on all ranks at once, and on parts of a step only:

| rate | measured on |
|---|---|
| flops | forward and backward of the plain model |
| memory | the update of the plain model by torch's fused AdamW |
| latency, bandwidth | a gather and a reduction of a small buffer, and of one as large as a transformer block |

With these rates the model (`planning/time_model.py`) predicts the step of each plan, and the step is measured. All of
it takes turns, round by round, in another order in each round, so that other load affects rates and steps alike. Each
time is that of the slowest rank, and the medians over the rounds are compared. Ranks of one machine without GPUs copy
bytes with the cores that compute, so nothing overlaps (`overlaps=False`).

As a control the predictions are also made with the rates of memory and messages times `--wrong`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from zeroshard.comm.transport import Reduction
from zeroshard.planning import Configuration, Machine
from zeroshard.planning.time_model import multiplied
from zeroshard.testing import run_ranks
from zeroshard.train.config import ModelConfig
from zeroshard.train.model import GPT, Block

PLANS = ("ddp", "zero1", "zero2", "zero3")
SMALL = 1 << 12
"""Bytes of the small buffer: its time is latency."""


class Probe:
    """A reduction and a gather of one size, over the collectives of a sharded model."""

    def __init__(self, collectives: Any, num_bytes: int) -> None:
        self.collectives, self.num_bytes, ranks = collectives, num_bytes, collectives.mesh.shard.size
        # Peers can map it as long as this lives.
        self.memory = collectives.transport.allocate(num_bytes, collectives.device)
        self.full = self.memory.view(torch.float32)
        self.own = self.full.view(ranks, -1)[collectives.mesh.shard.rank]
        needed = collectives.transport.scratch_of_each(
            self.full.numel(), torch.float32, torch.float32, ranks, 1, in_place=True
        )
        scratch = torch.empty(max(needed), dtype=torch.uint8)
        self.reduction = Reduction(scratch, torch.float32, ranks)

    @property
    def sent(self) -> int:
        """Bytes of one of the two messages."""
        return self.num_bytes - self.own.nbytes

    def run(self) -> None:
        at = {"unit": "probe", "phase": "backward"}
        self.collectives.reduce_scatter(self.full, self.own, self.reduction, **at).release()
        self.collectives.all_gather(self.full, of_mean=True, **at).release()


class Plain:
    """The model in plain torch, without any communication."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.model = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def compute(self, tokens: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()

    @property
    def bytes_of_update(self) -> int:
        """Gradients are read; weights and two moments are read and written."""
        return sum(parameter.nbytes for parameter in self.model.parameters()) * 7


class Sharded:
    """The model under one plan."""

    def __init__(self, build: Callable[[], nn.Module], plan: str) -> None:
        self.model = build()
        self.handle = zeroshard.shard(self.model, plan, units=Block)
        self.optimizer = zeroshard.ShardedOptimizer(self.handle, torch.optim.AdamW, lr=1e-3, fused=True)

    def step(self, tokens: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()
        self.optimizer.step()
        self.handle.engine.gatherer.settle()  # gathers of the next step's weights belong to this step


def seconds_of(action: Callable[[], None]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    action()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def measure(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """On one rank: the seconds of each part and plan, round by round, and what the rates are computed from."""
    torch.set_num_threads(1)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT(shape_of(options), options.vocabulary)

    plain, plans = Plain(build), {plan: Sharded(build, plan) for plan in PLANS}
    collectives = plans["zero1"].handle.engine.collectives
    of_block = max(unit.layout.numel for unit in plans["zero1"].handle.engine.units) * 4
    probes = {"small": Probe(collectives, SMALL), "large": Probe(collectives, of_block)}
    collectives.map_peers()
    generator = torch.Generator().manual_seed(1000 + rank)
    seconds: dict[str, list[float]] = {}
    for number in range(options.warmup + options.rounds):
        tokens = torch.randint(options.vocabulary, (options.batch, options.context + 1), generator=generator)
        parts: dict[str, Callable[[], object]] = {
            "compute": lambda tokens=tokens: plain.compute(tokens),
            "update": plain.optimizer.step,
            **{name: probe.run for name, probe in probes.items()},
            **{plan: lambda of=of, tokens=tokens: of.step(tokens) for plan, of in plans.items()},
        }
        order = [name for name in parts if name != "update"]
        random.Random(number).shuffle(order)
        order.insert(order.index("compute") + 1, "update")  # it needs the gradients
        for name in order:
            found = seconds_of(parts[name])
            if number >= options.warmup:
                seconds.setdefault(name, []).append(found)
    return {
        "seconds": seconds,
        "sent": probes["large"].sent,
        "bytes_of_update": plain.bytes_of_update,
        "transport": collectives.transport.name,
    }


def shape_of(options: argparse.Namespace) -> ModelConfig:
    return ModelConfig(**{key: getattr(options, key) for key in ("layers", "width", "heads", "context")})


def machine_of(found: dict[str, Any], ranks: int, flops: float) -> Machine:
    """The rates. `flops`: the model's operations for forward and backward of a micro-batch."""
    medians = {name: statistics.median(values) for name, values in found["seconds"].items()}
    small = medians["small"] / 2
    return Machine(
        flops=flops / medians["compute"],
        memory=found["bytes_of_update"] / medians["update"],
        latency=small / (ranks - 1),
        bandwidth=found["sent"] / max(1e-9, medians["large"] / 2 - small),
        node=1 << 10,
        overlaps=False,
    )


def report(ranks: int, found: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the rates, and a row for each plan."""
    tokens = options.batch * options.context
    with torch.device("meta"):
        model = GPT(shape_of(options), options.vocabulary)
    configuration = Configuration(ranks=ranks, units=Block, device="cpu", transport=found["transport"])
    forecasts = {plan: zeroshard.plan(model, replace(configuration, plan=plan)) for plan in PLANS}
    elements = sum(multiplied(forecasts["ddp"].training, forecasts["ddp"].looked_up).values())
    machine = machine_of(found, ranks, 6.0 * elements * tokens)
    factor = options.wrong
    wrong = replace(machine, memory=machine.memory * factor, bandwidth=machine.bandwidth * factor)
    print(
        f"\n{ranks} ranks: {machine.flops / 1e9:.1f} GFLOP/s, {machine.memory / 1e9:.2f} GB/s in an update, "
        f"{machine.latency * 1e6:.0f} us and {machine.bandwidth / 1e9:.2f} GB/s in messages; "
        f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores\n"
    )
    columns = ("ranks", "plan", "modelled ms", "measured ms", "25 % to 75 %", "modelled / measured")
    print("|", " | ".join((*columns, f"control: memory, messages x {factor:g}")), "|")
    print("|" + "---|" * (len(columns) + 1))
    for plan, forecast in forecasts.items():
        values = found["seconds"][plan]
        measured, (low, _, high) = statistics.median(values), statistics.quantiles(values, n=4)
        modelled, control = (forecast.time(one, tokens).total for one in (machine, wrong))
        print(
            f"| {ranks} | {plan} | {modelled * 1e3:.0f} | {measured * 1e3:.0f} | {low * 1e3:.0f} to {high * 1e3:.0f} "
            f"| {modelled / measured:.2f} | {control / measured:.2f} |"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=20, help="that count")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and step")
    parser.add_argument("--wrong", type=float, default=0.25, help="factor on two rates, as a control")
    options = parser.parse_args()
    if min(options.ranks) < 2 or options.rounds < 2:
        parser.error("--ranks and --rounds must be at least 2")
    return options


def main() -> None:
    options = parse()
    for ranks in options.ranks:
        report(ranks, run_ranks(measure, ranks, options, timeout=3600)[0], options)


if __name__ == "__main__":
    main()
