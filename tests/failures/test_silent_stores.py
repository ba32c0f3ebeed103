"""The store of the process group does not answer, as whoever holds it is stopped, or has ended while its connections
stay open, also at the start; and a rank that is killed between its announcement and the read of its memory."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore

import zeroshard
from tests.checkpoint.common import Run
from tests.checkpoint.faults import StoreServer
from tests.failures.common import Ranks, has_ended, init, said_by, wait_until_noted
from tests.patience import AT_ONCE, wait_until
from tests.ports import free_port
from zeroshard.checkpoint import publishing
from zeroshard.comm.messages import Messages
from zeroshard.failures import watch
from zeroshard.failures.blame import Seen, blame
from zeroshard.failures.found import holder_of
from zeroshard.failures.notices import Beat, Notices
from zeroshard.failures.peers import Peers
from zeroshard.failures.processes import Who
from zeroshard.ranks.shared_memory import SharedMemory


def saving_rank(rank: int, mark: Callable[[], Any], directory: Path, background: bool) -> None:
    init(silence=3.0)
    run = Run(rank, "zero1", "fp32").train([0])
    wait_until_noted()
    publish = publishing.publish

    def stopped(*arguments: Any) -> None:
        mark()
        os.kill(os.getpid(), signal.SIGSTOP)
        publish(*arguments)

    publishing.publish = stopped
    zeroshard.save(directory, run.handle, run.optimizer, step=1, background=background).wait()
    run.train([1])


@pytest.mark.parametrize("background", [False, True])
def test_who_holds_the_store_is_stopped_in_a_save(tmp_path: Path, background: bool) -> None:
    """The other rank asked the store for the verdict. That call has no timeout, and a heartbeat waits for no answer, so
    nobody noticed: it waited forever."""
    ended = Ranks(saving_rank, 2, tmp_path / "steps", background, rank_0_holds_store=True).finish(limit=60.0)
    assert ended.statuses == [1, 1], ended
    stopped = r"has not answered for \d+ s: rank 0 \(process \d+ on .*\) has stopped \(no heartbeat\)"
    assert len(re.findall(rf"rank [01] exits because the store .* {stopped}", ended.said)) == 2, ended


def rank_with_a_worker(rank: int, mark: Callable[[], Any]) -> None:
    zeroshard.init()
    run = Run(rank, "zero1", "fp32").train([0])
    pids = run.handle.engine.collectives.exchange_objects(os.getpid())
    wait_until_noted()
    if rank == 0:
        if os.fork() == 0:  # has all open files of rank 0, as a worker of a DataLoader has them
            wait_until(lambda: has_ended(pids[1]))
            os._exit(0)
        mark()
        os.kill(os.getpid(), signal.SIGKILL)
    run.train([1, 2])


def test_who_held_the_store_has_ended_and_its_connections_are_open() -> None:
    """It took the timeout of collectives, and the network was blamed."""
    ended = Ranks(rank_with_a_worker, 2, rank_0_holds_store=True).finish(limit=60.0)
    assert ended.statuses == [-signal.SIGKILL, 1], ended
    assert re.search(r"has not answered for \d+ s: rank 0 \(process \d+ on .*\), which held it, has ended", ended.said)
    assert ended.seconds_of_their_own() < AT_ONCE, ended


def rank_that_announces(rank: int, mark: Callable[[], Any]) -> None:
    zeroshard.init()
    run = Run(rank, "zero2", "fp32").train([0])
    assert run.handle.engine.collectives.transport.reads_peers
    pids = run.handle.engine.collectives.exchange_objects(os.getpid())
    wait_until_noted()
    announce, peer = Messages.announce, SharedMemory.peer

    def last(self: Messages, *arguments: Any) -> Any:
        announce(self, *arguments)
        mark()
        os.kill(os.getpid(), signal.SIGKILL)

    def late(self: SharedMemory, *arguments: Any) -> Any:
        wait_until(lambda: has_ended(pids[1]))
        self._mapped.clear(), self._views.clear()  # memory that this rank has not read before
        return peer(self, *arguments)

    if rank == 1:
        Messages.announce = last  # type: ignore[method-assign]
    else:
        SharedMemory.peer = late  # type: ignore[method-assign,assignment]
    run.train([1])


def test_a_rank_is_killed_after_its_announcement() -> None:
    """The rank that read the memory then reported itself as the one that had failed: FileNotFoundError in /proc."""
    ended = Ranks(rank_that_announces, 2).finish(limit=60.0)
    assert ended.statuses == [1, -signal.SIGKILL], ended
    assert "rank 0 exits because rank 1 died without reporting an error" in ended.said, ended
    assert "failed first" not in ended.said, ended


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_start_are_told_in_one_line(rank: int) -> None:
    """torch's own error named neither the rank nor the timeout, and came with the traceback of its rendezvous."""
    port = free_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = "import zeroshard\ntry:\n    zeroshard.init(timeout=1)\nexcept TimeoutError as error:\n    print(error)"
    environment = {**os.environ, **place, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    done = said_by(program, environment)
    said = rf"rank {rank} of 2 did not meet the others at 127\.0\.0\.1:{port} within the timeout of 1 s: .*"
    assert re.fullmatch(said, done.stdout.strip()) and done.returncode == 0, done


def starting_rank(rank: int, mark: Callable[[], Any], place: str) -> None:
    """Rank 0 stops in `init`, or right after it. Rank 1 has not read yet which process rank 0 is."""
    start, Peers.find_neighbours = watch.start, lambda self, store: None  # type: ignore[method-assign]

    def stop() -> None:
        if rank == 0:
            mark()
            os.kill(os.getpid(), signal.SIGSTOP)

    if place == "in init":
        watch.start = lambda **options: (stop(), start(**options))[1]
    init(silence=3.0)
    if place == "after init":
        stop()
    Run(rank, "zero1", "fp32").train([0])


@pytest.mark.parametrize("place", ["in init", "after init"])
def test_who_holds_the_store_is_stopped_at_the_start(place: str) -> None:
    """The network was blamed, or nobody was named, and rank 0 was never woken."""
    ended = Ranks(starting_rank, 2, place, rank_0_holds_store=True).finish(limit=60.0)
    assert ended.statuses == [1, 1], ended
    assert re.search(r"rank 0 \(process \d+ on .*\) has stopped", ended.said), ended


def ending_rank(rank: int, mark: Callable[[], Any], directory: Path) -> None:
    """Rank 0 is killed after rank 1 has made its first connection, and before it makes the second."""
    come, pids, connected = Notices.come, [0, 0], directory / "connected"
    dist.all_gather_object(pids, os.getpid())

    def last(self: Notices, *arguments: Any) -> None:
        come(self, *arguments)
        if rank == 0:
            wait_until(connected.exists)
            mark()
            os.kill(os.getpid(), signal.SIGKILL)
        connected.touch()
        wait_until(lambda: has_ended(pids[0]))

    Notices.come = last  # type: ignore[method-assign]
    zeroshard.init()


def test_who_held_the_store_has_ended_before_a_rank_has_connected_again(tmp_path: Path) -> None:
    """It tried to connect for two minutes."""
    ended = Ranks(ending_rank, 2, tmp_path, rank_0_holds_store=True).finish(limit=60.0)
    assert ended.statuses == [-signal.SIGKILL, 1], ended
    assert "init: the store of the process group has closed its connections: the launcher or rank 0" in ended.said
    assert ended.seconds_of_their_own() < AT_ONCE, ended


def test_the_process_that_holds_a_store_is_found() -> None:
    server = StoreServer(1)
    try:
        store = TCPStore("127.0.0.1", server.port, is_master=False)
        found = holder_of(PrefixStore("of a group", store))
        assert found is not None and (found.pid, found.state) == (server.pid, "runs")
        os.kill(server.pid, signal.SIGSTOP)
        os.waitpid(server.pid, os.WUNTRACED)
        assert found.state == "stopped"
    finally:
        server.close()
    assert holder_of(store) is None
    own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert holder_of(own) is None and holder_of(HashStore()) is None


def test_a_rank_that_is_stopped_before_it_joins_is_named_and_woken() -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    stops = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    stopped = subprocess.Popen([sys.executable, "-c", stops], env={**os.environ, **place, "RANK": "1"})
    os.waitpid(stopped.pid, os.WUNTRACED)
    program = "import zeroshard\ntry:\n    zeroshard.init(timeout=1)\nexcept TimeoutError as error:\n    print(error)"
    environment = {**os.environ, **place, "RANK": "0", "LOCAL_RANK": "0"}
    done = said_by(program, environment)
    assert f"rank 1 (process {stopped.pid} on {socket.gethostname()}) had been stopped by a signal." in done.stdout, (
        done
    )
    assert stopped.wait() == 0


def test_a_rank_without_a_watch_is_blamed() -> None:
    me, other = Who("here", 1, 1, "node1"), Who("there", 2, 1, "node1")
    elsewhere = Seen(Beat(3, "at data.py:33 in read", None), 0.0, 0.0)
    lines = blame(0, {0: me, 1: other}, {1: elsewhere}, {2: None, 3: None})
    assert lines == [
        "rank 1 (process 2 on node1) is at data.py:33 in read",
        "no watch of ranks 2, 3: ended in zeroshard.init(), or has not called it",
    ]
    lines = blame(0, {0: me, 1: other}, {1: elsewhere}, {2: other})
    assert lines == ["rank 2 (process 2 on node1) has stopped, in zeroshard.init()"]


def test_a_rank_whose_launcher_has_ended_does_not_wait_for_it() -> None:
    """torch tried to connect to the launcher's store for two timeouts."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "1", "WORLD_SIZE": "2"}
    launcher = {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "2"}
    program = "import zeroshard\ntry:\n    zeroshard.init(timeout=600)\nexcept RuntimeError as error:\n    print(error)"
    done = said_by(program, {**os.environ, **place, **launcher})
    assert done.stdout.strip() == "the launcher has ended before all ranks had started", done
