"""Ranks on several simulated hosts: each host has its own network, PID and mount namespaces, and a bridge connects
them. The machine's own network is not touched, and everything ends with the processes.

    test ── hub: the bridge; holds the store, if no rank does
              ├── host 0: eth0 = 10.77.0.10 ── ranks
              └── host 1: eth0 = 10.77.0.11 ── ranks, with the same process numbers as those of host 0
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from zeroshard.comm import watch

_NEWNS, _NEWUTS, _NEWPID, _NEWNET = 0x00020000, 0x04000000, 0x20000000, 0x40000000
_PRIVATE = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC
_PORT = 29400  # each hub has a network of its own
_HUB = 1000
"""The value of `store_on` that stands for the hub."""


@dataclass(frozen=True)
class Result:
    """For each rank: its return value, its exit status (None: it had to be killed), and its end (seconds since the
    hosts were cut off). `said`: the stderr of all ranks."""

    values: list[Any]
    statuses: list[int | None]
    seconds: list[float]
    said: str


def on_hosts(
    fn: Callable[..., Any],
    hosts: Sequence[int],
    *args: Any,
    store_on: int = _HUB,
    timeout: float = 20.0,
    limit: float = 60.0,
) -> Result:
    """Call `fn(rank, *args)` on gloo ranks of which number `r` runs on the host `hosts[r]`, hosts numbered from 0.

    A rank that calls `cut_off()` removes all hosts except the first from the bridge.

    Args:
        store_on: the host whose first rank holds the store.
        timeout: of collectives.
        limit: seconds for everything.
    """
    expect_namespaces()
    with tempfile.TemporaryDirectory(prefix="zeroshard-hosts-") as name:
        folder = Path(name)
        sys.stdout.flush(), sys.stderr.flush()
        hub = os.fork()
        if hub == 0:
            _ending(folder, lambda: _hub(folder, fn, hosts, args, store_on, timeout, limit))
        os.waitpid(hub, 0)
        errors = sorted(folder.glob("error-*"))
        assert not errors, "\n".join(path.read_text() for path in errors)
        ends = [_read(folder / f"end-{rank}") for rank in range(len(hosts))]
        cut = float((folder / "cut").read_text()) if (folder / "cut").exists() else 0.0
        return Result(
            values=[_read(folder / f"value-{rank}") for rank in range(len(hosts))],
            statuses=[end and end[0] for end in ends],
            seconds=[end[1] - cut if end else limit for end in ends],
            said=(folder / "said").read_text() if (folder / "said").exists() else "",
        )


def cut_off() -> None:
    """Called by a rank: disconnects the hosts from each other. Returns once no packet passes between them."""
    folder = Path(os.environ["ZEROSHARD_HOSTS"])
    (folder / "cut off").touch()
    while not (folder / "cut").exists():
        time.sleep(0.01)


@functools.cache
def _missing() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces of its own need root on Linux"
    commands = "ip link add zsb type bridge && ip link add zsa type veth peer name zsc"
    with suppress(OSError):
        if subprocess.run(["unshare", "-npm", "--fork", "sh", "-c", commands], capture_output=True).returncode == 0:
            return ""
    return "this machine allows no network namespaces"


def expect_namespaces() -> None:
    """Skip the test where namespaces cannot be created."""
    if _missing():
        pytest.skip(_missing())


def _hub(
    folder: Path,
    fn: Callable[..., Any],
    hosts: Sequence[int],
    args: Sequence[Any],
    store_on: int,
    timeout: float,
    limit: float,
) -> None:
    _unshare(_NEWNET)
    _ip("link set lo up", "link add bridge type bridge", "addr add 10.77.0.1/24 dev bridge", "link set bridge up")
    held = _store(len(hosts), timeout, is_master=True) if store_on == _HUB else None
    init_of = {}
    for host in sorted(set(hosts)):
        reader, writer = os.pipe()
        go_reader, go_writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            ranks = [rank for rank, of in enumerate(hosts) if of == host]
            _ending(folder, partial(_host, folder, host, ranks, writer, go_reader, fn, hosts, args, store_on, timeout))
        init_of[host] = pid
        os.close(writer)
        os.read(reader, 1)
        _ip(
            f"link add port{host} type veth peer name eth0 netns {pid}",
            f"link set port{host} master bridge up",
        )
        os.write(go_writer, b".")
    deadline = time.monotonic() + limit
    waiting = set(init_of.values())
    while waiting and time.monotonic() < deadline:
        for pid in list(waiting):
            if os.waitpid(pid, os.WNOHANG)[0]:
                waiting.discard(pid)
        if (folder / "cut off").exists() and not (folder / "cut").exists():
            for host in sorted(init_of)[1:]:
                _ip(f"link set port{host} nomaster")
            _write(folder / "cut", str(time.monotonic()).encode())
        time.sleep(0.005)
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
    del held


def _host(
    folder: Path,
    host: int,
    ranks: Sequence[int],
    writer: int,
    go_reader: int,
    fn: Callable[..., Any],
    hosts: Sequence[int],
    args: Sequence[Any],
    store_on: int,
    timeout: float,
) -> None:
    """Fork the first process of a host's namespaces, and wait until it ends."""
    _unshare(_NEWNET | _NEWNS | _NEWPID | _NEWUTS)
    os.write(writer, b".")
    os.read(go_reader, 1)
    init = os.fork()
    if init:
        os.waitpid(init, 0)
        return
    _call("prctl", 1, signal.SIGKILL)  # dies with its parent
    os.closerange(3, 256)  # so that file descriptors have the same numbers on all hosts
    _call("mount", b"none", b"/", None, _PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    _call("sethostname", f"node{host}".encode(), len(f"node{host}"))
    _ip("link set lo up", f"addr add 10.77.0.{10 + host}/24 dev eth0", "link set eth0 up")
    pids = {}
    for rank in ranks:
        pid = os.fork()
        if pid == 0:
            first = rank == ranks[0] and store_on == host
            _ending(folder, partial(_rank, folder, rank, len(hosts), store_on, first, timeout, fn, args))
        pids[pid] = rank
    while pids:
        pid, status = os.wait()
        if pid in pids:
            _write(folder / f"end-{pids.pop(pid)}", pickle.dumps((os.waitstatus_to_exitcode(status), time.monotonic())))


def _rank(
    folder: Path,
    rank: int,
    world_size: int,
    store_on: int,
    holds_store: bool,
    timeout: float,
    fn: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as `run_ranks` does
    log = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    os.environ["GLOO_SOCKET_IFNAME"], os.environ["ZEROSHARD_HOSTS"] = "eth0", str(folder)
    address = "10.77.0.1" if store_on == _HUB else f"10.77.0.{10 + store_on}"
    status = 1
    try:
        store = _store(world_size, timeout, address, is_master=holds_store)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        _write(folder / f"value-{rank}", pickle.dumps(fn(rank, *args)))
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        watch.stop()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def _store(world_size: int, timeout: float, address: str = "10.77.0.1", *, is_master: bool) -> TCPStore:
    limit = timedelta(seconds=max(timeout, 20.0))
    return TCPStore(address, _PORT, world_size, is_master=is_master, wait_for_workers=False, timeout=limit)


def _ending(folder: Path, fn: Callable[[], None]) -> None:
    """Call `fn`, and end this process."""
    status = 1
    try:
        fn()
        status = 0
    except BaseException:
        (folder / f"error-{time.monotonic_ns()}").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _unshare(flags: int) -> None:
    _call("unshare", flags)


def _call(name: str, *args: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _ip(*commands: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"tmp-{path.name}")
    temporary.write_bytes(data)
    temporary.rename(path)
