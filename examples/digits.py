"""Handwritten digits of scikit-learn: convolutions with batch norm, a DataLoader with a DistributedSampler, ZeRO-3.

torchrun --nproc-per-node 2 examples/digits.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import zeroshard

device = zeroshard.init()
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
labels = torch.tensor(digits.target)
data = TensorDataset(images[:1400], labels[:1400])
sampler = DistributedSampler(data, shuffle=True, seed=0)  # each rank reads another part
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)  # and as many batches as the others


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


torch.manual_seed(0)
model = nn.Sequential(block(1, 16), block(16, 32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10)).to(device)
handle = zeroshard.shard(model, "zero3")
optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=3e-3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()

# The running statistics of batch norm are of each rank's own batches; now they are the same everywhere.
handle.average_buffers()
model.eval()
with torch.no_grad():  # under ZeRO-3 a forward is collective: all ranks evaluate
    found = model(images[1400:].to(device)).argmax(dim=1).cpu()
accuracy = float((found == labels[1400:]).float().mean())
if torch.distributed.get_rank() == 0:
    print(f"{accuracy:.1%} of {len(found)} digits are right")
