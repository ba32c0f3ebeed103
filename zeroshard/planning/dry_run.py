"""A dry run: the real engine as one rank of many, alone in its process, over a process group that moves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroshard.errors import InvalidState
from zeroshard.planning.forecast import expect_mesh


@contextmanager
def dry_run(ranks: int, *, replicas: int = 1, rank: int = 0, device: str = "cpu") -> Iterator[DeviceMesh]:
    """Inside, `shard(model, plan, mesh=mesh)` and all that follows runs as it does on that rank: what it holds is
    `handle.memory()`, and what it would send is in `handle.comm_log`. Both are as `plan` says, for the transport
    "native".

    What would arrive is made up (torch's "fake" backend copies what this rank has), so losses and weights mean nothing:
    build the optimizer with `non_finite="ignore"`. A checkpoint cannot be saved, as nobody else writes a part of it.

    Args:
        ranks: of the world; `replicas` of them hold the same shard.
        rank: which one this process is.
        device: the type of device where the model is.

    Yields:
        The mesh: one axis, or "replicate" and "shard".

    Raises:
        ValueError: numbers that make no mesh.
        RuntimeError: there is a process group already.
    """
    expect_mesh(ranks, replicas, rank)
    if dist.is_initialized():
        raise InvalidState("dry_run: this process is in a process group already: start a dry run in one of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the import makes the backend known

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        if replicas == 1:
            yield init_device_mesh(device, (ranks,))
        else:
            yield init_device_mesh(device, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
    finally:
        dist.destroy_process_group()
