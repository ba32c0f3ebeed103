"""Units of which a part is frozen after `shard`: frozen parameters are neither reduced nor gathered after the step.

A user sharded a model, then froze everything except the biases. Whole units, mostly zeros, were still reduced: 139,264
bytes, where torch's FSDP2, which separates parameters by `requires_grad`, sends 8,192. And after each step all weights
were gathered, whether they had changed or not.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.grids import EVERYTHING, at, grid
from tests.kit import PLANS, State, plans_of, same_bits, travelling
from tests.patience import HANG
from tests.together import on_ranks
from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.messages import Messages
from zeroshard.layout.interval import round_up
from zeroshard.layout.layout import SLOT_ALIGNMENT
from zeroshard.placement import Plan
from zeroshard.precision import MixedPrecision
from zeroshard.storage import unit
from zeroshard.storage.gradients import Gradients
from zeroshard.storage.unit import Unit
from zeroshard.testing import RankError, expect_same_logs, run_ranks

WIDTH, HIDDEN, RANKS = 20, 36, 3


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Part(), Part(), nn.Linear(WIDTH, 3))


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1 + rank + 10 * number), dtype=torch.float32)
    return model(x.to(torch.get_default_dtype())).square().mean()


def let_train(wanted: Callable[[str], bool], *models: nn.Module) -> None:
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(wanted(name))


ALL: Callable[[str], bool] = lambda name: True  # noqa: E731
BIASES: Callable[[str], bool] = lambda name: "bias" in name  # noqa: E731
LAST: Callable[[str], bool] = lambda name: name in ("1.down.weight", "2.bias")  # noqa: E731
PHASES = [ALL, BIASES, LAST, *([lambda name: "up" in name] if EVERYTHING else []), ALL]
"""The parameters that train in each phase."""


def poisoned(num_bytes: int, device: torch.device) -> Tensor:
    """Memory filled with an arbitrary bit pattern instead of zeros."""
    return torch.full((num_bytes,), 0x7E, dtype=torch.uint8, device=device)


@pytest.fixture(autouse=True)
def memory_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "plain_bytes", poisoned)


def trained_elements(of: Unit) -> list[int]:
    """The number of elements in each shard that take part: parameters that require grad, rounded up to 64 elements
    each."""
    marks = torch.zeros(of.layout.numel, dtype=torch.bool)
    for slot, parameter in zip(of.layout.slots, of.parameters, strict=True):
        if parameter.requires_grad:
            marks[slot.world.start : round_up(slot.world.stop, SLOT_ALIGNMENT)] = True
    if all(parameter.requires_grad for parameter in of.parameters):
        marks[:] = True
    return [int(shard.sum()) for shard in marks.view(of.layout.num_shards, -1)]


def expected_events(handle: zeroshard.Handle, rank: int) -> Counter[Any]:
    """(operation, unit, phase, bytes sent by this rank) of a step, without ZERO3's gathers in forward and backward."""
    result: Counter[Any] = Counter()
    for one in handle.engine.units:
        precision, weight = one.spec.precision, one.spec.weight_dtype.itemsize
        wire, gradient = precision.wire.itemsize, precision.grad.itemsize
        elements = trained_elements(one)
        if not sum(elements):
            continue
        others = len(elements) - 1
        result["reduce_scatter", one.name, "backward", (sum(elements) - elements[rank]) * wire] += 1
        if handle.plan is zeroshard.DDP:
            result["all_gather", one.name, "backward", others * elements[rank] * gradient] += 1
        elif handle.plan is not zeroshard.ZERO3:
            result["all_gather", one.name, "step", others * elements[rank] * weight] += 1
    return result


def found_events(handle: zeroshard.Handle) -> Counter[Any]:
    return Counter(
        tuple(event)
        for event in handle.comm_log.entries
        if event.op != "exchange" and (handle.plan is not zeroshard.ZERO3 or event.op != "all_gather")
    )


def expect_alike(rank: int, run: Callable[[int, Any], dict[str, Tensor]]) -> None:
    """`run(rank, plan)`, in fp64, gives the same bits under ZERO2 and ZERO3; with `make test-everything`, under every
    plan."""
    torch.set_default_dtype(torch.float64)
    found = [run(rank, plan) for plan in (PLANS if EVERYTHING else PLANS[2:])]
    assert all(same_bits(state, found[0]) for state in found)


PRECISIONS = (None, "bf16", MixedPrecision(reduce=torch.bfloat16))
TRAVEL_CASES = grid(range(len(PRECISIONS)), ("shared", "messages"), (2, 3))


@pytest.mark.by_gloo
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_trains_travels_and_nothing_else(num_ranks: int) -> None:
    """The bytes equal a count over the parameters, and the bytes passed to the backend are those of the log."""
    sent = 0

    def train(rank: int, plan: Plan, precision: Any, way: str) -> tuple[State, CommLog]:
        nonlocal sent
        model = build()
        handle = zeroshard.shard(model, plan, units=Part, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.01, foreach=False)
        for step, phase in enumerate(PHASES):
            let_train(phase, model)
            optimizer.backward(loss_of(model, rank, step))  # a call of the model, in which ranks notice the change
            optimizer.zero_grad()
            handle.engine.gatherer.settle()
            handle.comm_log.clear()
            sent = 0
            optimizer.backward(loss_of(model, rank, step).float())
            assert optimizer.step().applied
            if way == "messages":
                assert sent == handle.comm_log.bytes()
            assert found_events(handle) == expected_events(handle, rank), (plan, precision, way, step)
        return handle.full_state_dict(main=True), handle.comm_log

    def check(rank: int) -> list[CommLog]:
        logs, send = [], Messages.send

        def counted(self: Messages, axis: Any, tensor: Tensor, to: int, kind: str) -> Any:
            nonlocal sent
            sent += 0 if kind.startswith("announce") else tensor.nbytes
            return send(self, axis, tensor, to, kind)

        Messages.send = counted
        for number, way in at(TRAVEL_CASES, num_ranks):
            with travelling(way):
                runs = [train(rank, plan, PRECISIONS[number], way) for plan in plans_of(number + num_ranks)]
            assert all(same_bits(state, runs[0][0]) for state, _ in runs), (PRECISIONS[number], way)
            logs += [log for _, log in runs]
        return logs

    for logs in zip(*run_ranks(check, num_ranks), strict=True):
        expect_same_logs(logs)


STEPS = [*PHASES, LAST]
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.3, "foreach": False}
Plain = tuple[list[tuple[Tensor, State]], Any]


def in_plain_torch(num_ranks: int) -> Plain:
    """Freeze, train, unfreeze, train, in one process: norm and weights of each step, and the optimizer's state."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    steps = []
    for step, phase in enumerate(STEPS):
        let_train(phase, model)
        for of_rank in range(num_ranks):
            (loss_of(model, of_rank, step) / num_ranks).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step(), optimizer.zero_grad()
        steps.append((norm, {name: value.clone() for name, value in model.state_dict().items()}))
    return steps, optimizer.state_dict()["state"]


def as_in_plain_torch(rank: int, expected: Plain, plan: Plan, mesh: Any = None) -> State:
    """Weights, state and norms are those of plain torch in one process; frozen parameters keep their bits."""
    model, (steps, state) = build(), expected
    handle = zeroshard.shard(model, plan, units=Part, mesh=mesh)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, **ADAMW)
    after = handle.full_state_dict()
    for step, (phase, (norm, weights)) in enumerate(zip(STEPS, steps, strict=True)):
        let_train(phase, model)
        before = after
        loss_of(model, rank, step).backward()
        torch.testing.assert_close(optimizer.clip_grad_norm_(0.5).double(), norm)
        assert optimizer.count_zero_gradients() == 0
        optimizer.step(), optimizer.zero_grad()
        after = handle.full_state_dict()
        for name, value in weights.items():
            torch.testing.assert_close(after[name], value)
            assert torch.equal(before[name], after[name]) != phase(name)
    torch.testing.assert_close(optimizer.state_dict()["state"], state)
    return after


MESHES = [*([(2,)] if EVERYTHING else []), (3,), (2, 2)]
FROZEN_CASES = grid(("shared", "messages", "native"), PLANS, MESHES, apart=(0, 1))


@pytest.mark.by_cpu
@pytest.mark.parametrize("shape", MESHES)
def test_frozen_and_let_go_as_in_plain_torch(shape: tuple[int, ...]) -> None:
    """Also on a mesh of two axes, with sums over replicas. The shared and pairwise transports give the same bits; the
    backend's own collectives add up more than two terms in another order."""
    num_ranks = torch.Size(shape).numel()

    def check(rank: int) -> None:
        torch.set_default_dtype(torch.float64)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if len(shape) > 1 else None
        expected = in_plain_torch(num_ranks)
        found: dict[bool, State] = {}
        for way, plan in at(FROZEN_CASES, shape):
            with travelling(way):
                state = as_in_plain_torch(rank, expected, plan, mesh)
            assert same_bits(state, found.setdefault(num_ranks > 2 and way == "native", state)), (way, plan)

    run_ranks(check, num_ranks)


@on_ranks(RANKS)
def test_accumulated_before_something_is_frozen_or_let_go(rank: int) -> None:
    """`requires_grad` changes between two micro-batches, reduced each time or once: as in plain torch, gradients
    accumulated so far count in this step, and frozen parameters are left out from the next step on."""

    def run(rank: int, plan: Plan, every: bool, phases: list[Any], compared: bool) -> State:
        model, plain = build(), [build()] * compared
        handle = zeroshard.shard(model, plan, units=Part)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        plain_optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in plain]
        for step in range(2):
            for number, phase in enumerate(phases if not step else phases[-1:]):
                let_train(phase, model, *plain)
                last = number == len(phases) - 1 or step == 1
                handle.set_requires_gradient_sync(every or last)
                handle.comm_log.clear()
                loss_of(model, rank, number + 10 * step).backward()
                for expected, of_rank in itertools.product(plain, range(RANKS)):
                    (loss_of(expected, of_rank, number + 10 * step) / RANKS).backward()
            optimizer.step()
            for one in plain_optimizers:
                one.step(), one.zero_grad()
        reductions = {key: count for key, count in found_events(handle).items() if key[0] == "reduce_scatter"}
        assert reductions == {k: c for k, c in expected_events(handle, rank).items() if k[0] == "reduce_scatter"}
        state = handle.full_state_dict()
        for expected in plain:
            for name, value in expected.state_dict().items():
                torch.testing.assert_close(state[name], value)
        return state

    torch.set_default_dtype(torch.float64)
    for number, phases in enumerate(([ALL, BIASES], [LAST, BIASES, ALL, LAST])):
        for every in (False, True):
            plans = plans_of(number + every)
            found = [run(rank, plan, every, phases, plan is plans[0]) for plan in plans]
            assert all(same_bits(state, found[0]) for state in found)


@on_ranks(RANKS)
def test_a_gradient_that_waits_is_in_p_grad_once_its_parameter_is_frozen(rank: int) -> None:
    """Once it was no longer in `p.grad` after the next backward, so `p.grad = None` and clipping had no effect on it,
    although the step used it."""
    for plan in plans_of(0):
        for discarded in (True, False):
            model = build()
            handle = zeroshard.shard(model, plan, units=Part)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.5)
            loss_of(model, rank, 0).backward()
            let_train(BIASES, model)
            loss_of(model, rank, 1).backward()
            weight, before = model[0].up.weight, handle.full_state_dict()["0.up.weight"]
            assert weight.grad is not None and not weight.requires_grad
            gradient = handle.gradient("0.up.weight")
            if discarded:
                weight.grad = None
            else:
                nn.utils.clip_grad_value_(weight, 1e-3)
            optimizer.step()
            wanted = before - 0.5 * (0 if discarded else gradient.clamp(-1e-3, 1e-3))
            torch.testing.assert_close(handle.full_state_dict()["0.up.weight"], wanted)
            assert discarded or float(gradient.abs().max()) > 1e-3


@on_ranks(RANKS)
def test_a_frozen_parameter_with_a_gradient_set_by_hand_is_stepped(rank: int) -> None:
    """As in plain torch. The gradient may be set before or after a backward, which does not change it. Ranks set their
    own values, and the step uses the mean."""
    for before in (True, False):
        for plan in plans_of(before):
            model = build()
            handle = zeroshard.shard(model, plan, units=Part)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.5)
            let_train(BIASES, model)
            start = handle.full_state_dict()["0.up.weight"]
            by_hand = torch.full((HIDDEN, WIDTH), 1.0 + rank)
            if before:
                model[0].up.weight.grad = by_hand
            loss_of(model, rank, 0).backward()
            if not before:
                model[0].up.weight.grad = by_hand
                optimizer.clip_grad_norm_(1e9)  # reduces the gradient
                loss_of(model, rank, 1).backward()
            assert optimizer.step().applied
            assert torch.equal(handle.full_state_dict()["0.up.weight"], start - 1.0)
            handle.comm_log.clear()
            loss_of(model, rank, 2).backward()
            optimizer.step()
            assert found_events(handle) == expected_events(handle, rank)
            assert torch.equal(handle.full_state_dict()["0.up.weight"], start - 1.0)


def test_two_optimizers_over_one_unit() -> None:
    """After its step, each optimizer sends only the weights that it has changed."""

    def run(rank: int, plan: Plan) -> State:
        model, expected = build(), build()
        handle = zeroshard.shard(model, plan, units=10**9)
        sharded, plain = [], []
        for wanted in (BIASES, lambda name: "bias" not in name):
            for one, into, kind in ((model, sharded, zeroshard.ShardedOptimizer), (expected, plain, None)):
                params = [p for name, p in one.named_parameters() if wanted(name)]
                into.append(kind(params, torch.optim.SGD, lr=0.1) if kind else torch.optim.SGD(params, lr=0.1))
        for step, phase in enumerate(PHASES):
            let_train(phase, model, expected)
            loss_of(model, rank, step).backward()
            for of_rank in range(RANKS):
                (loss_of(expected, of_rank, step) / RANKS).backward()
            handle.comm_log.clear()
            for one in [*plain, *sharded]:
                if any(p.requires_grad for group in one.param_groups for p in group["params"]):
                    one.step()
            for one in plain:
                one.zero_grad()
            handle.engine.gatherer.settle()
            if plan is zeroshard.ZERO2:
                gathered = [event.bytes for event in handle.comm_log.entries if event.op == "all_gather"]
                most = sum(key[-1] for key in expected_events(handle, rank) if key[0] == "all_gather")
                assert sum(gathered) <= most
        state = handle.full_state_dict()
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(state[name], value)
        return state

    run_ranks(expect_alike, RANKS, run)


@on_ranks(RANKS)
def test_owners_of_frozen_parameters_get_and_give_nothing(rank: int) -> None:
    """An optimizer of whole parameters sends gradients to owners, and main back, only for parameters that train. (With
    DDP each rank steps all of them.)"""
    for plan in filter(zeroshard.DDP.__ne__, plans_of(1)):
        sent = {}
        for phase in (ALL, LAST):
            model = build()
            handle = zeroshard.shard(model, plan, units=Part)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adafactor, lr=0.01)
            let_train(phase, model)
            loss_of(model, rank, 0).backward()
            optimizer.step()
            handle.comm_log.clear()
            loss_of(model, rank, 1).backward()
            optimizer.step()
            rows = handle.engine.collectives.exchange_objects(handle.comm_log.bytes("all_to_all"))
            sent[phase] = sum(rows)
        trained = sum(p.numel() for name, p in model.named_parameters() if LAST(name))
        assert 0 < sent[LAST] <= 2 * 4 * trained < sent[ALL]


@on_ranks(2)
def test_a_parameter_that_is_frozen_on_one_rank_alone_is_refused(rank: int) -> None:
    for plan in (zeroshard.DDP, zeroshard.ZERO3):
        model = build()
        zeroshard.shard(model, plan, units=Part)
        let_train(lambda name: "bias" in name or (rank == 1 and name == "1.up.weight"), model)
        with pytest.raises(ValueError, match=r"parameter 1\.up\.weight requires grad on rank 1 alone"):
            loss_of(model, rank, 0)


@on_ranks(2)
def test_let_go_where_only_a_part_of_the_model_is_called(rank: int) -> None:
    """Ranks notice unfrozen parameters in a call of the model. A gradient that would be missing in the sum raises an
    error."""
    for plan in plans_of(1):
        model = build()
        zeroshard.shard(model, plan, units=Part)
        let_train(BIASES, model)
        loss_of(model, rank, 0).backward()
        model.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"parameter .*weight has a gradient, and did not require grad when"):
            model[2](torch.ones(1, WIDTH)).sum().backward()


def test_ranks_that_have_run_out_of_inputs_follow() -> None:
    def run(rank: int, plan: Plan) -> State:
        model, expected = build(), build()
        let_train(BIASES, expected)
        handle = zeroshard.shard(model, plan, units=Part)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        plain = torch.optim.SGD(expected.parameters(), lr=0.1)
        let_train(BIASES, model)
        with handle.join():
            for step in range(rank + 1):
                loss_of(model, rank, step).backward()
                optimizer.step()
        for step in range(RANKS):
            for of_rank in range(step, RANKS):
                (loss_of(expected, of_rank, step) / RANKS).backward()
            plain.step(), plain.zero_grad()
        state = handle.full_state_dict()
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(state[name], value)
        return state

    run_ranks(expect_alike, RANKS, run)


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adafactor, {"lr": 0.05}),
]


def at_random(rank: int, plan: Plan, seed: int) -> State:
    """Parameters are frozen and unfrozen before any micro-batch, reduced or not. Gradients, also of frozen parameters,
    are discarded, edited and set by hand. The weights are those of plain torch."""
    random = Random(seed)
    model, plain = build(), [build()] * (plan is PLANS[0] and rank == 0)  # the others: same bits
    units = random.choice([Part, nn.Linear, 10**9])
    handle = zeroshard.shard(model, plan, units=units, keep_gathered=random.choice([(), True]))
    optimizer_class, options = random.choice(OPTIMIZERS)
    optimizer = zeroshard.ShardedOptimizer(handle, optimizer_class, foreach=False, **options)
    plain_optimizers = [optimizer_class(one.parameters(), foreach=False, **options) for one in plain]
    names = [name for name, _ in model.named_parameters()]
    for step in range(6):
        num_batches, every = random.choice([1, 1, 2, 3]), random.random() < 0.5
        for number in range(num_batches):
            if random.random() < 0.6:
                chosen = {name for name in names if random.random() < random.choice([0.1, 0.5, 0.9])} | {"2.bias"}
                let_train(chosen.__contains__, model, *plain)
            handle.set_requires_gradient_sync(every or number == num_batches - 1)
            loss_of(model, rank, 10 * step + number).backward()
            for expected, of_rank in itertools.product(plain, range(RANKS)):
                (loss_of(expected, of_rank, 10 * step + number) / RANKS).backward()
        what, name = random.choice(["", "", "discard", "by hand", "scale"]), random.choice(names)
        one = model.get_parameter(name)
        scaled = what == "scale" and one.grad is not None and one.requires_grad
        for target in (one, *(expected.get_parameter(name) for expected in plain)):
            if what == "discard":
                target.grad = None
            elif what == "by hand":
                value = rank if target is one else (RANKS - 1) / 2
                target.grad = torch.full(target.shape, 0.1 * value)
            elif scaled:
                target.grad.mul_(0.5)  # type: ignore[union-attr]
        optimizer.step()
        for each in plain_optimizers:
            each.step(), each.zero_grad()
    state = handle.full_state_dict()
    for expected in plain:
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(
                state[name], value, msg=lambda text, name=name: f"seed {seed}, {plan}: {name} {text}"
            )
    return state


def without_a_block(rank: int, plan: Plan) -> State:
    """A block with frozen weights is two units. Rank 1 does not use what one of the blocks returns."""
    torch.manual_seed(0)
    model = nn.ModuleList(Part() for _ in range(4))
    for part in model:
        part.up.requires_grad_(False)
    handle = zeroshard.shard(model, plan, units=Part)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank + 10 * step))
        for number, part in enumerate(model):
            y = part(x)
            x = x if rank == 1 and number == 1 + step else y
        x.square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    return handle.full_state_dict()


def test_a_rank_may_leave_out_what_two_units_return() -> None:
    """Backward comes to both at once on ranks that use it, and came to one after the other, in reverse, on the other:
    ranks gathered in two orders."""

    def check(rank: int) -> None:
        expected = without_a_block(rank, zeroshard.DDP)
        for way in ("shared", "pairwise", "native"):
            with travelling(way):
                assert same_bits(without_a_block(rank, zeroshard.ZERO3), expected), way

    run_ranks(check, 2, collective_timeout=HANG)


@pytest.mark.parametrize("seeds", [range(3 if EVERYTHING else 2)])
def test_at_random(seeds: range) -> None:
    def check(rank: int) -> list[State]:
        torch.set_default_dtype(torch.float64)
        states = []
        for seed in seeds:
            plans = PLANS if EVERYTHING else (PLANS[0], PLANS[2 + seed % 2])
            found = [at_random(rank, plan, seed) for plan in plans]
            assert all(same_bits(state, found[0]) for state in found), seed
            states.append(found[0])
        return states

    first, *others = run_ranks(check, RANKS)
    assert all(all(map(same_bits, first, of_rank)) for of_rank in others)


@pytest.mark.parametrize("fault", ["shard not cleared", "too little summed"])
def test_faults_would_be_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "shard not cleared":
        monkeypatch.setattr(Gradients, "_clear_between_portions", lambda self: None)
    else:
        sum_only = Gradients.sum_only

        def without_one(self: Gradients, slots: set[int]) -> None:
            sum_only(self, slots)
            self._portions = self.buffer.layout.portions(sorted(slots)[1:])

        monkeypatch.setattr(Gradients, "sum_only", without_one)

    def check(rank: int) -> None:
        torch.set_default_dtype(torch.float64)
        as_in_plain_torch(rank, in_plain_torch(2), zeroshard.ZERO2)

    with pytest.raises(RankError):
        run_ranks(check, 2)
