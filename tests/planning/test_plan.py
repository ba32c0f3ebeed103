"""The plan equals the measurement to the byte: memory by phase, the log of a step, the files of a checkpoint.

`make test` runs a selection in which every pair of values occurs, among them every model with every optimizer, plan,
precision, schedule, transport and number of ranks from one to three. Four ranks have one case more, and every second
case is loaded. `make test-everything` runs every combination of what `PROVEN` lists, and loads all.
"""

from __future__ import annotations

import gc
import itertools
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.grids import EVERYTHING, grid, on_fewest_ranks, pairs_of
from tests.kit import PLANS, Block, loss_of_tokens, make, travelling
from tests.kit import SCHEDULES as LONG_SCHEDULES
from tests.planning.models import FROZEN, MODELS, Experts, Planned, Tied
from tests.together import in_turn
from zeroshard.checkpoint import Reader
from zeroshard.checkpoint.manifest import MAX_MANIFEST_BYTES
from zeroshard.comm.transport import TransportName
from zeroshard.planner import plan_memory
from zeroshard.planning import Configuration, Forecast, Phase, Workload, cheapest_first, disk, fit
from zeroshard.planning.optimizers import class_named
from zeroshard.planning.state import OptimizerKind
from zeroshard.precision import MixedPrecision
from zeroshard.testing import run_ranks

Taker = tuple[type[torch.optim.Optimizer], dict[str, Any], Callable[[str, nn.Parameter], bool]]


def anything(name: str, parameter: nn.Parameter) -> bool:
    return True


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2


OPTIMIZERS: dict[str, list[Taker]] = {
    "AdamW": [(torch.optim.AdamW, {}, anything)],
    "SGD:momentum=0.9": [(torch.optim.SGD, {"momentum": 0.9}, anything)],
    "Muon+AdamW": [(torch.optim.Muon, {}, is_matrix), (torch.optim.AdamW, {}, anything)],
    "SGD": [(torch.optim.SGD, {}, anything)],
    "Adafactor": [(torch.optim.Adafactor, {}, anything)],
    "Lamb": [(zeroshard.optim.Lamb, {}, anything)],
    "SGD[embed*]:momentum=0.9+Muon+Lamb[blocks*norm.*]+AdamW": [
        (torch.optim.SGD, {"momentum": 0.9}, lambda name, parameter: name.startswith("embed")),
        (torch.optim.Muon, {}, is_matrix),
        (zeroshard.optim.Lamb, {}, lambda name, parameter: name.startswith("blocks") and "norm." in name),
        (torch.optim.AdamW, {}, anything),
    ],
}
LOW_BIT = "AdamW8bit"
PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "remainder": MixedPrecision(grad=torch.bfloat16, main="remainder"),
}
WAYS: tuple[TransportName, ...] = ("shared", "pairwise", "native")
SCHEDULES = {
    name: (number if EVERYTHING else min(number, 2), every) for name, (number, every) in LONG_SCHEDULES.items()
}
"""A third micro-batch holds and sends what the second does."""
RANKS = (1, 2, 3, 4)

SELECTED: list[tuple[Any, ...]] = [
    *on_fewest_ranks(pairs_of(MODELS, [*OPTIMIZERS, LOW_BIT], PRECISIONS, SCHEDULES, PLANS, WAYS, RANKS[:3])),
    ("tied", "Muon+AdamW", "fp32", "every micro-batch", zeroshard.ZERO3, "pairwise", 4),
]
LOADED = [
    case for number, case in enumerate(SELECTED) if EVERYTHING or case[-1] == 4 or (number + number // len(MODELS)) % 2
]
"""Half of each value's cases."""
for _all, _loaded in zip(zip(*SELECTED, strict=True), zip(*LOADED, strict=True), strict=True):
    assert {*map(str, _all)} == {*map(str, _loaded)}, {*map(str, _all)} - {*map(str, _loaded)}
PROVEN = MODELS, (*[*OPTIMIZERS][:3], LOW_BIT), PRECISIONS, SCHEDULES, PLANS, ("shared",), RANKS
PARTS = list(itertools.product(RANKS, MODELS)) if EVERYTHING else [(ranks, "") for ranks in RANKS]
"""Number of ranks, and model ("": all of them), of each test."""


def takers_of(optimizer: str) -> list[Taker]:
    """The classes of an optimizer, with their options and what they take."""
    return OPTIMIZERS.get(optimizer) or [(class_named(optimizer), {}, anything)]


def shard(
    model: nn.Module, configuration: Configuration, mesh: Any = None, **options: Any
) -> tuple[zeroshard.Handle, zeroshard.ShardedOptimizer]:
    """Shard the model, and build its optimizer, as the configuration says."""
    chosen: dict[str, Any] = {"units": configuration.units, "precision": configuration.precision, "mesh": mesh}
    handle = zeroshard.shard(model, configuration.plan, **chosen)
    (first, defaults, _), *_ = takers = takers_of(str(configuration.optimizer))
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            number = next(number for number, (*_, takes) in enumerate(takers) if takes(name, parameter))
            of_class = {"optimizer_class": takers[number][0], **takers[number][1]} if number else {}
            group = groups.setdefault((number, is_matrix(name, parameter)), {"params": [], **of_class})
            group["params"].append(parameter)
    scale = zeroshard.DynamicScale(init=2.0**8) if configuration.precision == "fp16" else None
    several = [groups[key] for key in sorted(groups)]
    return handle, zeroshard.ShardedOptimizer(several, first, lr=1e-3, loss_scale=scale, **defaults, **options)


def accumulate(
    model: nn.Module, handle: Any, optimizer: Any, configuration: Configuration, step: int
) -> dict[str, int]:
    """Forward and backward passes of a step; returns the memory after the first forward."""
    behind_forward: dict[str, int] = {}
    for number in range(configuration.micro_batches):
        loss = loss_of_tokens(model, configuration.rank, number, step)
        behind_forward = behind_forward or handle.memory()
        if configuration.accumulates_locally and number < configuration.micro_batches - 1:
            with handle.no_sync():
                optimizer.backward(loss)
        else:
            optimizer.backward(loss)
    return behind_forward


def expect_planned(model: Planned, configuration: Configuration, mesh: Any = None, *, loaded: bool = True) -> None:
    """Two steps, a save and, if `loaded`, a load are as planned."""
    configuration = replace(configuration, units=model.units, group_of=is_matrix)
    planned, handle, optimizer = expect_measured(model, configuration, mesh)
    (folder,) = handle.engine.collectives.exchange_objects(tempfile.mkdtemp())[:1]
    expect_saved(Path(folder), handle, optimizer, planned)
    if loaded:
        fresh_handle, fresh = shard(make(model.build, seed=1), configuration, mesh)
        zeroshard.load(folder, fresh_handle, fresh)
        assert fresh_handle.memory() == vars(planned.phases["load"].held)
    handle.engine.collectives.exchange_objects(None)  # all have read the files
    shutil.rmtree(folder, ignore_errors=True)


def expect_measured(
    of: Planned,
    configuration: Configuration,
    mesh: Any = None,
    trained: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> tuple[Forecast, zeroshard.Handle, zeroshard.ShardedOptimizer]:
    """Two steps: the memory of each phase, and the log of the second step, are as planned. `trained`: another model
    than the one that is planned."""
    configuration = replace(configuration, units=of.units, group_of=is_matrix)
    with torch.device("meta"):
        planned = zeroshard.plan(of.build(), configuration)
    model = make(trained or of.build)
    phases: dict[str, Phase] = dict(planned.phases)
    handle, optimizer = shard(model, configuration, mesh, **options)
    assert handle.memory() == vars(phases["init"].held)
    accumulate(model, handle, optimizer, configuration, 0)
    optimizer.step()
    handle.engine.gatherer.settle()
    assert handle.memory() == vars(phases["between steps"].held)
    handle.comm_log.clear()
    assert accumulate(model, handle, optimizer, configuration, 1) == vars(phases["forward"].held)
    assert all(handle.memory()[kind] <= most for kind, most in vars(phases["backward"].held).items())
    optimizer.step()
    handle.engine.gatherer.settle()
    assert Counter(without_phase(handle.comm_log.entries)) == without_phase(planned.events)
    assert handle.memory(peak=True) == vars(phases["backward"].held)
    found = handle.memory()
    assert sum(planned.state.values()) == found["state"] + found["scalars"]
    full = handle.full_state_dict()
    assert sum({value.data_ptr(): value.nbytes for value in full.values()}.values()) == phases["full_state_dict"].copies
    with pytest.raises(ValueError, match="sharded already"):
        zeroshard.plan(model, configuration)
    return planned, handle, optimizer


def without_phase(events: Any) -> Counter[Any]:
    """Count events without their phase: a gather for backward may have begun in forward."""
    counted = Counter[Any]()
    for event, times in events.items() if isinstance(events, (dict, Counter)) else ((event, 1) for event in events):
        counted[event.op, event.unit, event.bytes] += times
    return counted


def expect_saved(folder: Path, handle: Any, optimizer: Any, planned: Forecast) -> None:
    """The size of the rank's file is as planned, up to the text of random states, and that of all files within the size
    of the manifest; a save does not change `memory()`."""
    before = handle.memory()
    zeroshard.save(folder, handle, optimizer, step=1)
    assert handle.memory() == before == vars(planned.phases["save"].held)
    step = folder / "step-1"
    rank = planned.configuration.rank
    on_disk = (step / f"rank-{rank:05}.safetensors").stat().st_size
    assert abs(on_disk - planned.file_bytes) <= 2000, (on_disk, planned.file_bytes)
    files = sum(path.stat().st_size for path in step.iterdir() if path.name != "manifest.json")
    assert abs(files - planned.checkpoint_bytes) <= 2000 * planned.configuration.ranks
    with Reader(step) as reader:
        manifest = replace(reader.manifest, values={}, versions={})
    # Random states are texts, so sizes and the offset of each tensor may have a digit more or less.
    assert abs(manifest.files[rank].index_bytes - planned.index_bytes) <= 40 + len(manifest.tensors)
    assert abs(len(manifest.encode()) - planned.manifest_bytes) <= 16 * planned.configuration.ranks


def expect_case(rank: int, of: tuple[Any, ...]) -> None:
    """A case of `SELECTED` on this rank."""
    name, optimizer, precision, schedule, plan, way, ranks = of
    micro_batches, every = SCHEDULES[schedule]
    configuration = Configuration(
        plan=plan,
        ranks=ranks,
        precision=PRECISIONS[precision],
        optimizer=optimizer,
        units=MODELS[name].units,
        micro_batches=micro_batches,
        reduce_every_micro_batch=every,
        device="cpu",
        transport=way,
        rank=rank,
    )
    with travelling(way):
        expect_planned(MODELS[name], configuration, loaded=EVERYTHING or of in LOADED)


def expect_cases(num_ranks: int, model: str, *, low_bit: bool) -> None:
    """The cases on so many ranks; of one model, or ("") of all."""
    every = [*SELECTED, *(itertools.product(*PROVEN) if EVERYTHING else ())]
    of_these = [case for case in every if case[-1] == num_ranks and (case[1] == LOW_BIT) == low_bit]
    cases = [(case,) for case in of_these if model in ("", case[0])]
    run_ranks(in_turn(expect_case, cases), num_ranks)
    print(f"{len(cases)} configurations on {num_ranks} ranks: planned and measured are equal; {model}")


def expect_one_unit(rank: int) -> None:
    """Only one reduction is in flight at any time: there is one scratch for it, from the first step on."""
    for plan, way, precision in grid(("ddp", "zero1"), WAYS, ("fp32", "bf16")):
        configuration = Configuration(
            plan=plan, ranks=3, precision=precision, device="cpu", transport=way, rank=rank, optimizer="SGD"
        )
        with travelling(way):
            planned, *_ = expect_measured(Planned(Tied, None), configuration)
        (unit,) = planned.training.units
        topology = planned.training.topology
        way = topology.transport, topology.num_shards, topology.num_replicas
        of_shards, of_replicas = unit.spec.reduce_scratch(*way, in_place=True)
        scratch = [one.num_bytes for one in planned.training.pool() if one.kind == "scratch"]
        assert scratch == [of_shards, of_replicas]


def test_a_process_keeps_nothing_of_its_plans() -> None:
    def kinds_after_plans() -> int:
        for plan in PLANS:
            zeroshard.plan(Tied(), Configuration(plan=plan, ranks=2, device="cpu"))
        gc.collect()
        return sum(type(item) is OptimizerKind for item in gc.get_objects())

    assert kinds_after_plans() == kinds_after_plans()


def test_a_model_of_one_unit() -> None:
    run_ranks(expect_one_unit, 3)


@pytest.mark.by_gloo
@pytest.mark.parametrize(("num_ranks", "model"), PARTS)
def test_planned_is_measured(num_ranks: int, model: str) -> None:
    expect_cases(num_ranks, model, low_bit=False)


@pytest.mark.by_gloo
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("low_bit")
@pytest.mark.parametrize("model", MODELS if EVERYTHING else [""])
def test_planned_is_measured_in_8_bits(model: str) -> None:
    """One test: the library takes seconds to import."""
    for num_ranks in RANKS if EVERYTHING else RANKS[:3]:
        expect_cases(num_ranks, model, low_bit=True)


@pytest.mark.by_gloo
def test_what_is_frozen_is_planned() -> None:
    """A first unit that backward does not reach, and a unit of which only a part trains."""

    def check(rank: int) -> None:
        for plan in (zeroshard.ZERO1, zeroshard.ZERO3):
            configuration = Configuration(plan=plan, ranks=2, units=Block, micro_batches=2, device="cpu", rank=rank)
            expect_planned(FROZEN, configuration)

    run_ranks(check, 2)


class Rows(torch.optim.Optimizer):
    """Keeps a number for each row of a parameter, and a square of that many rows from before its first step on."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for parameter in (one for group in self.param_groups for one in group["params"]):
            rows = parameter.shape[:1].numel()
            self.state[parameter]["left"] = torch.zeros(rows, rows, device=parameter.device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows = parameter.grad.reshape(parameter.shape[:1].numel(), -1)
                    self.state[parameter]["row"] = rows.norm(dim=1).reshape(parameter.shape[:1])
                    parameter.sub_(group["lr"] * parameter.grad / (1 + parameter.grad.norm()))


@pytest.mark.by_gloo
def test_state_of_rows_and_before_the_first_step_is_planned() -> None:
    """That of Adagrad, which it makes when it is built, was planned as nothing."""
    rows = f"{__name__}.Rows"

    def check(rank: int, ranks: int) -> None:
        for plan, optimizer in (("zero1", "Adagrad"), ("zero3", "Adagrad"), ("ddp", rows), ("zero2", rows)):
            options = Configuration(plan=plan, ranks=ranks, optimizer=optimizer, device="cpu", rank=rank)
            expect_planned(MODELS["tied"], options)

    for ranks in (1, 2):
        run_ranks(check, ranks, ranks)


@pytest.mark.by_gloo
def test_units_of_two_precisions_in_one_block_are_planned() -> None:
    """Both accumulate at the same time. With two units in all, the bucket of the second was not planned; under
    `no_sync` the one that backward comes to last was counted in place of the other."""

    def check(rank: int) -> None:
        for units, way, micro_batches in ((None, "native", 1), (None, "pairwise", 2), (Block, "shared", 2)):
            configuration = Configuration(
                plan="zero3" if way == "native" else "zero2",
                ranks=2,
                precision={nn.LayerNorm: "fp32", "*": "bf16"},
                optimizer="SGD",
                micro_batches=micro_batches,
                device="cpu",
                transport=cast(TransportName, way),
                rank=rank,
            )
            with travelling(way):
                expect_measured(Planned(Tied, units), configuration)

    run_ranks(check, 2)


@pytest.mark.by_gloo
def test_no_unit_is_gathered_behind_one_that_is_called_first_and_last() -> None:
    """The call of the head prefetched the first block, which follows the embedding, in place of the last block: both
    were gathered once more in each backward."""

    def check(rank: int) -> None:
        for way, micro_batches in (("native", 1), ("pairwise", 2)):
            configuration = Configuration(
                ranks=2, micro_batches=micro_batches, device="cpu", transport=cast(TransportName, way), rank=rank
            )
            with travelling(way):
                expect_measured(Planned(Tied, [("embed", "head"), Block]), configuration)

    run_ranks(check, 2)


class Late(nn.Module):
    """A norm that is registered behind what follows it, as in most models of `transformers`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(40, 42, bias=False), nn.Linear(42, 40), nn.LayerNorm(40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y


@pytest.mark.by_gloo
def test_with_a_batch_units_run_in_the_order_of_the_model() -> None:
    """Units by size have a part of one block and a part of the next: more of them accumulate at once than in the order
    of registration. A plan with a batch promised the buckets of that order, too."""

    def build() -> nn.Module:
        return nn.Sequential(*(Late() for _ in range(5)))

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def check(rank: int) -> None:
        workload = Workload(lambda: torch.ones(2, 40), loss_of)
        for plan, way, micro_batches in (
            ("zero2", "shared", 1),
            ("zero2", "native", 1),
            ("zero3", "pairwise", 1),
            ("zero2", "native", 2),
        ):
            options = Configuration(
                plan=plan,
                ranks=2,
                units=7100,
                group_of=is_matrix,
                micro_batches=micro_batches,
                device="cpu",
                transport=cast(TransportName, way),
                rank=rank,
            )
            planned = zeroshard.plan(build(), replace(options, workload=workload))
            with travelling(way):
                model = build()
                handle, optimizer = shard(model, options)
                for _ in range(2):
                    for number in range(micro_batches):
                        with handle.no_sync() if number < micro_batches - 1 else nullcontext():
                            optimizer.backward(loss_of(model, torch.full((2, 40), 1.0 + rank)))
                    optimizer.step()
                    handle.engine.gatherer.settle()
                assert handle.memory() == vars(planned.at_rest), (plan, way)
                assert handle.memory(peak=True) == vars(planned.phases["backward"].held), (plan, way)
            assert planned.whole_peak > planned.peak
            in_order = zeroshard.plan(build(), options)
            assert in_order.peak < planned.peak or micro_batches > 1, "this model has such units"

    run_ranks(check, 2)


class Prompted(nn.Module):
    """A prompt of length 0 is the only parameter outside of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.prompt = nn.Linear(4, 4), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.prompt, self.layer(x)])


@pytest.mark.by_gloo
def test_a_unit_of_empty_parameters_is_planned() -> None:
    """On one rank it was a ZeroDivisionError."""

    def check(rank: int, ranks: int) -> None:
        for plan in PLANS:
            chosen = Configuration(plan=plan, ranks=ranks, units=nn.Linear, device="cpu", rank=rank)
            planned, model = zeroshard.plan(Prompted(), chosen), Prompted()
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            assert handle.memory() == vars(planned.at_rest), plan

    for ranks in (1, 2):
        run_ranks(check, ranks, ranks)


class OwnState(Tied):
    """With an extra state, and a `state_dict` of its own, which takes no `keep_vars`."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self._extra = extra

    def get_extra_state(self) -> Any:
        return self._extra

    def set_extra_state(self, state: Any) -> None:
        pass

    def state_dict(self, prefix: str = "") -> dict[str, Any]:  # type: ignore[override]
        return {name: value for name, value in super().state_dict(prefix=prefix).items() if value is not None}


@pytest.mark.by_gloo
def test_a_state_dict_of_the_models_own_is_planned() -> None:
    """That of a model which takes no `keep_vars` was a TypeError, and an extra state that is no tensor an
    AttributeError."""

    def check(rank: int) -> None:
        configuration = Configuration(ranks=2, device="cpu", rank=rank)
        for extra in (None, torch.ones(999)):
            expect_planned(Planned(partial(OwnState, extra), None), configuration, loaded=False)

    run_ranks(check, 2)
    assert zeroshard.plan(OwnState({"seen": 3})).file_bytes


@pytest.mark.by_gloo
def test_replicas_are_planned() -> None:
    def check(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for name, plan, optimizer in (
            ("tied", zeroshard.ZERO3, "AdamW"),
            ("experts", zeroshard.ZERO1, "Muon+AdamW"),
            *[("LoRA", zeroshard.ZERO2, "AdamW")] * EVERYTHING,
        ):
            configuration = Configuration(
                plan=plan, ranks=4, replicas=2, precision="bf16", optimizer=optimizer, device="cpu", rank=rank
            )
            expect_planned(MODELS[name], configuration, mesh)

    run_ranks(check, 4)


@pytest.mark.by_gloo
def test_what_is_not_planned_is_noticed() -> None:
    """The checks can fail: with an expert more, with a head that trains beside the adapters, with another transport."""

    def with_experts() -> nn.Module:
        model = MODELS["experts"].build()
        model.blocks.append(Experts(fused=True))
        return model

    def with_head() -> nn.Module:
        model = MODELS["LoRA"].build()
        model.head.requires_grad_(True)
        return model

    def check(rank: int) -> None:
        cases = ("experts", with_experts, "pairwise"), ("LoRA", with_head, "pairwise"), ("tied", None, "shared")
        for name, trained, planned in cases:
            configuration = Configuration(plan="zero3", ranks=2, device="cpu", transport=planned, rank=rank)
            with travelling("pairwise"), pytest.raises(AssertionError):
                expect_measured(MODELS[name], configuration, trained=trained)

    run_ranks(check, 2)


# Without ranks --------------------------------------------------------------------------------------------------------


def on_meta(width: int = 64, blocks: int = 4) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))


def test_it_says_at_rest_and_at_most_what_plan_memory_says() -> None:
    for plan in PLANS:
        planned = zeroshard.plan(on_meta(), Configuration(plan=plan, ranks=8, precision="bf16", device="cpu"))
        assert vars(planned.at_rest) == plan_memory(on_meta(), plan, 8, precision="bf16")
        assert vars(planned.phases["backward"].held) == plan_memory(on_meta(), plan, 8, precision="bf16", peak=True)


def test_ignored_parameters_are_named_beside_the_plan() -> None:
    """They were in no number: with half of the model ignored, the plan said half of what a process holds."""
    model = on_meta(width=64, blocks=4)
    model[3].bias.requires_grad_(False)
    whole = zeroshard.plan(model, Configuration(plan="ddp", ranks=2, optimizer="SGD"))
    planned = zeroshard.plan(model, Configuration(plan="ddp", ranks=2, optimizer="SGD", ignored=["2", "3"]))
    of_one, bias = (64 * 64 + 64) * 4, 64 * 4
    assert (whole.ignored, planned.ignored) == (0, 2 * of_one + 2 * of_one - bias)
    assert planned.num_parameters == 2 * (64 * 64 + 64)


def calls_of(function: Callable[[], Any]) -> tuple[int, Any]:
    """How many functions are called, which is the same on a busy machine; and what it returns."""
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, of: calls.update([event]))
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return calls["call"] + calls["c_call"], result


def test_many_ranks_and_large_models_take_no_time() -> None:
    """Forty billion parameters, most of them stepped by owners; the work does not grow with the number of ranks."""
    model, calls = on_meta(width=20_000, blocks=100), []
    for ranks in (8, 64, 16_384):  # the first plan of a process imports more
        options = Configuration(ranks=ranks, precision="bf16", optimizer="Muon+AdamW", units=nn.Linear)
        number, planned = calls_of(lambda of=options: zeroshard.plan(model, of))  # type: ignore[misc]
        calls.append(number)
        assert planned.num_parameters == 100 * 20_000 * 20_001 and planned.sent > 0
        assert planned.checkpoint_bytes > planned.num_parameters * 8
        assert planned.fullest.whole_peak >= planned.whole_peak
    assert calls[2] < 1.1 * calls[1] and calls[1] < 1_000_000, calls


def test_headers_of_many_ranks_are_taken_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = Tied()
        model.register_buffer("table", torch.empty(100_000))
    options = Configuration(plan="zero1", ranks=6, replicas=2, optimizer="Muon+AdamW", units=Block, device="cpu")
    exact = zeroshard.plan(model, options).checkpoint_bytes
    assert exact > 400_000
    monkeypatch.setattr(disk, "FILES_PLANNED", 0)
    for rank in (0, 2, 5):
        found = zeroshard.plan(model, replace(options, rank=rank)).checkpoint_bytes
        assert found == pytest.approx(exact, abs=19_000), "a tenth of the bytes without the buffer"


def test_the_rank_that_holds_most_is_found() -> None:
    """Owners of whole parameters hold more state than others: what fitted on rank 0 did not fit on rank 4."""
    more = 0
    for blocks, ranks, plan in itertools.product((2, 3, 7), (2, 5, 12), ("ddp", "zero1", "zero3")):
        options = Configuration(ranks=ranks, plan=plan, precision="bf16", optimizer="Muon+AdamW", units=Block)
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(100, 64), *(Block(64) for _ in range(blocks)), nn.Linear(64, 100))
        each = [zeroshard.plan(model, replace(options, rank=rank)) for rank in range(ranks)]
        for one in each[::5]:
            fullest = one.fullest
            assert fullest.peak == max(other.peak for other in each)
            assert fullest.at_rest.sum == max(other.at_rest.sum for other in each)
            assert fullest.peak == each[fullest.configuration.rank].peak
        more += each[0].fullest is not each[0]
        if each[0].fullest is not each[0] and plan == "zero3":
            (candidate,) = fit(model, each[0].peak, options, plans=[plan], sizes=())
            assert not candidate.fits and candidate.forecast.configuration.rank == each[0].fullest.configuration.rank
    assert more >= 3
    on_replicas = Configuration(ranks=10, replicas=2, rank=7, precision="bf16", optimizer="Muon+AdamW", units=Block)
    fullest = zeroshard.plan(model, on_replicas).fullest
    assert fullest.configuration.rank // 5 == 1 and fullest.peak == max(
        zeroshard.plan(model, replace(on_replicas, rank=rank)).peak for rank in range(10)
    )
    elementwise = zeroshard.plan(model, replace(on_replicas, optimizer="AdamW"))
    assert elementwise.fullest is elementwise


def test_what_fits_comes_first_and_the_rest_says_why() -> None:
    model = on_meta(width=1000, blocks=20)  # 80 MB in fp32
    found = fit(model, 150_000_000, Configuration(ranks=8), precisions=["fp32", "bf16"])
    fitting = [one for one in found if one.fits]
    # units of 32 MiB, which is the default, of 512 and of 8 MiB: three choices
    assert found[: len(fitting)] == fitting and len(found) == 2 * (1 + 1 + 3 + 3)
    assert [one.forecast.sent for one in fitting] == sorted(one.forecast.sent for one in fitting)
    assert all(one.spare >= 0 and one.reason == "" for one in fitting)
    names = {(one.forecast.configuration.plan, one.forecast.configuration.precision) for one in fitting}
    assert ("ddp", "fp32") not in names and ("zero3", "bf16") in names
    (ddp,) = (one for one in found if not one.fits and one.forecast.configuration.plan == "ddp" and one.spare > -2e8)
    assert ddp.reason.endswith("too much in forward: optimizer state 160 MB, weights 80.1 MB"), ddp.reason
    assert not any(one.fits for one in fit(model, 1000, Configuration(ranks=8)))


def test_what_fits_only_if_every_micro_batch_is_reduced_is_found() -> None:
    """Micro-batches under `no_sync` keep all gradients in full, and nothing else was tried: nothing fitted."""
    model, four = on_meta(width=1000, blocks=20), Configuration(ranks=8, micro_batches=4, precision="fp32")
    once, each = (zeroshard.plan(model, replace(four, reduce_every_micro_batch=every)) for every in (False, True))
    found = fit(model, (once.peak + each.peak) // 2, four, plans=["zero3"], sizes=())
    assert [(one.fits, one.forecast.configuration.reduce_every_micro_batch) for one in found] == [
        (True, True),
        (False, False),
    ]
    for number, *of in (
        (1, once.peak, four, "zero3"),  # it fits as it is
        (1, 1, four, "zero1"),  # it holds all gradients in full between steps, too
        (1, 1, replace(four, reduce_every_micro_batch=True), "zero3"),
        (1, 1, replace(four, micro_batches=1), "zero3"),
        (1, 1, replace(four, ranks=1), "zero3"),
    ):
        assert len(fit(model, *of[:2], plans=[of[2]], sizes=())) == number, of


def test_what_fits_is_tried_in_the_usual_precisions_or_in_that_of_the_configuration() -> None:
    def tried(configuration: Configuration, model: nn.Module | None = None, **options: Any) -> set[Any]:
        found = fit(model or on_meta(), 10**9, configuration, **options)
        return {one.forecast.configuration.precision for one in found}

    assert tried(Configuration(ranks=8)) == {"bf16", "bf16-remainder", "fp32"}
    assert tried(Configuration(ranks=8, precision="fp16")) == {"fp16"}
    assert tried(Configuration(ranks=8, precision="fp16"), precisions=["fp32", None]) == {"fp32", None}


def test_what_the_model_does_not_take_is_left_out_of_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    found = fit(model, 10**9, Configuration(ranks=8))
    assert {one.forecast.configuration.precision for one in found} == {"fp32"}
    assert [record.getMessage()[:70] for record in caplog.records] == [
        "fit: bf16, bf16-remainder not tried: precision: torch's batch norm tak"
    ]
    with pytest.raises(ValueError, match="matches no module"):  # whatever the precision
        fit(on_meta(), 10**9, Configuration(ranks=8, units=nn.Conv2d))


def test_what_fits_is_tried_with_the_units_of_the_configuration_and_on_other_meshes() -> None:
    model = on_meta(width=100, blocks=4)

    def tried(**options: Any) -> list[tuple[Any, Any, int]]:
        found = [one.forecast for one in fit(model, 10**9, precisions=["bf16"], **options)]
        return sorted((str(one.configuration.plan), one.num_units, one.configuration.replicas) for one in found)

    named = Configuration(ranks=64, units=nn.Linear)
    own = [("ddp", 4, 1), ("zero1", 4, 1), ("zero2", 4, 1), ("zero3", 4, 1)]
    assert tried(configuration=named) == own
    assert tried(configuration=named, replicas=[8]) == [*own, ("zero3", 4, 8)]
    # a size that makes the same units as another one is not tried
    assert tried(configuration=named, sizes=[1 << 20, 2 << 20]) == sorted([*own, ("zero2", 1, 1), ("zero3", 1, 1)])


def test_what_fits_is_in_the_order_of_exposed_seconds_on_a_machine() -> None:
    model = on_meta(width=2000, blocks=8)
    workload = Workload(
        lambda: torch.zeros(1, 2000), lambda model, inputs: model(inputs).square().mean(), num_tokens=512
    )
    given = Configuration(ranks=64, units=nn.Linear, workload=workload)
    found = fit(model, 10**12, given, replicas=[8], precisions=["bf16"])
    ordered = cheapest_first(found, "nodes-100")
    seconds = [one.forecast.time("nodes-100").exposed for one in ordered]
    assert seconds == sorted(seconds) and set(map(id, ordered)) == set(map(id, found))
    # gathers that stay inside a node are cheaper there, although a rank sends no less
    assert ordered[0].forecast.configuration.replicas == 8 and found[0].forecast.configuration.replicas == 1


def test_bad_input() -> None:
    model = on_meta()
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"ranks": 0}, "ranks must be a whole number from 1"),
        ({"ranks": 6, "replicas": 4}, "6 ranks do not divide into 4 replicas"),
        ({"ranks": 2, "rank": 2}, "below the number of ranks"),
        ({"micro_batches": True}, "micro_batches must be"),
        ({"device": "abacus"}, "device must be one of cpu, cuda"),
        ({"loss_scales": -1}, "loss_scales must be a whole number from 0"),
        ({"plan": "zero4"}, "unknown plan 'zero4'"),
        ({"precision": "int8"}, "unknown precision"),
        ({"transport": "pigeon"}, "transport must be one of"),
        ({"optimizer": "AdamV"}, "unknown optimizer 'AdamV'.*did you mean Adam"),
        ({"optimizer": "SGD:momentum"}, "expected name=value"),
        ({"optimizer": "SGD:lr=1)(lr=2"}, "expected name=value"),
        ({"optimizer": "SGD:**{}"}, "expected name=value"),
        ({"optimizer": "SGD:lr=high"}, "expected name=value"),
        ({"optimizer": "SGD:lr={[]: 1}"}, "expected name=value"),
        ({"optimizer": ()}, "expected one optimizer class"),
        ({"optimizer": "SGD:speed=3"}, "SGD does not take these options"),
        ({"optimizer": "Muon"}, "Muon does not take 0.bias of shape .*Muon.AdamW"),
        ({"optimizer": "AdamW[1.*]"}, "AdamW does not take 0.weight of shape .*'AdamW.SGD'"),
        ({"optimizer": "SGD[head.*]+AdamW"}, r"SGD\[head\.\*\] matches no name of a parameter: .* as 0.weight"),
        ({"optimizer": "SGD+AdamW+SGD"}, "or several different ones, found SGD, AdamW, SGD"),
        ({"optimizer": []}, "expected one optimizer class"),
        ({"optimizer": "Adam-W"}, "expected a name, as in AdamW"),
        ({"optimizer": "no.such.Optimizer"}, "'no.such.Optimizer' cannot be imported"),
        ({"optimizer": "torch.nn.Linear"}, "expected a class of optimizers"),
        ({"optimizer": "LBFGS"}, "LBFGS cannot be sharded"),
        ({"units": nn.Conv2d}, "matches no module"),
    )
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            zeroshard.plan(model, Configuration(**wrong))
    for budget in (0, "80GB", float("nan")):
        with pytest.raises(ValueError, match="at least one byte"):
            fit(model, budget)  # type: ignore[arg-type]


def test_numbers_that_plan_memory_cannot_have() -> None:
    model = on_meta()
    for wrong, message in (
        ({"world_size": 0}, "world_size must be a whole number from 1"),
        ({"world_size": 2.0}, "world_size must be a whole number from 1"),
        ({"num_replicas": -2}, "num_replicas must be a whole number from 1"),
        ({"rank": 2}, "rank must be in"),
        ({"state_bytes_per_element": -8}, "state_bytes_per_element must be a whole number from 0"),
        ({"state_scalars": -1}, "state_scalars must be a whole number from 0"),
        ({"device_type": "cpu:0"}, "device_type must be one of cpu, cuda, found .cpu:0."),
    ):
        with pytest.raises(ValueError, match=message):
            plan_memory(model, "zero3", **{"world_size": 2} | cast(Any, wrong))


def test_options_of_an_optimizer_may_have_commas() -> None:
    state = zeroshard.plan(on_meta(), Configuration(optimizer="Adam:betas=(0.8, 0.9),amsgrad=True,lr=1e-2")).state
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    several = Configuration(optimizer="Muon:lr=1e+3 +AdamW")  # it was cut in 1e+3
    assert zeroshard.plan(on_meta(), several).state.keys() == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}


def test_other_types_are_named() -> None:
    """They were AttributeErrors of the planner's insides."""
    model, wrong = on_meta(), cast(Any, zeroshard.plan)
    linear = nn.Linear(1, 1)
    for call, message in (
        (lambda: wrong(model, "zero3"), "expected a Configuration, as in plan.model, .*, found 'zero3'"),
        (lambda: wrong(nn.Linear), "expected a Module, as in"),
        (lambda: fit(model, 10**9, cast(Any, {"ranks": 2})), r"fit: expected a Configuration, as in fit.model, 80"),
        (lambda: Configuration(workload=cast(Any, 3)), "must be a Workload"),
        (lambda: Workload(cast(Any, torch.zeros(1)), lambda model, inputs: model(inputs)), "expected two functions"),
        (
            lambda: wrong(model, Configuration(optimizer=cast(Any, torch.optim.SGD(linear.parameters())))),
            "expected an optimizer class or its name, found a SGD",
        ),
        (lambda: wrong(model, Configuration(optimizer=cast(Any, None))), "class or its name, found None"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    for loss in (lambda model, inputs: model(inputs), lambda model, inputs: 3.0):
        with pytest.raises(ValueError, match="the loss must be a tensor with one element"):
            wrong(model, Configuration(workload=Workload(lambda: torch.zeros(1, 64), loss)))
    for plans, precisions in (("zero3", "bf16"), (zeroshard.ZERO3, MixedPrecision())):
        found = fit(model, 10**9, Configuration(), plans=plans, precisions=precisions)
        assert {(one.forecast.configuration.plan, one.forecast.configuration.precision) for one in found} == {
            (plans, precisions)
        }


def test_batch_norms_are_refused_as_shard_does() -> None:
    """A plan in bf16 was printed that `shard` refused."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    refused = pytest.raises(ValueError, match=r"batch norm takes no weights in torch.bfloat16 .*: keep 1 in fp32")
    with refused:
        zeroshard.plan(model, Configuration(precision="bf16"))
    with refused:
        plan_memory(model, "zero3", 8, precision="bf16")
    for precision in ("fp32", MixedPrecision(keep=(nn.BatchNorm2d,))):
        zeroshard.plan(model, Configuration(precision=precision))
    zeroshard.plan(model, Configuration(precision="bf16", ignored=["1"]))


class Flattened(torch.optim.SGD):
    """Keeps a row of all elements as state: for a parameter of another shape the trial does not tell its length."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["flat"] = parameter.grad.flatten()
            parameter.sub_(parameter.grad / (1 + parameter.grad.norm()))


def test_state_that_does_not_follow_from_shapes_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match=r"Flattened: for a parameter of shape \(7, 5\) its state 'flat'"):
        zeroshard.plan(model, Configuration(optimizer=Flattened))


def test_the_manifest_hardly_grows_with_the_number_of_ranks() -> None:
    """It had a digest for each MiB and an entry for each piece of each rank: 306 MB for 405 B parameters on 1,024
    ranks, which no reader took. Now it has one entry for each file, and three runs for a parameter on any number of
    ranks."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(8)))
    forecasts = [zeroshard.plan(model, Configuration(plan="zero3", ranks=ranks)) for ranks in (1024, 16384)]
    sizes = [forecast.manifest_bytes for forecast in forecasts]
    assert sizes[1] - sizes[0] < 500 * (16384 - 1024)
    assert sizes[1] < MAX_MANIFEST_BYTES / 16
    tensors = dict(forecasts[1].checkpoint._tensors())
    assert all(len(entry.runs) <= 3 for entry in tensors.values())
    assert max(entry.num_parts for entry in tensors.values()) > 1000, "the control: many ranks hold a parameter"
