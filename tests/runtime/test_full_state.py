"""Options of `full_state_dict` and `load_full_state_dict`: one rank only, on the CPU, a part of the model.

Without them, saving on rank 0 needs the whole model on every rank (in GPU memory), and a state dict that lacks a name
cannot be loaded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import Block, Net, loss_of_tokens, make, plans_of, same_bits
from tests.together import in_turn, on_ranks
from zeroshard.testing import expect_same_logs, run_ranks


class WithBuffers(Net):
    def __init__(self) -> None:
        super().__init__(tied=True, blocks=2)
        self.batch_norm = nn.BatchNorm1d(7, affine=False)
        self.embed.weight.requires_grad_(False)


def start(plan: Any, rank: int, precision: Any = "bf16", seed: int = 0) -> tuple[Any, Any, Any]:
    model = make(WithBuffers, seed)
    handle = zeroshard.shard(model, plan, units=Block, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
    optimizer.backward(loss_of_tokens(model, rank, 0, 0))
    optimizer.step()
    return model, handle, optimizer


def test_on_rank_0_alone_and_on_the_cpu() -> None:
    def check(rank: int) -> list[Any]:
        logs = []
        for plan in plans_of(0):
            _, handle, optimizer = start(plan, rank)
            for main in (False, True):
                everywhere = handle.full_state_dict(main=main)
                alone = handle.full_state_dict(main=main, rank0_only=True, device="cpu")
                assert list(alone) == (list(everywhere) if rank == 0 else [])
                assert rank or same_bits(alone, everywhere)
                on_meta = handle.full_state_dict(main=main, device="meta")  # values are moved to another device
                assert all(value.is_meta for value in on_meta.values())
            logs.append(handle.comm_log)
            del optimizer
        return logs

    for logs in zip(*run_ranks(check, 3), strict=True):
        expect_same_logs(logs)


@on_ranks(2)
def test_what_rank_0_has_becomes_everyones(rank: int) -> None:
    def check(rank: int, precision: str) -> None:
        for plan in plans_of(1):
            _, source, kept = start(plan, rank, precision)
            state, main = source.full_state_dict(), source.full_state_dict(main=True, rank0_only=True, device="cpu")
            _, handle, optimizer = start(plan, rank, precision, seed=1)
            for given in (main, main if rank == 0 else None):
                handle.load_full_state_dict(
                    {name: value + 1 for name, value in source.full_state_dict(main=True).items()}
                )
                keys = handle.load_full_state_dict(given, broadcast_from_rank0=True)
                assert keys == ([], []) and keys.missing_keys == []
                assert same_bits(handle.full_state_dict(), state), plan
                again = handle.full_state_dict(main=True, rank0_only=True)
                assert same_bits(again, main), plan
            without = {name: value for name, value in main.items() if name != "norm.weight"}
            with pytest.raises(ValueError, match=r"\(on rank 0\): missing norm\.weight"):
                handle.load_full_state_dict(without, broadcast_from_rank0=True)
            assert same_bits(handle.full_state_dict(), state), plan
            del kept, optimizer

    in_turn(check, ["bf16", "bf16-remainder"])(rank)


@on_ranks(2)
def test_a_part_with_strict_off(rank: int) -> None:
    """Missing parameters keep their values, unexpected names are ignored, and both are returned, as in torch."""

    def check(rank: int, from_rank0: bool) -> None:
        for plan in plans_of(0):
            _, handle, optimizer = start(plan, rank)
            before = handle.full_state_dict(main=True)
            part = {name: value + 1 for name, value in before.items() if name.startswith(("blocks.1", "batch_norm"))}
            plain = make(WithBuffers).load_state_dict({**part, "other": torch.ones(1)}, strict=False)
            given = {**part, "other": torch.ones(1)} if rank == 0 or not from_rank0 else {}
            keys = handle.load_full_state_dict(given, strict=False, broadcast_from_rank0=from_rank0)
            assert (sorted(keys.missing_keys), keys.unexpected_keys) == (
                sorted(plain.missing_keys),
                plain.unexpected_keys,
            )
            assert same_bits(handle.full_state_dict(main=True), {**before, **part}), plan
            wrong = {"norm.weight": torch.ones(2)}
            with pytest.raises(ValueError, match=r"norm\.weight: expected \(19,\), found \(2,\)"):
                handle.load_full_state_dict(wrong, strict=False, broadcast_from_rank0=from_rank0)
            if not from_rank0:
                with pytest.raises(ValueError, match="the ranks have different state dicts"):
                    handle.load_full_state_dict(part if rank == 0 else {}, strict=False)
            assert same_bits(handle.full_state_dict(main=True), {**before, **part}), plan
            del optimizer

    in_turn(check, [False, True])(rank)


def test_the_optimizers_state_on_rank_0_alone() -> None:
    """State by element, and of whole parameters at owners; other ranks hold the state of at most one unit at a time."""

    def check(rank: int) -> list[Any]:
        logs = []
        for plan in plans_of(1):
            model = make(lambda: nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 8)))
            handle = zeroshard.shard(model, plan, units=nn.Linear, precision="bf16")
            groups = [
                {"params": [p for p in model.parameters() if p.dim() == 2], "optimizer_class": torch.optim.Muon},
                {"params": [p for p in model.parameters() if p.dim() == 1]},
            ]
            optimizer = zeroshard.ShardedOptimizer(groups, torch.optim.AdamW, lr=1e-2, foreach=False)
            for step in range(2):
                data = torch.randn(3, 12, generator=torch.Generator().manual_seed(rank + 9 * step))
                model(data).float().square().mean().backward()
                optimizer.step()
            everywhere = optimizer.state_dict()
            for device in (None, "cpu"):
                alone = optimizer.state_dict(rank0_only=True, device=device)
                assert list(alone) == (list(everywhere) if rank == 0 else [])
                if rank == 0:
                    assert alone["param_groups"] == everywhere["param_groups"]
                    assert alone["state"].keys() == everywhere["state"].keys()
                    for index, state in everywhere["state"].items():
                        assert same_bits(alone["state"][index], state)
            logs.append(dict(handle.comm_log.digests))  # owners send unevenly
        return logs

    for digests in zip(*run_ranks(check, 3), strict=True):
        assert digests[1:] == digests[:1] * 2
