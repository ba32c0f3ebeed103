"""Only rank 0 has the values: `load_state_dict(state, broadcast_from_rank0=True)`.

The option is that of torch.distributed.checkpoint, for weights and optimizer state. (For optimizer state every rank
once had to hold all of it on the host at once.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, Block, Net, loss_of_tokens, make, same_bits
from tests.together import in_turn
from zeroshard.comm.collectives import Collectives
from zeroshard.testing import run_ranks

CLASSES = {torch.optim.AdamW: {"lr": 1e-2, "foreach": False}, torch.optim.Adafactor: {"lr": 1e-2}}


class Scaled(Net):
    """With a 0-dimensional parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


def start(plan: Any, optimizer_class: Any, seed: int, frozen: bool = False) -> tuple[Any, Any, Any]:
    model: Any = make(Scaled, seed)
    if frozen:
        model.blocks[0].requires_grad_(False)
    if plan is zeroshard.OPTIMIZER_ONLY:
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), optimizer_class, **CLASSES[optimizer_class])
        return model, optimizer.handle, optimizer
    handle = zeroshard.shard(model, plan, units=Block)
    return model, handle, zeroshard.ShardedOptimizer(handle, optimizer_class, **CLASSES[optimizer_class])


def step(model: Any, optimizer: Any, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of_tokens(model, rank, 0, number).backward()
    if optimizer.handle.plan.external_gradients:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
    optimizer.step()


def test_it_goes_on_as_where_all_ranks_have_it() -> None:
    def check(rank: int, optimizer_class: Any) -> None:
        model, handle, optimizer = start(zeroshard.ZERO2, optimizer_class, 0)
        for number in range(2):
            step(model, optimizer, rank, number)
        weights, state = handle.full_state_dict(), optimizer.state_dict()
        state["param_groups"][0]["lr"] = 3e-2
        optimizer.param_groups[0]["lr"] = 3e-2
        step(model, optimizer, rank, 2)
        whole = handle.full_state_dict()
        nothing: Any
        every = [(plan, [{}, None][i % 2], i == 3) for i, plan in enumerate(PLANS)]
        for plan, nothing, frozen in every if EVERYTHING else every[list(CLASSES).index(optimizer_class) :: 2]:
            model, handle, optimizer = start(plan, optimizer_class, 1, frozen)
            handle.load_full_state_dict(weights if rank == 0 else nothing, broadcast_from_rank0=True)
            optimizer.load_state_dict(state if rank == 0 else nothing, broadcast_from_rank0=True)
            assert optimizer.state_dict()["param_groups"] == state["param_groups"]
            model.requires_grad_(True)
            step(model, optimizer, rank, 2)
            assert same_bits(handle.full_state_dict(), whole), plan
        model, handle, optimizer = start(zeroshard.OPTIMIZER_ONLY, optimizer_class, 1, True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state if rank == 0 else nothing, broadcast_from_rank0=True)
        for mine, theirs in zip(optimizer.state_dict()["state"].values(), state["state"].values(), strict=True):
            assert all(torch.equal(mine[key], value) for key, value in theirs.items())

    run_ranks(in_turn(check, CLASSES), 3)


def test_no_rank_gets_more_than_a_unit_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata that ranks exchange first are smaller than a single tensor of the state."""

    def check(rank: int) -> None:
        model, _, optimizer = start(zeroshard.ZERO3, torch.optim.AdamW, 0)
        step(model, optimizer, rank, 0)
        state = optimizer.state_dict()
        sent: list[int] = []
        broadcast = Collectives.broadcast

        def noted(self: Any, tensors: Any, *args: Any) -> None:
            sent.extend(tensor.numel() for tensor in tensors)
            broadcast(self, tensors, *args)

        monkeypatch.setattr(Collectives, "broadcast", noted)
        optimizer.load_state_dict(state if rank == 0 else {}, broadcast_from_rank0=True)
        assert sorted(sent) == sorted(2 * [p.numel() for p in model.parameters() if p.numel() > 1])

    run_ranks(check, 2)


def test_what_is_wrong_on_rank_0_raises_everywhere_and_changes_nothing() -> None:
    def check(rank: int) -> None:
        model, handle, optimizer = start(zeroshard.ZERO3, torch.optim.AdamW, 0)
        step(model, optimizer, rank, 0)
        good, weights = optimizer.state_dict(), handle.full_state_dict()
        first = next(iter(good["state"]))
        groups, name = good["param_groups"], next(iter(weights))
        of_first = good["state"][first]
        cases: list[tuple[Any, str]] = [
            ({}, "on rank 0.: a state_dict with 'state' and 'param_groups' is needed"),
            ({**good, "param_groups": [*groups, *groups]}, "param groups of"),
            ({**good, "state": {first: {**of_first, "exp_avg": torch.zeros(3)}}}, "state 'exp_avg' of"),
            ({**good, "state": {first: {**of_first, "more": object()}}}, "is of type object"),
            ({**good, "state": 3}, "TypeError"),
            ([1, 2], "TypeError"),
        ]
        for state, message in cases:
            with pytest.raises(ValueError, match=message):
                optimizer.load_state_dict(state if rank == 0 else {}, broadcast_from_rank0=True)
        for values, message in [
            ({**weights, name: torch.zeros(2)}, f"{name}: expected"),
            ({**weights, name: "text"}, f"{name}: expected a dense tensor, found a str"),
            ({**weights, "other": torch.zeros(2)}, "unexpected other"),
            (None, "missing"),
            (3, "expected a dict"),
        ]:
            with pytest.raises(ValueError, match=message):
                handle.load_full_state_dict(values if rank == 0 else None, broadcast_from_rank0=True)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="where rank 0 alone has it, pass broadcast_from_rank0=True"):
            optimizer.load_state_dict({})
        assert same_bits(handle.full_state_dict(), weights)
        assert torch.equal(optimizer.state_dict()["state"][first]["exp_avg"], of_first["exp_avg"])

    run_ranks(check, 2)
