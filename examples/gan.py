"""A GAN: two models with a handle and an optimizer each. The generator learns to write points of a ring.

torchrun --nproc-per-node 2 examples/gan.py
"""

import math

import torch
from torch import Tensor, nn

import zeroshard

device = zeroshard.init()
rank = torch.distributed.get_rank()
BATCH = 64

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
of_generator, of_critic = zeroshard.shard(generator, "zero3"), zeroshard.shard(critic, "zero3")
generator_step = zeroshard.ShardedOptimizer(of_generator, torch.optim.Adam, lr=3e-3, betas=(0.5, 0.9))
critic_step = zeroshard.ShardedOptimizer(of_critic, torch.optim.Adam, lr=3e-3, betas=(0.5, 0.9))
random = torch.Generator().manual_seed(1 + rank)


def ring() -> Tensor:
    angle = 2 * math.pi * torch.rand(BATCH, generator=random)
    return torch.stack((angle.cos(), angle.sin()), dim=1).to(device)


def noise() -> Tensor:
    return torch.randn(BATCH, 8, generator=random).to(device)


def is_real(points: Tensor, answer: float) -> Tensor:
    found = critic(points)
    return nn.functional.binary_cross_entropy_with_logits(found, torch.full_like(found, answer))


for _step in range(60):
    critic_step.zero_grad()
    loss = is_real(ring(), 1.0) + is_real(generator(noise()).detach(), 0.0)
    loss.backward()
    critic_step.step()

    generator_step.zero_grad()
    is_real(generator(noise()), 1.0).backward()  # gives the critic gradients, too: its zero_grad discards them
    generator_step.step()

with torch.no_grad():
    radius = float(generator(noise()).norm(dim=1).mean())
print(f"rank {rank}: mean radius of the points {radius:.2f}, of the ring 1.00")
