"""torch: test/distributed/_composable/fsdp/test_fully_shard_training.py, its classes
TestFullyShard1DTrainingCompose and TestFullyShardSharedParams, and test_fully_shard_compose.py,
test_fully_shard_shared_params.py: recomputation, tied weights, parts of a model that run alone.
"""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint as recompute

import zeroshard
from tests.outside.common import (
    MLP,
    VOCAB,
    Block,
    State,
    Transformer,
    Twins,
    average_gradients,
    expect_close,
    numbers,
    state_of,
    tokens,
    under_all_plans,
)
from tests.together import on_ranks
from zeroshard.placement import Plan

Adam = torch.optim.Adam

# Recomputation -------------------------------------------------------------------------------------------------------


def recomputed(model: Transformer, kind: str) -> Transformer:
    if kind == "composable":
        for layer in model.layers:
            checkpoint(layer)
    elif kind == "wrapper":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    else:
        for layer in model.layers:
            layer.forward = partial(recompute, layer.forward, use_reentrant=kind == "reentrant")
    return model


@on_ranks(2)
def test_groups_of_modules_as_units_with_recomputation(rank: int) -> None:
    """test_train_parity_with_activation_checkpointing, `module_grouping`: two layers, both embeddings, and norm and
    output are one unit each; or, tied, the embedding and the output."""

    def train(rank: int, plan: Plan) -> Any:
        result = {}
        for tied in (False, True):
            if tied:
                units = [("embed", "output"), Block]
            else:
                units = [("layers.0",), ("layers.1", "layers.2"), ("embed", "position"), ("norm", "output")]
            twins = Twins(Transformer(tied=tied), plan, shard={"units": units})
            recomputed(twins.model, "composable")
            weights = twins.train(lambda model, step: model(tokens(rank, step)).sum(), steps=2)
            result.update({f"{tied}.{name}": value for name, value in weights.items()})
        return result

    under_all_plans(rank, train)


@on_ranks(2)
def test_activation_checkpointing(rank: int) -> None:
    """test_train_parity_with_activation_checkpointing, blocks as units; TestFullyShardSharedParams.
    test_train_parity_with_shared_params."""

    def of_kind(rank: int, plan: Plan, kind: str, tied: bool) -> State:
        plain = Transformer(layers=2, tied=tied)
        model = recomputed(copy.deepcopy(plain), kind)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer, plain_optimizer = (
            zeroshard.ShardedOptimizer(handle, Adam, lr=1e-2),
            Adam(plain.parameters(), lr=1e-2),
        )
        for step in range(2):
            losses = [one(tokens(rank, step)).sum() for one in (model, plain)]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
            average_gradients(plain.parameters())
            for one in (optimizer, plain_optimizer):
                one.step(), one.zero_grad()
        weights = handle.full_state_dict()
        expect_close(weights, state_of(plain))
        return weights

    kinds = [("composable", False), ("composable", True), ("wrapper", False), ("utils", True), ("reentrant", False)]
    under_all_plans(rank, of_kind, cases=kinds)


# Tied weights --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, rows: int = 13, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.output = nn.Linear(width, rows, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.embed(ids))


@pytest.mark.parametrize("units", [None, (nn.Embedding, nn.Linear)])
@on_ranks(3)
def test_a_tied_weight_whose_rows_no_number_of_ranks_divides(rank: int, units: Any) -> None:
    """test_train_shared_params_uneven_shard; test_shared_params_separate_fsdp_groups_error: there an error when the two
    modules are sharded one by one, here the weight belongs to the unit that comes first."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(Tied(), plan, torch.optim.AdamW, shard={"units": units})
        before = twins.handle.full_state_dict()["embed.weight"]
        after = twins.train(
            lambda model, step: nn.functional.cross_entropy(
                model(torch.arange(13)), (torch.arange(13) * 3 + rank + step) % 13
            )
        )
        assert (before != after["embed.weight"]).any(1).all()  # every row, also the last rank's
        return after

    under_all_plans(rank, train, 3)


@on_ranks(2)
def test_layer_after_layer(rank: int) -> None:
    """test_layer_by_layer_shard_no_false_positive, TestFullyShardShareCommContext.test_share_comm_context: layers that
    are created and sharded one after the other, each with its own handle."""

    def train(rank: int, plan: Plan) -> Any:
        layers, plain, optimizers = nn.Sequential(), nn.Sequential(), []
        for _ in range(3):
            layer = MLP(8)
            plain.append(copy.deepcopy(layer))
            handle = zeroshard.shard(layer, plan)
            layers.append(layer)
            optimizers.append(zeroshard.ShardedOptimizer(handle, Adam, lr=1e-2))
        plain_optimizer = Adam(plain.parameters(), lr=1e-2)
        for step in range(3):
            losses = [one(numbers(8, rank, step)).sum() for one in (layers, plain)]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
            average_gradients(plain.parameters())
            for one in (*optimizers, plain_optimizer):
                one.step(), one.zero_grad()
        found = {f"{i}.{n}": v for i, one in enumerate(optimizers) for n, v in one.handle.full_state_dict().items()}
        expect_close(found, state_of(plain))
        return found

    under_all_plans(rank, train)


# A head that runs in chunks ------------------------------------------------------------------------------------------


class ChunkedHead(nn.Module):
    """embed, body, norm, head; the caller may skip the head, and call it on chunks."""

    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.body = nn.Linear(16, 16, bias=False)
        self.norm = nn.RMSNorm(16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, skip_head: bool = False) -> Tensor:
        h = self.norm(self.body(self.embed(tokens)))
        return h if skip_head else self.head(h)


def chunked_backward(model: nn.Module, ids: Tensor, chunks: int = 4) -> Tensor:
    """Backward of the head chunk by chunk, then of the rest. Returns the sum of the losses."""
    h = model(ids, skip_head=True)
    gradients, total = [], torch.zeros(())
    for chunk in torch.chunk(h.detach(), chunks, dim=1):
        piece = chunk.contiguous().requires_grad_()
        loss = model.head(piece).square().sum()
        total += loss.detach()
        loss.backward()
        gradients.append(piece.grad)
    h.backward(torch.cat(gradients, dim=1))
    return total


@on_ranks(2)
def test_a_head_that_runs_alone_chunk_by_chunk(rank: int) -> None:
    """test_partial_group_forward_then_standalone, ..._grad_accum_chunked, test_partial_group_reshard_toggle: the
    gradients of all chunks add up, with and without a reduction in between, for every choice of units."""

    def of_units(rank: int, plan: Plan, tie: bool, units: Any) -> State:
        twins = Twins(ChunkedHead(tie), plan, shard={"units": units})
        for step in range(2):
            for micro_batch in range(2):
                ids = tokens(rank, step, micro_batch, length=8)
                expected = chunked_backward(twins.plain, ids)
                if micro_batch:
                    found = chunked_backward(twins.model, ids)
                else:
                    with twins.handle.no_sync():
                        found = chunked_backward(twins.model, ids)
                torch.testing.assert_close(found, expected)
            twins.expect_equal_gradients()
            twins.step()
        return twins.expect_equal()

    every = (None, (nn.Embedding, nn.Linear, nn.RMSNorm), [("embed",), ("body",), ("norm", "head")])
    under_all_plans(rank, of_units, cases=itertools.product((False, True), every))


@on_ranks(2)
def test_two_partial_forwards_before_one_backward(rank: int) -> None:
    """test_double_partial_forward_then_backward: the head, used by neither, has no gradient and is not updated."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(ChunkedHead(), plan, shard={"units": nn.Linear})
        before = twins.handle.full_state_dict()["head.weight"]
        twins.train(
            lambda model, step: sum(model(tokens(rank, step, kind), skip_head=True).square().sum() for kind in (0, 1))
        )
        after = twins.handle.full_state_dict()
        assert torch.equal(before, after["head.weight"])
        return after

    under_all_plans(rank, train)


@on_ranks(2)
def test_after_an_exception_in_forward_training_goes_on(rank: int) -> None:
    """test_reset_iter_state_after_exception: `reset_iter_state()` must be called there; no call is needed here."""

    class Raising(nn.Module):
        def __init__(self, wrapped: nn.Module) -> None:
            super().__init__()
            self.wrapped, self.armed = wrapped, False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed:
                raise RuntimeError("boom")
            return self.wrapped(x)

    def train(rank: int, plan: Plan) -> Any:
        model = ChunkedHead()
        model.body = Raising(model.body)
        twins = Twins(model, plan, shard={"units": nn.Linear})
        for step in range(3):
            twins.model.body.armed = True
            with pytest.raises(RuntimeError, match="boom"):
                twins.model(tokens(rank, step))
            twins.model.body.armed = False
            twins.backward(lambda model, s=step: model(tokens(rank, s)).sum())
            twins.step()
        return twins.expect_equal()

    under_all_plans(rank, train)
