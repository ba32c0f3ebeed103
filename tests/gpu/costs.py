"""Pieces of `make test-gpu` that measure: waits of the host, bytes, launches and time."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from tests import apart
from tests.gpu.checks import Checks, Setting, Skip, run_python
from tests.gpu.jobs import Matrices
from tests.gpu.worlds import Lone, exchanging_alone, on_own_devices, one_rank
from tests.kit import DEVICE, PLANS, Job, Net, loss_of_tokens, make
from tests.timed_backend import Timed
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.packets import Reading
from zeroshard.planner import plan_memory
from zeroshard.planning import Configuration, Workload
from zeroshard.train import model as gpt

LEAST_TORCH = (2, 11)
SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "alone": nullcontext,
    "with exchanges": exchanging_alone,
}
"""One rank as it is, and as if it had peers."""


def versions(checks: Checks, setting: Setting) -> None:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    checks.expect("torch is 2.11 or newer", found >= LEAST_TORCH, torch.__version__)
    checks.note("CUDA that torch was built for", torch.version.cuda)
    if setting.device != "cuda":
        return
    checks.expect("torch can use CUDA", torch.cuda.is_available(), f"{torch.cuda.device_count()} GPUs")
    checks.expect("NCCL is there", dist.is_nccl_available(), ".".join(map(str, torch.cuda.nccl.version())))
    for index in range(setting.num_gpus):
        properties = torch.cuda.get_device_properties(index)
        sizes = f"{properties.total_memory / 2**30:.1f} GiB, {properties.multi_processor_count} multiprocessors"
        checks.note(f"GPU {index}", f"{properties.name}, {sizes}, compute {properties.major}.{properties.minor}")


# Waits of the host ----------------------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """On a CPU, in place of `set_sync_debug_mode`: an operation that reads a tensor's value for the host raises."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("called a synchronizing operation: the host reads a tensor")
        return func(*args, **(kwargs or {}))


@contextmanager
def _only_reads(storages: set[int]) -> Iterator[None]:
    """On a CPU: methods that read a tensor without an operation raise, unless its storage is one of these."""

    def unless_known(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.untyped_storage().data_ptr() not in storages:
                raise RuntimeError("called a synchronizing operation: the host reads a tensor")
            return method(tensor, *args, **kwargs)

        return read

    with ExitStack() as stack:
        for name in ("tolist", "cpu", "numpy"):
            stack.enter_context(patch.object(Tensor, name, unless_known(getattr(Tensor, name))))
        yield


@contextmanager
def no_waits(device: str) -> Iterator[list[str]]:
    """Inside, an operation for which the host waits for the GPU raises, except in the exchanges of sums among all
    ranks: these are listed."""
    start_sum, read, exchanges, told = Collectives._start_sum, Collectives._read, [], set[int]()

    def start(self: Collectives, numbers: Tensor, at: Any) -> Reading:
        with _waits_are("default", device):  # gloo, with which the tests sum, waits
            return start_sum(self, numbers, at)

    def counted(self: Collectives, numbers: Reading, at: Any) -> Tensor:
        exchanges.append(at.text)
        with _waits_are("default", device):
            sums = read(self, numbers, at)
        told.add(sums.untyped_storage().data_ptr())  # they are on the host
        return sums

    reads = _only_reads(told) if device == "cpu" else nullcontext()
    starting, counting = patch.object(Collectives, "_start_sum", start), patch.object(Collectives, "_read", counted)
    with starting, counting, _waits_are("error", device), reads, _by_host(device):
        yield exchanges


@contextmanager
def _by_host(device: str) -> Iterator[None]:
    """On the device of `tests/apart` other collectives pass through the host as well, which NCCL's do not."""
    if device != apart.NAME:
        yield
        return

    def allowed(method: Callable[[Timed], None]) -> Callable[[Timed], None]:
        def moved(work: Timed) -> None:
            with apart.waits_are(True):
                method(work)

        return moved

    with patch.object(Timed, "read", allowed(Timed.read)), patch.object(Timed, "write", allowed(Timed.write)):
        yield


@contextmanager
def _waits_are(mode: str, device: str) -> Iterator[None]:
    if device == apart.NAME:
        with apart.waits_are(mode == "default"):
            yield
        return
    if device == "cpu":
        with Reads() if mode == "error" else torch.utils._python_dispatch._disable_current_modes():
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


STEADY: dict[str, Job] = {
    "bf16, clipped": Job(precision="bf16", max_norm=1.0, defaults={"lr": 1e-2, "fused": True}),
    "fp32": Job(defaults={"lr": 1e-2, "fused": True}),
    "bf16 with remainder": Job(precision="bf16-remainder", defaults={"lr": 1e-2, "foreach": True}),
    "fp16, dynamic scale": Job(precision="fp16", scale="dynamic"),
    "whole parameters (Muon)": Job(torch.optim.Muon, {"lr": 0.02}, model=Matrices, units=nn.Linear),
}


def syncs(checks: Checks, setting: Setting) -> None:
    jobs = {name: STEADY[name] for name in list(STEADY)[: 1 if setting.is_small else None]}
    with one_rank(setting.device):
        for exchanges, switch in SWITCHES.items():
            for name, job in jobs.items():
                for plan in PLANS[:: 3 if setting.is_small else 1]:
                    with switch():
                        found = _steady_waits(job, plan, setting.device)
                    checks.expect(f"{name}, {plan}, {exchanges}: one wait per step", found == "1", found)
        found = _steady_waits(STEADY["fp32"], zeroshard.ZERO1, setting.device, zeroshard.LossScaler())
        checks.expect("a loss with a scaler of its own: one wait per step", found == "1", found)
        for reader in (Reader, Lister):
            control = _steady_waits(Job(model=reader), zeroshard.DDP, setting.device)
            checks.expect(f"a {reader.__name__.lower()} is found (control)", "synchronizing" in control, control)


class Reader(Net):
    """A model that reads a value."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)
        return logits * (1.0 if logits.sum().item() < math.inf else 0.0)


class Lister(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)
        return logits * len(logits[0, 0].tolist())


def _steady_waits(job: Job, plan: Any, device: str, scaler: zeroshard.LossScaler | None = None) -> str:
    """How often the host waits in a step, or the error of another wait."""
    model = make(job.model)
    handle = zeroshard.shard(model, plan, units=job.units, precision=job.precision)
    optimizer = zeroshard.ShardedOptimizer(handle, job.optimizer, loss_scale=job.scale, **job.defaults)

    def step() -> None:
        optimizer.backward(loss, scaler=scaler)
        if job.max_norm is not None:
            optimizer.clip_grad_norm_(job.max_norm)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(3):
        loss = loss_of_tokens(model, 0, 0, number)
        step()
    tokens = torch.randint(23, (3, 6)).to(DEVICE)  # outside: a copy from the host waits
    try:
        with no_waits(device) as exchanges:
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
            step()
    except (RuntimeError, SystemError) as error:  # torch 2.11 may lose the message of an `.item()`
        text = "called a synchronizing operation" if isinstance(error, SystemError) else error
        return f"{text} ({_place(error)})"
    return str(len(exchanges))


def _place(error: BaseException) -> str:
    """The innermost line of this repository."""
    found, frame = "", error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if "zeroshard" in file or "/tests/" in file:
            found = f"{file.rpartition('/')[2]}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


# A GPT ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Of a GPT and its batches. `context`: tokens per sequence."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int

    def build(self) -> nn.Module:
        sizes = {"layers": self.layers, "width": self.width, "heads": self.heads, "context": self.context}
        config = SimpleNamespace(**sizes, dropout=0.0, tied=False)
        return gpt.GPT(config, self.vocabulary)  # type: ignore[arg-type]

    def build_on_device(self) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            return self.build()

    def tokens(self) -> Tensor:
        return torch.randint(self.vocabulary, (self.batch, self.context + 1))

    def forecast(self, plan: Any, num_ranks: int, *, precision: str, device: str) -> Any:
        with torch.device("meta"):
            model = self.build()
        workload = Workload(self.tokens, loss_of)
        return zeroshard.plan(
            model,
            Configuration(
                plan=plan,
                ranks=num_ranks,
                units=gpt.Block,
                precision=precision,
                device=_as_planned(device),
                transport="native",
                workload=workload,
            ),
        )


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


TINY = Shape(layers=2, width=32, heads=2, vocabulary=64, context=16, batch=2)
MIDDLE = Shape(layers=8, width=1024, heads=8, vocabulary=8192, context=512, batch=8)
NARROW = replace(MIDDLE, batch=1, context=16)
"""Next to no activations, whose kernels differ between devices: what is left is the engine's."""
LARGE = Shape(layers=18, width=2048, heads=16, vocabulary=32768, context=1024, batch=8)
"""1.04 B parameters."""


def _trainer(
    shape: Shape, plan: Any, precision: str, compiled: bool = False
) -> tuple[zeroshard.Handle, Callable[[Tensor], None]]:
    """A sharded GPT, and its step. `compiled`: its blocks are."""
    model = shape.build_on_device()
    handle = zeroshard.shard(model, plan, units=gpt.Block, precision=precision)
    _compile(model, compiled)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-4, fused=True)

    def step(tokens: Tensor) -> None:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()

    return handle, step


def _compile(model: nn.Module, compiled: bool) -> None:
    """Compile its blocks."""
    for module in model.modules() if compiled else ():
        if isinstance(module, gpt.Block):
            module.compile()


# Memory ---------------------------------------------------------------------------------------------------------------

OTHERS = 2 << 20
"""Bytes that a test's model may hold beside what is planned: the table of its rotations, and numbers on their way."""
LEAST_OF_PLAN = 0.95
"""What a peak is of its plan at least. (The plan has pool buffers through all of backward; the allocator gets them back
one by one.)"""


def memory(checks: Checks, setting: Setting) -> None:
    shape = TINY if setting.is_small else NARROW
    plans = (zeroshard.DDP, zeroshard.ZERO3) if setting.is_small else PLANS
    rows = []
    with one_rank(setting.device):
        if setting.device == "cuda":
            _plain_step(shape)(shape.tokens().to(DEVICE))  # allocates what the libraries of both threads keep
        for exchanges, switch in SWITCHES.items():
            for plan in plans:
                for precision in ("fp32", "bf16", "bf16-remainder")[: 1 if setting.is_small else None]:
                    case = f"{plan}, {precision}, {exchanges}"
                    with switch():
                        rows.append([case, *_memory_of(checks, case, shape, plan, precision, setting.device)])
    title = "MB, planned and measured: between steps, and the peak of a step with activations"
    checks.table(title, ["case", "planned", "held", "allocated", "planned peak", "measured peak", "ratio"], rows)


def _memory_of(checks: Checks, case: str, shape: Shape, plan: Any, precision: str, device: str) -> list[str]:
    num_ranks = Lone(1) if case.endswith("exchanges") else 1
    with patch.object(Configuration, "num_shards", property(lambda self: num_ranks)):
        forecast = shape.forecast(plan, 1, precision=precision, device=device)
    tokens = shape.tokens().to(DEVICE)
    gc.collect()  # the model of the case before
    before = _allocated(device)
    handle, step = _trainer(shape, plan, precision)
    for _ in range(3):
        step(tokens)
    handle.engine.gatherer.settle()
    _reset_peak(device)
    step(tokens)
    peak = _allocated(device, peak=True) - before + tokens.nbytes
    handle.engine.gatherer.settle()
    planned = _planned(shape, plan, num_ranks, precision, device)
    checks.expect_equal(f"{case}: `handle.memory()` is as planned", handle.memory(), planned)
    held, planned_held = sum(handle.memory().values()), sum(planned.values())
    row = [_mb(planned_held), _mb(held)]
    if device == "cpu":
        return [*row, "", _mb(forecast.whole_peak), "", ""]
    allocated, ratio = _allocated(device) - before, peak / forecast.whole_peak
    checks.expect(
        f"{case}: the allocator holds it", 0 <= allocated - held <= OTHERS, f"{allocated - held:+} bytes of {held}"
    )
    if device == "cuda":  # other kernels have other activations
        checks.expect(f"{case}: the peak is planned", LEAST_OF_PLAN <= ratio <= 1.005, f"{ratio:.3f}")
    return [*row, _mb(allocated), _mb(forecast.whole_peak), _mb(peak), f"{ratio:.3f}"]


def _planned(shape: Shape, plan: Any, num_ranks: int, precision: str, device: str) -> dict[str, int]:
    with torch.device("meta"):
        model = shape.build()
    names = {"units": gpt.Block, "precision": precision, "transport": "native", "device_type": _as_planned(device)}
    return plan_memory(model, plan, num_ranks, **names)  # type: ignore[arg-type]


def _as_planned(device: str) -> str:
    return "cpu" if device == "cpu" else "cuda"  # all accelerators have the sizes of CUDA


def _allocated(device: str, *, peak: bool = False) -> int:
    """The bytes of living tensors. (The allocator's blocks are up to a megabyte larger.)"""
    if device == "cpu":
        return 0
    torch.accelerator.synchronize()
    if device == "cuda":
        found: int = torch.cuda.memory_stats()["requested_bytes.all." + ("peak" if peak else "current")]
        return found
    return torch.accelerator.max_memory_allocated() if peak else torch.accelerator.memory_allocated()


def _reset_peak(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f}"


# Launches -------------------------------------------------------------------------------------------------------------

LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)


def profile(checks: Checks, setting: Setting) -> None:
    shape = TINY if setting.is_small else MIDDLE
    what = "operations" if setting.is_small else "launches"
    with one_rank(setting.device):
        rows = [["plain torch", *_totals(_profiled(_plain_step(shape), shape, setting), setting.device)]]
        for exchanges, switch in SWITCHES.items():
            for plan in (zeroshard.ZERO3,) if setting.is_small else (zeroshard.DDP, zeroshard.ZERO3):
                case = f"{plan}, {exchanges}"
                with switch():
                    handle, step = _trainer(shape, plan, "bf16")
                    events = _profiled(step, shape, setting, f"trace-{plan}-{exchanges.replace(' ', '-')}")
                rows.append([case, *_totals(events, setting.device)])
                spans = _spans(events, setting.device)
                _show_spans(checks, f"{case}: one step of {shape.layers} blocks", what, spans)
                update = next(span for span in spans if span.phase == "step: update")
                pieces = sum(len(s.state.pieces) for o in handle.engine.claims.owners() for s in o.steppers)
                each = f"{update.launches / pieces:.1f} {what} and {update.micros / pieces:.1f} µs of the host for each"
                checks.note(f"{case}: the update of {pieces} pieces", each)
                checks.expect(f"{case}: phases and units are named", len({s.unit for s in spans}) > shape.layers)
                checks.expect(f"{case}: {what} were counted", sum(s.launches for s in spans) > 20)
    checks.table("A whole step", ["", what, "host ms"], rows)


@dataclass(frozen=True)
class Span:
    """A range of the engine in the profile of a step. A range may lie inside another. `unit`: "" if it is of none."""

    phase: str
    unit: str
    launches: int
    micros: float


def _show_spans(checks: Checks, title: str, what: str, spans: Sequence[Span]) -> None:
    """Two tables: by phase, over all units; by unit, over all phases that are no part of another."""
    header = ["", "calls", f"{what} per call", "host µs per call", "host µs in all"]
    checks.table(f"{title}, by phase", header, _sums([(span.phase, span) for span in spans]))
    outer = [span for span in spans if span.phase not in _INNER and span.unit]
    checks.table(f"{title}, by unit", header, _sums([(span.unit, span) for span in outer]))


_INNER = ("all_gather", "reduce_scatter", "all_to_all", "replicate", "exchange")
"""Ranges of collectives: they lie inside those of phases."""


def _sums(named: Sequence[tuple[str, Span]]) -> list[list[str]]:
    groups: dict[str, list[Span]] = {}
    for name, span in named:
        groups.setdefault(name, []).append(span)
    rows = []
    for name, spans in groups.items():
        n, launches, micros = len(spans), sum(s.launches for s in spans), sum(s.micros for s in spans)
        rows.append([name, str(n), f"{launches / n:.1f}", f"{micros / n:.0f}", f"{micros:.0f}"])
    return sorted(rows, key=lambda row: -int(row[-1]))


def _plain_step(shape: Shape, compiled: bool = False) -> Callable[[Tensor], None]:
    model = shape.build_on_device()
    _compile(model, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()

    return step


def _profiled(step: Callable[[Tensor], None], shape: Shape, setting: Setting, file: str = "") -> list[Any]:
    """The events of the host in one step. `file`: the trace's, for a viewer (of a GPU)."""
    from torch.profiler import ProfilerActivity

    tokens, on_gpu = shape.tokens().to(DEVICE), setting.device == "cuda"
    for _ in range(3):
        step(tokens)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        with torch.profiler.record_function("whole step"):
            step(tokens)
        if on_gpu:
            torch.cuda.synchronize()
    if on_gpu and file:
        profiler.export_chrome_trace(str(setting.folder / f"{file}.json.gz"))
    return [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CPU]


def _is_launch(event: Any, device: str) -> bool:
    if device == "cuda":
        return event.name in LAUNCHES
    return event.name.startswith("aten::") and not event.cpu_children


def _totals(events: Sequence[Any], device: str) -> list[str]:
    whole = next(event for event in events if event.name == "whole step")
    launches = sum(_is_launch(event, device) for event in events)  # backward launches on a thread of its own
    return [str(launches), f"{whole.time_range.elapsed_us() / 1e3:.2f}"]


def _spans(events: Sequence[Any], device: str) -> list[Span]:
    starts = [(event.thread, event.time_range.start) for event in events if _is_launch(event, device)]
    found = []
    for event in events:
        if not event.name.startswith("zeroshard::"):
            continue
        phase, _, unit = event.name.removeprefix("zeroshard::").rstrip(")").partition("(")
        begin, end = event.time_range.start, event.time_range.end
        launches = sum(thread == event.thread and begin <= start <= end for thread, start in starts)
        found.append(Span(phase, unit, launches, event.time_range.elapsed_us()))
    return found


# Speed ----------------------------------------------------------------------------------------------------------------

PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312, "L40S": 362, "B200": 2250}
"""bf16 without sparsity, by a part of the GPU's name, from the data sheets."""


def large(checks: Checks, setting: Setting) -> None:
    shape, steps = (TINY, 2) if setting.is_small else (LARGE, 10)
    num_ranks = max(setting.num_gpus, 1)
    rows = on_own_devices(setting.device, _speeds_of_all, num_ranks, shape, steps, num_ranks)[0]
    if rows is None:
        raise Skip("it needs a GPU of 40 GB")
    header = [
        "",
        "steps/s",
        "tokens/s per GPU",
        "MFU",
        "of a matrix product's rate",
        "host ms",
        "peak GB",
        "planned GB",
    ]
    checks.table(f"A GPT of {shape.layers} blocks of width {shape.width}, bf16, {num_ranks} ranks", header, rows)
    for name, *cells in rows:
        checks.expect(f"{name}: it trained", len(cells) == len(header) - 1, cells[0])
        if setting.device == "cuda" and len(cells) == len(header) - 1 and cells[-1]:
            ratio = float(cells[-2]) / float(cells[-1])
            checks.expect(f"{name}: the peak is planned", LEAST_OF_PLAN <= ratio <= 1.005, f"{ratio:.3f}")


def _speeds_of_all(rank: int, shape: Shape, steps: int, num_ranks: int) -> list[list[str]] | None:
    """One row for each contender, or its name and its error; None: the GPU is too small. On one rank."""
    if DEVICE.type == "cuda" and torch.cuda.get_device_properties().total_memory < 40e9:
        return None
    rows = []
    for name in _contenders(num_ranks):
        try:
            rate = _rate_of_products()  # again for each: a GPU is not equally fast all the time
            rows.append([name, *_speed_of(name, shape, steps, num_ranks, rate)])
        except (RuntimeError, ImportError) as error:  # no room, no compiler
            rows.append([name, f"{type(error).__name__}: {error}"])
    return rows


def _contenders(num_ranks: int) -> list[str]:
    plain = ["plain torch, autocast"] if num_ranks == 1 else []
    if DEVICE.type != "cuda":
        return [*plain, "zero3"]
    compiled = [f"{name}, blocks compiled" for name in ("zero3", *plain)]
    return [*plain, "ddp", "zero1", "zero3", *compiled]


def _speed_of(name: str, shape: Shape, steps: int, num_ranks: int, rate: float) -> list[str]:
    gc.collect()  # the contender before
    if "compiled" in name:
        torch._dynamo.reset()  # the same code was compiled for it
    before, plan = _allocated(DEVICE.type), name.partition(",")[0]
    compiled = "compiled" in name
    step = _plain_step(shape, compiled) if plan == "plain torch" else _trainer(shape, plan, "bf16", compiled)[1]
    tokens = shape.tokens().to(DEVICE)
    for _ in range(3):
        step(tokens)
    _reset_peak(DEVICE.type)
    began, of_host = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step(tokens)
    of_host = (time.process_time() - of_host) / steps
    peak = _allocated(DEVICE.type, peak=True) - before  # waits for the GPU
    seconds, planned = (time.perf_counter() - began) / steps, ""
    if name in ("ddp", "zero1", "zero3"):
        planned = f"{shape.forecast(plan, num_ranks, precision='bf16', device=DEVICE.type).whole_peak / 1e9:.3f}"
    return [*_speeds(shape, seconds, rate), f"{1e3 * of_host:.1f}", f"{peak / 1e9:.3f}", planned]


def _speeds(shape: Shape, seconds: float, rate: float) -> list[str]:
    tokens = shape.batch * shape.context
    matrices = 12 * shape.layers * shape.width**2 + shape.vocabulary * shape.width
    # 6 operations per weight of a matrix and token; attention: 12 T C per token and block, half of it masked.
    flops = tokens * (6 * matrices + 6 * shape.layers * shape.width * shape.context) / seconds
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else ""
    peak = next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)
    mfu = f"{flops / peak:.3f}" if peak else f"{flops / 1e12:.2f} TFLOP/s"
    return [f"{1 / seconds:.3f}", f"{tokens / seconds:.0f}", mfu, f"{flops / rate:.3f}"]


def _rate_of_products() -> float:
    """Floating-point operations per second of a large matrix product in bf16, as measured."""
    n, times = (8192, 20) if DEVICE.type == "cuda" else (64, 2)
    a = torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16)
    for repeat in (3, times):
        _reset_peak(DEVICE.type)
        began = time.perf_counter()
        for _ in range(repeat):
            a @ a
        _allocated(DEVICE.type)  # waits for the GPU
    return 2 * n**3 * times / (time.perf_counter() - began)


def step_time(checks: Checks, setting: Setting) -> None:
    if setting.device == apart.NAME:
        raise Skip("this device has no speed of its own")
    if setting.is_small:
        sizes = "--layers 1 --width 32 --heads 2 --vocabulary 64 --context 16 --steps 2 --warmup 1"
        few = ["--contenders", "zero3", "plain torch"]
        runs = [["--ranks", "1", *sizes.split(), *few]]
    else:
        middle = "--layers 12 --width 1024 --heads 16 --vocabulary 32768 --context 512 --batch 8 --steps 20"
        tiny = "--layers 12 --width 128 --heads 2 --vocabulary 256 --context 64 --batch 1 --steps 20"  # the host's time
        ranks = [str(number) for number in sorted({1, setting.num_gpus})]
        cases = [("fp32", middle), ("bf16", middle), ("bf16", tiny)]
        runs = [["--ranks", *ranks, "--dtype", dtype, *sizes.split()] for dtype, sizes in cases]
    for arguments in runs:
        status, output = run_python("benchmarks/step_time.py", "--device", setting.device, *arguments)
        checks.text(f"step_time.py {' '.join(arguments)}", output)
        agree = status == 0 and "losses agree" in output
        agree &= "zero3 / plain torch" in output or not setting.is_small  # another number of ranks has other contenders
        checks.expect("it ran, and all contenders had the same losses", agree, f"status {status}")
