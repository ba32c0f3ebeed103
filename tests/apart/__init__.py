"""A device whose memory the host cannot reach, on a CPU: what code for GPUs may not do, this device refuses as well.

`device.cpp` is a backend of torch for its device type PrivateUse1. Its kernels are those of the CPU. It is used like
CUDA, and finds without a GPU:

- operations with one tensor on the device and another one on the host: an error, as with CUDA;
- code of the host that follows an address of the device: SIGSEGV;
- memory that is read before it is written, or after it was freed: it holds NaN;
- how often the host waits for the device (`num_waits`; `waits_are` forbids it), and how many operations are launched
  (`num_launches`);
- bytes that are allocated, and their peak: `torch.accelerator.memory_allocated`, as with CUDA's allocator.

Operations run at once: for the order of streams see `tests/streams.py`. Ranks exchange through
`tests/timed_backend.py`.

    ZEROSHARD_TEST_DEVICE=apart ZEROSHARD_TEST_BACKEND=late pytest tests/...
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

NAME = "apart"
_SOURCE = Path(__file__).parent / "device.cpp"
_BUILD = Path(__file__).parents[2] / "build" / "apart"


@cache
def load() -> ctypes.CDLL:
    """Make torch.device("apart") known to this process. Compiles `device.cpp` if it has changed (12 seconds)."""
    path = str(_built())
    torch.ops.load_library(path)
    torch.utils.rename_privateuse1_backend(NAME)
    library = ctypes.CDLL(path)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    library.apart_waits.restype = library.apart_launches.restype = ctypes.c_int64
    library.apart_let_wait.restype, library.apart_let_wait.argtypes = ctypes.c_bool, [ctypes.c_bool]
    return library


def _built() -> Path:
    """
    Raises:
        CalledProcessError, FileNotFoundError: the compiler's.
    """
    from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths

    source = _SOURCE.read_bytes()
    built = _BUILD / f"{torch.__version__}-{hashlib.sha256(source).hexdigest()[:12]}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:  # several processes may build it
            command = [get_cxx_compiler(), "-shared", "-fPIC", "-O0", "-std=c++20", str(_SOURCE), "-o", f"{folder}/new"]
            torch_is_in = [f"-isystem{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
            subprocess.run([*command, *torch_is_in, "-lc10", "-ltorch_cpu", "-ltorch"], check=True)
            os.rename(f"{folder}/new", built)
    return built


def _module() -> ModuleType:
    """What torch looks for in `torch.apart`."""
    module = ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: 1  # type: ignore[attr-defined]
    module.current_device = lambda: 0  # type: ignore[attr-defined]
    module.set_device = lambda device: None  # type: ignore[attr-defined]
    module.get_device_properties = lambda device: SimpleNamespace(uuid=os.getpid())  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    # As those of `torch.cuda`, with the device as an option. There is one generator, the host's.
    module.get_rng_state = lambda device=None: torch.get_rng_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)  # type: ignore[attr-defined]
    module.device = torch.device  # type: ignore[attr-defined]
    module.is_initialized = lambda: True  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]  # type: ignore[attr-defined]
    return module


def num_waits() -> int:
    """How often the host has waited for the device since the process began."""
    return int(load().apart_waits())


@contextmanager
def waits_are(allowed: bool) -> Iterator[None]:
    """Inside, an operation for which the host waits for the device raises, unless it is allowed."""
    before = load().apart_let_wait(allowed)
    try:
        yield
    finally:
        load().apart_let_wait(before)


def num_launches() -> int:
    """The operations on the device since the process began."""
    return int(load().apart_launches())
