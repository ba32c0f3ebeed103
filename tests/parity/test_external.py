"""Plan OPTIMIZER_ONLY: torch DDP or other code reduces the gradients, and this optimizer shards its state.

The usage is that of FairScale's OSS and torch's ZeroRedundancyOptimizer. As the gradients are torch DDP's own, weights
are bit-equal to those of torch DDP with the plain optimizer, except with `fused`.
"""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.grids import at, grid
from tests.kit import LAST_BITS, Net, loss_of_tokens, make, same_bits
from tests.parity.common import ELEMENTWISE, expect_equal_logs
from tests.together import on_ranks
from zeroshard.loss_scale import ConstantScale, DynamicScale, LossScaler
from zeroshard.optim import Lamb
from zeroshard.testing import run_ranks

CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    **{name: ELEMENTWISE[name] for name in ("sgd", "adamw", "rmsprop", "rprop", "adagrad")},
    "lamb": (Lamb, {"lr": 1e-2}),
}


def run(rank: int, optimizer_of: Any, steps: int = 4, micro_batches: int = 1, max_norm: float | None = None) -> Any:
    model = make(Net)
    ddp = DistributedDataParallel(model)
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            if micro_batch < micro_batches - 1:
                with ddp.no_sync():
                    loss_of_tokens(ddp, rank, micro_batch, step, micro_batches).backward()
            else:
                loss_of_tokens(ddp, rank, micro_batch, step, micro_batches).backward()
        if max_norm is not None:
            if isinstance(optimizer, zeroshard.ShardedOptimizer):
                optimizer.clip_grad_norm_(max_norm)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}, optimizer


DDP_CASES = grid(CASES, (1, 3), (1, 2, 3))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_under_torchs_ddp_it_is_the_plain_optimizer(num_ranks: int) -> None:
    def check(rank: int) -> list[Any]:
        logs = []
        for name, micro_batches in at(DDP_CASES, num_ranks):
            of_class, options = CASES[name]
            if name != "lamb":
                options = {**options, "foreach": False}
            expected, _ = run(rank, lambda m, c=of_class, o=options: c(m.parameters(), **o), 3, micro_batches)
            found, optimizer = run(
                rank,
                lambda m, c=of_class, o=options: zeroshard.ShardedOptimizer(m.parameters(), c, **o),
                3,
                micro_batches,
            )
            assert same_bits(found, expected), (name, micro_batches)
            assert optimizer.handle.plan is zeroshard.OPTIMIZER_ONLY
            logs.append(optimizer.handle.comm_log)
        return logs

    for logs in zip(*run_ranks(check, num_ranks), strict=True):
        expect_equal_logs(logs)


def test_it_is_torchs_zero_redundancy_optimizer_with_balanced_state() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.distributed.optim compiles functions
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow: once, before ranks are forked

    def check(rank: int) -> int:
        options = {"lr": 1e-2, "foreach": False}
        expected, _ = run(rank, lambda m: ZeroRedundancyOptimizer(m.parameters(), torch.optim.AdamW, **options))
        found, ours = run(rank, lambda m: zeroshard.ShardedOptimizer(m.parameters(), torch.optim.AdamW, **options))
        assert same_bits(found, expected)
        return ours.handle.memory()["state"]

    state = run_ranks(check, 3)
    numel = sum(p.numel() for p in Net().parameters())
    assert 8 * numel <= sum(state) <= 8 * (numel + 3 * 256) and max(state) == state[0] <= 8 * (numel // 3 + 256)


@on_ranks(2)
def test_clipping_is_torchs(rank: int) -> None:
    """Norms are added up in another order: weights are nearly equal after four steps, and far from those without
    clipping."""
    options = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    plain = lambda m: torch.optim.SGD(m.parameters(), **options)  # noqa: E731
    expected, _ = run(rank, plain, max_norm=0.2)
    unclipped, _ = run(rank, plain)
    found, _ = run(rank, lambda m: zeroshard.ShardedOptimizer(m.parameters(), torch.optim.SGD, **options), max_norm=0.2)
    difference = max(float((found[name] - expected[name]).abs().max()) for name in found)
    assert difference < LAST_BITS < max(float((found[name] - unclipped[name]).abs().max()) for name in found)


@pytest.mark.by_gloo
@on_ranks(2)
def test_sparse_gradients_are_torchs(rank: int) -> None:
    """The rank whose shard has the embedding raised torch's error about `reshape`, and the other one waited for it."""

    def trained(optimizer_of: Any) -> Any:
        model = make(lambda: nn.Sequential(nn.Embedding(700, 5, sparse=True), nn.Linear(5, 3)))
        ddp, optimizer = DistributedDataParallel(model), optimizer_of(model)
        for step in range(2):
            optimizer.zero_grad()
            ddp(torch.tensor([1, 350, 699, 1 + rank]) - step).square().sum().backward()
            optimizer.step()
        assert model[0].weight.grad.is_sparse
        return {name: value.clone() for name, value in model.state_dict().items()}

    options = {"lr": 0.1, "foreach": False}
    plain = trained(lambda m: torch.optim.SGD(m.parameters(), **options))
    assert same_bits(trained(lambda m: zeroshard.ShardedOptimizer(m.parameters(), torch.optim.SGD, **options)), plain)


@pytest.mark.parametrize("by", ["DDP", "nobody"])
@on_ranks(2)
def test_clips_in_a_row_act_on_sparse_gradients_too(rank: int, by: str) -> None:
    """What a second clip found had not been clipped by the first one where it is sparse, in silence. `by`: who reduces
    them: DDP leaves each row once, autograd once for each use."""
    for calls in ([("norm", 1.0), ("norm", 0.5)], [("value", 0.1), ("norm", 0.5)], [("norm", 1.0), ("value", 0.1)] * 2):
        weights, norms = [], []
        for is_sharded in (False, True):
            model = make(lambda: nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4)))
            model[0].sparse = is_sharded
            ddp = DistributedDataParallel(model) if by == "DDP" else model
            parameters = list(model.parameters())
            optimizer: Any = torch.optim.SGD(parameters, lr=1.0)
            of_torch = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_
            by_norm, by_value = (partial(clip, parameters) for clip in of_torch)
            if is_sharded:
                optimizer = zeroshard.ShardedOptimizer(parameters, torch.optim.SGD, lr=1.0, foreach=False)
                by_norm, by_value = optimizer.clip_grad_norm_, optimizer.clip_grad_value_
            (ddp(torch.tensor([1, 3, 3, 5 + (rank if by == "DDP" else 0)])) * 3).square().sum().backward()
            norms.append([float(by_norm(most) if what == "norm" else by_value(most) or 0) for what, most in calls])
            optimizer.step()
            weights.append([parameter.detach().clone() for parameter in parameters])
        assert norms[1] == pytest.approx(norms[0], rel=1e-5), calls
        torch.testing.assert_close(weights[1], weights[0])


@on_ranks(2)
def test_parameters_in_channels_last_are_refused(rank: int) -> None:
    """DDP gave their gradients in the order of one format in the strides of the other."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(
        ValueError, match=r"parameter 0 has the strides \(36, 1, 12, 4\) \(channels_last\?\), .*DDP, parameter\.data ="
    ):
        zeroshard.ShardedOptimizer(DistributedDataParallel(model).parameters(), torch.optim.SGD, lr=0.1)
    turned = nn.Parameter(torch.ones(3, 2).t())  # which `model.to(memory_format=)`, as the error once said, leaves
    for parameter in (*model.parameters(), turned):
        parameter.data = parameter.data.contiguous()
    zeroshard.ShardedOptimizer([turned], torch.optim.SGD, lr=0.1)
    ddp = DistributedDataParallel(model)
    zeroshard.ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    x = torch.ones(2, 4, 8, 8).to(memory_format=torch.channels_last)
    ddp(x).square().sum().backward()
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [*expected])


@on_ranks(2)
def test_each_clip_acts_on_what_the_earlier_ones_have_left(rank: int) -> None:
    """The second clip forgot what the first one had done, in silence: the step was twice as long."""
    for calls in ([("norm", 1.0), ("norm", 2.0)], [("value", 0.1), ("norm", 2.0)], [("norm", 9.0), ("value", 1.0)] * 2):
        weights, norms = [], []
        for is_sharded in (False, True):
            model = make(lambda: nn.Linear(4, 4))
            ddp, plain = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer: Any = plain
            if is_sharded:
                optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
            (ddp(torch.full((2, 4), 3.0 + rank)) ** 2).sum().backward()
            of_torch = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_
            by_norm, by_value = (partial(clip, list(model.parameters())) for clip in of_torch)
            if is_sharded:
                by_norm, by_value = optimizer.clip_grad_norm_, optimizer.clip_grad_value_
            norms.append([float(by_norm(most)) if what == "norm" else by_value(most) for what, most in calls])
            more = ddp(torch.ones(1, 4)).sum()  # is added to what the clips have left
            optimizer.backward(more) if is_sharded else more.backward()
            optimizer.step()
            weights.append(model.weight.detach().clone())
        assert norms[1] == pytest.approx(norms[0]) and torch.allclose(*weights)


@on_ranks(2)
def test_without_ddp_every_rank_says_so(rank: int) -> None:
    """Without a reduction each rank's shard would be trained on its own data only."""
    model = make(Net)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    loss_of_tokens(model, rank, 0, 0).backward()
    with pytest.raises(RuntimeError, match="the ranks step with different gradients"):
        optimizer.step()


def test_state_is_sharded_over_a_process_group_of_choice() -> None:
    """Four ranks under one DDP, with state sharded over pairs of ranks: each pair holds all state and computes the
    same."""

    def check(rank: int) -> tuple[int, Any]:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        options = {"lr": 1e-2, "foreach": False}
        expected, _ = run(rank, lambda m: torch.optim.AdamW(m.parameters(), **options))
        found, ours = run(
            rank,
            lambda m: zeroshard.ShardedOptimizer(
                m.parameters(), torch.optim.AdamW, process_group=pairs[rank // 2], **options
            ),
        )
        assert same_bits(found, expected)
        return ours.handle.memory()["state"], ours.handle.comm_log

    found = run_ranks(check, 4)
    state = [of_rank[0] for of_rank in found]
    assert state[0] + state[1] == state[2] + state[3] >= 8 * sum(p.numel() for p in Net().parameters())
    expect_equal_logs([log for _, log in found])


@on_ranks(2)
def test_16_bit_models_get_an_fp32_master(rank: int) -> None:
    """A 16-bit model trains like an fp32 copy under a plain optimizer. (FairScale: OSS around an fp32-master
    optimizer.)"""
    for dtype in (torch.bfloat16, torch.float16):
        models = [make(Net).to(dtype) for _ in range(2)]
        ddps = [DistributedDataParallel(model) for model in models]
        masters = [nn.Parameter(p.detach().float()) for p in models[0].parameters()]
        plain = torch.optim.AdamW(masters, lr=1e-2, foreach=False)
        ours = zeroshard.ShardedOptimizer(
            models[1].parameters(), torch.optim.AdamW, lr=1e-2, foreach=False, loss_scale=1.0
        )
        for step in range(4):
            for ddp in ddps:
                ddp.zero_grad()
                loss_of_tokens(ddp, rank, 0, step).backward()
            for master, parameter in zip(masters, models[0].parameters(), strict=True):
                master.grad = parameter.grad.float()
            plain.step()
            with torch.no_grad():
                for master, parameter in zip(masters, models[0].parameters(), strict=True):
                    parameter.copy_(master)
            assert ours.step().applied
        assert same_bits(dict(models[0].state_dict()), dict(models[1].state_dict()))


@on_ranks(2)
def test_overflows_are_agreed_on_and_skipped(rank: int) -> None:
    """torch DDP's reduction spreads an inf to all ranks. Every rank skips; gradients stay until `zero_grad`, as in
    torch."""
    model = make(Net)
    ddp = DistributedDataParallel(model)
    optimizer = zeroshard.ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-2, loss_scale=DynamicScale(init=2.0**8, growth_interval=2)
    )
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        bad = step == 2
        loss = loss_of_tokens(ddp, rank, 0, step)
        optimizer.backward(loss * torch.inf if bad and rank == 1 else loss)
        result = optimizer.step()
        scales.append(result.loss_scale)
        assert result.applied is not bad
        assert same_bits(before, dict(model.state_dict())) is bad
    assert scales == [2.0**8, 2.0**8, 2.0**9, 2.0**8, 2.0**8, 2.0**9]


def test_weights_by_token_are_means_over_all_tokens() -> None:
    """torch DDP has already divided by the number of ranks; zeroshard once divided by it again."""

    def check(rank: int) -> None:
        model = make(lambda: nn.Linear(4, 1, bias=False))
        ddp = DistributedDataParallel(model)
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
        before = model.weight.detach().clone()
        optimizer.backward(ddp(torch.full((1, 4), rank + 1.0)).sum(), weight=rank + 1)
        optimizer.step()
        assert torch.allclose(before - model.weight.detach(), torch.full((1, 4), (1 + 4 + 9) / 6))

    run_ranks(check, 3)


@on_ranks(2)
def test_losses_with_different_scales_would_mix_and_are_refused(rank: int) -> None:
    """Gradients of both add up in p.grad: the second one's once counted 16 times."""
    model = make(lambda: nn.Linear(4, 1, bias=False))
    ddp = DistributedDataParallel(model)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    scalers = [LossScaler(ConstantScale(4.0)), LossScaler(ConstantScale(64.0))]
    with ddp.no_sync():
        optimizer.backward(ddp(torch.ones(1, 4)).sum(), scaler=scalers[0])
    with pytest.raises(ValueError, match="use one scaler"):
        optimizer.backward(ddp(torch.ones(1, 4)).sum(), scaler=scalers[1])
    optimizer.backward(ddp(torch.ones(1, 4)).sum(), scaler=scalers[0])
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(before - model.weight.detach(), torch.full((1, 4), 2.0))


@on_ranks(2)
def test_gradients_that_change_after_a_clip(rank: int) -> None:
    """A clip acts in the step. What `loss.backward()` added after it was clipped as well, in silence."""
    clips = {"norm": lambda o: o.clip_grad_norm_(1.0), "value": lambda o: o.clip_grad_value_(0.1)}
    changes = {
        "added": lambda ddp, p: ddp(torch.ones(1, 4)).sum().backward(),
        "written": lambda ddp, p: p.grad.add_(1.0),
        "replaced": lambda ddp, p: setattr(p, "grad", p.grad.clone()),
        "anew": lambda ddp, p: [ddp.zero_grad(), ddp(torch.ones(1, 4)).sum().backward()],
        "none": lambda ddp, p: p.grad.sum(),
    }
    for clip, (name, change) in itertools.product(clips.values(), changes.items()):
        model = make(lambda: nn.Linear(4, 1, bias=False))
        ddp = DistributedDataParallel(model)
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
        ddp(torch.ones(1, 4)).sum().backward()
        clip(optimizer)
        change(ddp, model.weight)
        before = model.weight.detach().clone()
        if name == "none":
            optimizer.step()
            continue
        with pytest.raises(RuntimeError, match="have changed since clip_grad_norm_"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="have changed since clip_grad_norm_"):
            optimizer.clip_grad_norm_(1.0)
        assert torch.equal(before, model.weight)
        optimizer.zero_grad()
        ddp(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(before - model.weight.detach(), torch.ones(1, 4))


@on_ranks(2)
def test_a_backward_after_the_norm_was_taken_counts(rank: int) -> None:
    """The ranks agree on norm and found-inf once per step; a later backward must make them agree again."""
    model = make(lambda: nn.Linear(4, 1, bias=False))
    ddp = DistributedDataParallel(model)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, non_finite="skip")
    optimizer.backward(ddp(torch.ones(1, 4)).sum())
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(2.0)
    optimizer.backward(ddp(torch.ones(1, 4)).sum() * torch.inf)
    assert not optimizer.step().applied


@on_ranks(2)
def test_a_weighted_loss_that_the_model_discards_does_not_count(rank: int) -> None:
    """Its weight was added to that of the next loss, and the step was half as large."""
    found = []
    for discards in (False, True):
        model = make(Net)
        ddp = DistributedDataParallel(model)
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        if discards:
            optimizer.backward(loss_of_tokens(ddp, rank, 0, 0), weight=3.0)
            model.zero_grad()
        optimizer.backward(loss_of_tokens(ddp, rank, 0, 1), weight=2.0)
        optimizer.step()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert same_bits(*found)
