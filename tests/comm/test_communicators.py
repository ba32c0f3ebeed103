"""The communicators of a native backend exist before the first step, are used again, and are created by all members.

NCCL creates a communicator in a group's first collective. That of the reductions came in the middle of the first
backward, where ranks may be at different reductions; and each `shard` made new groups, which nobody ever freed.
"""

from __future__ import annotations

import gc
import logging
import weakref
from contextlib import nullcontext, redirect_stderr, suppress
from datetime import timedelta
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroshard
from tests.kit import PLANS, Block, Net, loss_of_tokens, make, travelling
from tests.patience import HANG
from tests.timed_backend import TimedGroup, timed_ranks
from zeroshard.comm import joining
from zeroshard.comm.joining import launched
from zeroshard.comm.native_transport import NativeTransport
from zeroshard.io.logger import tell
from zeroshard.ranks import backends, groups
from zeroshard.ranks.mesh import Mesh
from zeroshard.testing import expect_same_logs, run_ranks


class Used:
    """The groups of the collectives that this rank issues, in order, each with its ranks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.groups: list[TimedGroup] = []
        issue = TimedGroup._issue

        def noted(group: TimedGroup, *args: Any) -> Any:
            self.groups.append(group)
            return issue(group, *args)

        patch.setattr(TimedGroup, "_issue", noted)

    def names(self) -> list[list[int]]:
        return [dist.get_process_group_ranks(group) for group in dict.fromkeys(self.groups)]


def step(model: Any, optimizer: Any, rank: int) -> None:
    loss_of_tokens(model, rank, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()


def late_groups(rank: int, patch: pytest.MonkeyPatch, replicas: int) -> tuple[list[list[int]], int, Any]:
    """Shard and train under all plans. The ranks of the groups as `shard` first uses them; how many groups training
    uses first; the logs."""
    orders, late, logs = [], 0, []
    for plan in (PLANS[1], PLANS[3]):
        used = Used(patch)
        mesh = init_device_mesh("cpu", (replicas, 2 // replicas)) if replicas > 1 else None
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block, mesh=mesh)
        assert {event.op for event in handle.comm_log.entries} <= {"exchange"}, "a warm-up is not logged"
        orders += used.names()
        known = set(used.groups)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        step(model, optimizer, rank)
        late += len(set(used.groups) - known)
        logs.append(handle.comm_log)
    return orders, late, logs


def test_every_communicator_exists_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(rank: int) -> Any:
        found = late_groups(rank, monkeypatch, 1), late_groups(rank, monkeypatch, 2)
        monkeypatch.setattr(NativeTransport, "warm_up", lambda self, axes, device: None)
        return found, late_groups(rank, monkeypatch, 1)[1]

    with timed_ranks("late"):
        of_ranks = run_ranks(check, 2)
    for one in (0, 1):
        orders, late, logs = zip(*(found[one] for found, _ in of_ranks), strict=True)
        assert orders[0] == orders[1] and late == (0, 0)
        for of_plan in zip(*logs, strict=True):
            expect_same_logs(of_plan)
    assert all(control > 0 for _, control in of_ranks), "without the warm-up, training creates communicators"


def test_a_closed_model_leaves_its_group_to_the_next_one() -> None:
    def check(rank: int) -> None:
        def reduce_group(model: Any) -> tuple[zeroshard.Handle, Any]:
            handle = zeroshard.shard(model, "zero2", units=Block)
            step(model, zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1), rank)
            return handle, handle.engine.collectives.mesh.reduce.group

        first, of_first = reduce_group(make(Net))
        second, of_second = reduce_group(make(Net))
        assert of_first is not of_second, "two living models may reduce in another order on each rank"
        second.close()
        second.close()
        number = len(dist.distributed_c10d._world.pg_names)
        third, of_third = reduce_group(make(Net))
        assert of_third is of_second and len(dist.distributed_c10d._world.pg_names) == number
        first.abandon()  # after a failure: what is in flight there must not meet another model
        third.close()
        fourth, of_fourth = reduce_group(make(Net))
        assert of_fourth is of_second
        _, of_fifth = reduce_group(make(Net))
        assert of_fifth not in (of_first, of_second)
        assert fourth.engine.collectives.mesh.reduce.own.group is of_fourth
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("timed", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
        assert reduce_group(make(Net))[1] not in (of_first, of_second, of_fifth), "a group of another world"

    with timed_ranks("early"):
        run_ranks(check, 2)


def test_groups_of_dropped_models_end() -> None:
    """Nobody closes a model in a notebook, or in a search over settings. Over NCCL each kept a communicator."""

    def check(rank: int, replicas: int) -> list[int]:
        mesh = init_device_mesh("cpu", (replicas, 2)) if replicas > 1 else None
        numbers = []
        for round in range(6):
            model = make(Net)
            handle = zeroshard.shard(model, PLANS[1 + round % 3], units=Block, mesh=mesh)
            step(model, zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1), rank)
            if round % 2:
                handle.abandon()
            elif round == 4:
                handle.close()
            of_model = weakref.ref(model)
            del model, handle
            gc.collect()
            assert of_model() is None, "nothing keeps it"
            numbers.append(len(dist.distributed_c10d._world.pg_names))
        return numbers

    with timed_ranks("late"):
        for numbers in run_ranks(check, 2, 1) + run_ranks(check, 4, 2):
            assert len({*numbers}) == 1, numbers


class Bound:
    """Stands for the default group of a world of 4 that is bound to a device."""

    def __init__(self) -> None:
        self.bound_device_id: Any = torch.device("cuda", 0)


def with_more_groups_on_some_ranks(rank: int, way: str) -> None:
    """torch asks every rank to call `new_group`, and only the members have the group then."""
    mesh = dist.new_group([0, 1], timedelta(seconds=HANG))
    for _ in range(2):
        dist.new_group([0], timedelta(seconds=HANG))
    with travelling(way):
        for plan in (PLANS[1], PLANS[3]):
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block, mesh=mesh)
            step(model, zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1), rank)


@pytest.mark.parametrize("way", ["pairwise", "native"])
def test_ranks_may_have_made_different_numbers_of_groups(way: str) -> None:
    """`shard` waited until the timeout."""
    with timed_ranks("random") if way == "native" else nullcontext():
        run_ranks(with_more_groups_on_some_ranks, 2, way, collective_timeout=HANG)


@pytest.mark.parametrize(("ranks", "expected"), [((0, 1, 2, 3), "cuda:0"), ((0, 2), "None")])
def test_a_group_of_some_ranks_is_not_split_off(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], expected: str
) -> None:
    """`ncclCommSplit` waits for all ranks of the world, and only members create a group."""
    default, seen = Bound(), []

    def new_group(*args: Any, **kwargs: Any) -> Any:
        seen.append(str(default.bound_device_id))
        raise KeyError

    monkeypatch.setattr(groups, "default_group", lambda: default)
    monkeypatch.setattr(groups, "timeout_of", lambda group, device: timedelta(seconds=1))
    for name, value in {"get_world_size": 4, "get_backend_config": "cuda:nccl"}.items():
        monkeypatch.setattr(dist, name, lambda *args, value=value: value)
    monkeypatch.setattr(dist, "new_group", new_group)
    with suppress(KeyError):
        groups.new_group(ranks, default, torch.device("cuda", 0))  # type: ignore[arg-type]
    assert seen == [expected] and str(default.bound_device_id) == "cuda:0"


def on_machine_with(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> dict[str, Any]:
    """What `_join` does as local rank 3 of a machine where a process sees so many devices of an accelerator: returns
    the index that it made current, and the arguments of `init_process_group`."""
    given: dict[str, Any] = {}
    devices = SimpleNamespace(device_count=lambda: count, current_device=lambda: given["index"])
    monkeypatch.setattr(devices, "set_device", lambda index: given.update(index=index), raising=False)
    monkeypatch.setattr(torch, kind, devices)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **named: given.update(named, backend=backend))
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("RANK", raising=False)
    return given


def test_init_binds_the_group_to_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    given = on_machine_with(monkeypatch, "cuda", 4)
    joining._join(None, timedelta(seconds=7))
    assert given["backend"] == "cpu:gloo,cuda:nccl" and given["index"] == 3
    assert given["device_id"] == torch.device("cuda", 3) and given["timeout"] == timedelta(seconds=7)
    assert given["pg_options"].is_high_priority_stream and given["pg_options"]._timeout == timedelta(seconds=7)
    given.clear()
    joining._join("gloo", timedelta(seconds=7))
    assert not {"device_id", "pg_options"} & given.keys()


def test_init_takes_the_only_device_that_a_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Slurm with --gpus-per-task=1, and under Ray: it was "invalid device ordinal"."""
    given = on_machine_with(monkeypatch, "cuda", 1)
    joining._join(None, timedelta(seconds=7))
    assert given["index"] == 0 and given["device_id"] == torch.device("cuda", 0)
    given = on_machine_with(monkeypatch, "cuda", 2)
    with pytest.raises(
        ValueError, match="LOCAL_RANK is 3, and this process sees 2 cuda devices: start at most 2 ranks"
    ):
        joining._join(None, timedelta(seconds=7))
    assert not given


@pytest.mark.parametrize(
    ("environment", "index"),
    [
        ({"LOCAL_RANK": "3", "RANK": "6", "SLURM_LOCALID": "1"}, 3),
        ({"RANK": "6", "SLURM_LOCALID": "1"}, 1),
        ({"RANK": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMI_LOCAL_RANK": "2"}, 0),
        ({"RANK": "6", "SLURM_LOCALID": ""}, 2),  # by the number of devices
        ({"SLURM_LOCALID": "1"}, 0),  # no rank: a world of its own, as before
    ],
)
def test_a_rank_without_a_local_rank_takes_the_device_that_its_launcher_means(
    environment: dict[str, str], index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks took device 0, and NCCL refused it with "invalid usage"."""
    given = on_machine_with(monkeypatch, "cuda", 4)
    for name in ("LOCAL_RANK", "RANK", *backends._LOCAL_RANKS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert backends.take_device("cuda") == torch.device("cuda", index) and given["index"] == index


def test_two_ranks_on_one_gpu_are_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NCCL says names neither the cause nor what to write."""
    on_machine_with(monkeypatch, "cuda", 4)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)

    def init_process_group(backend: str, **named: Any) -> None:
        raise dist.DistBackendError(f"NCCL error in: x.cpp:1, {words}")

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(joining, "_meeting", lambda *arguments: nullcontext())
    words = "invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
    with pytest.raises(ValueError, match="ranks 0 and 1 use the same GPU: set LOCAL_RANK"):
        joining._join(None, timedelta(seconds=7))
    words = "unhandled system error"
    with pytest.raises(dist.DistBackendError, match=words):
        joining._join(None, timedelta(seconds=7))


def timeouts_on_two_axes(rank: int) -> list[list[float]]:
    device, own = torch.device("cpu"), timedelta(seconds=9)
    mesh = init_device_mesh("cpu", (2, 2))
    found = [[backends.timeout_of(mesh.get_group(axis), device).total_seconds()] for axis in range(2)]
    for given in (mesh, dist.new_group([0, 1, 2, 3], timeout=own), dist.new_group([0, 1, 2, 3])):
        of = Mesh.of(given, device).with_two_ways()
        axes = (of.world, of.shard, of.replicate, of.reduce)
        groups = [group for axis in axes for group in (axis.group, axis.downward) if group is not None]
        found.append([backends.timeout_of(group, device).total_seconds() for group in groups])
    return found


@pytest.mark.by_gloo
def test_groups_without_a_timeout_have_that_of_init() -> None:
    """They had torch's own, and a rank that did not come was noticed after half an hour. A timeout that the program has
    given to a group stays."""
    for found in run_ranks(timeouts_on_two_axes, 4, collective_timeout=77.0):
        own, of_mesh, of_group, of_default = [set(seconds) for seconds in (found[0] + found[1], *found[2:])]
        assert own == {1800.0} and of_mesh == {77.0} and of_group == {9.0} and of_default == {77.0}


def test_init_joins_the_backend_of_another_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It joined gloo alone, and every rank kept device 0."""
    given = on_machine_with(monkeypatch, "xpu", 4)
    joining._join(None, timedelta(seconds=7))
    assert given == {"index": 3, "backend": "cpu:gloo,xpu:xccl", "timeout": timedelta(seconds=7)} | {
        name: given[name] for name in ("store", "rank", "world_size")
    }
    given = on_machine_with(monkeypatch, "mps", 1)  # gloo is torch's backend for it
    joining._join(None, timedelta(seconds=7))
    assert given["backend"] == "gloo" and "index" not in given


def test_one_queue_for_all_streams_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Megatron's habit; gathers and reductions have two communicators. Once, and not for models on CPUs."""

    def run(rank: int) -> list[str]:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        told = []
        for value, device in (("2", "cuda:0"), ("1", "cpu"), ("1", "cuda:0"), ("1", "cuda:0")):
            monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
            caplog.clear()
            Mesh.of(None, torch.device(device))
            told.append(" ".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING"))
        return told

    (told,) = run_ranks(run, 1)
    assert [bool(words) for words in told] == [False, False, True, False]
    assert "CUDA_DEVICE_MAX_CONNECTIONS is 1" in told[2]


def test_processes_that_do_not_know_of_each_other_are_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """srun and mpirun without RANK: each process was a world of one, silently; torch's own init raises there."""

    def run(rank: int) -> list[str]:
        cases = ({}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_NTASKS": "4"},  # of a batch script, which is one process
                 {"SLURM_STEP_NUM_TASKS": "4"}, {"OMPI_COMM_WORLD_SIZE": "2"}, {"PMI_SIZE": "2"})  # fmt: skip
        told = []
        for case in cases:
            dist.destroy_process_group()
            caplog.clear()
            with monkeypatch.context() as patch:
                for name in ("RANK", "WORLD_SIZE"):
                    patch.delenv(name, raising=False)
                for name, value in case.items():
                    patch.setenv(name, value)
                zeroshard.init()
            told.append(" ".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING"))
        return told

    (told,) = run_ranks(run, 1)
    assert [words.partition(",")[0] for words in told] == [
        "", "", "", "SLURM_STEP_NUM_TASKS is 4", "OMPI_COMM_WORLD_SIZE is 2", "PMI_SIZE is 2",
    ]  # fmt: skip


def test_warnings_are_seen_where_a_program_sets_up_no_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that does nothing once hid them."""

    def run(rank: int) -> str:
        logging.getLogger().handlers.clear()  # those of pytest
        with redirect_stderr(StringIO()) as seen:
            joining.warn_of_other_tasks()
            tell(rank, "the model is sharded")
        return seen.getvalue()

    monkeypatch.setenv("PMI_SIZE", "2")
    (seen,) = run_ranks(run, 1)
    assert seen.startswith("PMI_SIZE is 2, and RANK") and seen.count("\n") == 1


@pytest.mark.parametrize("given", ["3 2 localhost 1", "x 2 localhost 1", "0 2  1", "0 2 localhost ", " 2 localhost 1"])
def test_an_environment_that_is_none_of_a_rank_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), given.split(" "), strict=True):
        monkeypatch.setenv(name, value)
    rank, world_size, *_ = given.split(" ")
    with pytest.raises(ValueError, match=f"of rank 0, found RANK={rank}, WORLD_SIZE={world_size}, MASTER_ADDR="):
        launched()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launched() == (1, 2)
    for name in ("RANK", "WORLD_SIZE"):  # one alone: each process would train alone, where torch raises
        with monkeypatch.context() as without:
            without.delenv(name)
            with pytest.raises(ValueError, match=rf"found (.*, )?{name}=, "):
                launched()
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert launched() is None
