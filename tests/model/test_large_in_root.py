"""Large modules that the policy leaves to the root unit (embedding, head) are units of their own: gathered when they
are called or read, and kept as long as the root unit's weights. (The size above which they are is lowered here.)"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.grids import EVERYTHING, at
from tests.kit import PLANS, VOCAB, WIDTH, Block, Job, Net, State, loss_of_tokens, make, same_bits, travelling
from tests.patience import HANG
from tests.planning.models import Planned
from tests.planning.test_plan import expect_measured, expect_planned
from tests.together import Together, in_turn, on_ranks
from zeroshard.model import units
from zeroshard.model.unit_spec import UnitSpec, in_order_of_reduction
from zeroshard.model.units import choose_units
from zeroshard.placement import Plan
from zeroshard.planning import Configuration
from zeroshard.runtime.reduce import Reducer
from zeroshard.runtime.reductions import Reductions
from zeroshard.testing import run_ranks


@pytest.fixture(autouse=True)
def small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked, so they have this size as well."""
    monkeypatch.setattr(units, "PART_BYTES", 4 * 2 * WIDTH)


@contextmanager
def root_parts(apart: bool) -> Iterator[None]:
    """Whether large modules are units of their own, or in the root unit."""
    with pytest.MonkeyPatch.context() as patch:
        if not apart:
            patch.setattr(units, "PART_BYTES", 1 << 40)
        yield


class Reads(Net):
    """Calls neither embedding nor head, but reads their weights."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.embedding(tokens, self.embed.weight)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.head.weight, self.head.bias)


class TiedByHand(Net):
    """The head is the embedding's weight, read after the embedding has been called; it has no module."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embed.weight)


class Checkpointed(Net):
    """The head runs inside a checkpoint: backward runs it again."""

    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        y: Tensor = checkpoint(lambda x: self.head(self.norm(x)), x, use_reentrant=self.reentrant)
        return y


class Reentrant(Checkpointed):
    reentrant = True


class InBetween(Net):
    """A module that is registered behind the blocks, and used between them inside of a reentrant checkpoint: the graph
    of the outer backward has no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 0:
                x = checkpoint(self.middle, x, use_reentrant=True)[..., :WIDTH]
        return self.head(self.norm(x))


def found(model: nn.Module, policy: Any = Block) -> dict[str, UnitSpec]:
    return {spec.name: spec for spec in choose_units(model, policy, None)}


# Which modules -------------------------------------------------------------------------------------------------------


def test_large_modules_of_the_root_unit_are_units() -> None:
    specs = found(Net(blocks=3))
    assert [*specs] == ["root", "embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert specs["root"].names == ("norm.weight", "norm.bias")
    assert specs["head"].names == ("head.weight", "head.bias")
    assert specs["head"].modules == ("", "head") and specs["head"].gathered_by == ("head",)
    assert all(specs[name].outer for name in ("root", "embed", "head")), "kept from forward to backward, as before"


def test_what_stays_in_the_root_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "embed.weight" in found(Net(tied=True, blocks=3))["root"].names, "two modules read it"
    alone = TiedByHand(blocks=3)
    del alone.norm
    assert [*found(alone)] == ["root", "blocks.0", "blocks.1", "blocks.2"], "there is nothing else"
    own = Net(blocks=3)
    own.table = nn.Parameter(torch.ones(100, WIDTH))
    assert "table" in found(own)["root"].names, "no module's call would gather it"
    own.tables = nn.ParameterList([torch.ones(100, WIDTH)])
    assert "tables.0" in found(own)["root"].names
    assert "norm + head" in found(Net(blocks=3), [Block, ("norm", "head")]), "named by the user"
    assert not any(spec.gathered_by for policy in (None, 500) for spec in found(Net(blocks=3), policy).values())
    monkeypatch.setattr(units, "PART_BYTES", units.DEFAULT_UNIT_BYTES)
    assert [*found(Net(blocks=3))] == ["root", "blocks.0", "blocks.1", "blocks.2"], "small models are as they were"


def test_parts_of_different_kinds() -> None:
    model = Net(blocks=3)
    model.head.bias = nn.Parameter(model.head.bias.detach().double())
    model.embed.requires_grad_(False)
    specs = found(model)
    assert {"embed", "head (float32)", "head (float64)", "root"} <= specs.keys()
    assert not specs["embed"].trainable


# Training ------------------------------------------------------------------------------------------------------------


JOBS: dict[str, Job] = {
    "called": Job(model=Net, precision="bf16"),
    "read": Job(model=Reads, precision="bf16"),
    "tied by hand": Job(model=TiedByHand, precision="bf16"),
    "checkpointed": Job(model=Checkpointed, precision="bf16"),
    "reentrant": Job(model=Reentrant, precision="bf16"),
    "in between": Job(model=InBetween, precision="bf16"),
    "tied": Job(model=partial(Net, tied=True), precision="bf16"),
}
TRAINED = Together(JOBS, on_three=["read", "reentrant", "in between"])


@pytest.mark.parametrize("name", JOBS)
def test_training_is_that_of_one_process(name: str) -> None:
    TRAINED.expect_reference(name)


PLANNED = (
    list(product(PLANS, (1, 2), ("shared", "pairwise", "native"), (2, 3)))
    if EVERYTHING
    else [
        (zeroshard.DDP, 2, "shared", 2),
        (zeroshard.ZERO1, 1, "pairwise", 2),
        (zeroshard.ZERO2, 2, "native", 2),
        (zeroshard.ZERO3, 1, "shared", 2),
        (zeroshard.ZERO3, 2, "native", 2),
        (zeroshard.DDP, 1, "pairwise", 3),
        (zeroshard.ZERO1, 2, "shared", 3),
        (zeroshard.ZERO2, 1, "shared", 3),
        (zeroshard.ZERO3, 2, "pairwise", 3),
    ]
)
"""Plan, number of micro-batches, transport and number of ranks."""


@pytest.mark.by_gloo
@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks("num_ranks")
def test_memory_and_messages_are_as_planned(rank: int, num_ranks: int) -> None:
    def check(rank: int, plan: Plan, micro_batches: int, way: Any) -> None:
        configuration = Configuration(
            plan=plan,
            ranks=num_ranks,
            rank=rank,
            precision="bf16",
            device="cpu",
            transport=way,
            micro_batches=micro_batches,
        )
        with travelling(way):
            if EVERYTHING or (plan is zeroshard.ZERO3 and micro_batches == 2):
                expect_planned(Planned(Net, Block), configuration)  # saves and loads as well
            else:
                expect_measured(Planned(Net, Block), configuration)

    in_turn(check, at(PLANNED, num_ranks))(rank)


@on_ranks(2)
def test_what_is_gathered_first_and_reduced_first(rank: int) -> None:
    """The first gather and the last reduction are not those of the whole root unit. The control: without units of their
    own, both are in "root"."""
    for reads, apart in ((Net, True), (Reads, True), (Net, False)):
        model = make(partial(reads, blocks=3))
        with root_parts(apart):
            handle = zeroshard.shard(model, "zero3", units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        for _ in range(2):
            handle.comm_log.clear()
            loss_of_tokens(model, rank, 0, 0).backward()
            optimizer.step()
        gathers = [e.unit for e in handle.comm_log.entries if e.op == "all_gather" and e.phase == "forward"]
        reductions = [event.unit for event in handle.comm_log.entries if event.op == "reduce_scatter"]
        blocks = ["blocks.0", "blocks.1", "blocks.2"]
        if not apart:
            assert gathers == ["root", *blocks] and reductions == [*blocks[::-1], "root"]
        else:
            assert gathers == ["root", "embed", *blocks, "head"]
            assert reductions == ["blocks.2", "blocks.1", "head", "blocks.0", "embed", "root"]


def test_the_order_of_reductions() -> None:
    def order(model: nn.Module, policy: Any = Block) -> list[str]:
        specs = choose_units(model, policy, None)
        return [one.spec.name for one in in_order_of_reduction([OfSpec(spec) for spec in specs])]

    assert order(Net(blocks=3)) == ["blocks.2", "blocks.1", "head", "blocks.0", "embed", "root"]
    assert order(Net(blocks=1)) == ["head", "blocks.0", "embed", "root"]
    assert order(Net(tied=True, blocks=3)) == ["blocks.2", "blocks.1", "blocks.0", "root"]
    assert order(Switched(blocks=3)) == ["blocks.2", "blocks.1", "second", "head", "blocks.0", "embed", "root"]
    # Without root parts, as they are registered.
    assert order(Net(blocks=3), [Block, ("embed",), ("norm", "head")]) == [
        "norm + head",
        *(f"blocks.{i}" for i in (2, 1, 0)),
        "embed",
    ]
    assert order(Net(blocks=3), 1 << 20) == ["root"]
    assert in_order_of_reduction([]) == []


class LeavesOut(Net):
    """Blocks in reentrant checkpoints, and a head that a rank may leave out: before the end of backward, this rank does
    not know that the head gets no gradient."""

    out = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return nn.functional.pad(x, (0, VOCAB - WIDTH)) if self.out else self.head(self.norm(x))


@pytest.mark.parametrize(
    ("way", "num_ranks", "plans"),
    [
        ("shared", 3, (zeroshard.ZERO1, zeroshard.ZERO2)),
        ("native", 2, (zeroshard.DDP, zeroshard.ZERO3)),
        ("pairwise", 4, (zeroshard.ZERO1, zeroshard.ZERO3)),
        *([("pairwise", 3, (zeroshard.ZERO2, zeroshard.ZERO3))] * EVERYTHING),
    ],
)
def test_nobody_waits_for_root_parts_inside_of_a_backward(way: str, num_ranks: int, plans: tuple[Plan, ...]) -> None:
    """A rank that leaves the head out reduces it at the end of its backward, and before, it waits for the others'
    gathers: a deadlock, if these waited for the head. (Four ranks: two shards with two replicas each.) The bits are
    those of a training in which embedding and head are in the root unit."""
    runs = [(plans[0], False), *((plan, True) for plan in (PLANS if EVERYTHING else plans))]

    def check(rank: int) -> list[str]:
        waits, states = Waits(), []
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if num_ranks == 4 else None
        for plan, apart in runs:
            model = make(partial(LeavesOut, blocks=3))
            with root_parts(apart):
                handle = zeroshard.shard(model, plan, units=Block, mesh=mesh)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            for step in range(3):
                model.out = rank in ((), (1,), (0, 1))[step]
                optimizer.zero_grad()
                with waits.noted():
                    loss_of_tokens(model, rank, 0, step).backward()
                optimizer.step()
            states.append(handle.full_state_dict())
            assert same_bits(states[0], states[-1]), plan
        return waits.inside

    with travelling(way):
        assert all(not inside for inside in run_ranks(check, num_ranks, collective_timeout=HANG))


@pytest.mark.by_gloo
def test_a_wait_for_a_root_part_would_be_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(Reducer, "_may_start", lambda self, unit: True)

    def check(rank: int) -> list[str]:
        waits = Waits()
        model = make(Net)
        zeroshard.shard(model, "zero1", units=Block)
        with waits.noted():
            loss_of_tokens(model, rank, 0, 0).backward()
        return waits.inside

    with travelling("pairwise"):
        assert all("head" in inside for inside in run_ranks(check, 2))


@dataclass
class OfSpec:
    spec: UnitSpec


class Waits:
    """Notes the units of the root for whose reductions this rank waits inside of a backward, before its end."""

    def __init__(self) -> None:
        self.inside: list[str] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        finish, release, end = Reductions._finish_oldest, Reductions._release_oldest, Reducer.end_backward
        go_on = Reductions._go_on
        at_end = False

        def note(unit: Any) -> None:
            if unit.spec.of_root and not at_end:
                self.inside.append(unit.name)

        def noted_finish(reductions: Any) -> None:
            unit, grads, _ = reductions._arriving[0]
            if not grads.buffer.pending.has_arrived:  # else this rank does not wait for a peer
                note(unit)
            finish(reductions)

        def noted_release(reductions: Any) -> None:
            note(reductions._read_by_peers[0][0])
            release(reductions)

        def noted_go_on(reductions: Any) -> None:
            for unit, _ in [] if reductions._lag is None else reductions._not_over[: -reductions._lag]:
                note(unit)
            go_on(reductions)

        def noted_end(reducer: Any) -> None:
            nonlocal at_end
            at_end = True
            end(reducer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reductions, "_finish_oldest", noted_finish)
            patch.setattr(Reductions, "_release_oldest", noted_release)
            patch.setattr(Reductions, "_go_on", noted_go_on)
            patch.setattr(Reducer, "end_backward", noted_end)
            yield


class Switched(Net):
    """With a second head, which a forward may not use."""

    use = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.second = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.second(x)[..., :WIDTH] if self.use else x))


class ForImages(Net):
    """A projector that is registered behind the blocks, used before them, and only on some ranks."""

    use = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.projector = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.projector(x) if self.use else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_a_module_that_is_used_before_its_place_is_no_root_part() -> None:
    """Ranks that use it would gather it earlier than the others. So it stays in the root unit, as it is no head."""
    assert [*found(ForImages(blocks=3))] == ["root", "embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    positions = ForImages(blocks=3)
    positions.positions = nn.Embedding(WIDTH, WIDTH)
    assert "projector" not in found(positions), "it has as many rows as there are positions, not tokens"
    model = nn.Sequential(OrderedDict(images=nn.Linear(WIDTH, WIDTH), net=Net(blocks=3)))
    assert [*found(model)][:4] == ["root", "images", "net.embed", "net.blocks.0"], "in front of all blocks"


@pytest.mark.by_cpu
@pytest.mark.parametrize(("way", "plans"), [("shared", ("zero1", "zero3")), ("native", ("zero3",))])
def test_a_rank_may_leave_one_out(way: str, plans: tuple[str, ...]) -> None:
    """As in the root unit: all ranks gather it at the same place, whether they use it or not."""

    def check(rank: int, kind: Any, plan: str, apart: bool) -> State:
        model = make(kind)
        with root_parts(apart):
            handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        has_changed = True
        for step, users in enumerate([(), (0,), (1,), (0, 1), ()]):
            model.use = rank in users
            optimizer.zero_grad()
            handle.comm_log.clear()
            loss_of_tokens(model, rank, 0, step).backward()
            optimizer.step()
            gathered = [event.unit for event in handle.comm_log.entries if event.op == "all_gather"]
            if plan == "zero3" and kind is Switched:
                assert gathered.count("second") == (apart and has_changed), (step, gathered)
            has_changed = bool(users)  # a step changes what has a gradient on any rank
        return handle.full_state_dict()

    def compared(rank: int, kind: Any) -> None:
        expected = check(rank, kind, "zero3", False)
        for plan in plans:
            assert same_bits(check(rank, kind, plan, True), expected), plan

    with travelling(way):
        run_ranks(in_turn(compared, [Switched, ForImages]), 2)


@on_ranks(2)
def test_reads_outside_of_a_forward_raise_as_before(rank: int) -> None:
    model = make(Net)
    handle = zeroshard.shard(model, "zero3", units=Block)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"head\.weight are not here"):
            model.head.weight.sum()
        with torch.no_grad():
            loss = loss_of_tokens(model, rank, 0, 0)  # an evaluation
    with handle.unsharded(), torch.no_grad():
        assert torch.equal(loss, loss_of_tokens(model, rank, 0, 0))
        assert torch.isfinite(model.head.weight.sum())


def test_checkpoints_load_with_and_without(tmp_path: Path) -> None:
    def check(rank: int, before: bool) -> None:
        states = []
        for saves in (True, False):
            model = make(Net, seed=int(saves))
            with root_parts(saves != before):
                handle = zeroshard.shard(model, "zero3", units=Block, precision="bf16")
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
            if saves:
                loss_of_tokens(model, rank, 0, 0).backward()
                optimizer.step()
                zeroshard.save(tmp_path / str(before), handle, optimizer, step=1)
            else:
                zeroshard.load(tmp_path / str(before), handle, optimizer)
            loss_of_tokens(model, rank, 0, 1).backward()
            optimizer.step()
            states.append(handle.full_state_dict(main=True))
        assert same_bits(*states)

    run_ranks(in_turn(check, [True, False]), 2)


WHOLE: list[tuple[Any, str]] = [(Net, "zero3"), (Reads, "zero3"), *([(Net, "zero1"), (Reads, "zero1")] * EVERYTHING)]


@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
def test_whole_models_are_compiled() -> None:
    """By default rank 0 compiles one model and rank 1 the other, each beside a rank that trains uncompiled: compiling
    takes most of the time."""

    def check(rank: int, model: Any, plan: str) -> None:
        losses = []
        for compiled in (False, True):
            made = make(partial(model, blocks=2 if EVERYTHING else 1))
            handle = zeroshard.shard(made, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            compiles = compiled and (EVERYTHING or rank == (model is Reads))
            runs = torch.compile(made, backend="eager") if compiles else made
            losses.append([])
            for step in range(2):
                loss = loss_of_tokens(runs, rank, 0, step)
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.item())
        assert losses[0] == losses[1]

    run_ranks(in_turn(check, WHOLE), 2)
