"""Ranks that use CUDA, forked by tests of a process that does not: a process that has used CUDA cannot fork any."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


class _ToHost(pickle.Pickler):
    """Pickles CUDA tensors as CPU tensors."""

    def reducer_override(self, value: Any) -> Any:
        is_elsewhere = isinstance(value, torch.Tensor) and value.device.type == "cuda"
        return value.detach().cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL) if is_elsewhere else NotImplemented


class _Pickle:
    """In place of the module `pickle` in `zeroshard.testing`."""

    loads = staticmethod(pickle.loads)

    @staticmethod
    def dumps(value: Any) -> bytes:
        file = io.BytesIO()
        _ToHost(file).dump(value)
        return file.getvalue()


@contextmanager
def ranks_on_cuda() -> Iterator[None]:
    """Inside, `run_ranks` may be called for functions that use CUDA: their results come back in host memory, and this
    process takes CUDA for absent. (An optimizer's step asks a CUDA device that is available whether a graph is being
    captured, and so would initialise it.) Needs PYTORCH_NVML_BASED_CUDA_CHECK=1."""
    here, available = os.getpid(), torch.cuda.is_available
    with (
        patch("torch.cuda.is_available", lambda: os.getpid() != here and available()),
        patch("zeroshard.testing.pickle", _Pickle),
    ):
        yield
