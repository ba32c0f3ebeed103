"""Optional contenders of `step_time.py`: DeepSpeed, FairScale and Megatron-core, each where it can be imported.

    pip install wheel ninja hjson py-cpuinfo msgpack einops
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-deps --no-build-isolation deepspeed fairscale megatron-core

`--no-deps`, because they would replace torch. Megatron-core takes part on GPUs only: its gradient buffers and its
distributed optimizer call `torch.cuda` whatever the model's device is.

DeepSpeed compiles an extension at its first start. If that is interrupted, every later start waits for ever: delete the
file `lock` in `~/.cache/torch_extensions/*/deepspeed_shm_comm`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FAIRSCALE, DEEPSPEED, MEGATRON = "FairScale OSS", "DeepSpeed ZeRO-", "Megatron"
NAMES = (FAIRSCALE, *(f"{DEEPSPEED}{stage}" for stage in (1, 2, 3)), MEGATRON)


def missing(name: str, device: str) -> str:
    """Why this contender cannot take part; empty where it can."""
    if name == MEGATRON and device == "cpu":
        return "it needs CUDA"
    module = {FAIRSCALE: "fairscale", MEGATRON: "megatron"}.get(name, "deepspeed")
    return "" if importlib.util.find_spec(module) else f"{module} is not installed"


class Steps:
    """How a peer runs a backward and a step, where it does so by calls of its own."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()

    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)


def build(name: str, model: nn.Module, adamw: dict[str, Any], dtype: torch.dtype) -> Steps:
    if name == FAIRSCALE:
        return _fairscale(model, adamw)
    if name == MEGATRON:
        return _Megatron(model, adamw, dtype)
    return _DeepSpeed(model, adamw, dtype, int(name.removeprefix(DEEPSPEED)))


def _fairscale(model: nn.Module, adamw: dict[str, Any]) -> Steps:
    """Sharded optimizer state and gradients: ZeRO-2."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(params=model.parameters(), optim=torch.optim.AdamW, **adamw)
    wrapped = ShardedDataParallel(model, optimizer, sync_models_at_startup=False)
    steps = Steps(wrapped, optimizer)
    steps.clip = optimizer.clip_grad_norm  # type: ignore[method-assign]
    # Not optimizer.zero_grad: it leaves the buckets as they are, and gradients accumulate from step to step, silently.
    steps.zero_grad = wrapped.zero_grad  # type: ignore[method-assign]
    return steps


class _DeepSpeed(Steps):
    """The optimizer is torch's, as for all others. Buckets and overlap: DeepSpeed's defaults."""

    def __init__(self, model: nn.Module, adamw: dict[str, Any], dtype: torch.dtype, stage: int) -> None:
        if not next(model.parameters()).is_cuda:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,  # its default is 1.0: without this its losses are those of clipped gradients
            "bf16": {"enabled": dtype == torch.bfloat16},
        }
        optimizer = torch.optim.AdamW(model.parameters(), **adamw)
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, dist_init_required=False)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        super().__init__(engine, optimizer)
        self.engine = engine

    def zero_grad(self) -> None:
        pass  # `step` does it

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def clip(self, max_norm: float) -> None:
        raise SystemExit("--clip: DeepSpeed takes it from its configuration: leave its contenders out")


class _Megatron(Steps):
    """Its distributed optimizer, with overlapped reductions and gathers."""

    def __init__(self, model: nn.Module, adamw: dict[str, Any], dtype: torch.dtype) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        wrapped = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1, params_dtype=dtype),
            DistributedDataParallelConfig(
                overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True
            ),
            model,
        )
        config = OptimizerConfig(
            optimizer="adam",
            lr=adamw["lr"],
            weight_decay=adamw["weight_decay"],
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            clip_grad=0.0,
        )
        super().__init__(wrapped, get_megatron_optimizer(config, [wrapped]))

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.model.finish_grad_sync()  # type: ignore[operator]

    def clip(self, max_norm: float) -> None:
        raise SystemExit("--clip: Megatron takes it from its configuration: leave it out")
