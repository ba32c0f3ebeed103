"""Muon for the matrices of the blocks, AdamW for everything else, in one optimizer with one learning rate schedule.

torchrun --nproc-per-node 2 examples/muon.py
"""

import torch
from torch import nn

import zeroshard

device = zeroshard.init()
rank = torch.distributed.get_rank()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), Block(32), Block(32), nn.Linear(32, 64)).to(device)
handle = zeroshard.shard(model, "zero2", units=Block)

matrices = [p for block in (model[1], model[2]) for p in block.parameters() if p.dim() == 2]
others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
optimizer = zeroshard.ShardedOptimizer(
    [
        {"params": matrices, "lr": 0.02, "weight_decay": 0.01},
        {"params": others, "optimizer_class": torch.optim.AdamW, "lr": 3e-3, "betas": (0.9, 0.95)},
    ],
    torch.optim.Muon,
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)

data = torch.Generator().manual_seed(1 + rank)
losses = []
for _step in range(60):
    tokens = torch.randint(64, (16, 8), generator=data).to(device)
    targets = (5 * tokens + 3) % 64  # what each token is to be mapped to
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())
print(f"rank {rank}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
