"""Time of one training step under each plan, compared to torch's own DDP, ZeroRedundancyOptimizer and FSDP2, and on one
rank also to plain torch.

    python benchmarks/step_time.py --ranks 2 4
    python benchmarks/step_time.py --device cuda --ranks 8 --width 1024 --batch 16
    python benchmarks/step_time.py --model resnet           another model than the trainer's GPT (`workloads.py`)
    python benchmarks/step_time.py --other ../before        another checkout of zeroshard takes turns with this one

All contenders have the same weights and data, and take turns, step by step:

    round 0   ddp  zero3  FSDP2  zero1  DDP ...     a barrier before each turn; its time is that of the slowest rank
    round 1   zero1  DDP  ddp  FSDP2  zero3 ...     another order in each round

so that other load on the machine affects all of them alike. Only ratios are printed: that of the medians with its 95 %
interval (bootstrap over starts and rounds), that of the medians of CPU seconds (of all ranks together), and the
quartiles of the ratios within single rounds. These differ widely on a machine that others use: a hundred rounds tell
2 per cent. Plans with a sharded optimizer gather weights while the next forward starts. The timing waits for these
gathers, so that no contender's work falls into the time of the next one; `--block` times several steps of one contender
in a row, as in training, and waits once.

A step of zeroshard always takes the norm of the gradient, and refuses one that is not finite. The others take it where
gradients are clipped, as in most training of language models: `--clip 1.0` compares programs that do the same.

"no exchange" is the least that a step with a sharded optimizer can take: each rank trains alone, and its optimizer
updates as many elements as a shard has. Its losses are not compared, as it does less.

DeepSpeed, FairScale and Megatron-core take part where they can be imported and are named (`peers.py`):

    python benchmarks/step_time.py --contenders zero1 zero2 zero3 "DeepSpeed ZeRO-3" "FairScale OSS"

On a CPU each contender has processes of its own, which take turns. In one process, memory that one contender frees is
what another one allocates: whether a step has thousands of page faults or none then depends on who else takes part. A
process keeps some luck for life (where its memory lies): with `--starts 6` all start six times.

At the end the losses of the first steps of all contenders are compared. If they differ, no ratios are printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import Barrier, Semaphore
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import peers
import torch
import torch.distributed as dist
from torch import Tensor, nn
from workloads import WORKLOADS, Workload

import zeroshard
from zeroshard.testing import run_ranks

PLANS = ("ddp", "zero1", "zero2", "zero3")
OTHER = "other "
"""Stands before the names of the plans of `--other`."""
PLAIN = "plain torch"
"""Takes part where there is one rank."""
ALONE = "no exchange"
"""Takes part where it is named, and where there are several ranks."""
PAIRS = [
    ("ddp", "torch DDP"),
    ("zero1", "torch DDP"),
    ("zero1", "torch ZeRO"),
    ("zero2", "torch ZeRO"),
    ("zero3", "torch FSDP2"),
    ("zero3", "zero1"),
    ("zero2", peers.FAIRSCALE),
    *((f"zero{stage}", f"{peers.DEEPSPEED}{stage}") for stage in (1, 2, 3)),
    ("zero1", peers.MEGATRON),
    *((plan, PLAIN) for plan in PLANS),
    *((plan, OTHER + plan) for plan in PLANS),
    *((name, ALONE) for name in (*PLANS, "torch DDP", "torch ZeRO", "torch FSDP2")),
]
"""(plan, peer): the time of the plan is divided by that of the peer."""

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "bf16-mixed": 2e-2}
"""Relative tolerance of the losses of the first `COMPARED` steps: the contenders add up gradients in different orders.
Later steps enlarge such differences."""
COMPARED = 10


class Version:
    """A checkout of zeroshard. Several can be loaded in one process, but only one at a time is in use: `import`
    statements inside functions find its modules."""

    def __init__(self, root: Path | None) -> None:
        """`root`: the folder that contains the package; None: the installed one."""
        if root is not None:
            _forget_modules()
            sys.path.insert(0, str(root))
        self.package = importlib.import_module("zeroshard")
        importlib.import_module("zeroshard.train.model")  # found by `use`
        if root is not None:
            sys.path.remove(str(root))
        if root is not None and not str(self.package.__file__).startswith(f"{root}{os.sep}"):
            raise SystemExit(f"--other {root}: expected a checkout of zeroshard, found no package of that name there")
        self._modules = _modules()

    def use(self) -> None:
        _forget_modules()
        sys.modules.update(self._modules)


def _modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "zeroshard"}


def _forget_modules() -> None:
    for name in _modules():
        del sys.modules[name]


@dataclass
class Contender:
    """`settle` waits for gathers that the last step has started. `losses`: one per step, of this rank."""

    version: Version
    model: nn.Module
    optimizer: torch.optim.Optimizer | peers.Steps
    clip: Callable[[float], Any]
    settle: Callable[[], None] = lambda: None
    backward: Callable[[Tensor], Any] = Tensor.backward
    autocast: bool = False
    losses: list[Tensor] = field(default_factory=list)

    def step(self, batch: Sequence[Tensor], max_norm: float) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.model(*batch)
        self.backward(loss)
        if max_norm:
            self.clip(max_norm)
        self.optimizer.step()
        self.losses.append(loss.detach())


@dataclass(frozen=True)
class Setting:
    """What all contenders share. `adamw`: arguments of `torch.optim.AdamW`. `dtype`: of the model as it is built.
    `mixed`: it computes in bf16, and the optimizer updates fp32 values: here an fp32 copy of bf16 weights; FSDP2's
    mixed precision; autocast in the others. `units`, `messages`: as the options. `blocks`: names of classes."""

    adamw: dict[str, Any]
    dtype: torch.dtype
    device: str
    mixed: bool = False
    units: str = "block"
    messages: bool = False
    blocks: tuple[str, ...] = ("Block",)


def ours(plan: str, version: Version, model: nn.Module, setting: Setting) -> Contender:
    zeroshard, dtype = version.package, setting.dtype
    precision = "bf16" if setting.mixed else zeroshard.MixedPrecision(dtype, dtype, None, dtype)
    if setting.messages:
        importlib.import_module("zeroshard.comm.collectives").Collectives._try_to_share = lambda self: None
    are_blocks = setting.units == "block" or (setting.units == "advised" and plan == "zero3")
    handle = zeroshard.shard(model, plan, units=setting.blocks if are_blocks else None, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, **setting.adamw)
    engine = getattr(handle, "engine", handle)  # older checkouts have no engine beside the handle
    settle = engine.gatherer.settle
    return Contender(version, model, optimizer, optimizer.clip_grad_norm_, settle, backward=optimizer.backward)


def plain(version: Version, model: nn.Module, setting: Setting) -> Contender:
    return _of_torch(version, model, torch.optim.AdamW(model.parameters(), **setting.adamw), setting.mixed)


def alone(version: Version, model: nn.Module, setting: Setting) -> Contender:
    updated, left = [], sum(p.numel() for p in model.parameters()) / dist.get_world_size()
    for parameter in model.parameters():
        if left > 0:
            updated.append(parameter)
            left -= parameter.numel()
    contender = _of_torch(version, model, torch.optim.AdamW(updated, **setting.adamw), setting.mixed)
    contender.optimizer.zero_grad = model.zero_grad  # type: ignore[method-assign]
    contender.clip = partial(nn.utils.clip_grad_norm_, updated)
    return contender


def torch_ddp(version: Version, model: nn.Module, setting: Setting) -> Contender:
    wrapped = _data_parallel(model)
    return _of_torch(version, wrapped, torch.optim.AdamW(wrapped.parameters(), **setting.adamw), setting.mixed)


def torch_zero(version: Version, model: nn.Module, setting: Setting) -> Contender:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = _data_parallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **setting.adamw)
    return _of_torch(version, wrapped, optimizer, setting.mixed)


def torch_fsdp2(version: Version, model: nn.Module, setting: Setting) -> Contender:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if setting.mixed else MixedPrecisionPolicy()
    mesh = dist.init_device_mesh(setting.device, (dist.get_world_size(),))
    for module in [*(m for m in model.modules() if type(m).__name__ in setting.blocks), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    return _of_torch(version, model, torch.optim.AdamW(model.parameters(), **setting.adamw), autocast=False)


def peer(name: str, version: Version, model: nn.Module, setting: Setting) -> Contender:
    own = name != peers.FAIRSCALE  # the others keep an fp32 copy of bf16 weights themselves
    dtype = torch.bfloat16 if setting.mixed and own else setting.dtype
    steps = peers.build(name, model.to(dtype), setting.adamw, dtype)
    autocast = setting.mixed and not own
    return Contender(version, steps.model, steps, steps.clip, backward=steps.backward, autocast=autocast)


def _data_parallel(model: nn.Module) -> nn.Module:
    # DDP's fastest configuration: no copies between gradients and buckets, no broadcast of buffers.
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def _of_torch(version: Version, model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool) -> Contender:
    parameters = list(model.parameters())

    def clip(max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    return Contender(version, model, optimizer, clip, autocast=autocast)


BUILDERS: dict[str, Callable[[Version, nn.Module, Setting], Contender]] = {
    **{plan: partial(ours, plan) for plan in PLANS},
    PLAIN: plain,
    ALONE: alone,
    "torch DDP": torch_ddp,
    "torch ZeRO": torch_zero,
    "torch FSDP2": torch_fsdp2,
    **{name: partial(peer, name) for name in peers.NAMES},
}


OPTIONAL = (ALONE, *peers.NAMES)


class Turns:
    """Which contender steps when: another order in each round. `apart`: each contender has processes of its own, one
    for each of its ranks."""

    def __init__(self, names: Sequence[str], rounds: int, world_size: int, *, apart: bool) -> None:
        self._world_size = world_size
        self._orders = [list(names) for _ in range(rounds)]
        for index, order in enumerate(self._orders):
            random.Random(index).shuffle(order)
        self._may_step = {name: Semaphore(0) for name in names} if apart else {}
        self.all_here = Barrier(len(names) * world_size) if apart else None
        if apart:
            self._call(self._orders[0][0])

    def of_round(self, index: int) -> list[str]:
        return self._orders[index]

    @contextmanager
    def turn(self, index: int, name: str, rank: int) -> Iterator[None]:
        """Wait for the turn of this contender; afterwards it is the next one's. Its ranks leave together."""
        if not self._may_step:
            yield
            return
        self._may_step[name].acquire()
        yield
        order, later = self._orders[index], self._orders[index + 1 :]
        following = [*order[order.index(name) + 1 :], *(later[0] if later else [])]
        if following and rank == 0:
            self._call(following[0])

    def _call(self, name: str) -> None:
        for _ in range(self._world_size):
            self._may_step[name].release()


def measure_apart(
    process: int, world_size: int, folder: str, options: argparse.Namespace, turns: Turns
) -> dict[str, Any]:
    """In a process of one contender: what `measure` returns for it, as a rank of a group of this contender."""
    assert turns.all_here is not None
    turns.all_here.wait()  # all connections of the group that is destroyed here have been made
    dist.destroy_process_group()
    number, rank = divmod(process, world_size)
    store = dist.FileStore(f"{folder}/{number}", world_size)
    limit = timedelta(seconds=options.timeout)  # ranks wait for their turn inside of it
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    return measure(rank, argparse.Namespace(**{**vars(options), "contenders": [options.contenders[number]]}), turns)


def trainers_gpt(options: argparse.Namespace) -> Workload:
    shape = {key: getattr(options, key) for key in ("layers", "width", "heads", "context", "tied")}

    def build() -> nn.Module:
        from zeroshard.train.model import GPT  # of the version in use

        return GPT(SimpleNamespace(**shape, dropout=0.0), options.vocabulary)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        # Small tokens are more frequent than large ones, so there is something to learn and the losses move.
        drawn = torch.rand(options.batch, options.context + 1, generator=generator)
        tokens = (drawn**3 * options.vocabulary).long()
        return tokens[:, :-1], tokens[:, 1:]

    return Workload(build, ("Block",), batch)


def measure(rank: int, options: argparse.Namespace, turns: Turns) -> dict[str, Any]:
    """On one rank: seconds per step, CPU seconds per step and final losses of each contender."""
    warnings.simplefilter("ignore")  # torch's own deprecations, repeated on every rank
    device = torch.device(options.device, rank % torch.cuda.device_count() if options.device == "cuda" else None)
    if options.device == "cpu":
        torch.set_num_threads(options.threads or max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    this = Version(None)
    other = Version(options.other.resolve()) if options.other is not None else this
    adamw, mixed = {"lr": 3e-4, "weight_decay": 0.1, "fused": True}, options.dtype == "bf16-mixed"
    workload = WORKLOADS[options.model] if options.model != "gpt" else trainers_gpt(options)
    setting = Setting(adamw, dtype, options.device, mixed, options.units, options.messages, workload.blocks)
    contenders = {}
    for name in options.contenders:
        if name == (PLAIN if dist.get_world_size() > 1 else ALONE):
            continue
        version = other if name.startswith(OTHER) else this
        version.use()
        torch.manual_seed(0)
        model = workload.build().to(device, dtype)
        num_parameters = sum(p.numel() for p in model.parameters())
        contenders[name] = BUILDERS[name.removeprefix(OTHER)](version, model, setting)

    generator = torch.Generator().manual_seed(1000 + rank)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(options.warmup + options.steps):
        drawn = [workload.batch(generator) for _ in range(options.block)]
        batches = [tuple(tensor.to(device) for tensor in batch) for batch in drawn]
        for name in filter(contenders.__contains__, turns.of_round(index)):
            with turns.turn(index, name, rank):
                elapsed, on_cpu = _timed(contenders[name], batches, options.clip, device)
            if index >= options.warmup:
                seconds[name].append(elapsed / options.block)
                cpu_seconds[name].append(on_cpu / options.block)
    losses = {name: _mean_over_ranks(torch.stack(c.losses)).tolist() for name, c in contenders.items()}
    return {"num_parameters": num_parameters, "seconds": seconds, "cpu_seconds": cpu_seconds, "losses": losses}


def _timed(
    contender: Contender, batches: Sequence[Sequence[Tensor]], clip: float, device: torch.device
) -> tuple[float, float]:
    """Seconds that the slowest rank took, and CPU seconds that all ranks took."""
    contender.version.use()
    dist.barrier()
    _synchronize(device)
    start, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        contender.step(batch, clip)
    contender.settle()
    _synchronize(device)
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    on_cpu = torch.tensor(time.process_time() - cpu, dtype=torch.float64, device=device)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    dist.all_reduce(on_cpu)
    return elapsed.item(), on_cpu.item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mean_over_ranks(values: Tensor) -> Tensor:
    values = values.double()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def start_ranks(world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The results of rank 0 of each contender: from forked gloo ranks, or from spawned NCCL ones, one per GPU."""
    rounds = options.warmup + options.steps
    with tempfile.TemporaryDirectory() as folder:
        if options.device == "cuda":
            turns = Turns(options.contenders, rounds, world_size, apart=False)
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            of_ranks = (world_size, store.port, folder, options, turns)
            torch.multiprocessing.spawn(_cuda_rank, of_ranks, nprocs=world_size)
            return json.loads(Path(folder, "result").read_text())
        left_out = ALONE if world_size == 1 else PLAIN
        names = [name for name in options.contenders if name != left_out]
        options = argparse.Namespace(**{**vars(options), "contenders": names})
        turns, found = Turns(names, rounds, world_size, apart=True), {}
        limits = {"timeout": options.timeout, "collective_timeout": 120}
        results = run_ranks(measure_apart, len(names) * world_size, world_size, folder, options, turns, **limits)
        for result in results[::world_size]:
            for what, value in result.items():
                found[what] = {**found.get(what, {}), **value} if isinstance(value, dict) else value
        return found


def start_again(world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The results of `--starts` starts, one behind the other."""
    found = start_ranks(world_size, options)
    for _ in range(options.starts - 1):
        more = start_ranks(world_size, options)
        for what in ("seconds", "cpu_seconds"):
            for name, values in more[what].items():
                found[what][name] += values
    return found


def _cuda_rank(rank: int, world_size: int, port: int, folder: str, options: argparse.Namespace, turns: Turns) -> None:
    # As torchrun does: `init` then makes the group as for users, bound to the GPU and on streams of high priority.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    zeroshard.init("nccl")
    result = measure(rank, options, turns)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    dist.destroy_process_group()


def report(world_size: int, result: dict[str, Any], options: argparse.Namespace) -> bool:
    """Print the ratios; False (and no ratios) where the losses differ."""
    print(f"\n{world_size} ranks, {result['num_parameters'] / 1e6:.1f} M parameters, {options.dtype}, {options.device}")
    losses = {name: torch.tensor(values[:COMPARED]) for name, values in result["losses"].items() if name != ALONE}
    first, reference = next(iter(losses.items()))
    tolerance = getattr(WORKLOADS.get(options.model), "tolerance", None) or TOLERANCE[options.dtype]
    for name, values in losses.items():
        if not torch.allclose(values, reference, rtol=tolerance, atol=0):
            gap = ((values - reference).abs() / reference).max().item()
            print(f"the losses of {name} and {first} differ by up to {gap:.1e}: they do not do the same work")
            return False
    gap = max(((values - reference).abs() / reference).max().item() for values in losses.values())
    print(f"losses agree: {reference[0]:.4f} -> {reference[-1]:.4f} over {len(reference)} steps, within {gap:.0e}")
    print(f"{'':<24} {'medians':>8} {'95% interval':>14} {'CPU':>6}   {'25%':>5} {'75%':>5}  of single rounds")
    seconds, on_cpu = result["seconds"], result["cpu_seconds"]
    for plan, peer in PAIRS:
        if plan in seconds and peer in seconds:
            ratio = statistics.median(seconds[plan]) / statistics.median(seconds[peer])
            of_cpu = statistics.median(on_cpu[plan]) / statistics.median(on_cpu[peer])
            rounds = [a / b for a, b in zip(seconds[plan], seconds[peer], strict=True)]
            low, _, high = statistics.quantiles(rounds, n=4)
            sure = "{:.3f}, {:.3f}".format(*interval(seconds[plan], seconds[peer], options.starts))
            print(f"{plan + ' / ' + peer:<24} {ratio:8.3f} {sure:>14} {of_cpu:6.3f}   {low:5.2f} {high:5.2f}")
    return True


def interval(plan: Sequence[float], peer: Sequence[float], starts: int, draws: int = 2000) -> tuple[float, float]:
    """The 95 per cent interval of the ratio of the medians: starts, and rounds of each, are drawn with replacement
    (bootstrap)."""
    generator, ratios = random.Random(0), []
    rounds = len(plan) // starts
    for _ in range(draws):
        drawn = [
            start * rounds + number
            for start in generator.choices(range(starts), k=starts)
            for number in generator.choices(range(rounds), k=rounds)
        ]
        ratios.append(statistics.median(plan[i] for i in drawn) / statistics.median(peer[i] for i in drawn))
    ratios.sort()
    return ratios[draws // 40], ratios[-draws // 40 - 1]


def add_units(parser: argparse.ArgumentParser) -> None:
    kinds = "blocks of the model, or groups of neighbours up to 32 MiB (the default of zeroshard.shard)"
    what = f"units of zeroshard: {kinds}; advised: blocks under zero3, else groups"
    parser.add_argument("--units", choices=("advised", "block", "group"), default="advised", help=what)


def add_contenders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--contenders", nargs="+", choices=BUILDERS, metavar="NAME", help=f"default: all but {', '.join(OPTIONAL)}"
    )


def choose_contenders(parser: argparse.ArgumentParser, options: argparse.Namespace, device: str) -> None:
    """Those that were asked for, if all can take part; else an error of the command line."""
    if options.contenders is None:
        options.contenders = [name for name in BUILDERS if name not in OPTIONAL]
    for name in filter(peers.NAMES.__contains__, options.contenders):
        if why := peers.missing(name, device):
            parser.error(f"{name}: {why}. See benchmarks/peers.py")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="world sizes, one after the other")
    parser.add_argument("--steps", type=int, default=30, help="rounds that count")
    parser.add_argument("--starts", type=int, default=1, help="how often all contenders start anew")
    parser.add_argument("--warmup", type=int, default=5, help="rounds before them")
    parser.add_argument("--block", type=int, default=1, help="steps in a row that are timed as one")
    add_contenders(parser)
    parser.add_argument("--other", type=Path, help="another checkout of zeroshard, whose plans take part as well")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_units(parser)
    parser.add_argument("--messages", action="store_true", help="zeroshard sends messages, as between hosts")
    parser.add_argument("--threads", type=int, default=0, help="per rank on CPU; 0: cores / ranks, at least 1")
    kinds = "of weights, gradients and state; bf16-mixed: see Setting"
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="fp32", help=kinds)
    parser.add_argument("--model", choices=("gpt", *WORKLOADS), default="gpt", help="sizes of gpt: the options below")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--tied", action="store_true", help="the embedding matrix is the output head too")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--clip", type=float, default=0.0, help="largest gradient norm; 0: do not clip")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for everything on CPU")
    parser.add_argument("--json", type=Path, help="write all times and losses to this file")
    options = parser.parse_args()
    if options.steps < 2 or options.block < 1 or options.starts < 1:
        parser.error("--steps must be at least 2, --block and --starts at least 1")
    choose_contenders(parser, options, options.device)
    if options.other is not None:
        options.contenders += [OTHER + name for name in options.contenders if name in PLANS]
    return options


def main() -> None:
    options = parse()
    results = {world_size: start_again(world_size, options) for world_size in options.ranks}
    equal = [report(world_size, result, options) for world_size, result in results.items()]
    if options.json:
        said = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": said, "results": results}, indent=1))
    raise SystemExit(0 if all(equal) else 1)


if __name__ == "__main__":
    main()
