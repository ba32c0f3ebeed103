"""Parameters that are frozen and unfrozen after `shard`.

A user froze the backbone, sharded the model, built the optimizer as in the README (`ShardedOptimizer(handle, ...)`),
and unfroze the backbone some steps later: it never changed (0.0, where torch changed it by 0.9), without an error.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, State, make, plans_of, same_bits
from tests.together import on_ranks
from zeroshard.placement import Plan
from zeroshard.step.steppers import Steppers
from zeroshard.storage.unit import Unit
from zeroshard.testing import RankError, run_ranks


def build() -> nn.Module:
    """Backbone ("0", "1") and head ("2")."""
    return make(lambda: nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 16), nn.Linear(16, 8)))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 40, generator=torch.Generator().manual_seed(7 * step + rank))


def frozen() -> nn.Module:
    model = build()
    model[:2].requires_grad_(False)
    return model


def plain(num_ranks: int, steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, change: Any) -> State:
    """The same training in one process."""
    for step in range(steps):
        change(step)
        for rank in range(num_ranks):
            (model(batch(rank, step)).square().mean() / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train_step(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.backward(model(batch(rank, step)).float().square().mean())
    assert optimizer.step().applied


# Frozen at `shard`, trained later -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16-remainder"])
@on_ranks(2)
def test_the_optimizer_of_a_handle_takes_what_requires_grad_later(rank: int, precision: str) -> list[Any]:
    """The first linear layer's weight trains from step 2 on, its bias from step 4 on."""

    def change(model: nn.Module, step: int) -> None:
        for name, at in (("weight", 2), ("bias", 4)):
            if step == at:
                getattr(model[0], name).requires_grad_(True)

    def run(rank: int, plan: Plan) -> tuple[State, Any]:
        model = frozen()
        handle = zeroshard.shard(model, plan, units=nn.Linear, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1, foreach=False)
        for step in range(6):
            change(model, step)
            train_step(model, optimizer, rank, step)
        names = {id(p): name for name, p in model.named_parameters()}
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        assert order == ["0.weight", "0.bias", "2.weight", "2.bias"]  # as `model.parameters()`
        assert len(optimizer.state_dict()["state"]) == 4
        return handle.full_state_dict(main=True), handle.comm_log

    runs = {plan: run(rank, plan) for plan in plans_of(precision == "fp32")}
    first = next(iter(runs.values()))[0]
    assert all(same_bits(state, first) for state, _ in runs.values())
    if precision == "fp32":
        model = frozen()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        for name, value in plain(2, 6, model, optimizer, lambda step: change(model, step)).items():
            torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)
    return [log for _, log in runs.values()]


@on_ranks(2)
def test_it_takes_what_nobody_else_has(rank: int) -> None:
    """Param groups and a second optimizer keep their parameters; newly unfrozen ones join the first group."""
    for plan in plans_of(0):
        model = frozen()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        first = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        model[1].requires_grad_(True)
        second = zeroshard.ShardedOptimizer([{"params": model[1].parameters(), "lr": 0.2}], torch.optim.SGD)
        model.requires_grad_(True)
        before = handle.full_state_dict()
        first.backward(model(batch(rank, 0)).square().mean())
        gradients = {name: handle.gradient(name) for name in before}
        first.step(), second.step()
        for name, value in handle.full_state_dict().items():
            lr = 0.2 if name[0] == "1" else 0.1
            torch.testing.assert_close(value, before[name] - lr * gradients[name])
        assert [p.shape for p in first.param_groups[0]["params"]] == [(24, 40), (24,), (8, 16), (8,)]
        # added to its own group before a call of the model
        model = frozen()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        model.requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.5})
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        assert sizes == [4, 2], sizes  # the rest of the backbone is in the first group
        # the user has chosen the parameters: as in torch, others are not trained
        model = frozen()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(model[2].parameters(), torch.optim.SGD, lr=0.1)
        model.requires_grad_(True)
        before = handle.full_state_dict()
        train_step(model, optimizer, rank, 0)
        after = handle.full_state_dict()
        assert [name for name in before if not torch.equal(before[name], after[name])] == ["2.weight", "2.bias"]


@on_ranks(2)
def test_all_frozen_at_shard_and_some_let_go_before_the_optimizer_is_built(rank: int) -> None:
    for plan in plans_of(1):
        for of_handle in (True, False):
            model = build().requires_grad_(False)
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            model[1].requires_grad_(True)
            source = handle if of_handle else model.parameters()
            optimizer = zeroshard.ShardedOptimizer(source, torch.optim.SGD, lr=0.1)
            before = handle.full_state_dict()
            train_step(model, optimizer, rank, 0)
            after = handle.full_state_dict()
            assert [name for name in before if not torch.equal(before[name], after[name])] == ["1.weight", "1.bias"]


@on_ranks(2)
def test_a_part_of_the_model_that_is_called_alone_does_not_lose_gradients(rank: int) -> None:
    """Only a call of the model notices unfrozen parameters. A gradient that arises without such a call raises an
    error."""
    for plan in plans_of(0):
        model = frozen()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        model.requires_grad_(True)
        model[2](model[1](torch.ones(1, 24))).sum().backward()
        with pytest.raises(RuntimeError, match="a parameter has a gradient that was frozen"):
            optimizer.step()


def test_checkpoints_before_and_after(tmp_path: Path) -> None:
    """A checkpoint of a run with freezing loads into a run without it, and the other way round."""

    def start(plan: Any, model: nn.Module) -> tuple[Any, Any]:
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        return handle, zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1, foreach=False)

    def check(rank: int) -> None:
        for plan in (zeroshard.ZERO1, zeroshard.ZERO3):
            model = frozen()
            handle, optimizer = start(plan, model)
            train_step(model, optimizer, rank, 0)
            model[1].requires_grad_(True)
            train_step(model, optimizer, rank, 1)
            folder = tmp_path / plan.name
            zeroshard.save(folder, handle, optimizer, step=2)
            saved, state = handle.full_state_dict(), optimizer.state_dict()
            train_step(model, optimizer, rank, 2)
            expected = handle.full_state_dict()
            for way in ("folder", "state_dict", "frozen at first"):
                model = frozen()
                if way != "frozen at first":
                    model[1].requires_grad_(True)
                handle, optimizer = start(plan, model)
                model[1].requires_grad_(True)
                if way == "state_dict":
                    handle.load_full_state_dict(saved)
                    optimizer.load_state_dict(state)
                else:
                    zeroshard.load(folder, handle, optimizer)
                train_step(model, optimizer, rank, 2)
                assert same_bits(handle.full_state_dict(), expected), (plan, way)

    run_ranks(check, 2)


@on_ranks(2)
def test_state_loads_into_an_optimizer_of_a_handle_where_more_is_frozen_now(rank: int) -> None:
    """Parameters of integers never train, so a state dict is not expected to have them; that was refused. Where a part
    of what is frozen now had no place in it, the error says what to do."""
    for plan in plans_of(0):
        model = build()
        model.table = nn.Parameter(torch.arange(3, device=model[0].weight.device), requires_grad=False)
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
        optimizer.backward(model[:3](batch(rank, 0)).square().mean())
        optimizer.step()
        state = optimizer.state_dict()
        handle.close()

        model[0].requires_grad_(False)
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
        optimizer.load_state_dict(state)
        assert same_bits(optimizer.state_dict()["state"][0], state["state"][0])

        model[2].bias.requires_grad_(False)
        model.never = nn.Parameter(torch.ones(2, device=model[0].weight.device), requires_grad=False)
        handle.close()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
        with pytest.raises(ValueError, match=r"Let the parameters require grad .*freeze them after the load"):
            optimizer.load_state_dict(state)


# Frozen after `shard` -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_is_frozen_is_not_reduced(rank: int) -> list[Any]:
    """Freezing and unfreezing in every order, also of a part of a unit, gives the weights of plain torch. (A backbone
    frozen after `shard` once was still reduced: zeros, 82,944 bytes where 9,216 are needed.)"""
    changes = {1: (0, False), 2: (1, False), 4: (0, True), 6: (1, True), 7: (2, False)}

    def change(model: Any, step: int) -> None:
        if step in changes:
            index, requires = changes[step]
            model[index].requires_grad_(requires)
            model[index].bias.requires_grad_(requires or index == 1)  # the bias of unit 1 keeps training

    def run(rank: int, plan: Plan, precision: Any) -> tuple[State, Any]:
        model = build()
        handle = zeroshard.shard(model, plan, units=nn.Linear, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1, foreach=False)
        memory: list[Any] = []
        for step in range(9):
            change(model, step)
            handle.comm_log.clear()
            optimizer.backward(model(batch(rank, step)).float().square().mean())
            reduced = [event.unit for event in handle.comm_log.entries if event.op == "reduce_scatter"]
            trains = [name for name in "210" if any(p.requires_grad for p in model[int(name)].parameters())]
            assert reduced == trains, (step, reduced)
            norm = sum(
                float(handle.gradient(f"{name}.{kind}").double().square().sum())
                for name in trains
                for kind in ("weight", "bias")
            )
            result = optimizer.step()
            assert result.applied
            assert result.grad_norm == pytest.approx(norm**0.5, rel=1e-5)
            gathered = [
                event.unit for event in handle.comm_log.entries if event.phase == "step" and event.unit in "012"
            ]
            assert set(gathered) <= set(trains)
            memory.append({kind: num for kind, num in handle.memory().items() if kind != "scalars"})
            assert memory[-1] == memory[0]
        return handle.full_state_dict(main=True), handle.comm_log

    logs = []
    for precision in (None, "bf16-remainder"):
        runs = {plan: run(rank, plan, precision) for plan in plans_of(precision is None)}
        first = next(iter(runs.values()))[0]
        assert all(same_bits(state, first) for state, _ in runs.values())
        if precision is None:
            model = build()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
            for name, value in plain(2, 9, model, optimizer, partial(change, model)).items():
                torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)
        logs += [log for _, log in runs.values()]
    return logs


@on_ranks(2)
def test_frozen_between_two_micro_batches(rank: int) -> None:
    """As in torch, the next step still uses gradients from before the freezing; after that the unit is not reduced."""
    for plan, reduced in itertools.product(PLANS, (True, False)):
        model = build()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        with nullcontext() if reduced else handle.no_sync():
            model(batch(rank, 0)).square().mean().backward()
        model[0].requires_grad_(False)
        model(batch(rank, 1)).square().mean().backward()
        assert optimizer.step().applied
        handle.comm_log.clear()
        train_step(model, optimizer, rank, 2)
        assert [e.unit for e in handle.comm_log.entries if e.op == "reduce_scatter"] == ["2", "1"]
        expected = build()
        plain_optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
        for numbers in ((0, 1), (2,)):
            for number in numbers:
                expected[0].requires_grad_(number == 0)
                for of_rank in range(2):
                    (expected(batch(of_rank, number)).square().mean() / 2).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        state = handle.full_state_dict()
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(state[name], value)


class WithMethod(nn.Sequential):
    def features(self, x: Tensor) -> Any:
        return self.forward(x)


@on_ranks(2)
def test_a_method_of_the_model_follows_as_its_forward_does(rank: int) -> None:
    for plan in plans_of(1):
        ends = []
        for name in ("__call__", "features"):
            model = WithMethod(*frozen())
            handle = zeroshard.shard(model, plan)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            handle.register_forward_method(model, "features")
            for step in range(3):
                model[0].requires_grad_(step > 0)
                getattr(model, name)(batch(rank, step)).square().mean().backward()
                optimizer.step()
            ends.append(handle.full_state_dict())
        assert same_bits(*ends), plan
        assert not torch.equal(ends[0]["0.bias"], build()[0].bias)


@on_ranks(2)
def test_frozen_before_a_backward_in_which_one_rank_alone_calls_the_model_again(rank: int) -> None:
    """The agreement is collective: it waits for the next forward."""
    for plan in plans_of(0):
        ends = []
        for recomputes in (False, rank == 0):
            model = build()
            handle = zeroshard.shard(model, plan)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            for step in range(3):
                x = batch(rank, step)
                y = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
                model[0].bias.requires_grad_(step != 1)
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append(handle.full_state_dict())
        assert same_bits(*ends), plan


@pytest.mark.by_gloo  # its messages say what they belong to; other ranks wait until the timeout
def test_ranks_must_agree_in_what_requires_grad() -> None:
    """Each case breaks the communication between the ranks, so each case starts new ranks. If one rank alone has
    changed something, the first rank that finds out raises, and another one may wait until that rank has ended."""

    def different(rank: int, plan: Any) -> None:
        model = build()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        model[rank].requires_grad_(False)
        with pytest.raises(ValueError, match=r"parameter 0\.bias requires grad on rank 1 alone"):
            model(batch(rank, 0))
        handle.engine.expect_in_place()

    def one_alone(rank: int, plan: Any) -> None:
        model = build()
        zeroshard.shard(model, plan, units=nn.Linear)
        if rank == 1:
            model[0].requires_grad_(False)
        model(batch(rank, 0)).square().mean().backward()

    for plan in (zeroshard.DDP, zeroshard.ZERO3):
        run_ranks(different, 2, plan)
        with pytest.raises(RankError, match=r"rank 1 is at a change of requires_grad \(freeze and unfreeze the same"):
            run_ranks(one_alone, 2, plan)


@on_ranks(2)
def test_forward_alone_inside_unsharded_needs_no_agreement(rank: int) -> None:
    model = build()
    handle = zeroshard.shard(model, "zero3", units=nn.Linear)
    model[0].requires_grad_(False)
    with handle.unsharded():
        if rank == 1:
            model(batch(rank, 0))
    with torch.no_grad():
        model(batch(rank, 0))
    model(batch(rank, 0)).sum().backward()
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter 0\.bias has a gradient, and did not require grad"):
        model[0](batch(rank, 0)).sum().backward()


@pytest.mark.parametrize("trains", [False, True])
@on_ranks(2)
def test_a_scope_behind_a_backward_that_left_all_out_on_one_rank(rank: int, trains: bool) -> None:
    """Under `no_sync`: that rank alone agreed on the change, and the others were at the scope's weights."""
    for plan in (zeroshard.DDP, zeroshard.ZERO2):  # under ZeRO-3 the backward gathers
        model = build()
        model[2].requires_grad_(not trains)
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        with handle.no_sync():
            loss = model(batch(rank, 0)).sum()
            (loss.detach().requires_grad_() if rank else loss).backward()
        model[2].requires_grad_(trains)
        with handle.unsharded():
            assert handle.engine.freezing.num_changes == 0
        optimizer.zero_grad()
        with handle.unsharded():  # here all of them follow
            model(batch(rank, 1)).sum().backward()
            assert (model[2].weight.grad is not None) is trains


@on_ranks(2)
def test_a_loop_inside_unsharded_follows(rank: int) -> None:
    """Entering the block is collective: there the ranks agree, as a forward inside cannot. The step once raised that
    the model had not been called since."""

    def change(model: nn.Module, step: int) -> None:
        model[0].requires_grad_(step in (1, 3))
        model[1].requires_grad_(step != 2)

    for plan in PLANS:
        model = frozen()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1, foreach=False)
        for step in range(4):
            change(model, step)
            with handle.unsharded():
                optimizer.backward(model(batch(rank, step)).square().mean())
            assert optimizer.step().applied
        model = frozen()
        reference = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        expected = plain(2, 4, model, reference, partial(change, model))
        torch.testing.assert_close(handle.full_state_dict(), dict(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_at_random(shape: tuple[int, ...]) -> None:
    """Weights, biases and layers are frozen and unfrozen between steps of one or two micro-batches. The weights are
    those of plain torch, and have the same bits under every plan, also with replicas. By default under DDP, and in turn
    under ZERO3 and ZERO2."""
    plans = PLANS if EVERYTHING else (PLANS[0], PLANS[-len(shape)])

    def run(rank: int, plan: Plan, seed: int) -> State:
        random, num_ranks = Random(seed), math.prod(shape)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if len(shape) > 1 else None
        model, plain = build(), [build()] * (plan is PLANS[0] and rank == 0)  # the others have the same bits
        keep = random.choice([(), True, ["1"]])
        handle = zeroshard.shard(model, plan, units=nn.Linear, mesh=mesh, keep_gathered=keep)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.05, foreach=False)
        plain_optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05, foreach=False) for one in plain]
        for step in range(6):
            for index in range(3):
                if random.random() < 0.4:
                    requires, name = random.random() < 0.5, random.choice(["weight", "bias", ""])
                    for one in (model, *plain):
                        layer: Any = one[index]
                        (getattr(layer, name) if name else layer).requires_grad_(requires)
            for one in (model, *plain):
                one[2].bias.requires_grad_(True)  # something must train
            for micro_batch in range(random.choice([1, 2])):
                number = step + 10 * micro_batch
                model(batch(rank, number)).square().mean().backward()
                for expected, of_rank in itertools.product(plain, range(num_ranks)):
                    (expected(batch(of_rank, number)).square().mean() / num_ranks).backward()
            optimizer.step()
            for one in plain_optimizers:
                one.step(), one.zero_grad()
        state = handle.full_state_dict()
        for expected in plain:
            for name, value in expected.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
        return state

    def check(rank: int) -> list[State]:
        states = []
        for seed in range(2) if EVERYTHING else [len(shape) - 1]:
            found = [run(rank, plan, seed) for plan in plans]
            assert all(same_bits(state, found[0]) for state in found), seed
            states.append(found[0])
        return states

    first, *others = run_ranks(check, math.prod(shape))
    assert all(all(map(same_bits, first, of_rank)) for of_rank in others)


def trains(handle: Any, optimizer: Any, model: nn.Module, of: str) -> bool:
    before = handle.full_state_dict()[of]
    optimizer.zero_grad()
    model(batch(0, 1)).square().mean().backward()
    optimizer.step()
    return not torch.equal(before, handle.full_state_dict()[of])


@on_ranks(2)
def test_a_class_that_refuses_what_is_unfrozen_does_so_again(rank: int) -> None:
    """The forward raised. If the loop went on (a notebook's cell that is run again), the bias stayed as it was, in
    silence; also under OPTIMIZER_ONLY, where the step raised. Another optimizer may have it then."""
    model = build().requires_grad_(False)
    model[1].weight.requires_grad_(True)
    handle = zeroshard.shard(model, "zero1", units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Muon, lr=0.1)
    assert trains(handle, optimizer, model, "1.weight")
    model[1].bias.requires_grad_(True)
    for _ in range(3):
        with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
            trains(handle, optimizer, model, "1.bias")
    assert len(optimizer.param_groups[0]["params"]) == 1
    other = zeroshard.ShardedOptimizer([model[1].bias], torch.optim.SGD, lr=0.1)
    assert trains(handle, optimizer, model, "1.weight") and trains(handle, other, model, "1.bias")

    plain = build()
    plain[1].bias.requires_grad_(False)
    matrices = [{"params": [layer.weight for layer in plain] + [plain[1].bias], "optimizer_class": torch.optim.Muon}]
    alone = zeroshard.ShardedOptimizer(matrices, torch.optim.SGD, lr=0.1)
    plain[1].bias.requires_grad_(True)
    for _ in range(2):
        plain(batch(0, 1)).square().mean().backward()
        with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
            alone.step()


@on_ranks(2)
def test_what_is_unfrozen_trains_although_a_group_beside_it_was_refused(rank: int) -> None:
    """The first group had the weight after `add_param_group` had raised, and no step updated it."""
    model = build().requires_grad_(False)
    model[2].weight.requires_grad_(True)
    handle = zeroshard.shard(model, "zero2", units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        optimizer.add_param_group({"params": [model[0].bias], "optimizer_class": torch.optim.Muon})
    assert trains(handle, optimizer, model, "0.weight") and trains(handle, optimizer, model, "0.bias")
    assert [len(group["params"]) for group in optimizer.param_groups] == [3]


@on_ranks(2)
def test_without_memory_for_what_is_unfrozen_on_one_rank_all_raise_and_can_go_on(rank: int) -> None:
    """The other rank waited. If new steppers had no memory for their state, it was lost, in silence."""
    model = build()
    model[1].requires_grad_(False)
    handle = zeroshard.shard(model, "zero2", units=nn.Linear, precision="bf16")
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=0.1)
    assert trains(handle, optimizer, model, "0.weight")
    model[1].requires_grad_(True)
    for owner, name in ((Unit, "_new_gradients"), (Steppers, "build"), (Steppers, "load")):

        def fails(*_: object) -> NoReturn:
            raise MemoryError

        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(owner, name, fails)
            with pytest.raises(RuntimeError, match=r"on rank 1\): MemoryError"):
                trains(handle, optimizer, model, "1.weight")
        optimizer.zero_grad()
    assert trains(handle, optimizer, model, "1.weight")
    assert [float(state["step"]) for state in optimizer.state_dict()["state"].values()] == [2, 2, 1, 1, 2, 2]
