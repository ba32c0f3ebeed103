"""Compares the planned peak of a step, with activations, to the measured growth of a process's resident set.

    python benchmarks/activations.py
    python benchmarks/activations.py --models llama --sequences 4 8

The engine runs as rank 0 of 8 in a dry run, so that one process holds what one of 8 ranks would hold. Each case has its
own process. The second step is measured. Needs Linux, zeroshard[train] and transformers.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard.planning import Configuration, Workload, dry_run
from zeroshard.testing import run_ranks

RANKS, VOCABULARY, LENGTH = 8, 512, 256
_M_MMAP_THRESHOLD = -3


def gpt() -> tuple[nn.Module, type[nn.Module], Callable[[nn.Module, Any], Tensor]]:
    from zeroshard.train.config import ModelConfig
    from zeroshard.train.model import GPT, Block

    config = ModelConfig(layers=4, width=256, heads=4, context=LENGTH)
    return GPT(config, VOCABULARY), Block, lambda model, tokens: model(tokens, tokens)


def gpt2() -> tuple[nn.Module, type[nn.Module], Callable[[nn.Module, Any], Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), GPT2Block, lambda model, tokens: model(tokens, labels=tokens).loss


def llama() -> tuple[nn.Module, type[nn.Module], Callable[[nn.Module, Any], Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=704,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    return LlamaForCausalLM(config), LlamaDecoderLayer, lambda model, tokens: model(tokens, labels=tokens).loss


def measured(build: Callable[[], Any], plan: str, batch: int, recompute: bool) -> int:
    """Peak bytes of a step, minus the resident bytes before the model was built."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # freed blocks go back to the system at once
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # so that zeroshard leaves it so (`host_memory.py`)
    with dry_run(RANKS) as mesh:
        train(build, plan, 1, recompute, mesh)  # a first run loads the code of a step, which is resident from then on
        gc.collect()
        start = _resident("VmRSS")
        train(build, plan, batch, recompute, mesh)
        return _resident("VmHWM") - start


def train(build: Callable[[], Any], plan: str, batch: int, recompute: bool, mesh: Any) -> None:
    """Two steps; the peak is that of the second one."""
    model, block, loss_of = build()
    for module in model.modules() if recompute else ():
        if isinstance(module, block):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    handle = zeroshard.shard(model, plan, units=block, mesh=mesh)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, non_finite="ignore", fused=True)
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
        tokens = torch.randint(VOCABULARY, (batch, LENGTH))
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def planned(build: Callable[[], Any], plan: str, batch: int, recompute: bool) -> zeroshard.planning.Forecast:
    with torch.device("meta"):
        model, block, loss_of = build()
    workload = Workload(lambda: torch.randint(VOCABULARY, (batch, LENGTH)), loss_of, recompute)
    configuration = Configuration(
        plan=plan, ranks=RANKS, units=block, device="cpu", transport="native", workload=workload
    )
    return zeroshard.plan(model, configuration)


def case(rank: int, *arguments: Any) -> tuple[int, int, int]:
    dist.destroy_process_group()
    forecast = planned(*arguments)
    found = forecast.peak, forecast.whole_peak, measured(*arguments)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


MODELS = {build.__name__: build for build in (gpt, gpt2, llama)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--plans", nargs="+", choices=("ddp", "zero1", "zero2", "zero3"), default=["zero1", "zero3"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[4, 8, 16], help=f"of {LENGTH} tokens in a step")
    return parser.parse_args()


def main() -> None:
    options = parse()
    print("| model | plan | recomputed | sequences | engine MB | planned MB | measured MB | planned / measured |")
    print("|---|---|---|---|---|---|---|---|")
    each = itertools.product(options.models, (False, True), options.sequences, options.plans)
    for name, recompute, batch, plan in each:
        ((engine, whole, found),) = run_ranks(case, 1, MODELS[name], plan, batch, recompute)
        columns = (name, plan, "blocks" if recompute else "", batch)
        ratio = f"{whole / found:.3f}" if found else "all of it lay in pages that the process had"
        print(
            "|", " | ".join(map(str, columns)), f"| {engine / 1e6:.1f} | {whole / 1e6:.1f} | {found / 1e6:.1f} |",
            f"{ratio} |", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
