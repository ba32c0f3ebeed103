"""A dry run: the real engine as one rank of many in a single process, over a fake process group that moves no data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroshard.errors import InvalidState
from zeroshard.planner import expect_mesh


@contextmanager
def dry_run(ranks: int, *, replicas: int = 1, rank: int = 0, device: str = "cpu") -> Iterator[DeviceMesh]:
    """A block in which `shard(model, plan, mesh=mesh)` and everything after it run as on that rank. `handle.memory()`
    shows what the rank holds, `handle.comm_log` what it would send. Both equal the forecast of `plan` for the transport
    "native".

    Received data are invalid (torch's "fake" backend sends nothing), so losses and weights have no meaning: build the
    optimizer with `non_finite="ignore"`. Checkpoints cannot be saved, as the other ranks' parts are missing.

    Args:
        ranks: number of ranks in the world.
        replicas: how many ranks hold the same shard.
        rank: the rank of this process.
        device: the type of device of the model.

    Yields:
        The mesh: one axis, or "replicate" and "shard".

    Raises:
        ValueError: the numbers do not form a mesh.
        RuntimeError: this process has a process group already.
    """
    expect_mesh(ranks, replicas, rank)
    if dist.is_initialized():
        raise InvalidState("dry_run: this process is in a process group already: start a dry run in one of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the import registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        if replicas == 1:
            yield init_device_mesh(device, (ranks,))
        else:
            yield init_device_mesh(device, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
    finally:
        dist.destroy_process_group()
