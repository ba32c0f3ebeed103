"""Tensors that a program keeps in the memory of replicated weights: after a step they have the new values, as in plain
torch, also where those of the other ranks arrive later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import grid
from tests.kit import DEVICE, PLANS, travelling
from tests.together import on_ranks
from zeroshard.storage.buffer import FlatBuffer
from zeroshard.testing import run_ranks

WIDTH = 13
FULL = [plan for plan in PLANS if plan is not zeroshard.ZERO3]
WAYS = ("shared", "pairwise", "native")


class Training:
    """Two layers, each a unit, trained for some steps."""

    def __init__(self, rank: int, plan: zeroshard.Plan, precision: str | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(DEVICE)
        self.handle = zeroshard.shard(self.model, plan, units=[nn.Linear], precision=precision)
        self.optimizer = zeroshard.ShardedOptimizer(self.handle, torch.optim.SGD, lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(4, WIDTH, generator=generator).to(DEVICE, self.weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.model[0].weight

    def step(self) -> None:
        self.model(self.x).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


KEPT = [(*case, 3 if case[1] == "pairwise" else 2) for case in grid(FULL, WAYS, [None, "bf16"])]


@pytest.mark.parametrize(("plan", "way", "precision", "ranks"), KEPT)
@on_ranks("ranks")
def test_kept_tensors_have_the_values_of_the_last_step(
    rank: int, plan: zeroshard.Plan, way: str, precision: str | None, ranks: int
) -> None:
    with travelling(way):
        training = Training(rank, plan, precision)
        state, view = training.model.state_dict(), training.weight.t()[1:5]
        others = training.weight.detach(), training.weight.data
        for _ in range(2):
            training.step()
            found = {name: value.clone() for name, value in state.items()}
            found |= {"detach": others[0].clone(), "data": others[1].clone(), "view": view.detach().clone()}
            expected = dict(training.handle.full_state_dict())
            weight = expected["0.weight"]
            expected |= {"detach": weight, "data": weight, "view": weight.t()[1:5]}
            assert [name for name in expected if not torch.equal(expected[name].to(DEVICE), found[name])] == []
        training.step()
        (view.float() * 2).sum().backward()
        gradient = torch.zeros(WIDTH, WIDTH, device=DEVICE)
        gradient[:, 1:5] = 2
        assert torch.equal(training.handle.gradient("0.weight").to(DEVICE).float(), gradient)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_storage_that_is_kept_counts_as_a_tensor(rank: int, way: str) -> None:
    with travelling(way):
        training = Training(rank, zeroshard.ZERO2)
        bias = training.model[1].bias
        storage, place, dtype = bias.untyped_storage(), bias.storage_offset(), bias.dtype
        for _ in range(2):
            training.step()
            found = torch.empty(0, dtype=dtype, device=DEVICE).set_(storage, place, (WIDTH,)).clone()
            assert torch.equal(found, training.handle.full_state_dict()["1.bias"].to(DEVICE))


@pytest.mark.by_cpu
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_what_moves_a_weight_to_shared_memory_is_told_to_take_a_copy(rank: int, way: str) -> None:
    with travelling(way):
        training = Training(rank, zeroshard.ZERO2)
        training.step()
        training.weight.detach().share_memory_()  # as a queue of torch.multiprocessing does
        with pytest.raises(RuntimeError, match=r"replaced .*in shared memory, to which .* give them a copy"):
            training.step()


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_only_units_of_which_tensors_are_kept_are_waited_for(rank: int, way: str) -> None:
    with travelling(way):
        training = Training(rank, zeroshard.ZERO2)
        training.step()
        training.model.state_dict(), training.weight.norm()  # these die at once
        training.step()
        hidden = sum(type(parameter) is not nn.Parameter for parameter in training.model.parameters())
        kept = training.model[1].bias.detach()
        training.step()
        still = sum(type(parameter) is not nn.Parameter for parameter in training.model.parameters())
        del kept
        assert (hidden, still) == (4, 2)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_one_rank_may_keep_a_tensor(rank: int, way: str) -> None:
    with travelling(way):
        training = Training(rank, zeroshard.ZERO1)
        kept = training.weight.detach() if rank == 1 else None
        for _ in range(3):
            training.step()
            if kept is not None:
                training.model.eval()(training.x)  # this rank alone
        weight = training.handle.full_state_dict()["0.weight"].to(DEVICE)
        assert kept is None or torch.equal(kept, weight)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_kept_tensors_have_values_that_are_loaded(rank: int, way: str) -> None:
    with travelling(way):
        training = Training(rank, zeroshard.ZERO2)
        kept = training.weight.detach()
        state = {name: torch.full_like(value, 3.0) for name, value in training.handle.full_state_dict().items()}
        training.handle.load_full_state_dict(state)
        assert torch.equal(kept, torch.full_like(kept, 3.0))


def test_what_is_kept_and_not_waited_for_is_old() -> None:
    """Whether it is depends on when messages come, so it is the state of the parameters that tells."""
    assert {*run_ranks(_not_waited_for_at_all, 2)} == {4}


def _not_waited_for_at_all(rank: int) -> int:
    with travelling("pairwise"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatBuffer, "is_lent", property(lambda self: False))
        training = Training(rank, zeroshard.ZERO2)
        kept = training.weight.detach()
        training.step()
        del kept
        return sum(type(parameter) is not nn.Parameter for parameter in training.model.parameters())


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_the_memory_of_kept_tensors_is_not_freed_by_park(rank: int, way: str) -> None:
    """Under DDP it was, and a read ended the process."""
    for plan in FULL:
        with travelling(way):
            _park(Training(rank, plan), is_freed=way != "shared")  # where nothing is resized


@on_ranks(1)
def test_nor_on_one_rank(rank: int) -> None:
    for plan in PLANS:
        _park(Training(rank, plan), is_freed=True)


def _park(training: Training, *, is_freed: bool) -> None:
    kept = training.weight.detach()
    training.step()
    before = kept.clone()
    training.handle.park()
    freed = [unit.weights.buffer.full.untyped_storage().nbytes() for unit in training.handle.engine.units]
    assert torch.equal(kept, before)
    training.handle.unpark()
    training.step()
    assert torch.equal(kept, training.handle.full_state_dict()["0.weight"].to(DEVICE))
    if is_freed:
        assert sorted(map(bool, freed)) == [False, True]
