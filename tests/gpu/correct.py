"""Pieces of `make test-gpu` that check values: each trains small models, and compares bits with one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.gpu.checks import ROOT, Checks, Setting, Skip, run_python
from tests.gpu.jobs import EXACT, FEW, JOBS, compare, difference_of, references, under_all_plans
from tests.gpu.sanitizing import Collective, Streams
from tests.gpu.worlds import (
    Sleeps,
    dropped_waits,
    exchanging_alone,
    on_own_devices,
    on_shared_device,
    one_rank,
)
from tests.kit import DEVICE, PLANS, Job, Outcome, train
from tests.timed_backend import register
from zeroshard.comm.alike import as_terms
from zeroshard.errors import Error
from zeroshard.layout.exact import add_exactly
from zeroshard.layout.sums import divide
from zeroshard.storage.main_weights import join_remainder, split_remainder


def one_rank_exchanges(checks: Checks, setting: Setting) -> None:
    _started_by_init(checks, setting)
    jobs = {name: JOBS[name] for name in ((FEW[0], FEW[-1]) if setting.is_small else JOBS)}
    few = {name: jobs[name] for name in FEW[: 1 if setting.is_small else None]}
    with one_rank(setting.device):
        expected = references(0, jobs, 1)
        compare(checks, "as it is", [under_all_plans(0, few)], {name: expected[name] for name in few})
        with exchanging_alone():
            found = under_all_plans(0, jobs)
        compare(checks, "with exchanges", [found], expected)
        kinds = {event.op for outcomes in found.values() for outcome in outcomes for event in outcome.log.entries}
        checks.expect("gathers, reductions, all-to-all and sums were sent", kinds >= _KINDS, ", ".join(sorted(kinds)))
        alone = train(JOBS["fp32"], zeroshard.ZERO3, 0).log.entries
        checks.expect("without the switch nothing is sent (control)", not alone, len(alone))


def examples(checks: Checks, setting: Setting) -> None:
    """The commands of the README, as a user runs them first."""
    plain = _last_line(checks, "python examples/train_plain.py", "examples/train_plain.py")
    alone = _last_line(checks, "python examples/train_sharded.py", "examples/train_sharded.py")
    checks.expect_equal("plain and sharded, on one rank, end with the same loss", alone, plain)
    if not setting.is_small:
        ranks = str(max(setting.num_gpus, 1))
        program = (
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            ranks,
            "examples/train_sharded.py",
        )
        found = _last_line(checks, f"torchrun --nproc-per-node {ranks} examples/train_sharded.py", *program)
        checks.expect("torchrun's ranks print a loss", "loss" in found, found)


def _last_line(checks: Checks, what: str, *arguments: str) -> str:
    status, output = run_python(*arguments)
    checks.text(what, output)
    checks.expect_equal(f"{what}: status", status, 0)
    lines = [line for line in output.splitlines() if "loss" in line]
    return lines[-1].strip() if lines else ""


def _started_by_init(checks: Checks, setting: Setting) -> None:
    if setting.device != "cuda":
        register()
    device = zeroshard.init()
    try:
        checks.expect_equal("the device that `zeroshard.init()` returns", device.type, setting.device)
        few = {"fp32": JOBS["fp32"]}
        compare(checks, "after `zeroshard.init()`", [under_all_plans(0, few)], references(0, few, 1))
    finally:
        dist.destroy_process_group()


_KINDS = {"all_gather", "reduce_scatter", "all_to_all", "exchange"}


def arithmetic(checks: Checks, setting: Setting) -> None:
    """What must be exact is computed on the device as on the host."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(10_007, generator=generator) * torch.logspace(-30, 30, 10_007)
    integers = torch.randint(0, 1 << 48, (64,), generator=generator)
    places = torch.randint(0, 3, (10_007,), generator=generator)

    def quotients(dtype: torch.dtype, divisor: int) -> Callable[[Tensor], Tensor]:
        def divided(values: Tensor) -> Tensor:
            values = values.to(dtype)
            divide(values, divisor)
            return values

        return divided

    def halves(values: Tensor) -> Tensor:
        weight, rest = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
        split_remainder(values.clone(), weight, rest)
        join_remainder(weight, rest, joined := torch.empty_like(values))
        return torch.stack([weight.float(), rest.float(), joined])

    functions: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        f"the mean of {divisor} terms in {str(dtype).removeprefix('torch.')}": (quotients(dtype, divisor), (wide,))
        for divisor in (2, 3, 5, 6, 7, 12, 1000)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    }
    functions["an exact sum"] = (lambda values, where: add_exactly(values.double(), where, 3)), (wide, places)
    functions["terms of a comparison"] = as_terms, (integers,)
    functions["a number split in 16 bits and a remainder"] = halves, (wide,)
    for what, (function, arguments) in functions.items():
        there = function(*(argument.to(DEVICE) for argument in arguments)).cpu()
        checks.expect(f"{what}: as on the host", torch.equal(there, function(*arguments)))
    by_number = torch.equal((wide.to(DEVICE) / 3).cpu(), wide / 3)
    checks.note("torch divides by the number 3 as on the host", by_number)
    off = torch.equal((wide.to(DEVICE) * (1 / 3)).cpu(), wide / 3)
    checks.expect("a product with a reciprocal is not the quotient (control)", not off)


def delays(checks: Checks, setting: Setting) -> None:
    jobs = {name: JOBS[name] for name in FEW[: 1 if setting.is_small else None]}
    with one_rank(setting.device), exchanging_alone():
        expected = references(0, jobs, 1)
        for seed in range(1 if setting.is_small else 5):
            with Sleeps(setting.device, seed).installed() as sleeps:
                compare(checks, f"sleeps {seed}", [under_all_plans(0, jobs)], expected)
        checks.expect("there were sleeps", sleeps.num_sleeps > 100, sleeps.num_sleeps)
        with Sleeps(setting.device, 0, only_collectives=True).installed(), dropped_waits() as dropped:
            found = _difference(JOBS["fp32"], expected["fp32"][0])
            checks.note("waits that were dropped", len(dropped))
        checks.expect("a dropped wait for a gather is found (control)", found, found)


def _difference(job: Job, truth: object) -> str:
    try:
        return difference_of(train(job, zeroshard.ZERO3, 0), truth)  # type: ignore[arg-type]
    except Error as error:  # a gradient that is NaN
        return str(error)


def sharing(checks: Checks, setting: Setting) -> None:
    """Several ranks on one device."""
    runs = [(2, "late")] if setting.is_small else [(2, "late"), (2, "early"), (3, "random-1")]
    jobs = {"fp32": JOBS["fp32"]} if setting.is_small else JOBS
    for num_ranks, timing in runs:
        expected = on_shared_device(timing, references, 1, jobs, num_ranks)[0]
        found = on_shared_device(timing, under_all_plans, num_ranks, jobs)
        compare(checks, f"{num_ranks} ranks, {timing}", found, expected)
    if setting.device == "cuda":
        checks.expect(*_gloo_alone_is_refused())


def _gloo_alone_is_refused() -> tuple[str, bool, str]:
    from zeroshard.testing import run_ranks

    def attempt(rank: int) -> str:
        try:
            zeroshard.shard(nn.Linear(4, 4).to(DEVICE), "zero3")
        except Error as error:
            return str(error)
        return ""

    found = run_ranks(attempt, 2)[0]
    return "a group of gloo alone refuses a model on a GPU, in words", "moves cpu tensors" in found, found


def several(checks: Checks, setting: Setting) -> None:
    if setting.device == "cuda" and setting.num_gpus < 2:
        raise Skip("it needs two GPUs")
    most = 2 if setting.is_small else setting.num_gpus
    exact = {name: EXACT[name] for name in list(EXACT)[: 1 if setting.is_small else None]}
    for num_ranks in sorted({2, most}):
        # A sum of two numbers has one order; of more, NCCL chooses it.
        jobs = exact | (JOBS if num_ranks == 2 and not setting.is_small else {})
        expected = on_own_devices(setting.device, references, 1, jobs, num_ranks)[0]
        found = on_own_devices(setting.device, under_all_plans, num_ranks, jobs)
        compare(checks, f"{num_ranks} ranks", found, expected)
    num_ranks = 4 if setting.is_small else setting.num_gpus // 2 * 2
    if num_ranks < 4:
        checks.note("2 x 2 ranks", "left out: it needs four GPUs")
        return
    expected = on_own_devices(setting.device, references, 1, exact, num_ranks)[0]
    found = on_own_devices(setting.device, _on_two_axes, num_ranks, exact)
    compare(checks, f"2 x {num_ranks // 2} ranks", found, expected)


def _on_two_axes(rank: int, jobs: Mapping[str, Job]) -> dict[str, list[Outcome]]:
    """`under_all_plans`, with two replicas."""
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=("replicate", "shard"))
    return {name: [train(job, plan, rank, mesh) for plan in PLANS] for name, job in jobs.items()}


def norms(checks: Checks, setting: Setting) -> None:
    runs, width = (2, 32) if setting.is_small else (100, 1024)
    torch.manual_seed(0)
    inputs = torch.randn(64, width).to(DEVICE)
    with one_rank(setting.device):
        for switch in (nullcontext(), exchanging_alone()):
            exchanges = "alone" if isinstance(switch, nullcontext) else "with exchanges"
            with switch:
                for plan in PLANS[:: 3 if setting.is_small else 1]:
                    bits = _bits_of_norms(plan, inputs, runs)
                    checks.expect(f"{plan}, {exchanges}: {runs} runs, one norm", len(bits) == 1, sorted(bits)[:3])
        changed = _bits_of_norms(zeroshard.DDP, inputs, 2, changes=True)
        checks.expect("another bit of an input gives another norm (control)", len(changed) == 2, sorted(changed))


def _bits_of_norms(plan: object, inputs: torch.Tensor, runs: int, *, changes: bool = False) -> set[str]:
    """The norms of the same gradient, computed again each time, in hexadecimal."""
    width = inputs.shape[1]
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*blocks).to(DEVICE)
    handle = zeroshard.shard(model, plan, units=nn.Linear, precision="bf16")  # type: ignore[arg-type]
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.0)
    found = set()
    for run in range(runs):
        optimizer.zero_grad()
        optimizer.backward(model(inputs * (1 + run / 128 * changes)).float().square().mean())
        found.add(float(optimizer.clip_grad_norm_(1e9)).hex())
    return found


def sanitizer(checks: Checks, setting: Setting) -> None:
    """With TORCH_CUDA_SANITIZER=1 an operation that races with another raises."""
    if setting.device != "cuda":
        checks.expect("a seeded race is found (control)", _race_is_found(), "by the handler of events alone")
        checks.expect("a read that waits for a collective is no race", not _is_race(waits=True))
        checks.expect("a read that does not wait for it is a race (control)", _is_race(waits=False))
        return
    with one_rank(setting.device), exchanging_alone(), Streams().installed() as streams:
        for name in FEW:
            for plan in PLANS:
                found = _error_of(partial(train, JOBS[name], plan, 0))
                checks.expect(f"{name}, {plan}: no race", not found, found)
        checks.expect("collectives ran on streams of their own", streams.num_seen > 100, streams.num_seen)
        with dropped_waits():
            found = _error_of(lambda: train(JOBS["fp32"], zeroshard.ZERO3, 0))
        checks.expect("a dropped wait for a gather is a race (control)", _RACE in found, found.partition("\n")[0])
    data, stream = torch.ones(1 << 20, device=DEVICE), torch.cuda.Stream()

    def race() -> None:
        with torch.cuda.stream(stream):
            data.mul_(2)  # nothing makes it wait for the operation that filled `data`

    found = _error_of(race)
    checks.expect("a seeded race is found (control)", _RACE in found, found.partition("\n")[0])


_RACE = "CUDASanitizerErrors"
"""The class that torch raises; it prints the race itself."""


def _error_of(action: Callable[[], object]) -> str:
    """The error that it raises, of whatever class; "" if it does not."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _race_is_found() -> bool:
    from torch.cuda._sanitizer import EventHandler

    def launch(handler: EventHandler, stream: int) -> list[object]:
        return list(handler._handle_kernel_launch(stream, set(), {1}, set(), "write", {1: ["data"]}))

    racing, ordered = EventHandler(), EventHandler()
    for handler in (racing, ordered):
        handler._handle_stream_creation(1)
        launch(handler, 0)
    ordered._handle_event_record(1, 0)
    ordered._handle_event_wait(1, 1)
    return bool(launch(racing, 1)) and not launch(ordered, 1)


def _is_race(waits: bool) -> bool:
    """Whether a read of stream 0 is taken for a race with a gather that was called there. Stream 7 is NCCL's; events 1
    and 2 are those that the call records."""
    from torch.cuda._sanitizer import EventHandler

    handler = EventHandler()
    handler._handle_stream_creation(7)

    def gather() -> None:
        handler._handle_event_record(1, 0)
        handler._handle_event_wait(1, 7)
        handler._handle_event_record(2, 7)

    with Streams().installed() as streams:
        streams.run(handler, Collective("gather", writes={99}, names={99: ["output"]}), gather)
    if waits:
        handler._handle_event_wait(2, 0)
    return bool(handler._handle_kernel_launch(0, {99}, set(), set(), "read", {99: ["data"]}))


SUITES = (
    "tests/parity/test_plans.py",
    "tests/parity/test_precisions.py",
    "tests/parity/test_keep.py",
    "tests/parity/test_remainder_runs.py",
    "tests/parity/test_whole.py",
    "tests/comm/test_communication.py",
    "tests/comm/test_order.py",
    "tests/runtime/test_writing.py",
    "tests/runtime/test_local_parts.py",
    "tests/runtime/test_lent_views.py",
    "tests/step/test_ahead.py",
    "tests/checkpoint/test_round_trips.py",
    "tests/test_optimizer.py",
)
"""Tests of what runs on the device. Those marked `by_cpu` are skipped."""


def suites(checks: Checks, setting: Setting) -> None:
    """pytest, with the backend whose ranks share a device."""
    if setting.is_small:
        found = run_pytest("late", "tests/parity/test_plans.py", "-k", "all_plans_step_the_same_vectors")
        _tell_tests(checks, "one test, late", *found)
        return
    runs = [(timing, file) for timing in ("late", "early") for file in SUITES]
    with ThreadPoolExecutor(max((os.cpu_count() or 1) // 4, 1)) as pool:  # each test has up to four ranks
        found_of_all = pool.map(lambda run: run_pytest(*run), runs)
        for (timing, file), found in zip(runs, found_of_all, strict=True):
            _tell_tests(checks, f"{file}, {timing}", *found)


def _tell_tests(checks: Checks, what: str, status: int, output: str) -> None:
    checks.expect(f"{what}: all tests pass", status == 0, output.rstrip().rpartition("\n")[2])
    if status:
        checks.text(what, "\n".join(output.splitlines()[-40:]))


def run_pytest(timing: str, *arguments: str) -> tuple[int, str]:
    """Its status and output. Only pytest is needed, none of the plugins that `pyproject.toml` has options for."""
    of_pytest = ["-c", "tests/gpu/suites.ini", "--rootdir", str(ROOT), "--confcutdir", str(ROOT), "-q", *arguments]
    status, output = run_python("-m", "pytest", *of_pytest, variables={"ZEROSHARD_TEST_BACKEND": timing})
    print(output, flush=True)
    return status, output
