"""Files of shared memory: how many are open; and segments that are freed at an inconvenient moment: by a collection, or
in another thread that had the last reference (a profiler that looks at stacks)."""

from __future__ import annotations

import os
import resource
import weakref

import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import PLANS
from tests.together import on_ranks
from zeroshard.errors import SystemRefused
from zeroshard.ranks.shared_memory import NOWHERE, Location, SharedMemory, _Own
from zeroshard.ranks.trial import Probe
from zeroshard.testing import run_ranks


def test_a_freed_segment_is_not_taken_for_the_next_one_at_its_address() -> None:
    memory = SharedMemory()
    first, second = memory.allocate(4096), memory.allocate(4096)
    found = memory.locate(second)
    (of_second,) = (one for one in memory._own.values() if found is not None and one.segment == found.segment)
    memory._own[first.data_ptr()] = of_second  # as if it had been mapped there, before the finalizer of the first
    address = first.data_ptr()
    del first
    assert memory._own[address] is of_second
    del memory._own[address], second
    assert not memory._own


def test_segments_that_are_listed_for_peers_stay_until_they_have_mapped_them() -> None:
    memory = SharedMemory()
    tensors = [memory.allocate(num_bytes) for num_bytes in (4096, 8192)]
    gone = weakref.ref(torch.empty(1))
    memory._own[0] = _Own(99, 10**6, gone, lambda: None)  # its tensor has died, and its finalizers have not run yet
    kept, rows = memory.own_segments()
    tensors.clear()
    assert [size for _, _, size in rows] == [4096, 8192]
    assert [os.fstat(fd).st_size for _, fd, _ in rows] == [4096, 8192]
    assert memory.locate(kept[0]) is not None
    kept.clear()
    assert list(memory._own) == [0]


@pytest.mark.by_gloo
@on_ranks(2)
def test_what_a_peer_has_freed_does_not_stay_mapped(rank: int) -> None:
    """Each step with gradients that were set by hand left a full buffer of the peer mapped, and so in memory."""
    for plan in PLANS:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        memory, held = handle.engine.collectives.transport.memory, []
        for step in range(5):
            if step % 2:
                for parameter in model.parameters():
                    parameter.grad = torch.ones(parameter.shape)
            else:
                optimizer.backward(model(torch.ones(2, 64)).sum())
            optimizer.step()
            held.append(sum(tensor.nbytes for tensor in memory.mapped()))
        assert held[1] == held[3] and held[2] == held[4], (plan, held)
        handle.close()


@pytest.mark.by_gloo  # other transports have no files
def test_no_file_of_a_unit_stays_open_and_a_limit_of_files_is_told() -> None:
    def check(rank: int) -> None:
        files = len(os.listdir("/proc/self/fd"))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (files + 60, hard))  # fewer than there are units
        for plan in PLANS:
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(80)))
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            assert len(handle.engine.units) == 80 and len(os.listdir("/proc/self/fd")) < files + 40
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (files + 60, hard)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            before = [value.clone() for value in handle.full_state_dict().values()]
            for _ in range(2):
                optimizer.backward(model(torch.full((2, 4), 1.0 + rank)).sum())
                optimizer.step()
            after = list(handle.full_state_dict().values())
            assert not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
            handle.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (files + 20, files + 20))
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(80)))
        for plan in ("zero1", "zero3"):
            with pytest.raises(
                ValueError, match=r"this process has \d+ open files, as many as it may: raise the limit"
            ):
                zeroshard.shard(model, plan, units=nn.Linear)
        sizes = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, sizes[1]))
        files = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ValueError, match=r"this process may have files of at most 1000 bytes: raise the limit"):
            zeroshard.shard(nn.Linear(40, 40), "zero1")
        assert len(os.listdir("/proc/self/fd")) == files
        resource.setrlimit(resource.RLIMIT_FSIZE, sizes)

    run_ranks(check, 2)


@pytest.mark.by_gloo
def test_a_limit_at_the_trial_is_told_and_a_sandbox_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no such memory, ranks exchange messages; a limit of this process is the user's to raise."""

    def raises(error: Exception) -> None:
        def create(shared: SharedMemory, num_bytes: int) -> tuple[int, int]:
            raise error

        monkeypatch.setattr(SharedMemory, "create", create)

    raises(SystemRefused("this process has 9 open files, as many as it may"))
    with pytest.raises(SystemRefused, match="as many as it may"):
        Probe(SharedMemory(), 0, 2)
    raises(PermissionError())
    probe = Probe(SharedMemory(), 0, 2)
    assert Location(*probe.card()[2:]) == NOWHERE and not probe.answer([probe.card()] * 2)
