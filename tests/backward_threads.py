"""Runs every backward on a fresh thread, as torch's engine does for CUDA: the thread has its own numbers of graph nodes
and other thread-local values. The values that torch passes to the threads of its engine (grad mode, autocast) are
passed on here, too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.kit import DEVICE

_run_backward: Callable[..., Any] = torch.autograd._engine_run_backward


@contextmanager
def backward_on_threads() -> Iterator[None]:
    """Inside the context, `Tensor.backward`, `torch.autograd.backward` and `grad` run on threads, also in forked
    processes. With models on another device than the CPU, torch's engine does it."""
    if DEVICE.type != "cpu":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "_engine_run_backward", _on_a_thread)
        yield


def _on_a_thread(*args: Any, **kwargs: Any) -> Any:
    # A backward inside of another one stays on its thread. So does a backward under a tracer, a transform of torch.func
    # or a profiler, as these are thread-local. (The threads of torch's engine inherit them.)
    seen = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    if torch._C._current_graph_task_id() != -1 or seen or torch.autograd._profiler_enabled():
        return _run_backward(*args, **kwargs)
    result: list[Any] = []
    errors: list[BaseException] = []
    grad_mode, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()

    def run() -> None:
        try:
            _pass_on(*autocast)
            with torch.inference_mode(inference), torch.set_grad_enabled(grad_mode):
                result.append(_run_backward(*args, **kwargs))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="backward")
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()  # pop: the traceback refers to this frame, and the frame would keep the error alive
    return result[0]


def _pass_on(enabled: bool, dtype: torch.dtype, cache: bool) -> None:
    """Autocast, to a thread that ends with its backward. Not by `with torch.autocast`: its exit clears the cache, which
    all threads share; the threads of torch's engine leave it alone."""
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(cache)
