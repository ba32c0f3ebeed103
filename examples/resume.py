"""A run that goes on at any number of ranks, and under any plan, from where it was stopped.

torchrun --nproc-per-node 2 examples/resume.py steps        the first 30 steps
torchrun --nproc-per-node 3 examples/resume.py steps        30 more, on three ranks
python examples/resume.py steps --plan zero1                30 more, on one
"""

import argparse

import torch
from torch import nn

import zeroshard
from zeroshard.checkpoint import steps

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--plan", default="zero3")
parser.add_argument("--steps", type=int, default=30)
arguments = parser.parse_args()

device = zeroshard.init()
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
handle = zeroshard.shard(model, arguments.plan)
optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

first = 0
if steps(arguments.folder):
    first = zeroshard.load(arguments.folder, handle, optimizer, extra={"scheduler": scheduler}).step

for step in range(first, first + arguments.steps):
    # The batch depends only on the step, and each rank takes its part: the same 60 samples on any number of ranks.
    x = torch.randn(60, 16, generator=torch.Generator().manual_seed(step))
    mine = x[rank::world_size].to(device)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(mine), mine.sin().sum(dim=1, keepdim=True))
    loss.backward()
    optimizer.step()
    scheduler.step()

zeroshard.save(arguments.folder, handle, optimizer, step=step + 1, extra={"scheduler": scheduler})
torch.distributed.all_reduce(total := loss.detach().clone())
mean = float(total) / world_size
if rank == 0:
    print(f"steps {first + 1} to {step + 1} on {world_size} ranks, {arguments.plan}: loss {mean:.5f}")
