"""Norms over shards, replicas and tied parameters, clipping, and means weighted by tokens equal torch's in one process.

The engine adds up a norm in another order (rows of 1024, then ranks, in fp64) than torch does (one fp32 tensor after
the other). Norms agree to 1e-5, and so do weights after clipping.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import (
    DEVICE,
    LAST_BITS,
    VOCAB,
    Block,
    Net,
    largest_difference,
    loss_of_tokens,
    make,
    plans_of,
    same_bits,
)
from tests.parity.common import expect_equal_logs
from tests.together import on_ranks
from zeroshard.optim import Lamb
from zeroshard.testing import run_ranks

SGD = {"lr": 0.1, "momentum": 0.9, "foreach": False}
NORMS = {1.0: 3.0, 2.0: 0.3, math.inf: 0.01}
"""Kind of norm -> a limit below the norms of these tests."""


def tied() -> Net:
    return Net(blocks=1, tied=True)


def mean_gradients(model: nn.Module, num_ranks: int, step: int, micro_batches: int = 1) -> None:
    """Set p.grad to the mean over all ranks, in one process."""
    model.zero_grad()
    for rank in range(num_ranks):
        for micro_batch in range(micro_batches):
            loss_of_tokens(model, rank, micro_batch, step, micro_batches).backward()
    for parameter in model.parameters():
        parameter.grad /= num_ranks


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.05},
    ]


def clipped_in_one_process(rank: int, num_ranks: int) -> list[tuple[list[float], dict[str, Tensor]]]:
    """For each kind of norm: the norms of two steps, and the weights after them."""
    result = []
    for norm_type, limit in NORMS.items():
        reference = make(tied)
        plain = torch.optim.SGD(reference.parameters(), **SGD)
        norms = []
        for step in range(2):
            mean_gradients(reference, num_ranks, step, 2)
            norms.append(nn.utils.clip_grad_norm_(reference.parameters(), limit, norm_type).item())
            plain.step()
        assert min(norms) > limit, "something was clipped"
        result.append((norms, reference.state_dict()))
    return result


MESHES = {"3": (3, None), "2x2": (4, (2, 2)), **({"2": (2, None)} if EVERYTHING else {})}


@pytest.mark.parametrize(("num_ranks", "shape"), MESHES.values(), ids=MESHES)
def test_global_norms_and_clipping_are_torchs(num_ranks: int, shape: Any) -> None:
    """On a mesh with one axis, and on one of 2 x 2 with replicas."""
    truths = run_ranks(clipped_in_one_process, 1, num_ranks)[0]

    def check(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if shape else None
        logs = []
        for number, ((norm_type, limit), (expected, weights)) in enumerate(zip(NORMS.items(), truths, strict=True)):
            clipped = []
            for plan in plans_of(number + num_ranks):
                model = make(tied)
                handle = zeroshard.shard(model, plan, units=Block, mesh=mesh)
                optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, **SGD)
                found = []
                for step in range(2):
                    for micro_batch in range(2):
                        optimizer.backward(loss_of_tokens(model, rank, micro_batch, step, 2))
                    found.append(optimizer.clip_grad_norm_(limit, norm_type).item())
                    result = optimizer.step()
                    assert result.grad_norm == found[-1], "of the kind that was clipped by"
                clipped.append(handle.full_state_dict())
                assert found == pytest.approx(expected, rel=1e-5), (plan, norm_type)
                assert largest_difference(clipped[-1], weights) < LAST_BITS, (plan, norm_type)
                logs.append(handle.comm_log)
            assert all(same_bits(clipped[0], other) for other in clipped), norm_type
        return logs

    for logs in zip(*run_ranks(check, num_ranks), strict=True):
        expect_equal_logs(logs)


def test_a_norm_that_counts_a_replica_twice_is_seen() -> None:
    """The negative control: the norm over all four ranks of a 2 x 2 mesh counts each shard twice."""

    def check(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = make(tied)
        handle = zeroshard.shard(model, "zero2", units=Block, mesh=mesh)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, **SGD)
        optimizer.backward(loss_of_tokens(model, rank, 0, 0))
        norm = optimizer.clip_grad_norm_(1.0).item()
        own = [unit.grads.read(unit.own_shard()).double().square().sum() for unit in handle.engine.units]
        of_all = handle.engine.collectives.exchange(torch.stack(own)).sum().sqrt().item()
        assert of_all == pytest.approx(norm * math.sqrt(2), rel=1e-6)

    run_ranks(check, 4)


@pytest.mark.parametrize(("num_ranks", "max_norms"), [(3, [None, 0.4]), *([(2, [0.4])] if EVERYTHING else [])])
def test_clipping_by_value_and_both_kinds_in_one(num_ranks: int, max_norms: list[float | None]) -> None:
    """Clipping by norm, then by value. Sums in another order change only the last bits of clamped values."""

    def check(rank: int) -> None:
        for max_norm in max_norms:
            for number, precision in enumerate(("fp32", "bf16-remainder")):
                results = []
                for plan in plans_of(number + num_ranks):
                    model = make(tied)
                    handle = zeroshard.shard(model, plan, units=Block, precision=precision)
                    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, loss_scale=2.0**6, **SGD)
                    for step in range(2):
                        optimizer.backward(loss_of_tokens(model, rank, 0, step))
                        if max_norm is not None:
                            optimizer.clip_grad_norm_(max_norm)
                        optimizer.clip_grad_value_(0.004)
                        optimizer.step()
                    results.append(handle.full_state_dict(main=True))
                assert all(same_bits(results[0], other) for other in results)
                if precision == "fp32":
                    reference = make(tied)
                    plain = torch.optim.SGD(reference.parameters(), **SGD)
                    for step in range(2):
                        mean_gradients(reference, num_ranks, step)
                        if max_norm is not None:
                            nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
                        nn.utils.clip_grad_value_(reference.parameters(), 0.004)
                        assert max(float(p.grad.abs().max()) for p in reference.parameters()) == pytest.approx(0.004)
                        plain.step()
                    assert largest_difference(results[0], reference.state_dict()) < LAST_BITS

    run_ranks(check, num_ranks)


@on_ranks(2)
def test_a_clip_is_for_one_step(rank: int) -> None:
    model = make(lambda: nn.Linear(3, 3, bias=False))
    handle = zeroshard.shard(model, "zero2")
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
    moved = []
    for clip in (True, False):
        before = handle.full_state_dict()["weight"]
        optimizer.backward(model(torch.ones(1, 3)).sum())
        if clip:
            optimizer.clip_grad_norm_(0.5)
            optimizer.clip_grad_value_(0.01)
        optimizer.step()
        moved.append((before - handle.full_state_dict()["weight"]).abs().max().item())
    assert moved == pytest.approx([0.01, 1.0], abs=1e-6)


@on_ranks(3)
def test_group_norms_and_zeros_are_metrics(rank: int) -> None:
    """Norms of param groups; and the number of gradient elements that are exactly zero, without padding."""
    reference = make(tied)
    for group in by_kind(reference):
        assert group["params"]
    mean_gradients(reference, 3, 0)
    expected = [float(torch.cat([p.grad.reshape(-1) for p in g["params"]]).norm()) for g in by_kind(reference)]
    zeros = sum(int((p.grad == 0).sum()) for p in reference.parameters())
    for plan in plans_of(0):
        for optimizer_class in (torch.optim.SGD, Lamb):
            model = make(tied)
            zeroshard.shard(model, plan, units=Block)
            groups = by_kind(model)
            optimizer = zeroshard.ShardedOptimizer(groups, optimizer_class, lr=0.1)
            optimizer.backward(loss_of_tokens(model, rank, 0, 0))
            assert optimizer.count_zero_gradients() == zeros, (plan, optimizer_class)
            result = optimizer.step()
            assert result.group_norms == pytest.approx(expected, rel=1e-5)
            assert result.grad_norm == pytest.approx(math.hypot(*expected), rel=1e-5)


@on_ranks(3)
def test_rows_that_no_rank_used_are_counted_as_zeros(rank: int) -> None:
    """The negative control of the count: an embedding of which most rows are not used."""
    for plan in plans_of(1):
        model = make(lambda: nn.Embedding(50, 7))
        zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        optimizer.backward(model(torch.tensor([rank, 40])).sum())
        assert optimizer.count_zero_gradients() == (50 - 4) * 7


@on_ranks(2)
def test_a_step_with_an_abnormal_norm_is_skipped(rank: int) -> None:
    for plan in plans_of(0):
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.01, skip_norm_above=5.0)
        for step, factor in enumerate((1.0, 1000.0, 1.0)):
            before = handle.full_state_dict()
            optimizer.backward(loss_of_tokens(model, rank, 0, step) * (factor if rank == 1 else 1.0))
            result = optimizer.step()
            assert result.applied is (factor == 1.0) and (result.grad_norm > 5.0) is (factor > 1.0)
            assert same_bits(before, handle.full_state_dict()) is (factor > 1.0)
        assert {float(s["step"]) for s in optimizer.state_dict()["state"].values()} == {2.0}
        optimizer.backward(loss_of_tokens(model, rank, 0, 5) * torch.inf)
        optimizer.clip_grad_norm_(1.0, torch.inf)  # inf exceeds the limit, but must raise instead of being skipped
        with pytest.raises(RuntimeError, match="not finite"):
            optimizer.step()


# Weighted by tokens ---------------------------------------------------------------------------------------------------


def ragged(rank: int, micro_batch: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a batch; the number of counted tokens differs between ranks."""
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro_batch + 100 * step)
    tokens = torch.randint(VOCAB, (3, 6), generator=generator)
    targets = tokens[:, 1:].flatten().clone()
    targets[: 2 + 3 * rank + 4 * micro_batch] = -100
    return tokens[:, :-1], targets


def ragged_loss(model: nn.Module, rank: int, micro_batch: int, step: int) -> tuple[Tensor, int]:
    tokens, targets = ragged(rank, micro_batch, step)
    count = int((targets >= 0).sum())
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets), count


@pytest.mark.parametrize(("num_ranks", "micro_batches"), [(3, 2), *([(2, 1)] if EVERYTHING else [])])
def test_weights_by_token_are_the_mean_over_all_tokens(num_ranks: int, micro_batches: int) -> None:
    """One process trains on all tokens in one batch: equal up to the order of sums. Without weights the results
    differ."""

    def check(rank: int) -> list[Any]:
        logs = []
        reference = make(tied)
        plain = torch.optim.SGD(reference.parameters(), **SGD)
        norms = []
        for step in range(2):
            batches = [ragged(r, m, step) for r in range(num_ranks) for m in range(micro_batches)]
            logits = reference(torch.cat([tokens for tokens, _ in batches])).flatten(0, 1)
            plain.zero_grad()
            nn.functional.cross_entropy(logits, torch.cat([targets for _, targets in batches])).backward()
            norms.append(nn.utils.clip_grad_norm_(reference.parameters(), 0.4).item())
            plain.step()
        for weighted in (True, False):
            results = []
            # The unweighted run is the negative control; it needs no loss scale.
            for scale, plan in itertools.product((None, 2.0**8) if weighted else (None,), plans_of(num_ranks)):
                model = make(tied)
                handle = zeroshard.shard(model, plan, units=Block)
                optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, loss_scale=scale, **SGD)
                for step in range(2):
                    for micro_batch in range(micro_batches):
                        loss, count = ragged_loss(model, rank, micro_batch, step)
                        if weighted:
                            optimizer.backward(loss, weight=count)
                        else:
                            optimizer.backward(loss / micro_batches)
                    norm = optimizer.clip_grad_norm_(0.4).item()
                    assert (norm == pytest.approx(norms[step], rel=1e-5)) is weighted
                    optimizer.step()
                results.append(handle.full_state_dict())
                logs.append(handle.comm_log)
            assert all(same_bits(results[0], other) for other in results)
            assert (largest_difference(results[0], reference.state_dict()) < LAST_BITS) is weighted
        return logs

    for logs in zip(*run_ranks(check, num_ranks), strict=True):
        expect_equal_logs(logs)


@on_ranks(3)
def test_a_rank_without_tokens_weighs_nothing(rank: int) -> None:
    for plan in plans_of(1):
        model = make(lambda: nn.Linear(4, 1, bias=False))
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
        before = handle.full_state_dict()["weight"]
        optimizer.backward(model(torch.full((1, 4), rank + 1.0)).sum(), weight=[0.0, 1.0, 3.0][rank])
        optimizer.step()
        moved = before - handle.full_state_dict()["weight"]
        assert torch.allclose(moved, torch.full((1, 4), (1 * 2 + 3 * 3) / 4))


@on_ranks(2)
def test_weights_lose_no_precision_of_fp64_and_may_be_tensors(rank: int) -> None:
    """The loss was multiplied in fp32. On one rank the norm of a step with such a weight was a tensor."""
    model = make(lambda: nn.Linear(3, 2).double())
    optimizer = zeroshard.ShardedOptimizer(zeroshard.shard(model, "zero1"), torch.optim.SGD, lr=1.0)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64, device=DEVICE).view(4, 3)
    norms = []
    for weight in (None, 0.3, torch.tensor(7)):
        optimizer.backward(model(x).square().mean(), weight=weight)  # type: ignore[arg-type]
        norms.append(optimizer.clip_grad_norm_(math.inf).item())
        optimizer.zero_grad()
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-14)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_largest_element_is_not_found_beside_nan(num_ranks: int) -> None:
    """`max` of Python passes over a NaN that is not the first, of a later param group: the norm looked finite."""

    def check(rank: int) -> None:
        model = make(lambda: nn.Linear(3, 2))
        zeroshard.shard(model, "zero1")
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        optimizer = zeroshard.ShardedOptimizer(groups, torch.optim.SGD, lr=1.0, non_finite="skip")
        model.bias.register_hook(lambda gradient: gradient * math.nan)
        optimizer.backward(model(torch.ones(1, 3, device=DEVICE)).sum())
        with pytest.raises(RuntimeError, match="the gradient norm is nan"):
            optimizer.clip_grad_norm_(1.0, math.inf, error_if_nonfinite=True)
        assert math.isnan(optimizer.step().grad_norm)

    run_ranks(check, num_ranks)
