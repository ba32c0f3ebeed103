"""Process groups as DeviceMesh and torchtitan create them. After `init_process_group()` without a backend, a model on a
GPU was refused ("this process group moves cpu tensors"), as the backend was chosen before the model's device was known.
Groups that order their ranks differently, a model that is not on the current device, and one GPU for several ranks were
not noticed."""

from __future__ import annotations

import inspect
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroshard
from tests.kit import LAST_BITS, PLANS, Block, Job, Net, loss_of_tokens, make, plans_of, same_bits, train
from zeroshard.planner import plan_memory
from zeroshard.ranks import backends
from zeroshard.ranks.mesh import Mesh, problem_of
from zeroshard.testing import expect_same_logs, run_ranks

CUDA = torch.device("cuda", 0)
needs_any_order = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts the ranks of every group (new_group has no sort_ranks)",
)
JOB = Job(model=partial(Net, blocks=1), units=Block, steps=2)


class Group:
    """Stands for a process group with the given backend configuration."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: str) -> None:
        monkeypatch.setattr(dist, "get_backend_config", lambda group: config)


@pytest.mark.parametrize(
    ("config", "model", "expected", "pairwise"),
    [
        ("cpu:gloo,cuda:nccl", "cpu", "cpu", True),
        ("cpu:gloo,cuda:nccl", "cuda:0", "cuda:0", False),
        ("cpu:gloo,cuda:nccl", None, "cpu", True),  # no GPU here
        ("cpu:gloo,cuda:gloo", "cuda:0", "cpu", True),  # gloo has no GPU tensors: refused later, naming the parameter
        ("cuda:nccl", "cuda:1", "cuda:1", False),
        ("cpu:mine,cuda:mine", "cpu", "cpu", False),
        ("cpu:gloo,xpu:xccl", "xpu:2", "xpu:2", False),
        ("cpu:mpi", "cpu", "cpu", False),
    ],
)
def test_the_models_device_says_which_backend_is_meant(
    monkeypatch: pytest.MonkeyPatch, config: str, model: str | None, expected: str, pairwise: bool
) -> None:
    group: Any = Group(monkeypatch, config)
    device = backends.device_for(group, None if model is None else torch.device(model))
    assert device == torch.device(expected)
    assert backends.has_tagged_messages(group, device) == pairwise


def test_where_a_model_without_a_device_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = Group(monkeypatch, "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True, current_device=lambda: 3))
    assert backends.device_for(group, None) == torch.device("cuda", 3)


BACKENDS = ("gloo", None, "cpu:gloo", "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:fake")


@pytest.mark.by_cpu
def test_groups_without_a_named_backend_train_as_with_gloo() -> None:
    """The groups are created one after the other in the same processes."""

    def run(rank: int) -> list[list[Any]]:
        store, found = dist.distributed_c10d._get_default_store(), []
        for backend in BACKENDS:
            dist.barrier()
            dist.destroy_process_group()
            own = dist.PrefixStore(f"again {backend}", store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=2)
            found.append([train(JOB, plan, rank) for plan in plans_of(1)])
        return found

    for by_gloo, *others in run_ranks(run, 2):
        for backend, outcomes in zip(BACKENDS[1:], others, strict=True):
            for mine, theirs in zip(outcomes, by_gloo, strict=True):
                assert same_bits(mine.weights, theirs.weights) and mine.losses == theirs.losses, backend
                assert mine.log.bytes() == theirs.log.bytes(), backend


@pytest.mark.by_cpu
def test_a_fake_group_stands_for_ranks_that_are_all_alike() -> None:
    """As for estimates of memory: nothing is sent, but all code of a step runs, and holds what is planned."""

    def run(rank: int) -> None:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        zeroshard.init()
        with torch.device("meta"):
            on_meta = Net()
        for plan, replicas in itertools.product(PLANS, (1, 2)):
            mesh = init_device_mesh("cpu", (2, 2)) if replicas == 2 else None
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block, mesh=mesh)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1, non_finite="ignore")
            for step in range(2):
                loss_of_tokens(model, 1, 0, step, 1).backward()
                optimizer.step()
            planned = partial(plan_memory, on_meta, plan, 4 // replicas, units=Block, rank=1, num_replicas=replicas)
            expected = planned(state_bytes_per_element=0, state_scalars=0, transport="native")
            assert handle.memory() == expected, (plan, replicas)

    run_ranks(run, 1)


def test_a_mesh_named_as_pytorch_and_torchtitan_name_it() -> None:
    names = [("replicate", "shard"), ("dp_replicate", "dp_shard"), ("dp_replicate", "fsdp")]

    def run(rank: int) -> list[Any]:
        meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=pair) for pair in names]
        found = [train(JOB, PLANS[3], rank, mesh) for mesh in meshes]
        three = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        with pytest.raises(ValueError, match=r'found 3: pass the part of it .* mesh\["dp_replicate", "dp_shard"\]'):
            Mesh.of(three)
        turned = Mesh.of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "dp_replicate")))
        assert turned.shard.ranks == ((0, 2), (1, 3))[rank % 2]
        return [*found, train(JOB, PLANS[3], rank, three["dp_replicate", "dp_shard"])]

    for outcomes in run_ranks(run, 4):
        assert all(same_bits(outcome.weights, outcomes[0].weights) for outcome in outcomes)


def test_a_mesh_of_some_ranks_may_name_them_in_any_order() -> None:
    """The group of all its ranks was made in the mesh's order, which needs torch's `sort_ranks`."""

    def run(rank: int) -> tuple[int, ...] | None:
        mesh = DeviceMesh("cpu", [[2, 0]], mesh_dim_names=("replicate", "shard"))
        return Mesh.of(mesh).world.ranks if rank != 1 else None

    assert run_ranks(run, 3) == [(0, 2), None, (0, 2)]


# Groups in an order of their own ------------------------------------------------------------------------------------


needs_any_order = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="torch 2.11 sorts the ranks of a group"
)


def hsdp(rank: int, shard_groups: list[list[int]], replicate_groups: list[list[int]]) -> DeviceMesh:
    """A 2 x 2 mesh of process groups whose ranks are in the given order."""
    made = [
        [dist.new_group(ranks, sort_ranks=False) for ranks in groups] for groups in (replicate_groups, shard_groups)
    ]
    mine = [
        next(group for group, ranks in zip(groups, by_hand, strict=True) if rank in ranks)
        for groups, by_hand in zip(made, (replicate_groups, shard_groups), strict=True)
    ]
    grid = torch.tensor([[0, 1], [2, 3]])
    return DeviceMesh.from_group(mine, "cpu", mesh=grid, mesh_dim_names=("replicate", "shard"))


@needs_any_order
def test_replicas_that_hold_different_shards_are_refused() -> None:
    """Rank 1 held shard 1, and its replica, rank 3, held shard 0: gradients of different shards were added up."""

    def run(rank: int) -> None:
        swapped = hsdp(rank, [[0, 1], [3, 2]], [[0, 2], [1, 3]])
        with pytest.raises(ValueError, match=r"ranks 0 and 2 are replicas of each other, but rank 0 holds shard 0 of"):
            zeroshard.shard(make(Net), "zero3", mesh=swapped, units=Block)
        swapped = hsdp(rank, [[0, 1], [2, 3]], [[0, 2], [3, 1]])
        with pytest.raises(ValueError, match=r"ranks 0 and 1 hold shards of one replica, but rank 0 is number 0 of"):
            zeroshard.shard(make(Net), "zero3", mesh=swapped, units=Block)

    run_ranks(run, 4)


@needs_any_order
def test_groups_in_any_order_that_fits_train_alike() -> None:
    """Groups with any consistent order of ranks give the same results."""

    def run(rank: int) -> list[list[Any]]:
        meshes = [
            None,
            dist.new_group([3, 1, 2, 0], sort_ranks=False),
            hsdp(rank, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
            hsdp(rank, [[1, 0], [3, 2]], [[2, 0], [3, 1]]),
        ]
        return [[train(JOB, plan, rank, mesh) for mesh in meshes] for plan in plans_of(1)]

    for plan, found in zip(plans_of(1), zip(*run_ranks(run, 4), strict=True), strict=True):
        for outcomes in found:  # of a rank
            assert same_bits(outcomes[3].weights, found[0][3].weights), plan
            for outcome in outcomes:
                torch.testing.assert_close(outcome.losses, outcomes[0].losses, rtol=LAST_BITS, atol=0.0)
        expect_same_logs([outcomes[1].log for outcomes in found])
        expect_same_logs([outcomes[3].log for outcomes in found])


def test_what_is_wrong_with_a_mesh() -> None:
    good = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    assert problem_of(dict(enumerate(good))) == ""
    assert problem_of({rank: good[rank] for rank in (2, 0, 3, 1)}) == ""
    assert problem_of({1: good[1]}) == ""  # no other rank to compare with
    assert problem_of({**dict(enumerate(good)), 3: ([3, 2], [1, 3])})
    assert problem_of({**dict(enumerate(good)), 0: ([0, 1], [2, 0])})


# Devices ------------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_on_the_current_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(current_device=lambda: 0))
    assert backends._not_current(CUDA) == backends._not_current(torch.device("cpu")) == ""
    expected = "the model is on cuda:1, and the current device is cuda:0: call torch.cuda.set_device(1)"
    assert expected in backends._not_current(torch.device("cuda", 1))


def test_ranks_that_use_one_device_or_several_types_are_told() -> None:
    good = [("cuda", "node1 GPU-a", ""), ("cuda", "node1 GPU-b", ""), ("cuda", "node2 0", "")]
    assert backends._shared_or_mixed(dict(enumerate(good))) == ""
    assert backends._shared_or_mixed(dict(enumerate([("cpu", "", "")] * 3))) == ""
    shared = backends._shared_or_mixed({**dict(enumerate(good)), 3: good[1]})
    assert "ranks 1 and 3 use the same cuda device (node1 GPU-b): call torch.cuda.set_device(int(os.environ" in shared
    mixed = backends._shared_or_mixed({4: good[0], 2: ("cpu", "", "")})
    assert "rank 4 on cuda, rank 2 on cpu. Move it to the same type of device" in mixed
    assert backends._shared_or_mixed({0: good[0], 1: ("cuda", "node1 GPU-b", "no")}) == "rank 1: no"


@pytest.mark.by_gloo
def test_the_ranks_hear_of_it_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks compare their devices through the store: a collective on a device that two ranks share would hang."""
    monkeypatch.setattr(backends, "backends_of", lambda group: {"cpu": "gloo", "cuda": "nccl"})

    def run(rank: int) -> str:
        monkeypatch.setattr(backends, "_hardware", lambda device: "node1 GPU-a")
        with pytest.raises(ValueError, match="ranks 0 and 1 use the same cpu device") as caught:
            zeroshard.shard(make(Net), "zero3")
        monkeypatch.setattr(backends, "_hardware", lambda device: f"node1 GPU-{rank}")
        zeroshard.shard(make(Net), "zero3", units=Block)
        return str(caught.value)

    first, second, third = run_ranks(run, 3)
    assert first == second == third
