"""fp16 with one loss scaler for each of two losses, whose gradients differ by many powers of two.

One scale for both would overflow in the one or underflow in the other.

torchrun --nproc-per-node 2 examples/scalers.py
"""

import torch
from torch import nn

import zeroshard

device = zeroshard.init()
rank = torch.distributed.get_rank()

torch.manual_seed(0)
model = nn.ModuleDict(
    {"trunk": nn.Sequential(nn.Linear(16, 64), nn.Tanh()), "small": nn.Linear(64, 1), "large": nn.Linear(64, 1)}
).to(device)
handle = zeroshard.shard(model, "zero2", precision="fp16")
optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2)
scalers = {"small": zeroshard.LossScaler(), "large": zeroshard.LossScaler()}  # dynamic, from 65536
weights = {"small": 1e-6, "large": 1e4}

data = torch.Generator().manual_seed(1 + rank)
skipped = 0
for _step in range(50):
    x = torch.randn(32, 16, generator=data).to(device)
    targets = {"small": x[:, :1].sin(), "large": x[:, 1:2].cos()}
    optimizer.zero_grad()
    inner = model["trunk"](x)
    losses = {name: nn.functional.mse_loss(model[name](inner).float(), target) for name, target in targets.items()}
    for name, loss in losses.items():
        optimizer.backward(weights[name] * loss, scaler=scalers[name], retain_graph=name == "small")
    result = optimizer.step()  # skipped on all ranks, and the scale halved, where a loss has overflowed
    skipped += not result.applied
scales = {name: scaler.scale for name, scaler in scalers.items()}
if rank == 0:
    print(f"scales {scales}, {skipped} steps skipped, losses {[round(loss.item(), 3) for loss in losses.values()]}")
