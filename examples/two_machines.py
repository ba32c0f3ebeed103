"""The same five lines on two machines, with a checkpoint in a folder that both of them see. On each machine:

torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint FIRST:29500 examples/two_machines.py FOLDER

FIRST is the name or the address of the first machine. Started again, the run goes on from its checkpoint, on any number
of machines. two_machines.sh does this on one machine, as root.
"""

import argparse
import socket

import torch
from torch import nn

import zeroshard
from zeroshard.checkpoint import steps

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=50)
arguments = parser.parse_args()

device = zeroshard.init()
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
model.to(device)
handle = zeroshard.shard(model, "zero3")
optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-3)
print(f"rank {rank} of {world_size} on {socket.gethostname()}")

first = zeroshard.load(arguments.folder, handle, optimizer).step if steps(arguments.folder) else 0
for step in range(first, first + arguments.steps):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step * world_size + rank)).to(device)
    y = torch.sin(x).sum(1, keepdim=True)

    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()

zeroshard.save(arguments.folder, handle, optimizer, step=step + 1)
print(f"rank {rank}: step {step + 1} loss {loss.item():.6f}")
