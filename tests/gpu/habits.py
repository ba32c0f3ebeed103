"""The piece `habits` of `make test-gpu`: what users of plain torch do on a GPU, with and without zeroshard."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as recomputed
from torch.utils.data import DataLoader, TensorDataset

import zeroshard
from tests.gpu.around_steps import Training as Kept
from tests.gpu.beside_plain import (
    FEW_PLANS,
    KERNELS,
    ON_CUDA,
    SMALL_PLANS,
    SWITCHES,
    WIDTH,
    Case,
    Training,
    batch,
    compare,
    dense,
    difference,
    expect_words,
    guarded,
    loss_of_rows,
    mean_square,
    of,
)
from tests.gpu.checks import Checks, Setting
from tests.gpu.jobs import JOBS, difference_of
from tests.gpu.worlds import Sleeps, one_rank
from tests.kit import DEVICE, PLANS, State, make, same_bits, train, train_reference
from zeroshard.errors import Error
from zeroshard.placement import Plan

DENSE = Case(dense, loss_of_rows)


def habits(checks: Checks, setting: Setting) -> None:
    every = SMALL_PLANS if setting.is_small else FEW_PLANS
    with one_rank(setting.device):
        truth = of(DENSE)(None)
        compare(checks, "plain AdamW", of(DENSE), plans=every)
        other = of(replace(DENSE, defaults={"lr": 2e-2}))(None)
        checks.expect("another learning rate, other bits (control)", difference(other, truth) > 10 * KERNELS)
        for exchanges, switch in SWITCHES.items():
            plans = every[-1:] if setting.is_small and exchanges == "alone" else every
            with switch():
                for group in (_precisions, _masks, _layers, _optimizers, _memory, _inputs):
                    with guarded(checks, f"{group.__name__[1:]}, {exchanges}"):
                        group(checks, exchanges, plans, setting)
                if exchanges != "alone" or not setting.is_small:
                    with guarded(checks, f"deterministic, {exchanges}"):
                        _deterministic(checks, exchanges, setting)
                    with guarded(checks, f"streams, {exchanges}"):
                        _streams(checks, exchanges, plans, setting)
        for once in (_refusals, _other_places):
            with guarded(checks, once.__name__[1:]):
                once(checks, every)


Plans = tuple[Plan, ...]

# Autocast and scales --------------------------------------------------------------------------------------------------


def _precisions(checks: Checks, exchanges: str, plans: Plans, setting: Setting) -> None:
    if DEVICE.type not in ("cuda", "cpu"):
        return
    in_bf16 = replace(DENSE, around=partial(torch.autocast, DEVICE.type, torch.bfloat16))
    compare(checks, f"autocast bf16, {exchanges}", of(in_bf16), plans=plans)
    in_fp16 = replace(
        DENSE,
        around=partial(torch.autocast, DEVICE.type, torch.float16),
        loss_scale=zeroshard.DynamicScale(init=2.0**10, growth_interval=2),
        steps=4,
    )
    compare(checks, f"autocast fp16, scaled, {exchanges}", lambda plan: _Scaled(in_fp16, plan).trained(), plans=plans)
    in_fp16 = replace(in_fp16, loss_scale=None)
    what = f"autocast fp16, a scaler of the loss, {exchanges}"
    compare(checks, what, lambda plan: _Scaled(in_fp16, plan).trained(), plans=plans)


class _Scaled(Training):
    """With `torch.amp.GradScaler`, the optimizer's scale, or that of a loss. The gradients of step 1 overflow."""

    scaler: Any = None

    def step(self, number: int) -> None:
        if self.plan is None and not number:
            self.scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=2)
        elif self.case.loss_scale is None and not number:
            self.scaler = zeroshard.LossScaler(zeroshard.DynamicScale(init=2.0**10, growth_interval=2))
        self.optimizer.zero_grad()
        with self.case.around():
            loss = self.case.loss(self.model, number) * (1e38 if number == 1 else 1.0)
        if self.plan is None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.backward(loss, scaler=self.scaler)
            self.optimizer.step()
        self.losses.append(loss.item())


# Masks of dropout, recomputed -----------------------------------------------------------------------------------------


class _Recomputing(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Dropout(0.3), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + recomputed(block, x, use_reentrant=self.reentrant)
        return x


def _masks(checks: Checks, exchanges: str, plans: Plans, setting: Setting) -> None:
    case = Case(partial(dense, 0.3), loss_of_rows)
    compare(checks, f"dropout, {exchanges}", of(case), plans=plans)
    if DEVICE.type not in ("cuda", "cpu"):
        return  # torch knows no random numbers of other devices in a checkpoint
    for reentrant in (True, False):
        case = Case(partial(_Recomputing, reentrant=reentrant), loss_of_rows, units=nn.Sequential)
        kind = "reentrant checkpoint" if reentrant else "checkpoint"
        compare(checks, f"{kind} with dropout, {exchanges}", of(case), plans=plans)


# Layers with kernels of their own -------------------------------------------------------------------------------------


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], dropout: float) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, 2, dropout=dropout, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.rnn(x)[0])
        return outputs


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        padded = torch.arange(x.shape[1], device=x.device) >= x.shape[1] - 2
        outputs: Tensor = self.head(self.encoder(x, src_key_padding_mask=padded.expand(x.shape[0], -1))[:, :-2])
        return outputs


class _Attention(nn.Module):
    def __init__(self, backend: SDPBackend | None) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.whole = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        with nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            heads = self.query(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4).unbind()
            x = self.out(nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        outputs: Tensor = self.whole(x, x, x, need_weights=False)[0]
        return outputs


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (self._part(a, b) for a, b in ((3, 16), (16, 16)))
        self.head = nn.Linear(16, 4)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @staticmethod
    def _part(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x.to(memory_format=torch.channels_last)))
        outputs: Tensor = self.head(x.mean((2, 3)))
        return outputs


class _Evaluated(Training):
    """Trains, and evaluates."""

    def outcome(self) -> State:
        found = super().outcome()
        self.model.eval()
        with torch.no_grad(), self.case.around():
            self.losses.append(self.case.loss(self.model, 99).item())
        self.model.train()
        self.step(3)
        return {**found, **{f"{name}, later": value for name, value in super().outcome().items()}}


def _layers(checks: Checks, exchanges: str, plans: Plans, setting: Setting) -> None:
    def evaluated(what: str, case: Case, tolerance: float = KERNELS) -> None:
        tolerance = tolerance if ON_CUDA else 1e-6  # the fast path of an encoder in evaluation
        case = replace(case, optimizer=torch.optim.SGD, defaults={"lr": 0.5})  # Adam makes a last bit a whole step
        compare(
            checks, f"{what}, {exchanges}", lambda p: _Evaluated(case, p).trained(), plans=plans, tolerance=tolerance
        )

    def sequences(model: nn.Module, number: int) -> Tensor:
        return mean_square(model(batch(number, 4, 10, WIDTH)))

    def pictures(model: nn.Module, number: int) -> Tensor:
        return mean_square(model(batch(number, 4, 3, 8, 8)))

    if DEVICE.type not in ("cuda", "cpu"):
        return  # other devices lack these kernels
    for kind in (nn.LSTM, nn.GRU):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            evaluated(kind.__name__, Case(partial(_Recurrent, kind, 0.0), sequences, units=kind))
        chunks = sum("contiguous chunk" in str(one.message) for one in said)
        checks.note(f"{kind.__name__}, {exchanges}: warnings about memory that is no single chunk", chunks)
    # cuDNN keeps the random numbers of its own dropout from model to model: two runs of plain torch differ.
    dropping = Case(partial(_Recurrent, nn.LSTM, 0.3), sequences, units=nn.LSTM)
    evaluated("LSTM with dropout", dropping, tolerance=1e2)
    evaluated("TransformerEncoder", Case(_Encoder, sequences, units=nn.TransformerEncoderLayer))
    backends: list[SDPBackend | None] = [None, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    if ON_CUDA:
        backends += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    for backend in backends:
        around: Callable[[], AbstractContextManager[Any]] = nullcontext
        if ON_CUDA:
            around = partial(torch.autocast, "cuda", torch.bfloat16)
        case = Case(partial(_Attention, backend), sequences, units=nn.MultiheadAttention, around=around)
        evaluated(f"attention, {backend.name.lower() if backend else 'any kernel'}", case, 10 * KERNELS)
    benchmark = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = True
        evaluated("convolutions, channels last, batch norm", Case(_Convolutions, pictures, units=nn.Sequential))
    finally:
        torch.backends.cudnn.benchmark = benchmark


# Optimizers -----------------------------------------------------------------------------------------------------------


class _WithState(Training):
    """The outcome has the optimizer's state, and where it lies."""

    def outcome(self) -> State:
        found = super().outcome()
        for index, parameter in enumerate(self.model.parameters()):
            for name, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    found[f"{name} of {index}"] = value.detach().cpu().clone()
                    if value.numel() > 1 and value.device.type != DEVICE.type:
                        raise ValueError(f"{name} lies on {value.device}")
        return found


def _optimizers(checks: Checks, exchanges: str, plans: Plans, setting: Setting) -> None:
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    defaults: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "AdamW, foreach": (adamw, {"lr": 1e-2, "foreach": True}),
        "AdamW, amsgrad": (adamw, {"lr": 1e-2, "amsgrad": True}),
        "SGD, momentum": (sgd, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    }
    if DEVICE.type in ("cuda", "cpu"):
        lr = torch.tensor(1e-2, device=DEVICE)
        defaults["AdamW, fused"] = adamw, {"lr": 1e-2, "fused": True}
        defaults["AdamW, fused, lr a tensor"] = adamw, {"lr": lr, "fused": True}
        defaults["SGD, fused"] = sgd, {"lr": 1e-1, "momentum": 0.9, "fused": True}
    if ON_CUDA:
        defaults["AdamW, capturable"] = adamw, {"lr": 1e-2, "capturable": True}
        defaults["AdamW, capturable, lr a tensor"] = adamw, {"lr": lr, "capturable": True}
        defaults["AdamW, capturable, fused"] = adamw, {"lr": 1e-2, "capturable": True, "fused": True}
    for what, (kind, options) in defaults.items():
        case = replace(DENSE, optimizer=kind, defaults=options)
        compare(checks, f"{what}, {exchanges}", lambda plan, case=case: _WithState(case, plan).trained(), plans=plans)


# Memory that runs out -------------------------------------------------------------------------------------------------


class _CalledInBackward(torch.autograd.Function):
    """The identity, and a call in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad.clone(), None


class _Failing(nn.Module):
    """Raises in forward or in backward, while `where` says so."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if _Failing.where == "forward":
            _run_out()
        return _CalledInBackward.apply(x, _run_out_in_backward)  # type: ignore[no-untyped-call,no-any-return]


def _run_out_in_backward() -> None:
    if _Failing.where == "backward":
        _run_out()


def _run_out() -> None:
    if not ON_CUDA:
        raise torch.OutOfMemoryError("out of memory, as on a GPU")
    with _little_memory():
        torch.empty(1 << 40, dtype=torch.uint8, device=DEVICE)


@contextmanager
def _little_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(min((torch.cuda.memory_reserved() + (64 << 20)) / total, 1.0))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _failing() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), _Failing(), nn.Linear(WIDTH, 8))


class _Exhausted(Training):
    """In step 1 memory runs out first, where `where` says; at the end it notes how much is allocated at rest."""

    where = ""

    def step(self, number: int) -> None:
        if number == 1 and self.where:
            before = _allocated()
            try:
                self._fail(number)
            except torch.OutOfMemoryError:
                pass
            else:
                raise ValueError("memory did not run out")
            self.optimizer.zero_grad()
            gc.collect()
            self.left = _allocated() - before
        super().step(number)

    def _fail(self, number: int) -> None:
        if self.where == "large batch":
            x = torch.zeros(1 << 20, WIDTH, device=DEVICE)
            with _little_memory():
                self.model(x).sum().backward()
            return
        _Failing.where = self.where
        try:
            self.backward(number)
        finally:
            _Failing.where = ""


def _allocated() -> int:
    return torch.accelerator.memory_allocated() if DEVICE.type != "cpu" else 0


def _memory(checks: Checks, exchanges: str, plans: Plans, setting: Setting) -> None:
    case = Case(_failing, loss_of_rows)
    expected = of(case)(None)
    for where in ("forward", "backward", *(["large batch"] if ON_CUDA else [])):
        left = {}

        def run(plan: Plan | None, where: str = where, left: dict[str, int] = left) -> State:
            training = _Exhausted(case, plan)
            training.where = where
            found = training.trained()
            left[str(plan)] = training.left
            return found

        what = f"memory runs out in {where}, {exchanges}"
        compare(checks, what, run, plans=plans, expected=expected)
        with guarded(checks, f"{what}: what is left"):
            run(None)
            # zeroshard keeps its pool buffers from a forward to the next step: at most the weights, twice.
            room = 4 * sum(parameter.nbytes for parameter in make(_failing).parameters()) + (64 << 10)
            checks.expect(f"{what}: nothing is left", all(value <= room for value in left.values()), left)


# Inputs, and where the model lies -------------------------------------------------------------------------------------


class _Loaded(Training):
    """Inputs come from a DataLoader."""

    def trained(self) -> State:
        generator = torch.Generator().manual_seed(3)
        with torch.device("cpu"):
            rows = TensorDataset(torch.randn(32, WIDTH, generator=generator))
        loader = DataLoader(rows, batch_size=8, pin_memory=ON_CUDA, num_workers=int(ON_CUDA))
        for (x,) in loader:
            self.optimizer.zero_grad()
            loss = mean_square(self.model(x.to(DEVICE, non_blocking=True)))
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
        return self.outcome()


class _Parked(Training):
    def step(self, number: int) -> None:
        super().step(number)
        if self.handle is not None:
            self.handle.park()
            self.handle.unpark()


class _Moved(Training):
    """`model.to` the device on which it is, after `shard`, as many loops do."""

    def step(self, number: int) -> None:
        if not number:
            self.model.to(DEVICE)
            self.model.train()
        super().step(number)


def _inputs(checks: Checks, exchanges: str, plans: Plans, setting: Setting) -> None:
    loaded = "a DataLoader that pins, non_blocking" if ON_CUDA else "a DataLoader"
    compare(checks, f"{loaded}, {exchanges}", lambda plan: _Loaded(DENSE, plan).trained(), plans=plans)
    compare(checks, f"parked after each step, {exchanges}", lambda plan: _Parked(DENSE, plan).trained(), plans=plans)
    full = tuple(plan for plan in plans if plan is not zeroshard.ZERO3) or SMALL_PLANS[:1]
    compare(checks, f"model.to(device) after shard, {exchanges}", lambda p: _Moved(DENSE, p).trained(), plans=full)
    for plan in plans:
        with guarded(checks, f"{plan}, {exchanges}: built on the meta device"):
            expected = of(DENSE)(None)
            checks.expect_equal(
                f"{plan}, {exchanges}: built on the meta device, the same bits",
                same_bits(_materialized(plan), expected),
                True,
            )


def _materialized(plan: Plan) -> State:
    values = make(dense).state_dict()
    with torch.device("meta"):
        model = dense()
    names = {module: name for name, module in model.named_modules()}

    def fill(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            with torch.no_grad():
                parameter.copy_(values[f"{names[module]}.{name}"])

    training = Training.__new__(Training)
    training.case, training.plan, training.model, training.called, training.losses = DENSE, plan, model, model, []
    training.handle = zeroshard.shard(model, plan, units=nn.Linear, materialize=fill)
    training.optimizer = zeroshard.ShardedOptimizer(training.handle, torch.optim.AdamW, lr=1e-2)
    return training.trained()


def _other_places(checks: Checks, plans: Plans) -> None:
    """torch's default device; a model on the host."""
    torch.set_default_device(DEVICE)
    try:
        for exchanges, switch in SWITCHES.items():
            with switch():
                compare(checks, f"set_default_device, {exchanges}", of(DENSE), plans=plans)
    finally:
        torch.set_default_device(None)
    if not ON_CUDA:
        return
    for plan in plans:
        model = dense()
        try:
            handle = zeroshard.shard(model, plan)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2)
            mean_square(model(torch.randn(8, WIDTH))).backward()
            optimizer.step()
            found = "it trains there"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            checks.expect(f"{plan}: a model on the host is refused in words", isinstance(error, Error), found)
            continue
        checks.expect(f"{plan}: a model on the host", True, found)


def _refusals(checks: Checks, plans: Plans) -> None:
    """What cannot work says what to write instead."""
    for plan in plans:
        training = Training(replace(DENSE, loss_scale="dynamic"), plan)
        scaler = torch.amp.GradScaler("cuda" if ON_CUDA else "cpu", init_scale=4.0)
        scaler.scale(torch.ones((), device=DEVICE))
        training.optimizer.backward(loss_of_rows(training.model, 0))
        expect_words(checks, f"{plan}: GradScaler", partial(scaler.step, training.optimizer), "loss_scale")
        training.optimizer.zero_grad()
    switch = SWITCHES["with exchanges"]
    with switch():
        for plan in plans:
            for what, move in _MOVES.items():
                training = Training(DENSE, plan)
                training.step(0)

                def moved(move: Callable[[nn.Module], object] = move, training: Training = training) -> None:
                    move(training.model)
                    training.step(1)

                what = f"{plan}: model.{what} after shard"
                expect_words(checks, what, moved, "before shard()", "shard() the changed")


_MOVES: dict[str, Callable[[nn.Module], object]] = {
    "half()": lambda model: model.half(),
    "to(torch.bfloat16)": lambda model: model.to(torch.bfloat16),
}
if DEVICE.type != "cpu":
    _MOVES |= {"cpu()": lambda model: model.cpu(), 'to("cpu")': lambda model: model.to("cpu")}


# Deterministic algorithms ---------------------------------------------------------------------------------------------


def _deterministic(checks: Checks, exchanges: str, setting: Setting) -> None:
    """Operations without a deterministic form raise, and memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        jobs = dict(list(JOBS.items())[:2]) if setting.is_small else JOBS
        for name, job in {**jobs, "clipped": replace(JOBS["fp32"], max_norm=0.1)}.items():
            what = f"deterministic algorithms, {name}, {exchanges}"
            with guarded(checks, what):
                found = [train(job, plan, 0) for plan in PLANS]
                truth = found[0] if job.max_norm else train_reference(job, 1)[0]
                wrong = [
                    f"{plan}: {text}"
                    for plan, one in zip(PLANS, found, strict=True)
                    if (text := difference_of(one, truth))
                ]
                checks.expect(f"{what}: the bits of one process", not wrong, "; ".join(wrong))
        for plan in PLANS[-1:] if setting.is_small else PLANS:
            what = f"deterministic algorithms, {plan}, {exchanges}: saved and loaded"
            with guarded(checks, what):
                checks.expect(f"{what}, the same bits", _is_saved(setting, plan, exchanges))
    finally:
        torch.use_deterministic_algorithms(False)


def _is_saved(setting: Setting, plan: Plan, exchanges: str) -> bool:
    folder = setting.folder / f"deterministic {plan} {exchanges}"
    first, second = Kept(plan), Kept(plan, seed=1)
    first.step(0)
    zeroshard.save(folder, first.handle, first.optimizer, step=1)
    zeroshard.load(folder, second.handle, second.optimizer)
    for training in (first, second):
        training.step(1)
    return same_bits(first.weights(), second.weights())


# Streams --------------------------------------------------------------------------------------------------------------


class _OnStream(Training):
    """Each step runs on a stream of the user."""

    def step(self, number: int) -> None:
        if not ON_CUDA:
            super().step(number)
            return
        if not number:
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            super().step(number)
        torch.cuda.current_stream().wait_stream(self.stream)


class Late(nn.Module):
    """A block whose kernels wait for a while."""

    def __init__(self, sleeps: bool) -> None:
        super().__init__()
        self.up, self.sleeps = nn.Linear(WIDTH, WIDTH), sleeps

    def forward(self, x: Tensor) -> Tensor:
        if self.sleeps:
            _sleep()
        return torch.tanh(self.up(_CalledInBackward.apply(x, _sleep))) if self.sleeps else torch.tanh(self.up(x))  # type: ignore[no-untyped-call,no-any-return]


def _sleep() -> None:
    if ON_CUDA:
        torch.cuda._sleep(5_000_000)


class TwoStreams(nn.Module):
    """Two blocks run side by side, one of them on a second stream, with the waits that torch's pages ask for."""

    def __init__(self, sleeping: str = "") -> None:
        super().__init__()
        self.first, self.here, self.there, self.last = (Late(name in sleeping) for name in ("1", "h", "t", "l"))
        self.stream: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not ON_CUDA:
            y = self.here(x)
            return self.last(y + self.there(x))  # type: ignore[no-any-return]
        current = torch.cuda.current_stream()
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(current)
        y = self.here(x)
        with torch.cuda.stream(self.stream):
            x.record_stream(self.stream)
            z = self.there(x)
        current.wait_stream(self.stream)
        z.record_stream(current)
        return self.last(y + z)  # type: ignore[no-any-return]


def _streams(checks: Checks, exchanges: str, plans: Plans, setting: Setting) -> None:
    number_of_seeds = 1 if setting.is_small else 2
    with_sleeps = exchanges != "alone"
    for seed in range(number_of_seeds):
        sleeps = Sleeps(setting.device, seed).installed() if with_sleeps else nullcontext()
        with sleeps:
            compare(
                checks, f"steps on a stream, {exchanges}, {seed}", lambda p: _OnStream(DENSE, p).trained(), plans=plans
            )
            for sleeping in ("", "h") if setting.is_small else ("", "h", "t", "l", "ht"):
                case = Case(partial(TwoStreams, sleeping), loss_of_rows, units=Late)
                what = f"blocks on two streams, {sleeping or 'none'} late, {exchanges}, {seed}"
                compare(checks, what, of(case), plans=plans)
                if not setting.is_small:
                    on_one = lambda p, case=case: _OnStream(case, p).trained()  # noqa: E731
                    compare(checks, f"{what}, on a stream", on_one, plans=plans[-1:])
