"""Ranks of which the last one goes wrong in its third step: `torchrun -m tests.gpu.ending_ranks CASE SECONDS`.

The others must end soon, and say why: over NCCL no wait raises. SECONDS: the timeout of collectives.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor, left_out: tuple[int, ...] = ()) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number in left_out else x + torch.tanh(block(x))
        return x


def fail(module: nn.Module, inputs: object) -> None:
    raise ValueError("out of memory, say")


def go_wrong(case: str, model: Blocks) -> None:
    """What the last rank does before its third step."""
    if case in ("raises", "destroys"):
        model.blocks[3].register_forward_pre_hook(fail)
    elif case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "is elsewhere":
        time.sleep(3600)
    elif case == "leaves":
        sys.exit(0)


def train(case: str, timeout: float) -> None:
    device = zeroshard.init(timeout=timeout)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    print(f"rank {dist.get_rank()} on {device}", flush=True)
    torch.manual_seed(0)
    model = Blocks().to(device)
    handle = zeroshard.shard(model, "zero3", units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-3)
    for step in range(4):
        if is_last and step == 2:
            go_wrong(case, model)
        left_out = (3, 4) if case == "skips" and is_last and step == 2 else ()
        model(torch.randn(8, 64, device=device), left_out).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    try:
        train(sys.argv[1], float(sys.argv[2]))
    finally:
        if sys.argv[1] in ("destroys", "is right"):
            dist.destroy_process_group()
