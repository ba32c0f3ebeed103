"""How much communication is exposed: zeroshard's plans, torch DDP, ZeroRedundancyOptimizer, FSDP1 and FSDP2, compared
on a simulated network (`zeroshard/planning/fabric.py`).

    python benchmarks/overlap.py                                        # 8 and 64 ranks, three networks; half an hour
    python benchmarks/overlap.py --ranks 64 --networks slow --profile   # and what was waited for, in each phase
    python benchmarks/overlap.py --ranks 64 --replicas 8                # a mesh of 8 x 8
    python benchmarks/overlap.py --clock wall                           # waits are slept; needs a quiet machine

One process computes as one rank on one core. The simulated wire runs beside it by the clock, so

    exposed = step time - step time of the same contender on a network that takes no time

in per cent of the seconds for which the wire was busy. With `ProcessorClock` the fabric also sees each wait, and their
sum, "waited", is the same quantity without the noise of two measurements. In each round every contender takes one turn
on every network, in random order; only ratios of medians are printed. A turn runs one step that is not timed, so that
the timed one begins as in training: with the gathers that the last step has started.

The rates of the networks are given for a computer on which the plain step takes `REFERENCE` seconds. They are scaled by
the median of the plain steps that have been measured here so far: the ratio of computation to communication does not
depend on the machine.

What the comparison does not show: FSDP1 and FSDP2 hide communication by CUDA streams. With tensors on the CPU there are
none, and a collective without `async_op` is waited for where it is issued. FSDP2 has a setting that makes its gathers
asynchronous; "torch FSDP2 async" uses it, with explicit prefetching. Its reductions stay synchronous.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_time import PLANS, Contender, Setting, Version, plain, torch_ddp, torch_fsdp2, torch_zero
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zeroshard
from zeroshard.planning.fabric import simulated_fabric
from zeroshard.planning.wire import Clock, Fabric, Network, ProcessorClock, SideOfFabric, WallClock
from zeroshard.train.config import ModelConfig
from zeroshard.train.model import GPT, Block

REFERENCE = 0.197
"""Seconds of the plain step on the computer for which the rates are given."""

NETWORKS = {
    "slow": Network(latency=3e-6, bandwidth=0.5e9),
    "middling": Network(latency=3e-6, bandwidth=2e9),
    "fast": Network(latency=3e-6, bandwidth=10e9),
    "blocking": Network(latency=3e-6, bandwidth=0.5e9, overlaps=False),
}
"""`blocking` is a control: slow, and each collective is waited for where it is issued, so all of it is exposed."""
INSTANT = Network(latency=0.0, bandwidth=math.inf)
PHASES = ("forward", "backward", "step")


def ours(
    plan: str,
    version: Version,
    model: nn.Module,
    setting: Setting,
    mesh: DeviceMesh | None = None,
    beside: SideOfFabric | None = None,
) -> Contender:
    handle = zeroshard.shard(model, plan, units=Block, mesh=mesh)
    handle.engine.collectives.beside = beside
    # The values received from ranks that do not exist are copies, so losses have no meaning.
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, non_finite="ignore", **setting.adamw)
    return Contender(version, model, optimizer, optimizer.clip_grad_norm_, handle.engine.gatherer.settle)


def torch_fsdp1(version: Version, model: nn.Module, setting: Setting) -> Contender:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy([Block]),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        forward_prefetch=True,
    )
    return plain(version, wrapped, setting)


def torch_fsdp2_async(version: Version, model: nn.Module, setting: Setting) -> Contender:
    contender = torch_fsdp2(version, model, setting)
    model._set_unshard_async_op(True)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    model.set_modules_to_forward_prefetch(blocks[:1])
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
    return contender


BUILDERS: dict[str, Callable[[Version, nn.Module, Setting], Contender]] = {
    "plain": plain,
    **{plan: partial(ours, plan) for plan in PLANS},  # without a mesh
    "torch DDP": torch_ddp,
    "torch ZeRO": torch_zero,
    "torch FSDP1": torch_fsdp1,
    "torch FSDP2": torch_fsdp2,
    "torch FSDP2 async": torch_fsdp2_async,
}


class Turns:
    """The turns of all contenders on one fabric.

    Attributes:
        seconds: (contender, network) -> seconds of each timed step.
        wire: (contender, network) -> seconds for which the wire was busy in each timed step.
        waited: (contender, network, phase) -> collective -> seconds waited in each timed step.
    """

    def __init__(self, fabric: Fabric, contenders: dict[str, Contender], options: argparse.Namespace) -> None:
        self.fabric, self.contenders, self.options = fabric, contenders, options
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.wire: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.waited: dict[tuple[str, str, str], list[Counter[str]]] = defaultdict(list)
        self._generator = torch.Generator().manual_seed(0)

    def take(self, name: str, network_name: str, network: Network) -> None:
        """One turn of a contender."""
        contender, clock = self.contenders[name], self.fabric.clock
        self.fabric.network = network
        self._step(contender)
        mark, start = len(self.fabric.log), clock.now()
        waited = self._step(contender)
        self.seconds[name, network_name].append(clock.now() - start)
        self.wire[name, network_name].append(sum(transfer.seconds for transfer in self.fabric.log[mark:]))
        for phase, of_phase in waited.items():
            self.waited[name, network_name, phase].append(of_phase)
        contender.settle()
        self.fabric.settle()
        self.fabric.log.clear()

    def waits(self, name: str, network: str) -> list[float]:
        """Seconds waited in each timed step."""
        of_phases = (self.waited[name, network, phase] for phase in PHASES)
        return [sum(of_step.total() for of_step in step) for step in zip(*of_phases, strict=True)]

    def _step(self, contender: Contender) -> dict[str, Counter[str]]:
        """Phase -> collective -> seconds waited for."""
        tokens = self._tokens()
        before, waited = self._waited(), {}
        for phase, run in zip(PHASES, self._phases(contender, tokens), strict=True):
            run()
            after = self._waited()
            waited[phase] = after - before
            before = after
        return waited

    def _phases(self, contender: Contender, tokens: Tensor) -> list[Callable[[], Any]]:
        losses: list[Tensor] = []

        def forward() -> None:
            contender.optimizer.zero_grad()
            losses.append(contender.model(tokens[:, :-1], tokens[:, 1:]))

        def backward() -> None:
            losses[0].backward()
            # torch DDP waits for its futures here, which `ProcessorClock` does not see. zeroshard waits for its
            # reductions here as well, and FSDP has waited already: for them this changes nothing.
            self.fabric.settle()

        return [forward, backward, contender.optimizer.step]

    def _tokens(self) -> Tensor:
        shape = self.options.batch, self.options.context + 1
        return torch.randint(self.options.vocabulary, shape, generator=self._generator)

    def _waited(self) -> Counter[str]:
        waited: Counter[str] = Counter()
        for transfer in self.fabric.log:
            waited[transfer.collective] += transfer.waited  # type: ignore[assignment]
        return waited


def scaled(network: Network, factor: float) -> Network:
    """The network for a computer on which everything takes `factor` times as long."""
    return replace(network, latency=network.latency * factor, bandwidth=network.bandwidth / factor)


def measure(ranks: int, options: argparse.Namespace) -> Turns:
    clock: Clock = ProcessorClock() if options.clock == "processor" else WallClock()
    config = ModelConfig(layers=options.layers, width=options.width, heads=options.heads, context=options.context)
    version = Version(None)
    setting = Setting({"lr": 1e-4, "weight_decay": 0.1, "fused": True}, torch.float32, "cpu")
    with simulated_fabric(ranks, INSTANT, rank=options.rank, clock=clock) as fabric:
        sizes = options.replicas, ranks // options.replicas
        names = ("replicate", "shard")
        mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=names) if options.replicas > 1 else None
        contenders = {}
        for name in ["plain", *options.contenders]:
            torch.manual_seed(0)
            beside = SideOfFabric(fabric) if options.streams else None
            build = partial(ours, name, mesh=mesh, beside=beside) if name in PLANS else BUILDERS[name]
            contenders[name] = build(version, GPT(config, options.vocabulary), setting)
        turns = Turns(fabric, contenders, options)
        for name in contenders:
            for _ in range(options.warmup):
                turns.take(name, "warm-up", INSTANT)
        for index in range(options.rounds):
            for _ in range(3):
                turns.take("plain", "instant", INSTANT)
            factor = statistics.median(turns.seconds["plain", "instant"]) / REFERENCE
            networks = {"instant": INSTANT} | {name: scaled(NETWORKS[name], factor) for name in options.networks}
            round_ = [(name, network) for name in options.contenders for network in networks]
            random.Random(index).shuffle(round_)
            for name, network in round_:
                turns.take(name, network, networks[network])
    return turns


def report(ranks: int, turns: Turns, options: argparse.Namespace) -> None:
    median = {key: statistics.median(values) for key, values in turns.seconds.items()}
    wire = {key: statistics.median(values) for key, values in turns.wire.items()}
    one = median["plain", "instant"]
    print(f"\n{ranks} ranks. step, wire: in plain steps. exposed, waited: in per cent of wire")
    print(f"{'':<18}{'instant':>10}" + "".join(f"{name:>30}" for name in options.networks))
    print(
        f"{'':<18}{'step':>10}"
        + "".join(f"{'step':>10}{'wire':>6}{'exposed':>8}{'waited':>6}" for _ in options.networks)
    )
    for name in options.contenders:
        cells = [f"{median[name, 'instant'] / one:10.3f}"]
        for network in options.networks:
            busy, step = wire[name, network], median[name, network]
            waited = statistics.median(turns.waits(name, network))
            exposed = 100 * (step - median[name, "instant"]) / busy
            cells.append(f"{step / one:10.3f}{busy / one:6.2f}{exposed:8.0f}{100 * waited / busy:6.0f}")
        print(f"{name:<18}" + "".join(cells))
    spread = [value / one for value in turns.seconds["plain", "instant"]]
    print(f"{'plain':<18}{1:10.3f}   single steps {min(spread):.2f} to {max(spread):.2f}")
    if options.profile:
        _profile(turns, options, one)


def _profile(turns: Turns, options: argparse.Namespace, one: float) -> None:
    """Print what was waited for in each phase, as a share of the plain step."""
    for network in options.networks:
        print(f"\nwaited for on the network {network!r}, in per cent of the plain step")
        for name in options.contenders:
            cells = []
            for phase in PHASES:
                of_steps = turns.waited[name, network, phase]
                collectives = sorted(set().union(*of_steps))
                middle = {one_of: statistics.median(step[one_of] for step in of_steps) for one_of in collectives}
                found = ", ".join(f"{op} {100 * value / one:.1f}" for op, value in middle.items() if value > 1e-3 * one)
                cells.append(f"{phase}: {found or '-'}")
            print(f"{name:<18}" + "; ".join(cells))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64], help="world sizes, one after the other")
    parser.add_argument("--rank", type=int, default=0, help="the rank that this process is")
    parser.add_argument("--replicas", type=int, default=1, help="of the shards of zeroshard's plans: a 2-D mesh")
    parser.add_argument(
        "--streams", action="store_true", help="chains of zeroshard's exchanges on a stream, as on a GPU"
    )
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender on each network")
    parser.add_argument("--warmup", type=int, default=4, help="turns before them")
    names = [name for name in BUILDERS if name != "plain"]
    parser.add_argument("--contenders", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--clock", choices=("processor", "wall"), default="processor")
    parser.add_argument("--profile", action="store_true", help="what was waited for, in each phase")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--json", type=Path, help="write all times to this file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    warnings.simplefilter("ignore")  # torch's own deprecations
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # weights that are copies of one shard can underflow; denormals are slow
    found = {}
    for ranks in options.ranks:
        turns = measure(ranks, options)
        report(ranks, turns, options)
        found[ranks] = {" | ".join(key): [turns.seconds[key], turns.wire[key]] for key in turns.seconds}
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, "results": found}, indent=1))


if __name__ == "__main__":
    main()
