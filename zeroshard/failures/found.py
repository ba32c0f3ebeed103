"""Processes of this host that have not told who they are: found in /proc, where a store or a rank does not answer.

Ranks tell each other through the store which processes they are. That is of no use for the process that holds the store
if it stops before anybody has read that, nor for a rank that stops before it has come so far.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from zeroshard.failures.processes import Who, is_stopped

_LISTENS = "0A"
_CONNECTING = 5.0
_MAPPED = "0000000000000000FFFF0000"
"""An IPv4 address as an IPv6 one begins with this, as /proc/net/tcp6 writes it."""
_OF_JOB = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


class _Socket(NamedTuple):
    local: str
    remote: str
    state: str
    inode: str


def holder_of(store: Any) -> Who | None:
    """The process that holds a TCPStore, if it is another one of this host; None if it is not found."""
    number = port_of(store)
    if number is None:
        return None
    sockets, port = list(_sockets()), f":{number:04X}"
    to_store = {(one.local, one.remote) for one in sockets if one.remote.endswith(port)}
    # The other end of a connection is in the same list only if it is on this host. It has no process yet if nobody has
    # accepted it: then whoever listens will.
    others = [one for one in sockets if (one.remote, one.local) in to_store]
    if any(one.inode == "0" for one in others):
        others += [one for one in sockets if one.state == _LISTENS and one.local.endswith(port)]
    links = {f"socket:[{one.inode}]" for one in others}
    found = [who for who in _processes(lambda pid: _has_open(pid, links)) if who.pid != os.getpid()]
    return min(found, key=lambda who: who.started, default=None)  # its workers were started later


def is_refused(address: str, port: int) -> bool:
    """Whether nobody listens there. Connects only if no process of this host does."""
    if any(one.state == _LISTENS and one.local.endswith(f":{port:04X}") for one in _sockets()):
        return False
    try:  # this process may have a network of its own
        socket.create_connection((address, port), _CONNECTING).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def without_prefixes(store: Any) -> Any:
    """The store to which a `PrefixStore`, or several, one in the other, pass their calls; any other store itself."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def port_of(store: Any) -> int | None:
    """That of a TCPStore; None for other stores."""
    return getattr(without_prefixes(store), "port", None)


def launcher_holds_store() -> bool:
    """Whether torch's elastic launcher holds the store, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def has_one_launcher(world_size: int) -> bool:
    """Whether one launcher of torch elastic has started all ranks, on this machine, and holds the store. Then the store
    outlives the ranks, unless the launcher fails."""
    return launcher_holds_store() and os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)


def attempt(world_size: int) -> str:
    """How often torch's elastic launcher has started the ranks before. With several launchers each counts its own
    failures, so the ranks have no common number: "0"."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if has_one_launcher(world_size) else "0"


def stopped_of_this_job() -> dict[int, Who]:
    """The other ranks of this job that a signal has stopped, by what the launcher has set in their environments."""
    job, found = {name: os.environ.get(name) for name in _OF_JOB}, dict[int, Who]()
    if None in (job["MASTER_ADDR"], job["MASTER_PORT"]):
        return {}
    for who in _processes(is_stopped):
        theirs = _environment(who.pid)
        rank = theirs.get("RANK", "")
        if rank.isdecimal() and all(theirs.get(name) == value for name, value in job.items()):
            found.setdefault(int(rank), who)
    return {rank: found[rank] for rank in sorted(found) if str(rank) != os.environ.get("RANK")}


def wake(stopped: Mapping[int, Who]) -> None:
    """Continue processes that a signal has stopped, so that they can end, too."""
    for who in stopped.values():
        with suppress(OSError):
            os.kill(who.pid, signal.SIGCONT)


def _sockets() -> Iterator[_Socket]:
    for name in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/net/{name}") as file:
            next(file, None)
            for line in file:
                fields = line.split()
                local, remote = (end.removeprefix(_MAPPED) for end in fields[1:3])
                yield _Socket(local, remote, fields[3], fields[9])


def _processes(is_one: Callable[[int], bool]) -> Iterator[Who]:
    """In the order of their numbers."""
    names: list[str] = []
    with suppress(OSError):  # there is no /proc, or no descriptor left
        names = os.listdir("/proc")
    for pid in sorted(int(name) for name in names if name.isdecimal()):
        with suppress(OSError):  # it has ended, or is of another user
            if is_one(pid):
                yield Who.of_process(pid)


def _has_open(pid: int, links: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with suppress(OSError):
            if os.readlink(f"{folder}/{name}") in links:
                return True
    return False


def _environment(pid: int) -> dict[str, str]:
    """That with which the process was started."""
    with suppress(OSError), open(f"/proc/{pid}/environ", errors="replace") as file:
        return dict(entry.split("=", 1) for entry in file.read().split("\0") if "=" in entry)
    return {}
