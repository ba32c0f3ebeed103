"""The most bytes that are live while the whole model passes through a rank are those planned: in `shard`, in full state
dicts, in `close`.

`shard` once kept all original parameters until it returned, `close` copied the whole model before it freed anything,
and a state dict on rank 0 held two units in full, as a view of the one before was still referred to.

Measured are the storages behind all tensors, at every torch operation, without the engine's own records; in a dry run,
as gloo's threads release what they have sent a moment later.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import zeroshard
from tests.grids import EVERYTHING, grid
from tests.kit import PLANS
from tests.planning.test_dry_run import alone
from tests.planning.test_plan import PRECISIONS
from tests.storage.test_memory_bounds import Live
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.samples import Samples
from zeroshard.model.absent import as_tensors
from zeroshard.planning import Configuration, dry_run, whole_model
from zeroshard.step.flat_state import FlatState
from zeroshard.storage import main_weights
from zeroshard.storage.unit import Unit

COUNTED = 1 << 14  # bytes: smaller storages are not counted
WIDTH = 256
ELSEWHERE = {"rank0_only": True, "device": "meta"}
MUON = "Muon:ns_steps=1+AdamW"
CASES = grid(PLANS, PRECISIONS, ("AdamW", MUON), (1, 3, 4), (False, True))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(128 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.view(128, WIDTH)


UNITS = [nn.Linear, Scale]


def build(frozen: bool) -> nn.Module:
    """Units of different sizes, of which one may be frozen."""
    torch.manual_seed(0)
    sizes = (WIDTH, WIDTH, WIDTH + 64, WIDTH)
    model = nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in itertools.pairwise(sizes)), Scale())
    model[1].requires_grad_(not frozen)
    return model


class OnDevice(Live):
    """Without tensors on the meta device, which stands for another device here, and without small ones."""

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        with as_tensors():
            super()._add([t for t in tensors if not t.is_meta and t.untyped_storage().nbytes() >= COUNTED])


class Measured:
    """A model in training, with the bytes that are live."""

    def __init__(self, configuration: Configuration, mesh: Any, frozen: bool) -> None:
        with torch.device("meta"):
            self.planned = zeroshard.plan(build(frozen), configuration)
        self.live, model = OnDevice(), build(frozen)
        self.live.look()
        with self.live:
            chosen = {"units": UNITS, "precision": configuration.precision, "mesh": mesh}
            self.handle = zeroshard.shard(model, configuration.plan, **chosen)
            besides = self.besides_engine()
            self.at_shard = self.live.most - besides
            self.live.restart()
            groups = groups_of(model, has_muon=configuration.optimizer == MUON)
            self.optimizer = zeroshard.ShardedOptimizer(
                groups, torch.optim.AdamW, non_finite="ignore", loss_scale=1.0, foreach=False
            )
            besides = self.besides_engine()
            self.at_init = max(self.at_shard, self.live.most - besides)
            for _ in range(2 if EVERYTHING else 1):  # the first step leaves what the second one does
                model(torch.ones(1, WIDTH)).float().mean().backward()
                self.optimizer.step()
            self.handle.engine.gatherer.settle()
        self.model = model
        self.besides = self.besides_engine()
        # State in pieces that are too small to be counted.
        sizes = [t.untyped_storage().nbytes() for of_kind in self.optimizer.tensors().values() for t in of_kind]
        self.small = sum(size for size in sizes if size < COUNTED)

    def besides_engine(self) -> int:
        """What lives, and the engine does not count: samples of gathered values, for example."""
        return self.live.now() - sum(self.handle.memory().values())

    def free(self) -> None:
        """Free all but the units, as `close` does first of all."""
        self.optimizer.let_go()
        self.handle.engine.pool.empty()

    def most(self, work: Callable[[], Any]) -> int:
        """The most bytes while `work` runs, of what is planned."""
        gc.collect()
        self.live.restart()
        with self.live:
            kept = work()
        del kept
        return self.live.most - self.besides


def groups_of(model: nn.Module, *, has_muon: bool) -> list[dict[str, Any]]:
    """One group, or matrices and the rest."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not has_muon:
        return [{"params": parameters}]
    muon = {"params": [p for p in parameters if p.dim() == 2], "optimizer_class": torch.optim.Muon, "ns_steps": 1}
    return [muon, {"params": [p for p in parameters if p.dim() == 1]}]


def small(state: dict[str, Any]) -> int:
    """Bytes of the step counts in a state dict, which are too small to be measured."""
    values = [value for of_one in state.get("state", {}).values() for value in of_one.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and not value.dim())


def expect_planned(measured: Measured, *, reads_state: bool) -> None:
    """`reads_state`: in a dry run as one of several ranks, the others do not say what state they have."""
    planned, handle, optimizer = measured.planned, measured.handle, measured.optimizer
    phases = planned.phases
    assert measured.at_shard == whole_model.sharding(planned.training)
    assert measured.at_init == phases["init"].num_bytes
    calls: dict[str, Callable[[], Any]] = {
        "full_state_dict": handle.full_state_dict,
        "full_state_dict elsewhere": lambda: handle.full_state_dict(**ELSEWHERE),
    }
    if all(unit.spec.trainable for unit in planned.training.units):
        most = measured.most(lambda: handle.full_state_dict(main=True, **ELSEWHERE))
        one_unit = max(unit.layout.numel * unit.spec.precision.main_dtype.itemsize for unit in planned.training.units)
        assert most == planned.at_rest.sum + one_unit
    counts = 0
    if reads_state:
        counts = small(optimizer.state_dict())
        calls |= {
            "state_dict": optimizer.state_dict,
            "state_dict elsewhere": lambda: optimizer.state_dict(**ELSEWHERE),
        }
    for name, call in calls.items():
        assert measured.most(call) == phases[name].num_bytes - counts * (name == "state_dict"), name


def expect_planned_to_close(measured: Measured, *, rank0_only: bool, frees_first: bool) -> None:
    """`frees_first`: measure from the moment on in which the state and all transients are freed."""
    planned, name = measured.planned, "close elsewhere" if rank0_only else "close"
    closing = whole_model.closing(planned.training, elsewhere=rank0_only)
    assert planned.phases[name].num_bytes == max(planned.at_rest.sum, closing)
    if frees_first:
        measured.free()
    most = measured.most(lambda: measured.handle.close(rank0_only=rank0_only))
    assert most == max(0 if frees_first else planned.at_rest.sum, closing + measured.small)


def run_cases(check: Callable[[Measured, Configuration], None], cases: Any) -> None:
    def run() -> None:
        gc.freeze()
        for plan, precision, optimizer, ranks, frozen in cases:
            configuration = Configuration(
                plan=plan,
                ranks=ranks,
                rank=ranks // 2,
                precision=PRECISIONS[precision],
                optimizer=optimizer,
                units=UNITS,
                loss_scales=1,
                device="cpu",
                transport="native",
            )
            try:
                with dry_run(ranks, rank=configuration.rank) as mesh:
                    check(Measured(configuration, mesh, frozen), configuration)
            except Exception as error:
                error.add_note(f"{plan} {precision} {optimizer} on {ranks} ranks, frozen: {frozen}")
                raise

    alone(run)


def uncounted(patch: pytest.MonkeyPatch) -> None:
    """Control exchanges and samples, which would be seen beside so small a model."""
    for owner, name in (
        (Collectives, "begin_sum"),
        (Collectives, "_read"),
        (Collectives, "exchange_objects"),
        (Samples, "__init__"),
        (Samples, "take"),
    ):
        patch.setattr(owner, name, unseen(getattr(owner, name)))


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def test_the_most_is_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    uncounted(monkeypatch)
    # Temporaries of rounding and joining are then too small to be counted.
    monkeypatch.setattr(main_weights, "AT_ONCE", COUNTED // 4 - 1)

    def check(measured: Measured, configuration: Configuration) -> None:
        expect_planned(measured, reads_state=configuration.ranks == 1)
        frees_first = configuration.precision != "fp32"
        expect_planned_to_close(measured, rank0_only=configuration.ranks == 4, frees_first=frees_first)

    run_cases(check, CASES)


def test_a_reference_to_the_original_parameters_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `shard` once kept them, to restore the model after a failure."""
    names = inspect.unwrap(zeroshard.shard).__globals__
    build = names["_build_or_undo"]

    def build_and_keep(chosen: Any, *args: Any) -> Any:
        kept = [parameter.data for parameter in chosen.parameters.values()]
        return build(chosen, *args), kept.clear()  # type: ignore[func-returns-value]

    monkeypatch.setitem(names, "_build_or_undo", lambda *args: build_and_keep(*args)[0])

    def check(measured: Measured, configuration: Configuration) -> None:
        training = measured.planned.training
        units = sum(unit.held(peak=False).sum for unit in training.units)
        plain = sum(math.prod(shape) * 4 for unit in training.units for shape in unit.spec.shapes)
        assert measured.at_shard == units + plain > whole_model.sharding(training)

    run_cases(check, [(PLANS[1], "fp32", "AdamW", 4, False), (PLANS[3], "fp32", "AdamW", 4, False)])


def test_what_close_does_not_free_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Main and weights once stayed until all parameters had values of their own."""
    free, units = Unit.free, []

    def free_but_keep(unit: Unit) -> None:
        units.append((unit.weights.buffer.storages(), unit.main.storages()))
        free(unit)

    monkeypatch.setattr(Unit, "free", free_but_keep)

    def check(measured: Measured, configuration: Configuration) -> None:
        measured.free()
        most, closing = (
            measured.most(measured.handle.close),
            whole_model.closing(measured.planned.training, elsewhere=False),
        )
        assert most > closing + measured.small
        units.clear()

    run_cases(check, [(PLANS[3], "fp32", "AdamW", 4, False)])


def test_two_units_in_full_at_once_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference to the last buffer once lived until the next one was there."""
    gather_key, last = FlatState._gather_key, []

    def gather_and_keep(state: FlatState, unit: Unit, key: str, dtype: torch.dtype) -> torch.Tensor:
        full = gather_key(state, unit, key, dtype)
        last[:] = [full]
        return full

    monkeypatch.setattr(FlatState, "_gather_key", gather_and_keep)

    def check(measured: Measured, configuration: Configuration) -> None:
        planned = measured.planned.phases["state_dict elsewhere"].num_bytes
        assert measured.most(lambda: measured.optimizer.state_dict(**ELSEWHERE)) > planned
        last.clear()

    run_cases(check, [(PLANS[3], "fp32", "AdamW", 1, False)])
