"""Several process groups, handles or optimizers in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zeroshard
from tests.kit import (
    Block,
    Gated,
    Job,
    Net,
    Outcome,
    beside_one_process,
    largest_difference,
    logs,
    loss_of_tokens,
    make,
    plans_of,
    same_bits,
    train,
    train_reference,
)
from zeroshard.reference import Reference
from zeroshard.testing import expect_same_logs, run_ranks

ADAMW = {"lr": 1e-2, "foreach": False}


def test_two_process_groups_train_two_models() -> None:
    """Ranks 0 and 2 are one group, 1 and 3 another. Each group gives the same results as two ranks alone."""
    job = Job(micro_batches=2, steps=2)

    def shifted(model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
        return loss_of_tokens(model, rank + 5, micro_batch, step, micro_batches)

    other = Job(micro_batches=2, steps=2, loss_of=shifted)
    plans = plans_of(1)

    def run(rank: int) -> list[Outcome]:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[rank % 2]
        mesh: Any = group if rank % 2 else DeviceMesh.from_group(group, "cpu")
        return [train(other if rank % 2 else job, plan, dist.get_rank(group), mesh) for plan in plans]

    found = run_ranks(run, 4)
    for of_group, its_job in (((0, 2), job), ((1, 3), other)):
        expected = run_ranks(lambda rank, its_job=its_job: train_reference(its_job, 2), 1)[0]
        for plan in range(len(plans)):
            for group_rank, rank in enumerate(of_group):
                assert found[rank][plan].losses == expected[group_rank].losses
                assert same_bits(found[rank][plan].weights, expected[group_rank].weights)
            expect_same_logs(logs([found[rank][plan] for rank in of_group]))


class ActorAndCritic(nn.ModuleList):
    """Two models that share an encoder. Each is called alone; the list itself never."""

    def __init__(self) -> None:
        shared = nn.Linear(8, 16)
        super().__init__(nn.Sequential(shared, nn.Tanh(), nn.Linear(16, out)) for out in (4, 1))

    @staticmethod
    def loss(model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * rank)
        actor_or_critic = [*model.children()][micro_batch % 2]
        return actor_or_critic(torch.randn(5, 8, generator=generator)).square().mean() / micro_batches


def test_models_that_share_an_encoder_are_sharded_as_one() -> None:
    jobs = [
        Job(
            model=ActorAndCritic,
            loss_of=ActorAndCritic.loss,
            micro_batches=2,
            units=units,
            reduce_every_micro_batch=each,
        )
        for units in (nn.Linear, None)
        for each in (True, False)
    ]

    def of_rank(rank: int) -> list[list[Outcome]]:
        return [[train(job, plan, rank) for plan in plans_of(1)] for job in jobs]

    truth, ranks = beside_one_process(lambda: [train_reference(job, 2) for job in jobs], of_rank, 2)
    for rank, found in enumerate(ranks):
        for job, expected, outcomes in zip(jobs, truth, found, strict=True):
            # Where each backward reduces, the order of a sum depends on who owns the element (`Reference.step`).
            exact = outcomes[0] if job.reduce_every_micro_batch else expected[rank]
            for outcome in outcomes:
                assert same_bits(outcome.weights, exact.weights)
                assert largest_difference(outcome.weights, expected[rank].weights) < 1e-6
    assert not same_bits(truth[0][0].weights, make(ActorAndCritic).state_dict())  # a control


def test_two_models_take_turns() -> None:
    """As in adversarial training: two handles on the same ranks, with their forwards, backwards and steps
    interleaved."""
    jobs = [Job(model=lambda: make(Net, 0), steps=2), Job(model=lambda: make(Net, 7), steps=2)]
    expected = run_ranks(lambda rank: [train_reference(job, 3)[0].weights for job in jobs], 1)[0]

    def run(rank: int) -> list[Any]:
        results = []
        for plan in plans_of(1):
            torch.manual_seed(0)
            first = make(lambda: make(Net, 0))
            second = make(lambda: make(Net, 7))
            handles = [zeroshard.shard(model, plan, units=Block) for model in (first, second)]
            optimizers = [zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, **ADAMW) for handle in handles]
            for step in range(2):
                losses = [loss_of_tokens(model, rank, 0, step) for model in (first, second)]
                for optimizer, loss in zip(optimizers[::-1], losses[::-1], strict=True):
                    optimizer.backward(loss)
                optimizers[0].step()
                optimizers[1].step()
            for handle, weights in zip(handles, expected, strict=True):
                assert same_bits(handle.full_state_dict(), weights), plan
            results += [handle.comm_log for handle in handles]
        return results

    for of_ranks in zip(*run_ranks(run, 3), strict=True):
        expect_same_logs(of_ranks)


def gated_loss(model: Any, rank: int, step: int) -> Tensor:
    """In each step the gates are open on one rank only, each time another one; in one step on none."""
    for block in model.blocks:
        block.open = rank == step
    return loss_of_tokens(model, rank, 0, step)


def test_two_optimizers_share_a_model() -> None:
    """Two optimizers with different hyper-parameters; in the last step only the first one steps."""

    def groups(model: nn.Module) -> list[list[nn.Parameter]]:
        gates = [p for name, p in model.named_parameters() if "gate" in name]
        return [[p for name, p in model.named_parameters() if "gate" not in name], gates]

    def one_process(rank: int) -> Any:
        model = make(Gated)
        reference = Reference(
            model,
            torch.optim.AdamW,
            num_ranks=3,
            params=[{"params": p, "lr": lr} for p, lr in zip(groups(model), (1e-2, 0.3), strict=True)],
            foreach=False,
        )
        for step in range(4):
            reference.step(lambda model, rank, _, step=step: gated_loss(model, rank, step))
        return reference.state_dict()

    expected = run_ranks(one_process, 1)[0]

    def run(rank: int) -> list[Any]:
        results = []
        for plan in plans_of(1):
            model = make(Gated)
            handle = zeroshard.shard(model, plan, units=Block)
            pairs = zip(groups(model), (1e-2, 0.3), strict=True)
            optimizers = [zeroshard.ShardedOptimizer(p, torch.optim.AdamW, lr=lr, foreach=False) for p, lr in pairs]
            for step in range(4):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                optimizers[0].backward(gated_loss(model, rank, step))
                for optimizer in optimizers if step < 3 else optimizers[:1]:
                    optimizer.step()
            assert same_bits(handle.full_state_dict(), expected), plan
            results.append(handle.comm_log)
        return results

    for of_ranks in zip(*run_ranks(run, 3), strict=True):
        expect_same_logs(of_ranks)
