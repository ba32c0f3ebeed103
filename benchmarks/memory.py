"""Bytes that one rank holds under each plan, compared to torch's own DDP, ZeroRedundancyOptimizer and FSDP2.

    python benchmarks/memory.py --ranks 2 4

The contenders of `step_time.py`, each in its own ranks. No library's own figures are used: the count is of all storages
behind tensors that a torch operation has seen and that are still alive, activations and temporaries included. What a
backend of `torch.distributed` allocates inside itself is not seen (gloo's reduce-scatter, which FSDP2 uses, clones its
input). Printed are bytes per parameter between two steps, after `zero_grad()`, and the maximum at any operation of the
third step. The counts are the same in every run, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from typing import Any

import torch
import torch.distributed as dist
from step_time import BUILDERS, Setting, Version, add_contenders, choose_contenders
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from zeroshard.testing import run_ranks
from zeroshard.train.config import ModelConfig
from zeroshard.train.model import GPT

SMALLEST = 1024  # storages of fewer bytes are not counted
STEPS = 3


class LiveStorages(TorchDispatchMode):
    """All storages of this process that operations inside of the mode have touched: how many of their bytes are alive,
    and the maximum since `restart`. Memory of a peer is not counted: it is mapped by `from_file`, never allocated
    here."""

    def __init__(self, foreign: Any) -> None:
        super().__init__()
        self._refs: dict[int, StorageWeakRef] = {}
        self._foreign = foreign  # () -> tensors that map memory of peers
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # the DTensor then calls the operation on its local tensor, which is counted
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage.nbytes() >= SMALLEST and storage._cdata not in self._refs:
                    self._refs[storage._cdata] = StorageWeakRef(storage)
        if func is not torch.ops.aten.from_file.default:  # `foreign` lists this tensor only after the call
            self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        foreign = {tensor.untyped_storage()._cdata for tensor in self._foreign()}
        total = 0
        for key, ref in list(self._refs.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._refs[key]
            elif storage._cdata not in foreign:
                total += storage.nbytes()
        return total

    def restart(self) -> None:
        gc.collect()
        self.most = self.now()


def measure(rank: int, name: str, options: argparse.Namespace) -> tuple[float, float]:
    """Bytes per parameter between steps, and at most; each the maximum over all ranks."""
    warnings.simplefilter("ignore")  # torch's own deprecations
    config = ModelConfig(layers=options.layers, width=options.width, heads=options.heads, context=options.context)
    shape = options.batch, options.context + 1
    peers: list[Any] = []
    live = LiveStorages(lambda: [tensor for shared in peers if shared for tensor in shared.mapped()])
    with live:
        torch.manual_seed(0)
        model = GPT(config, options.vocabulary)
        numel = sum(parameter.numel() for parameter in model.parameters())
        contender = BUILDERS[name](Version(None), model, Setting({"lr": 1e-3, "fused": True}, torch.float32, "cpu"))
        if isinstance(contender.optimizer, zeroshard.ShardedOptimizer):
            peers.append(contender.optimizer.handle.engine.collectives.transport.memory)
        for step in range(STEPS):
            tokens = torch.randint(options.vocabulary, shape, generator=torch.Generator().manual_seed(step + 7 * rank))
            live.restart()
            contender.step((tokens[:, :-1], tokens[:, 1:]), 0.0)
        contender.settle()
        contender.optimizer.zero_grad()
        contender.losses.clear()
        most = live.most
        live.restart()
    found = torch.tensor([live.now(), most], dtype=torch.float64) / numel
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found[0].item(), found[1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="world sizes, one after the other")
    add_contenders(parser)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank: few, so that activations are small")
    options = parser.parse_args()
    choose_contenders(parser, options, "cpu")
    for world_size in options.ranks:
        print(f"\n{world_size} ranks, fp32: bytes per parameter on one rank\n{'':<12} between steps   at most")
        for name in options.contenders:
            rest, most = run_ranks(measure, world_size, name, options)[0]
            print(f"{name:<12} {rest:13.2f} {most:9.2f}")


if __name__ == "__main__":
    main()
