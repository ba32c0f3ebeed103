"""Tracing the memory of a micro-batch on the meta device gives the bytes that the operators allocate exactly, and those
of the allocator closely."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import Block, Net, loss_of_tokens, make
from zeroshard.model.units import choose_units
from zeroshard.planning import Configuration, Trace, Workload, activations, dry_run, fit, forecasting
from zeroshard.planning.activations import Live
from zeroshard.testing import run_ranks

BATCH, LENGTH, WIDTH = 8, 64, 96


class Wide(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(x.shape)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.Sequential(*(Wide() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embed(tokens)))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def tokens() -> Tensor:
    return torch.ones(BATCH, LENGTH, dtype=torch.long)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs)
    return loss


def trace(recompute: bool = False, precision: Any = None) -> Trace:
    with torch.device("meta"):
        model = Model()
    return Workload(tokens, loss_of, recompute).trace(model, choose_units(model, Wide, precision), precision)


def recompute_blocks(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Wide):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def allocated(work: Callable[[], object]) -> int:
    """The peak of the bytes that torch's allocator has allocated during `work`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        work()
    found: Any = profiler.profiler
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))


def test_a_model_that_has_changed_is_traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload kept its first trace: the plan of a model with checkpointing, of other inputs (also by `replace`) or
    of frozen parameters was that from before, in silence. What is tried together is traced once."""
    with torch.device("meta"):
        model = Model()
    sequences, traced = BATCH, list[int]()
    workload = Workload(lambda: torch.ones(sequences, LENGTH, dtype=torch.long), loss_of)
    configuration = Configuration(ranks=8, units=Wide, precision="fp32", workload=workload)
    first = zeroshard.plan(model, configuration)
    larger = replace(workload, inputs=lambda: torch.ones(2 * BATCH, LENGTH, dtype=torch.long))
    assert zeroshard.plan(model, replace(configuration, workload=larger)).trace.saved > first.trace.saved
    sequences *= 2
    second = zeroshard.plan(model, configuration)
    assert second.trace.saved > first.trace.saved
    recompute_blocks(model)
    third = zeroshard.plan(model, configuration)
    assert third.trace.saved < second.trace.saved
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)
    assert zeroshard.plan(model, configuration).trace.saved < third.trace.saved
    monkeypatch.setattr(activations, "_trace", lambda *of, known=activations._trace: (traced.append(0), known(*of))[1])
    assert len(fit(model, 10**9, configuration)) == 8 and len(traced) == 2, "with and without recomputation"
    muon = zeroshard.plan(model, replace(configuration, plan="zero1", optimizer="Muon+AdamW"))
    assert muon.fullest.trace is muon.trace and len(traced) == 3


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0].square().mean()


@pytest.mark.filterwarnings("ignore:TF32")
def test_the_gates_of_an_lstm_are_traced() -> None:
    """oneDNN's operator keeps them in a tensor that was taken to be empty: a sixth of the bytes was planned."""
    given = Workload(lambda: torch.ones(BATCH, LENGTH, WIDTH), loss_of)
    traced = zeroshard.plan(Recurrent(), Configuration(plan="ddp", device="cpu", workload=given)).trace
    model = Recurrent()
    drop_gradients(model)

    def step() -> None:
        inputs = torch.ones(BATCH, LENGTH, WIDTH)
        loss_of(model, inputs).backward()

    assert traced is not None and 1.5 * traced.peak < allocated(step)
    with torch.backends.mkldnn.flags(enabled=False):
        assert traced.peak == pytest.approx(allocated(step), rel=0.02)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_trace_is_what_real_tensors_take(recompute: bool) -> None:
    """The same counting with real tensors gives the same bytes; the allocator's bytes differ by the temporaries of
    kernels."""
    traced, model = trace(recompute), make(Model)
    drop_gradients(model)
    if recompute:
        recompute_blocks(model)
    live = Live()
    for parameter in model.parameters():
        live.note(parameter, counted=False)
    with live:
        loss = loss_of(model, tokens())
        assert (live.mark(), live.now) == (traced.forward, traced.saved)
        loss.backward()
        assert live.mark() == traced.backward
    measured = allocated(lambda: loss_of(model, tokens()).backward())
    assert traced.peak == pytest.approx(measured, rel=0.1)
    assert traced.inputs == BATCH * LENGTH * 8
    other = trace(not recompute)
    assert other.peak != pytest.approx(measured, rel=0.1), "the check would notice"


class Grouped(nn.Module):
    """Experts whose products are one operator, as in the mixtures of experts of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.ones(4, *shape)) for shape in ((8, 24), (24, 8)))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 2, 5, 9], dtype=torch.int32)
        for weight in (self.up, self.down):
            x = functional.grouped_mm(x, weight, offs=ends)
        return x.float().square().sum()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_products_of_groups_in_other_dtypes_than_bf16(precision: str) -> None:
    """Without values torch takes bf16 alone, its kernels also take these. `fit` tries fp32, and would fail as well."""
    build = partial(make, Grouped)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[precision]
    workload = Workload(lambda: torch.ones(9, 8, dtype=dtype), loss_of)
    traced = zeroshard.plan(build(), Configuration(precision=precision, device="cpu", workload=workload)).trace
    assert traced is not None
    model, live = build().to(dtype), Live()
    drop_gradients(model)
    for parameter in model.parameters():
        live.note(parameter, counted=False)
    with live:
        loss = loss_of(model, torch.ones(9, 8, dtype=dtype))
        assert (live.mark(), live.now) == (traced.forward, traced.saved)
        loss.backward()
    if precision == "fp32":  # in fp16 the engine has the gradients cast to fp32
        assert live.mark() == traced.backward
        assert fit(build(), 10**9, Configuration(ranks=2, workload=workload))


class KeepsItself(nn.Module):
    """As caches of keys and values do: what forward has made refers to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).sigmoid()  # which backward needs
            cache: list[Any] = [x]
            cache.append(cache)
        return x.sum()


def test_the_plan_does_not_depend_on_when_python_collects_garbage() -> None:
    workload = Workload(lambda: torch.zeros(BATCH, WIDTH), lambda model, x: model(x))
    traces = []
    for collects in (True, False):
        gc.collect()
        (gc.enable if collects else gc.disable)()
        before = gc.get_threshold()
        gc.set_threshold(1)
        try:
            trace = zeroshard.plan(KeepsItself(), Configuration(workload=workload)).trace
        finally:
            gc.set_threshold(*before)
            gc.enable()
        assert trace is not None
        traces.append([trace.saved, trace.peak, *((one.until, one.there) for one in trace.gradients)])
    assert traces[0] == traces[1]


def test_a_trace_collects_garbage_among_what_it_has_made_and_not_in_the_whole_program() -> None:
    """Each trace took seconds in a program with many objects."""
    workload = Workload(lambda: torch.zeros(BATCH, WIDTH), lambda model, x: model(x))
    found = list[int]()
    gc.unfreeze()  # conftest has frozen what is imported
    held = [[] for _ in range(50_000)]  # type: ignore[var-annotated]

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(len(gc.get_objects()))

    gc.disable()
    gc.callbacks.append(note)
    try:
        zeroshard.plan(KeepsItself(), Configuration(workload=workload))
        assert gc.get_freeze_count() == 0
    finally:
        gc.callbacks.remove(note)
        gc.enable()
        gc.freeze()
    assert found and max(found) < len(held)


def test_the_rows_of_a_sparse_gradient_are_traced() -> None:
    """A sparse tensor has no storage, which the trace asked for. (`shard` takes such gradients.)"""
    model = nn.Sequential(nn.Embedding(500, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
    workload = Workload(tokens, lambda model, inputs: model(inputs).square().mean())
    traced = zeroshard.plan(model, Configuration(plan="ddp", device="cpu", workload=workload)).trace
    assert traced is not None and traced.gradients[-1].until > BATCH * LENGTH * WIDTH * 4, "the rows that it has"
    drop_gradients(model)
    live = Live()
    for parameter in model.parameters():
        live.note(parameter, counted=False)
    with live:
        loss = workload.loss(model, tokens())
        assert (live.mark(), live.now) == (traced.forward, traced.saved)
        loss.backward()  # type: ignore[no-untyped-call]
        assert live.mark() == traced.backward


def test_modules_and_precisions() -> None:
    traced, recomputed, half = trace(), trace(recompute=True), trace(precision="bf16")
    of_blocks = [traced.modules[f"blocks.{number}"] for number in range(3)]
    assert len(set(of_blocks)) == 1 and 0 < sum(of_blocks) == traced.modules["blocks"] < traced.saved
    assert recomputed.modules["blocks.1"] == BATCH * LENGTH * WIDTH * 4, "nothing but the output"
    assert half.modules["blocks.1"] < 0.7 * traced.modules["blocks.1"]
    assert [gradient.name for gradient in traced.gradients][-1] == "embed.weight" and len(traced.gradients) == 8 * 3 + 3


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3"])
def test_the_peak_of_a_step(plan: str) -> None:
    """Engine, activations and inputs, as rank 0 of 8: within 10 per cent of the bytes that the allocator has
    allocated."""

    def check(rank: int) -> None:
        dist.destroy_process_group()
        for recompute in (False, True):
            with torch.device("meta"):
                options = {"plan": plan, "ranks": 8, "units": Wide, "device": "cpu", "transport": "native"}
                workload = Workload(tokens, loss_of, recompute)
                planned = zeroshard.plan(Model(), Configuration(workload=workload, **options))
            with dry_run(8) as mesh:
                handle = zeroshard.shard(model := make(Model), plan, units=Wide, mesh=mesh)
                if recompute:
                    recompute_blocks(model)
                optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, non_finite="ignore")

                def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
                    loss_of(model, tokens()).backward()
                    optimizer.step()

                step()
                before = sum(handle.memory().values())
                assert planned.whole_peak == pytest.approx(before + allocated(step), rel=0.1), (plan, recompute)
                assert planned.whole_peak > planned.peak
                handle.close()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    run_ranks(check, 1)


def test_what_fits_with_activations() -> None:
    """`fit` also tries recomputation where it is not chosen, and the reason names the memory that is too large."""
    with torch.device("meta"):
        model = Model()
    given = Configuration(ranks=8, units=Wide, workload=Workload(tokens, loss_of))
    without, with_recompute = (
        zeroshard.plan(model, Configuration(ranks=8, units=Wide, workload=Workload(tokens, loss_of, recompute)))
        for recompute in (False, True)
    )
    found = fit(model, with_recompute.whole_peak, given, plans=["zero3"], precisions=[None])
    assert [one.fits for one in found] == [True, False]
    assert found[0].forecast.configuration.workload.recompute  # type: ignore[union-attr]
    assert found[1].spare == with_recompute.whole_peak - without.whole_peak
    assert "activations" in found[1].reason


class Scaled(nn.Module):
    """A norm that is given fp32 where the rest computes in 16 bits: whether its input is cast depends on the units."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.scale = nn.Linear(WIDTH, WIDTH), Gain()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scale(self.wide(x).float())
        return x + y.to(x.dtype)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def test_what_is_tried_together_is_traced_and_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each number is that of the configuration on its own. All of it was planned anew for each workload and number
    of micro-batches, and traced anew for each size of units."""
    calls = dict.fromkeys(("trace", "needs", "units", "file"), 0)

    def counted(name: str, of: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return of(*args, **options)

        return call

    monkeypatch.setattr(activations, "_trace", counted("trace", activations._trace))
    monkeypatch.setattr(forecasting, "needs_of", counted("needs", forecasting.needs_of))
    monkeypatch.setattr(forecasting, "choose_units", counted("units", forecasting.choose_units))
    monkeypatch.setattr(forecasting.Checkpoint, "file", counted("file", forecasting.Checkpoint.file))
    for first, middle, traces in ((0, Wide, 2 * (1 + 2)), (5, Scaled, 2 * (2 + 3))):
        with torch.device("meta"):
            model = Model()
            model.blocks[1] = middle()
        options = Configuration(
            ranks=8, units=[Wide, Scaled], workload=Workload(tokens, loss_of), optimizer="Muon+AdamW"
        )
        half = Workload(lambda: torch.ones(BATCH // 2, LENGTH, dtype=torch.long), loss_of)
        calls.update(dict.fromkeys(calls, 0))
        splits = {"sizes": (1 << 18, 1 << 14), "precisions": ("bf16", "bf16-remainder")}
        found = fit(model, 1, options, splits=[(2, half)], **splits)
        # Of each workload: one or two without recomputation, and one for each set of modules that are recomputed.
        assert calls["trace"] == traces, calls
        assert calls["needs"] == 2, "once for plans in which every rank steps all parameters, once for the others"
        assert calls["units"] == calls["file"] and calls["units"] < len(found) / 2, calls
        for candidate in found if EVERYTHING else found[first::10]:
            alone = zeroshard.plan(model, candidate.forecast.configuration)
            assert (alone.trace, alone.moments) == (candidate.forecast.trace, candidate.forecast.moments)
            assert (alone.phases, alone.events) == (candidate.forecast.phases, candidate.forecast.events)
            assert alone.state == candidate.forecast.state


class Attending(nn.Module):
    def __init__(self, dropout: float, positional: bool) -> None:
        super().__init__()
        self.dropout, self.positional = dropout, positional
        self.inner = nn.Linear(64, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        heads = self.inner(inputs).unflatten(-1, (4, 16)).transpose(1, 2)
        if self.positional:
            return functional.scaled_dot_product_attention(heads, heads, heads, None, self.dropout, True)
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout, is_causal=True)


def test_attention_keeps_no_scores_on_a_gpu() -> None:
    """With dropout, torch computes it on a CPU with a matrix of scores, which was also planned for GPUs."""
    scores = 4 * 4 * 256 * 256 * 4  # fp32, of 4 heads and 4 sequences of 256 tokens

    def peak(device: str, dropout: float, *, positional: bool = False) -> int:
        with torch.device("meta"):
            model = Attending(dropout, positional)
        workload = Workload(lambda: torch.zeros(4, 256, 64), lambda model, inputs: model(inputs).sum())
        trace = zeroshard.plan(model, Configuration(device=device, workload=workload)).trace
        assert trace is not None
        return trace.peak

    assert peak("cuda", 0.1) == peak("cuda", 0.1, positional=True) == peak("cuda", 0.0) == peak("cpu", 0.0) < scores
    assert peak("cpu", 0.1) > 2 * scores


class Dropping(nn.Module):
    """The parts that a GPU computes by other operators than a CPU. `checkpoints`: it recomputes them itself."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        parts = (
            Attending(0.1, positional=False),
            nn.Flatten(1, 2),
            nn.RMSNorm(16),
            nn.Dropout(0.1),
            nn.Unflatten(1, (4, -1)),
        )
        self.parts = nn.Sequential(*parts)

    def forward(self, inputs: Tensor) -> Tensor:
        run: Any = partial(checkpoint, self.parts, use_reentrant=False) if self.checkpoints else self.parts
        return inputs + run(inputs).transpose(1, 2).flatten(2)


def test_what_a_gpu_computes_in_other_ways_is_recomputed_in_these() -> None:
    """The backward of the trace left the scope of these operators. Models with dropout or an `nn.RMSNorm`, the
    trainer's among them, could not be planned for GPUs with recomputation: torch found other tensors in it."""

    def peak(*, checkpoints: bool, recompute: bool) -> int:
        model = nn.Sequential(*(Dropping(checkpoints) for _ in range(4)))
        workload = Workload(lambda: torch.zeros(4, 256, 64), lambda model, inputs: model(inputs).sum(), recompute)
        trace = zeroshard.plan(model, Configuration(units=Dropping, workload=workload)).trace
        assert trace is not None
        return trace.peak

    usual = peak(checkpoints=False, recompute=False)
    assert max(peak(checkpoints=True, recompute=False), peak(checkpoints=False, recompute=True)) < 0.7 * usual


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_norm_is_planned_however_it_is_called() -> None:
    """With its input by name it raised a TypeError."""
    weight = torch.ones(64, dtype=torch.bfloat16)

    def peak(norm: Callable[[Tensor], Tensor]) -> int:
        workload = Workload(lambda: torch.zeros(512, 64), lambda model, inputs: norm(model(inputs)).sum())
        trace = zeroshard.plan(nn.Linear(64, 64), Configuration(device="cuda", workload=workload)).trace
        assert trace is not None
        return trace.peak

    usual = peak(lambda x: torch.rms_norm(x, (64,)))
    assert peak(lambda x: torch.rms_norm(input=x, normalized_shape=(64,))) == usual
    assert peak(lambda x: torch.rms_norm(x, (64,), weight)) > usual  # no kernel for two dtypes


def test_smaller_micro_batches_are_tried_until_they_fit() -> None:
    with torch.device("meta"):
        model = Model()

    def workload(sequences: int) -> Workload:
        return Workload(lambda: torch.ones(sequences, LENGTH, dtype=torch.long), loss_of, recompute=True)

    given = Configuration(plan="zero3", ranks=8, units=Wide, device="cpu", workload=workload(BATCH))
    splits = [(number, workload(BATCH // number)) for number in (2, 4, 8)]
    of = {n: zeroshard.plan(model, replace(given, micro_batches=n, workload=one)).whole_peak for n, one in splits}
    whole = zeroshard.plan(model, given).whole_peak
    assert whole > of[2] > of[4] > of[8]
    for budget, expected in ((whole, [1]), (whole - 1, [2, 1]), (of[4], [4, 2, 1]), (1, [8, 4, 2, 1])):
        found = fit(model, budget, given, plans=["zero3"], precisions=[None], splits=splits)
        numbers = [one.forecast.configuration.micro_batches for one in found]
        assert list(dict.fromkeys(numbers)) == expected  # reduced once, and in each
        assert [one.fits for one in found] == [budget > 1 and n == 0 for n in range(len(found))]
        assert all(one.forecast.configuration.workload.recompute for one in found)  # type: ignore[union-attr]


def test_a_model_that_looks_at_values_is_refused_and_left_as_it_was() -> None:
    class Looking(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            logits = super().forward(inputs)
            return logits * 2 if logits.sum() > 0 else logits

    model = make(Looking)
    before = dict(model.named_parameters())
    workload = Workload(tokens, lambda model, inputs: loss_of_tokens(model, 0, 0, 0))
    with pytest.raises(ValueError, match="cannot be traced without values"):
        zeroshard.plan(model, Configuration(units=Block, workload=workload))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Keeping(nn.Module):
    """Makes a table of positions when it is called with more of them than before, and a buffer in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.longest = nn.Linear(WIDTH, WIDTH), 4
        self.register_buffer("table", torch.arange(4.0)[:, None], persistent=False)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.register_buffer("table", torch.arange(float(self.longest))[:, None], persistent=False)
        if "seen" not in self._buffers:
            self.register_buffer("seen", torch.zeros(()))
        self.last = x * self.table[: x.shape[1]] if self.last is None else self.last + self.seen
        return self.inner(self.last).square().mean()  # type: ignore[no-any-return]


def test_what_a_forward_keeps_is_not_left_in_the_model() -> None:
    """Tensors without values stayed in it, or the number of positions for which there was no table any more: its next
    forward raised."""
    model = Keeping()
    inputs = torch.ones(BATCH, 2 * 4, WIDTH)
    zeroshard.plan(model, Configuration(workload=Workload(lambda: torch.ones(inputs.shape), loss_of)))
    assert (model.longest, model.last, [*model._buffers]) == (4, None, ["table"])
    assert model(inputs).item() > 0


def test_autocast_of_another_device_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Its casts were missing in the plan, in silence."""
    model = nn.Linear(WIDTH, WIDTH)

    def in_16_bits(model: nn.Module, inputs: Tensor, *, enabled: bool) -> Tensor:
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16, enabled=enabled):
            return model(inputs).float().mean()  # type: ignore[no-any-return]

    before, warned = vars(torch.autocast)["__init__"], []
    for device, enabled in (("cuda", True), ("cuda", False), ("cpu", True)):
        workload = Workload(lambda: torch.ones(BATCH, WIDTH), partial(in_16_bits, enabled=enabled))
        zeroshard.plan(model, Configuration(device=device, workload=workload))
        warned.append("the model calls autocast, which is not traced" in caplog.text)
        caplog.clear()
    assert warned == [True, False, False] and vars(torch.autocast)["__init__"] is before


def test_where_there_is_no_grad_and_a_table_without_values() -> None:
    """A plan inside of `torch.no_grad()` said that the loss does not require grad, and of a model on the meta device
    with a tensor that is no buffer, that there are two devices."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.table = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) + self.table).mean()  # type: ignore[no-any-return]

    workload = Workload(lambda: torch.ones(BATCH, WIDTH), loss_of)
    with torch.device("meta"):
        model = Table()
    with torch.no_grad():
        traces = [zeroshard.plan(one, Configuration(workload=workload)).trace for one in (model, Table())]
    assert traces[0] == traces[1] and model.table.is_meta


class Router(nn.Module):
    """Converts itself to fp32 in each forward, as the routers of Switch Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, 4, bias=False)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.to(torch.float32).scores(x.float())
        return scores


class Routed(nn.Module):
    def __init__(self, *, by_values: bool = False) -> None:
        super().__init__()
        self.inner, self.router, self.by_values = nn.Linear(WIDTH, WIDTH), Router(), by_values

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        scores = self.router(y)
        if self.by_values:
            y = y[torch.where(scores.argmax(-1) == 0)]
        return y.float().mean() + scores.square().mean()


def test_a_router_that_converts_itself_and_one_that_chooses_by_values() -> None:
    """Both ended as "Couldn't swap Linear.weight": torch converts no parameter without values, even to its dtype."""

    def plan(precision: Any, *, by_values: bool = False) -> Any:
        workload = Workload(lambda: torch.ones(BATCH, WIDTH), loss_of)
        with torch.device("meta"):
            model = Routed(by_values=by_values)
        options = Configuration(ranks=2, units=Routed, precision=precision, workload=workload)
        try:
            return zeroshard.plan(model, options).trace
        finally:
            assert not any("_apply" in vars(module) for module in model.modules())

    kept = plan(zeroshard.MixedPrecision(param=torch.bfloat16, keep=(Router,)))
    assert plan("fp32").modules["inner"] == 2 * kept.modules["inner"] == BATCH * WIDTH * 4
    with pytest.raises(
        ValueError, match=r"the weight of a Linear is converted in a forward to torch.float32, which sh"
    ):
        plan("bf16")
    with pytest.raises(ValueError, match=r"traced without values: aten.nonzero.default depends on them .*without a ba"):
        plan("fp32", by_values=True)
