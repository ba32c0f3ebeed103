"""A loop of Accelerate with a sharded model: another Accelerator, the same script. Needs accelerate.

torchrun --nproc-per-node 2 examples/with_accelerate.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zeroshard.integrations import Sharding
from zeroshard.integrations.accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2, sharding=Sharding("zero3"), cpu=not torch.cuda.is_available())
torch.manual_seed(0)
x = torch.randn(960, 16)
loader = DataLoader(TensorDataset(x, x.sin().sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for _epoch in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
accelerator.print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last, on {accelerator.num_processes} ranks")
