"""Simulated hosts share nothing by accident, and nothing of them is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.hosts.namespaces import SHARED, TMP, Host, Hosts, expect_namespaces, what_is_missing
from tests.patience import wait_until


def processes(hosts: Hosts) -> list[Path]:
    return [Path(f"/proc/{pid}") for host in hosts for pid in (host.pid, host._holder)] + [Path(f"/proc/{hosts._hub}")]


def test_hosts_share_one_folder_and_nothing_else() -> None:
    name, devices = socket.gethostname(), sorted(os.listdir("/sys/class/net"))
    write = "hostname; echo $$; for f in /tmp /dev/shm /tmp/shared; do ls $f/mine 2>/dev/null; touch $f/mine; done"
    with Hosts(2) as hosts:
        said = [host.run("sh", "-c", write).split() for host in hosts]
        assert said[0][0] == "node0" and said[1][0] == "node1"
        assert said[0][1] == said[1][1]  # process numbers
        assert said[0][2:] == [] and said[1][2:] == ["/tmp/shared/mine"]
        assert hosts[0].path(TMP / "mine").exists() and hosts[0].path(SHARED / "mine").exists()
        assert hosts[0].run("ls", "/sys/class/net").split() == ["eth0", "lo"]
        read_only = hosts[0].run("sh", "-c", "touch /var/tmp/zeroshard 2>&1; true")
        assert "Read-only file system" in read_only
        hosts.kill(1)
        hosts.boot(1)
        assert hosts[1].run("ls", "/tmp/mine", "/etc/hosts").split() == ["/etc/hosts", "/tmp/mine"]
        hosts.limit(100)
        assert "100Mbit" in hosts[1].run("tc", "qdisc", "show", "dev", "eth0")
    assert socket.gethostname() == name and sorted(os.listdir("/sys/class/net")) == devices


@pytest.mark.parametrize("error", [AssertionError, KeyboardInterrupt])
def test_nothing_is_left_of_a_test_that_ends_early(error: type[BaseException]) -> None:
    held: list[Path] = []

    def test() -> None:
        with Hosts(2) as hosts:
            hosts[0].start(["sleep", "1000"])
            held.extend([*processes(hosts), hosts[0].disk.parent])
            assert all(path.exists() for path in held)
            raise error

    with pytest.raises(error):
        test()
    assert held and not any(path.exists() for path in held)


def test_nothing_runs_on_if_the_test_itself_is_killed(tmp_path: Path) -> None:
    expect_namespaces()
    maker = os.fork()
    if maker == 0:
        tempfile.tempdir = str(tmp_path)
        with Hosts(1) as hosts:
            hosts[0].start(["sleep", "1000"])
            (tmp_path / "tmp").write_text(" ".join(map(str, processes(hosts))))
            (tmp_path / "tmp").rename(tmp_path / "held")
            signal.pause()
        os._exit(0)
    wait_until((tmp_path / "held").exists)
    held = [Path(path) for path in (tmp_path / "held").read_text().split()]
    assert all(path.exists() for path in held)
    os.kill(maker, signal.SIGKILL)
    os.waitpid(maker, 0)
    wait_until(lambda: not any(path.exists() for path in held))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert what_is_missing.__wrapped__() == "root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    assert what_is_missing.__wrapped__() == "the command tc (apt install iproute2)"
    monkeypatch.setattr(shutil, "which", lambda name: name)
    refused = subprocess.CompletedProcess([], 1, "", "unshare failed: Operation not permitted\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: refused)
    assert "refused here: unshare failed: Operation not permitted" in what_is_missing.__wrapped__()


def test_paths_of_a_host() -> None:
    host = Host(3, Path("/base/node3"))
    assert host.path("/tmp/a/b") == Path("/base/node3/a/b") and host.path(SHARED / "c") == Path("/base/shared/c")
