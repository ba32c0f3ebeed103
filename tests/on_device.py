"""Ranks that use a device, forked by tests of a process that does not: a process that has used CUDA cannot fork any."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tests.kit import DEVICE
from zeroshard import testing


class _ToHost(testing._Pickler):
    """Pickles tensors of a device as CPU tensors."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type in ("cpu", "meta"):
            return super().reducer_override(value)
        value = value.detach().cpu()
        found = super().reducer_override(value)
        return value.__reduce_ex__(pickle.DEFAULT_PROTOCOL) if found is NotImplemented else found


@contextmanager
def ranks_on_cuda() -> Iterator[None]:
    """Inside, `run_ranks` may be called for functions that use CUDA: their results come back in host memory, and this
    process takes CUDA for absent. (An optimizer's step asks a CUDA device that is available whether a graph is being
    captured, and so would initialise it.) Needs PYTORCH_NVML_BASED_CUDA_CHECK=1."""
    here, available = os.getpid(), torch.cuda.is_available
    with (
        patch("torch.cuda.is_available", lambda: os.getpid() != here and available()),
        patch.object(testing, "_Pickler", _ToHost),
    ):
        yield


class _DrawnByHost(TorchFunctionMode):
    """Random numbers of a generator of the host are drawn there, and copied to `DEVICE`: the same on every device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is None or kwargs.get("device") is not None or func not in _device_constructors():
            return func(*args, **kwargs)
        drawn: Any = func(*args, **kwargs, device=generator.device)
        return drawn if generator.device.type == DEVICE.type else drawn.to(DEVICE)


@contextmanager
def tests_on_device() -> Iterator[None]:
    """Inside, ranks of `run_ranks` make their tensors on `DEVICE`. A test that runs a backward in this process is
    skipped: torch starts a thread for each device there is, and later ranks could not run a backward."""
    here, rank_main, run_backward = os.getpid(), testing._rank_main, torch.autograd._engine_run_backward

    def on_device(*arguments: Any) -> None:
        torch.set_default_device(DEVICE)
        with _DrawnByHost():
            rank_main(*arguments)

    def elsewhere(*arguments: Any, **options: Any) -> Any:
        if os.getpid() == here:
            pytest.skip("it runs a backward in the process that forks ranks")
        return run_backward(*arguments, **options)

    with (
        patch.object(testing, "_rank_main", on_device),
        patch.object(testing, "_Pickler", _ToHost),
        patch.object(torch.autograd, "_engine_run_backward", elsewhere),
        ranks_on_cuda() if DEVICE.type == "cuda" else nullcontext(),
    ):
        yield
