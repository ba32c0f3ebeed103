"""Hosts of a small cluster inside this machine: Linux namespaces that a few processes hold.

    with Hosts(2) as hosts:
        hosts[1].run("hostname")

             hub: a network namespace with a bridge
              ├── port0 ── node0: eth0 = 10.77.0.10
              └── port1 ── node1: eth0 = 10.77.0.11

Each host has its own network, processes, mounts, host name and System V objects. It can write only to its own /tmp and
/dev/shm, and to `SHARED`; the rest of the file system is read-only there. An /etc/hosts of its own resolves host names.

Namespaces have no name outside of the processes that hold them, so clusters side by side do not collide, and the
network of this machine is not touched. They end with these processes. These end with the process that has made the
cluster, however it ends: the kernel then sends them SIGKILL (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.hosts.long_wires import LongWires

ROOT = Path(__file__).resolve().parents[2]
TMP = Path("/tmp")
SHARED = TMP / "shared"
"""A folder that all hosts of a cluster share."""
HUB_ADDRESS = "10.77.0.1"

_FLAGS = {"mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000, "net": 0x40000000}
"""Kind of namespace -> its flag for unshare(2) and setns(2)."""
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18
_SET_DEATH_SIGNAL = 1


@dataclass
class Host:
    """One host of a cluster.

    Attributes:
        number: from 0.
        disk: the folder that is /tmp on this host, as seen from outside.
        pid: of the first process of the host; 0: the host is off.
    """

    number: int
    disk: Path
    pid: int = 0
    _holder: int = field(default=0, repr=False)
    _started: list[subprocess.Popen[Any]] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        return f"node{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{10 + self.number}"

    def start(
        self, command: Sequence[str], *, forked: bool = False, log: str = "", variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[Any]:
        """Start a command on this host, in the repository's folder.

        Args:
            forked: the command is this interpreter with a module or a script: fork this process (`tests/forked.py`).
            log: standard output and error are appended to `{log}.out` and `{log}.err` in the host's /tmp; "": they go
                to those of this process.
            variables: added to the host's environment variables.
        """
        environment = {"HOME": "/tmp", "TMPDIR": "/tmp", "PATH": os.environ["PATH"]}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(variables or {})}
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": environment, "start_new_session": True}
        with ExitStack() as files:
            if log:
                for stream, end in (("stdout", "out"), ("stderr", "err")):
                    options[stream] = files.enter_context(open(self.disk / f"{log}.{end}", "ab"))
            enter = partial(_enter_host, self.pid)
            if forked:
                from tests.forked import Forked  # it imports torch

                self._started.append(Forked(command, before=enter, **options))
            else:
                self._started.append(subprocess.Popen(command, preexec_fn=enter, **options))
        return self._started[-1]

    def fork(self, fn: Callable[[], int]) -> int:
        """Fork this process into the host. The fork calls `fn`, and exits with the status that `fn` returns. Returns
        the number of the child of this process that waits for it."""
        return _forked(lambda: (_enter_host(self.pid), fn())[1])

    def run(self, *command: str) -> str:
        """Run a command on this host to its end; returns its output."""
        return _run(command, partial(_enter_host, self.pid))

    def path(self, inside: Path | str) -> Path:
        """The path outside of a file in the host's /tmp. It works for a host that is off, too."""
        inside = Path(inside)
        if inside.is_relative_to(SHARED):
            return self.disk.parent / "shared" / inside.relative_to(SHARED)
        return self.disk / inside.relative_to(TMP)


class Hosts:
    """A cluster. A context manager; inside it, a sequence of `Host`.

    Attributes:
        wires: delays and losses of packets, if there are long wires.
    """

    wires: LongWires

    def __init__(self, count: int, *, long_wires: bool = False) -> None:
        """`long_wires`: the wires between hosts and bridge can delay and lose packets."""
        self._count, self._has_long_wires = count, long_wires
        self._hosts: list[Host] = []
        self._is_limited = False

    def __enter__(self) -> Hosts:
        expect_namespaces(long_wires=self._has_long_wires)
        with ExitStack() as stack:
            base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zeroshard-hosts-")))
            (base / "shared").mkdir()
            self._hosts = [Host(number, base / f"node{number}") for number in range(self._count)]
            names = [f"{host.address} {host.name}" for host in self._hosts]
            (base / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
            holder, self._hub = _hold(["net"], _set_up_hub)
            stack.callback(_end, holder, holder)
            stack.callback(self._turn_off)
            if self._has_long_wires:
                self.wires = stack.enter_context(LongWires(partial(_enter, self._hub, ["net"]), self._count))
            for host in self._hosts:
                self.boot(host.number)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def boot(self, number: int) -> None:
        """Start a host that is off. Its /tmp is as the host left it. (With long wires, only once.)"""
        host, port = self._hosts[number], f"port{number}"
        host.disk.mkdir(exist_ok=True)
        host._holder, host.pid = _hold([*_FLAGS], partial(_set_up_host, host))
        if self._has_long_wires:
            self._in_hub(f"link set far{number} netns {host.pid} name eth0")
        else:
            self._in_hub(f"link add {port} type veth peer name eth0 netns {host.pid}")
        self._in_hub(f"link set {port} master bridge up")
        address = f"addr add {host.address}/24 dev eth0"
        _tool("ip", host.pid, "link set lo up", address, "link set eth0 up")

    def kill(self, number: int) -> None:
        """Kill all processes of the host at once. The kernel closes their connections, and the peers notice."""
        host = self._hosts[number]
        assert host.pid, f"{host.name} is off"
        _end(host.pid, host._holder)
        host.pid = host._holder = 0
        for process in host._started:
            process.wait()
        if not self._has_long_wires:
            # The kernel removes the port with the host's network, some time later: then `boot` could not make it anew.
            remove = ["ip", "link", "del", f"port{number}"]
            subprocess.run(remove, preexec_fn=partial(_enter, self._hub, ["net"]), capture_output=True)

    def power_off(self, number: int) -> None:
        """End the host without a word: its peers receive no packet from it any more."""
        self.cut(number)
        self.kill(number)

    def cut(self, number: int) -> None:
        """Pull the host's cable out of the bridge. Connections stay open on both sides."""
        self._in_hub(f"link set port{number} nomaster")

    def mend(self, number: int) -> None:
        self._in_hub(f"link set port{number} master bridge")

    def limit(self, mbit: int) -> None:
        """Limit the rate at which each host sends, and the rate at which it receives, to so many Mbit/s; 0: no
        limit."""
        for host in self._hosts:
            for pid, device in ((self._hub, f"port{host.number}"), (host.pid, "eth0")):
                if self._is_limited:
                    _tool("tc", pid, f"qdisc del dev {device} root")
                if mbit:
                    _tool("tc", pid, f"qdisc add dev {device} root tbf rate {mbit}mbit burst 64kb latency 200ms")
        self._is_limited = mbit > 0

    def fork_at_hub(self, fn: Callable[[], int]) -> int:
        """Like `Host.fork`, into the network of the bridge, whose address is `HUB_ADDRESS`."""
        return _forked(lambda: (_enter(self._hub, ["net"]), fn())[1])

    def _in_hub(self, *lines: str) -> None:
        _tool("ip", self._hub, *lines)

    def _turn_off(self) -> None:
        for host in self._hosts:
            if host.pid:
                self.kill(host.number)


def expect_namespaces(*, long_wires: bool = False) -> None:
    """Skip the test, with what is missing, where such a cluster cannot be made."""
    missing = what_is_missing(long_wires=long_wires)
    if missing:
        pytest.skip(f"hosts in namespaces need {missing}")


@functools.cache
def what_is_missing(*, long_wires: bool = False) -> str:
    """What `Hosts` needs and this machine lacks; "" if nothing."""
    if sys.platform != "linux":
        return "Linux"
    if os.geteuid() != 0:
        return "root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool} (apt install iproute2)"
    trial = [
        "ip link add zs0 type bridge",
        "ip link add zs1 type veth peer name zs2",
        "tc qdisc add dev zs1 root tbf rate 100mbit burst 64kb latency 200ms",
    ]
    command = ["unshare", "-nmpui", "--fork", "sh", "-c", " && ".join(trial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"namespaces with bridge, veth and tbf, which are refused here: {done.stderr.strip()}"
    return "/dev/net/tun" if long_wires and not os.access("/dev/net/tun", os.W_OK) else ""


# Processes that hold namespaces -------------------------------------------------------------------------------------


def _hold(kinds: Sequence[str], set_up: Callable[[], None]) -> tuple[int, int]:
    """Fork a process that makes namespaces of these kinds, calls `set_up` in them, and sleeps. Returns the number of
    this process's child, and that of the process that sleeps: with "pid", a child of that child, the first process of
    its namespace."""
    reader, writer = os.pipe()
    sys.stdout.flush(), sys.stderr.flush()
    holder = os.fork()
    if holder == 0:
        try:
            os.setsid()  # an interrupt from the terminal is for the test, which then ends this process
            _call("prctl", _SET_DEATH_SIGNAL, signal.SIGKILL)
            _call("unshare", sum(_FLAGS[kind] for kind in kinds))
            pid = os.fork() if "pid" in kinds else 0
            if pid:
                os.write(writer, b"pid %d\n" % pid)
                _wait_and_exit(pid)
            _call("prctl", _SET_DEATH_SIGNAL, signal.SIGKILL)
            set_up()
            os.write(writer, b"ready\n")
            os.closerange(0, writer + 1)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the first process inherits orphans: the kernel reaps them
            while True:
                signal.pause()
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader) as answers:
        text = answers.read()  # "pid" and "ready" are written by two processes, in any order
    if "ready\n" not in text:
        _end(holder, holder)
        raise OSError(f"a host in namespaces did not start: {text}")
    first = re.search(r"pid (\d+)\n", text)
    return holder, int(first[1]) if first else holder


def _end(pid: int, child: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(child, 0)


def _set_up_hub() -> None:
    bridge = ["link add bridge type bridge", f"addr add {HUB_ADDRESS}/24 dev bridge", "link set bridge up"]
    _tool("ip", 0, "link set lo up", *bridge)


def _set_up_host(host: Host) -> None:
    _call("sethostname", host.name.encode(), len(host.name))
    _mount(None, "/", flags=_PRIVATE | _RECURSIVE)
    _mount("proc", "/proc", "proc")
    _mount("sysfs", "/sys", "sysfs")
    _mount("tmpfs", "/dev/shm", "tmpfs")
    for folder in (ROOT, Path(sys.prefix)):
        if folder.is_relative_to(TMP):  # it would be hidden below
            _bind(folder, host.path(folder), read_only=True)
    _bind(host.path(SHARED), host.disk / SHARED.name)
    _bind(host.disk.parent / "hosts", Path("/etc/hosts"))
    _bind(host.disk, TMP)
    _mount(None, "/", flags=_REMOUNT | _BIND | _READ_ONLY)  # this mount, not the file system


def _bind(outside: Path, inside: Path, *, read_only: bool = False) -> None:
    if outside.is_dir():
        inside.mkdir(parents=True, exist_ok=True)
    _mount(outside, inside, flags=_BIND | _RECURSIVE)
    if read_only:
        _mount(None, inside, flags=_REMOUNT | _BIND | _READ_ONLY)


def _mount(source: Path | str | None, target: Path | str, kind: str = "", flags: int = 0) -> None:
    _call("mount", os.fsencode(source or "none"), os.fsencode(target), kind.encode() or None, flags, None)


# Processes that enter namespaces ------------------------------------------------------------------------------------


def _enter_host(pid: int) -> None:
    """Go on as a new process of that host."""
    _enter(pid, ["uts", "ipc", "net", "pid", "mnt"])
    child = os.fork()  # setns(2): only children are in the other PID namespace
    if child:
        _wait_and_exit(child)
    os.chdir(ROOT)


def _enter(pid: int, kinds: Sequence[str]) -> None:
    files = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds}
    for kind, file in files.items():
        _call("setns", file, _FLAGS[kind])
        os.close(file)


def _wait_and_exit(pid: int) -> NoReturn:
    """Close everything, so that whoever reads from the child notices its end; exit with the child's status."""
    os.closerange(0, 1 << 16)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


def _forked(fn: Callable[[], int]) -> int:
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _call("prctl", _SET_DEATH_SIGNAL, signal.SIGKILL)
            status = fn()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    return pid


def _tool(name: str, pid: int, *lines: str) -> None:
    """Run lines of ip(8) or tc(8) in the network of process `pid`; 0: in that of this process."""
    _run([name, "-batch", "-"], partial(_enter, pid, ["net"]) if pid else None, "\n".join(lines))


def _run(command: Sequence[str], enter: Callable[[], None] | None, text: str | None = None) -> str:
    done = subprocess.run(command, preexec_fn=enter, capture_output=True, text=True, input=text)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def _call(name: str, *args: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
