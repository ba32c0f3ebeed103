"""The GPUs of this machine, asked of the driver, without torch: importing torch takes seconds, and a process that has
used CUDA cannot fork ranks that use it."""

from __future__ import annotations

import ctypes
import sys


def gpu_names() -> list[str]:
    """One name for each GPU that CUDA_VISIBLE_DEVICES lets this process use; empty if there is no GPU or no driver.
    Call it only in a process that does not fork ranks."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_name_of(driver, index) for index in range(count.value)]


def _name_of(driver: ctypes.CDLL, index: int) -> str:
    device, name = ctypes.c_int(0), ctypes.create_string_buffer(100)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    return name.value.decode()
