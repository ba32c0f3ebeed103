"""Ports of this machine for tests in which a process listens later, or nobody ever does."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

_CHOSEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port on which nobody listens. It lies below those from which the system chooses one for each connection, so no
    other program gets it in the meantime."""
    first = int(_CHOSEN.read_text().split()[0]) if _CHOSEN.exists() else 32768
    while True:
        port = random.SystemRandom().randrange(max(1024, first // 2), first)
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        return port
