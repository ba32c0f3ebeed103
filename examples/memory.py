"""Bytes on one rank: planned without allocating the model, and counted in the live storages after a step."""

import torch
from torch import nn

import zeroshard
from zeroshard.planner import plan_memory


def network(width: int, blocks: int) -> nn.Sequential:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return nn.Sequential(*(block() for _ in range(blocks)))


device = zeroshard.init()
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

lines = []
if rank == 0:
    with torch.device("meta"):
        large = network(width=4096, blocks=48)
    numel = sum(parameter.numel() for parameter in large.parameters())
    print(f"{numel:,} parameters, bf16 weights, 64 ranks, NCCL: GB on one rank, and transient")
    for plan in ("ddp", "zero1", "zero2", "zero3"):
        kinds = {"units": nn.Sequential, "precision": "bf16", "transport": "native", "device_type": "cuda"}
        planned = plan_memory(large, plan, world_size=64, peak=True, **kinds)
        transient = sum(planned[kind] for kind in ("ring", "buckets", "scratch"))
        lines.append(f"{plan:5}{(sum(planned.values()) - transient) / 1e9:8.2f}  {transient / 1e9:6.2f}")
    print("\n".join(lines))

model = network(width=256, blocks=4).to(device)
at_rest = plan_memory(model, "zero3", world_size, units=nn.Sequential, rank=rank)
at_most = plan_memory(model, "zero3", world_size, units=nn.Sequential, rank=rank, peak=True)
handle = zeroshard.shard(model, "zero3", units=nn.Sequential)
optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-3)
optimizer.backward(model(torch.randn(8, 256, device=device)).square().mean())
optimizer.step()
assert handle.memory() == at_rest, (handle.memory(), at_rest)
assert handle.memory(peak=True) == at_most, (handle.memory(peak=True), at_most)
if rank == 0:
    print(f"zero3 on {world_size} ranks, planned and measured: between steps {at_rest}")
    print(f"at most {at_most}")
