"""A checkpoint does not depend on world size, plan or the format of main: every run loads it exactly, whatever saved
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zeroshard
from tests.checkpoint.common import FULL, PLANS, Awkward, Kind, Run, make, muon_and_adamw, same_bits, seed_all
from zeroshard.precision import MixedPrecision
from zeroshard.testing import run_ranks

WORLD_SIZES = (1, 2, 3, 4, 5, 8) if FULL else (1, 2, 3)
MAINS = ("fp32", "bf16", "bf16-remainder")
KINDS = {"muon and adamw": Kind(Awkward, groups=muon_and_adamw)} | ({"adamw": Kind(Awkward)} if FULL else {})
SAVED = [(plan.name, precision) for plan in PLANS for precision in MAINS]


def full_state(run: Run) -> dict[str, Any]:
    """The state that does not depend on the format: main and moments, without the buffer that differs between ranks.
    The frozen parameter, whose dtype is that of the weights, is cast to fp32."""
    left_out = ("weights", "main average")
    state = {name: value for name, value in run.state().items() if not name.startswith(left_out)}
    return {**state, "main frozen": state["main frozen"].float()}


@pytest.mark.parametrize("kind", list(KINDS))
def test_any_world_size_plan_and_format_to_any_other(tmp_path: Path, kind: str) -> None:
    def save(rank: int, num_ranks: int) -> dict[str, Any]:
        states = {}
        for index, (plan, precision) in enumerate(SAVED):
            if FULL or index % 4 == num_ranks % 4:
                seed_all(rank)
                run = Run(rank, plan, precision, KINDS[kind]).train(range(2))
                run.save(tmp_path / f"{num_ranks} {plan} {precision}", 2)
                states[f"{num_ranks} {plan} {precision}"] = full_state(run)
        return states if rank == 0 else {}

    def load(rank: int, num_ranks: int) -> tuple[int, list[str]]:
        wrong, count = [], 0
        for name, expected in saved.items():
            if name.startswith(f"{num_ranks} ") and not FULL:
                continue  # test_round_trips.py
            for _ in range(3 if FULL else 1):
                plan, precision = SAVED[(count * 5 + num_ranks) % len(SAVED)]
                run = Run(rank, plan, precision, KINDS[kind], seed=5)
                run.load(tmp_path / name, allow_rounding=precision != "fp32")  # the frozen parameter is rounded
                count += 1
                if not same_bits(full_state(run), expected):
                    wrong.append(f"{name} -> {num_ranks} {plan} {precision}")
        return count, wrong

    saved: dict[str, Any] = {}
    for num_ranks in WORLD_SIZES:
        saved |= run_ranks(save, num_ranks, num_ranks)[0]
    total = 0
    for num_ranks in WORLD_SIZES:
        results = run_ranks(load, num_ranks, num_ranks, timeout=3600)
        total += results[0][0]
        assert [wrong for _, wrong in results] == [[]] * num_ranks
    print(f"{kind}: {len(saved)} checkpoints, {total} loads")


def test_master_and_remainder_train_on_alike(tmp_path: Path) -> None:
    """Main is saved as fp32, loaded as remainder, saved again and loaded as fp32: the next steps give the same bits."""

    def check(rank: int) -> bool:
        seed_all(rank)
        master = Run(rank, "zero2", "bf16").train(range(2))
        master.save(tmp_path / "master", 2)
        first = Run(rank, "zero3", "bf16-remainder", seed=3)
        first.load(tmp_path / "master")
        first.save(tmp_path / "remainder", 2)
        second = Run(rank, "zero1", "bf16", seed=4)
        second.load(tmp_path / "remainder")
        master.load(tmp_path / "master")
        again = Run(rank, "ddp", "bf16", seed=5)
        again.load(tmp_path / "master")
        states = []
        for run in (master, second, again):
            seed_all(rank)
            run.train(range(2, 5))
            states.append(run.state())
        return same_bits(states[0], states[1]) and same_bits(states[0], states[2])

    assert all(run_ranks(check, 3))


def test_fp32_becomes_bf16_only_when_asked(tmp_path: Path) -> None:
    narrow = MixedPrecision(torch.bfloat16, torch.bfloat16, None, torch.bfloat16)

    def check(rank: int) -> tuple[str, bool, bool]:
        wide = Run(rank, "zero3", "fp32").train(range(2))
        wide.save(tmp_path, 2)
        run = Run(rank, "zero2", narrow, seed=1)
        before = run.state()
        try:
            run.load(tmp_path)
        except zeroshard.CheckpointError as error:
            message = str(error)
        untouched = same_bits(before, run.state())
        run.load(tmp_path, allow_rounding=True)
        expected = {name: value.bfloat16() for name, value in wide.handle.full_state_dict().items()}
        rounded = same_bits(run.handle.full_state_dict(), expected)
        moments = run.optimizer.state_dict()["state"][0]["exp_avg"]
        run.train(range(2, 4))
        run.save(tmp_path, 4)
        wide.load(tmp_path)  # and back: bf16 to fp32 is exact
        return message, untouched, rounded and moments.dtype == torch.bfloat16

    for message, untouched, rounded in run_ranks(check, 2):
        assert "would be rounded to torch.bfloat16 (see allow_rounding)" in message
        assert untouched and rounded


def test_frozen_and_trained_parameters_meet(tmp_path: Path) -> None:
    """Parameters are saved while trainable and loaded as frozen, and the other way round."""

    def check(rank: int) -> bool:
        trained = make(Awkward)
        handle = zeroshard.shard(trained, "zero3")
        zeroshard.save(tmp_path, handle, step=1)
        frozen = make(Awkward, 1)
        for parameter in frozen.blocks.parameters():
            parameter.requires_grad_(False)
        other = zeroshard.shard(frozen, "zero1")
        zeroshard.load(tmp_path, other)
        zeroshard.save(tmp_path, other, step=2)
        last = make(Awkward, 2)
        third = zeroshard.shard(last, "zero2")
        zeroshard.load(tmp_path, third)
        a, b, c = (h.full_state_dict() for h in (handle, other, third))
        return same_bits(a, b) and same_bits(a, c)

    assert all(run_ranks(check, 2))


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 4)
        self.three = nn.Linear(4, 5)


def test_what_does_not_fit_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    class Original(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 4)
            self.two = nn.Linear(4, 5)

    def check(rank: int) -> list[Any]:
        models = make(Original), make(Renamed, 1), nn.Sequential(nn.Linear(3, 5))
        handle = zeroshard.shard(models[0], "zero2")
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2)
        zeroshard.save(tmp_path, handle, optimizer, step=3)
        other = zeroshard.shard(models[1], "zero3")
        its_optimizer = zeroshard.ShardedOptimizer(other, torch.optim.SGD, lr=1e-2)
        before, messages = other.full_state_dict(), []
        for one in (None, its_optimizer):
            with pytest.raises(zeroshard.CheckpointError) as caught:
                zeroshard.load(tmp_path, other, one)
            messages.append(str(caught.value))
        untouched = same_bits(before, other.full_state_dict())
        loaded = zeroshard.load(tmp_path, other, its_optimizer, strict=False)
        after = other.full_state_dict()
        expected = {**before, **{k: v for k, v in handle.full_state_dict().items() if k.startswith("one")}}
        with pytest.raises(zeroshard.CheckpointError) as caught:
            zeroshard.load(tmp_path, zeroshard.shard(models[2], "ddp"), strict=True)
        with pytest.raises(zeroshard.CheckpointError, match=r"holds no step 7; it has the steps \[3\]"):
            zeroshard.load(tmp_path, handle, step=7)
        return [*messages, untouched, same_bits(after, expected), list(loaded.missing), list(loaded.unexpected)]

    for result in run_ranks(check, 2):
        weights, both, untouched, taken, missing, unexpected = result
        assert "missing: three.bias, three.weight" in weights and "unexpected: two.bias, two.weight" in weights
        assert "state of AdamW for SGD (make the optimizer of the class that was saved; or leave it out" in both
        assert "optimizer state of three.weight" in both
        assert untouched and taken
        assert {"three.weight", "three.bias"} <= set(missing) and {"two.weight", "two.bias"} <= set(unexpected)


def test_other_shapes_are_refused_also_when_not_strict(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        models = nn.Linear(3, 4), nn.Linear(5, 4)
        zeroshard.save(tmp_path, zeroshard.shard(models[0], "zero1"), step=0)
        with pytest.raises(zeroshard.CheckpointError, match=r"weight: expected the shape \(4, 5\), found \(4, 3\)"):
            zeroshard.load(tmp_path, zeroshard.shard(models[1], "zero1"), strict=False)

    run_ranks(check, 2)


def test_each_rank_reads_its_own_part(tmp_path: Path) -> None:
    """Four ranks together read little more than one rank alone: two ranks read each block at a boundary of shards."""

    def sharded(plan: str) -> zeroshard.Handle:
        return zeroshard.shard(nn.Sequential(*[nn.Linear(600, 600) for _ in range(4)]), plan)

    def save(rank: int) -> None:
        zeroshard.save(tmp_path, sharded("zero3"), step=0)

    def bytes_read(rank: int, plans: list[str]) -> list[int]:
        return [int(zeroshard.load(tmp_path, sharded(plan)).bytes_read) for plan in plans]

    run_ranks(save, 2)
    alone = run_ranks(bytes_read, 1, ["zero3"])[0][0]
    limits = {"zero3": 2.0, "zero1": 2.0, "ddp": 4.1}
    of_ranks = run_ranks(bytes_read, 4, list(limits))
    for (plan, most), shares in zip(limits.items(), zip(*of_ranks, strict=True), strict=True):
        print(plan, alone, shares)
        assert sum(shares) <= most * alone
        assert max(shares) <= (alone + 100 if plan == "ddp" else alone / 4 + 2 * (1 << 20) + 25_000)


class NewStorages(TorchDispatchMode):
    """Records the size of the largest storage that an operation has allocated."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


@pytest.mark.by_cpu
@pytest.mark.parametrize("precision", ["fp32", "bf16-remainder"])
def test_nothing_large_is_made_on_the_way(tmp_path: Path, precision: str) -> None:
    """A rank holds 4 MB of main, and as much of each moment; saving and loading handle one block or piece at a time."""

    def check(rank: int) -> list[int]:
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
        handle = zeroshard.shard(model, "zero3", units=nn.Linear, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-3)
        optimizer.backward(model(torch.ones(2, 1000)).square().mean())
        optimizer.step()
        largest = []
        for work in (
            lambda: zeroshard.save(tmp_path, handle, optimizer, step=1),
            lambda: zeroshard.load(tmp_path, handle, optimizer),
            lambda: zeroshard.save(tmp_path, handle, optimizer, step=2, background=True).wait(),
        ):
            with NewStorages() as made:
                work()
            largest.append(made.largest)
        return largest

    for save, load, background in run_ranks(check, 2):
        print(precision, save, load, background)
        assert max(save, load) <= 1 << 20
        assert background > 1 << 20, "a copy is seen: the measurement sees what there is"


def test_a_failing_rank_makes_all_ranks_raise(tmp_path: Path) -> None:
    class Bad:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def state_dict(self) -> dict[str, Any]:
            return {"rank": self.rank}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.rank == 1:
                raise RuntimeError("not today")

    def check(rank: int) -> None:
        model = nn.Linear(3, 4)
        handle = zeroshard.shard(model, "zero1")
        zeroshard.save(tmp_path, handle, step=0, extra={"bad": Bad(rank)})
        with pytest.raises(zeroshard.CheckpointError, match=r"\(on rank 1\): .* 'bad' raised RuntimeError: not today"):
            zeroshard.load(tmp_path, handle, extra={"bad": Bad(rank)})

    run_ranks(check, 3)
