"""Memory of the host: in large pages, and kept by this process after it is freed."""

from __future__ import annotations

import ctypes
import functools
import os

from torch import Tensor

KEPT_AFTER_FREE = 64 << 20
"""How much of what this process frees its C library keeps."""
_LARGEST_KEPT = KEPT_AFTER_FREE // 2  # the most that glibc allows on a 64-bit system
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


@functools.cache
def keep_freed_memory() -> bool:
    """Let the C library keep up to `KEPT_AFTER_FREE` of what this process frees, for blocks of up to half of that.
    Returns whether it does: not where it is no glibc, or where the user has set it by the environment.

    The system clears each page that it hands out, at the first write to it: activations and gradients that are freed
    and allocated again in each step cost thousands of page faults. glibc gives back what is free at the end of its heap
    beyond twice the largest block that was freed before (mallopt(3), "dynamic mmap threshold"). After one block of
    32 MiB these are the values that are set here; a model with smaller tensors never gets there.
    """
    if any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT) and mallopt(_TRIM_THRESHOLD, KEPT_AFTER_FREE))


def prefer_huge_pages(tensor: Tensor) -> None:
    """Ask the system for huge pages: it then clears newly taken memory in a fraction of the time."""
    libc = _libc()
    if tensor.device.type != "cpu" or tensor.nbytes < _HUGE_PAGE or libc is None:
        return
    page = os.sysconf("SC_PAGE_SIZE")
    start = -(-tensor.data_ptr() // page) * page
    stop = (tensor.data_ptr() + tensor.nbytes) // page * page
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if os.uname().sysname == "Linux" else None
