"""What this process frees is kept for the next step, up to a limit."""

import os
import platform
import subprocess
import sys

import pytest

from zeroshard.storage.host_memory import keep_freed_memory

PROGRAM = """
import ctypes, resource
import torch
from zeroshard.storage.host_memory import keep_freed_memory

def page_faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        blocks = [torch.ones(1 << 20) for _ in range(8)]  # 4 MiB each, half of what is kept
        del blocks
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4

ctypes.CDLL(None).mallopt(-3, 1 << 20)  # what is free at the end of the heap depends on what lies behind it
before = [page_faults_of_a_step() for _ in range(2)]
assert keep_freed_memory()
after = [page_faults_of_a_step() for _ in range(2)]
print(before[-1], after[-1])
"""
of_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is a function of glibc")


@of_glibc
def test_a_step_has_no_page_faults_for_memory_that_the_step_before_has_freed() -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM]
    before, after = map(int, subprocess.check_output(command, env=inherited, text=True, timeout=120).split())
    pages = 8 * (4 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert before > pages / 2 and after < pages / 20


@of_glibc
@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "1000000"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1000000")],
)
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory.__wrapped__()
