"""Ranks that meet again over a store that still has what they, or the ranks before them, have written."""

from __future__ import annotations

import gc
import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.checkpoint.faults import StoreServer
from tests.failures.common import wait_until_noted
from tests.patience import wait_until
from tests.ports import free_port
from zeroshard.errors import InvalidState
from zeroshard.failures import membership, watch
from zeroshard.failures.membership import Membership
from zeroshard.failures.store_line import Closed, StoreLine
from zeroshard.ranks import names
from zeroshard.testing import RankError, run_ranks

pytestmark = pytest.mark.by_gloo


def launched(rank: int, num_ranks: int, port: int, per_launcher: int | None) -> None:
    """Leave the group of the test. The environment is that of a launcher; `per_launcher`: of torch elastic, which holds
    the store, with so many ranks on this host. None: rank 0 holds the store."""
    dist.barrier()  # else one may leave while another one still connects
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if per_launcher is not None:
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": str(per_launcher)}


@contextmanager
def store_at(per_launcher: int | None, num_ranks: int) -> Iterator[int]:
    """The port of the store."""
    if per_launcher is None:
        yield free_port()
        return
    server = StoreServer(num_ranks)
    try:
        yield server.port
    finally:
        server.close()


def trained(rank: int) -> float:
    torch.manual_seed(3)
    model = nn.Linear(5, 3)
    handle = zeroshard.shard(model, "zero3")
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        model(torch.full((2, 5), rank + 1.0)).square().sum().backward()
        optimizer.step()
    total = sum(float(values.sum()) for values in handle.full_state_dict().values())
    handle.close()
    return total


def meet_often(rank: int, num_ranks: int, port: int, per_launcher: int | None) -> list[float]:
    launched(rank, num_ranks, port, per_launcher)
    pace, found = random.Random(rank), []
    for number in range(4):
        time.sleep(0.1 * pace.random())
        if number == 2:  # once by torch's own call, with keys that no earlier group has had
            dist.init_process_group("gloo")
        zeroshard.init(timeout=60.0)
        found.append(trained(rank))
        wait_until_noted()  # its watch is that of this group: it hears of all ranks
        current = watch.current()
        assert current is not None and current._cause is None
        wait_until(lambda current=current: current._peers._complete)
        time.sleep(0.1 * pace.random())
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("per_launcher", [None, 1])
def test_a_process_may_leave_its_group_and_join_another_one(per_launcher: int | None) -> None:
    """Ranks waited for each other at the addresses of an earlier group, until the timeout: from the second or third
    time on."""
    with store_at(per_launcher, 3) as port:
        first, *others = run_ranks(meet_often, 3, 3, port, per_launcher, timeout=240)
    assert len(set(first)) == 1 and all(found == first for found in others)


def fail_once(rank: int, port: int, per_launcher: int, makes_group: bool, fails: bool) -> float:
    launched(rank, 2, port, per_launcher)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(not fails))
    if makes_group:  # torch's own keys are of no use for a second time: pytorch/pytorch#135712
        store = dist.PrefixStore(f"group-{fails}", dist.TCPStore("127.0.0.1", port, 2, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)  # the one that torch would have used
        group = dist.distributed_c10d._get_default_group()
        dist.distributed_c10d._world.pg_map[group] = (dist.distributed_c10d._world.pg_map[group][0], store)
    zeroshard.init(timeout=60.0)
    if fails and rank == 1:
        zeroshard.abort(ValueError("out of memory"), quiet=True)
        raise ValueError("out of memory")
    if fails:
        with suppress(RuntimeError):
            dist.barrier()
        threading.Event().wait()  # its watch ends it
    result = trained(rank)
    wait_until_noted()
    current = watch.current()
    assert current is not None and current._cause is None, current and current._cause
    wait_until(lambda: current._peers._complete)
    return result


@pytest.mark.parametrize(("per_launcher", "makes_group"), [(1, False), (2, True)])
def test_ranks_that_are_started_again_do_not_hear_of_the_failure_before(per_launcher: int, makes_group: bool) -> None:
    """With several launchers, and in a group that the program had made, the watch ended the new ranks at once: "exits
    because rank 1 failed", the failure for which they had been started again. And ranks connected to addresses of those
    that had ended."""
    with store_at(per_launcher, 2) as port:
        with pytest.raises(RankError, match="out of memory"):
            run_ranks(fail_once, 2, port, per_launcher, makes_group, True)
        first, second = run_ranks(fail_once, 2, port, per_launcher, makes_group, False)
    assert first == second


def test_the_control_without_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.failures.membership.attempt", lambda world_size: "0")
    with store_at(2, 2) as port:
        for fails in (True, False):
            with pytest.raises(RankError):
                run_ranks(fail_once, 2, port, 2, True, fails)


def free(port: int) -> bool:
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(("", port))
        except OSError:
            return False
        return True


def leave(rank: int, port: int, go_on: str) -> list[bool]:
    def is_watched() -> bool:
        return any(thread.name == "zeroshard watch" for thread in threading.enumerate())

    launched(rank, 2, port, None)
    zeroshard.init()
    trained(rank)
    before = [free(port), is_watched()]
    dist.barrier()
    try:
        if go_on == "raises":
            raise ValueError
    except ValueError:
        dist.destroy_process_group()
        noted = watch.current()
        assert noted is not None
        beats = noted.beats
        wait_until(lambda: noted.beats > beats + 2)
        assert is_watched()  # it may raise on, and would tell the others
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    wait_until(lambda: not is_watched())
    wait_until(lambda: free(port))
    return before


@pytest.mark.parametrize("go_on", ["ends", "raises"])
def test_the_watch_ends_with_its_group_and_the_port_is_free(go_on: str) -> None:
    """It held the store, and so MASTER_PORT, until the process ended: another group there found old keys."""
    assert run_ranks(leave, 2, free_port(), go_on) == [[False, True]] * 2


def use_after(rank: int, port: int, folder: str) -> float:
    launched(rank, 2, port, None)
    zeroshard.init()
    model = nn.Linear(5, 3)
    handle = zeroshard.shard(model, "zero3")
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
    loss = model(torch.full((2, 5), rank + 1.0)).square().sum()
    if rank == 0:  # its watch goes on for longer
        Membership.is_left = lambda self: False  # type: ignore[method-assign]
    dist.destroy_process_group()
    if rank == 1:
        wait_until(lambda: watch.current() is None)
    loss.backward()
    optimizer.step()
    before = "destroyed: call it before destroy_process_group"
    with pytest.raises(InvalidState, match=f"save: .* {before}"):
        zeroshard.save(folder, handle, optimizer, step=1)
    with pytest.raises(InvalidState, match=f"load: .* {before}"):
        zeroshard.load(folder, handle, optimizer)
    with pytest.raises(InvalidState, match=f"join: .* {before}"), handle.join():
        pass
    assert not os.listdir(folder)
    handle.close()
    return float(model.weight.detach().sum())


def test_what_is_called_behind_the_end_of_the_group_does_not_wait_for_the_watch(tmp_path: Path) -> None:
    """Watches end at another moment on each rank: in `close` one rank waited for ever for another without one. `save`,
    `load` and `join` raised errors of torch, and left a folder."""
    first, second = run_ranks(use_after, 2, free_port(), str(tmp_path))
    assert first == second


def test_a_port_that_is_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The note on torch's error said that rank 0 or the launcher had ended."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(InvalidState, match=f"port {port} of this host is in use"):
            zeroshard.init()


def told_another_place(rank: int, port: int) -> None:
    launched(rank, 2, port, None)
    zeroshard.init()
    zeroshard.init()  # nothing has changed
    told = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    for other in ({"RANK": str(1 - rank)}, {"WORLD_SIZE": "3"}, {"MASTER_PORT": str(port + 1)}):
        os.environ |= told | other
        with pytest.raises(InvalidState, match=f"is rank {rank} of 2 in a process group that it has joined before"):
            zeroshard.init()
    del os.environ["WORLD_SIZE"]  # as some libraries do at their end: this tells no place
    zeroshard.init()
    del os.environ["RANK"]  # a program without a launcher is a world of one
    with pytest.raises(InvalidState, match="now to be rank 0 of 1: call"):
        zeroshard.init()
    os.environ |= told
    zeroshard.init()
    dist.barrier()
    dist.destroy_process_group()


def test_a_process_that_is_told_another_place_does_not_keep_its_group() -> None:
    """A worker of a pool waited for the ranks of the task before, or trained with them, in silence."""
    run_ranks(told_another_place, 2, free_port())


def fork_a_rank(rank: int) -> str:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    zeroshard.init()
    reads, writes = os.pipe()
    if not (child := os.fork()):
        os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        try:
            zeroshard.init()
        except InvalidState as error:
            os.write(writes, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writes)
    with os.fdopen(reads) as told:
        return told.read()


def test_a_forked_process_does_not_train_alone_with_the_group_of_its_parent() -> None:
    """As a notebook with `zeroshard.init()` in a cell before `notebook_launcher`: both ranks were rank 0 of 1."""
    [told] = run_ranks(fork_a_rank, 1)
    assert told.startswith("init: this process is rank 0 of 1 in") and "to be rank 1 of 2 at 127.0.0.1:1: call" in told


def test_a_line_that_has_ended_takes_no_job() -> None:
    line = StoreLine(dist.HashStore(), lambda store: None, 0.5)
    line.close(lambda store: None, 60.0)
    with pytest.raises(Closed):
        line.ask(lambda store: None, 60.0)


def test_an_answer_is_for_who_asks_now() -> None:
    """Asks of processes that have ended are answered in vain; one of a rank that has the name is for the next one."""
    store, found = dist.HashStore(), list[str]()

    def ask(rank: int, last: str) -> str:
        return names.ask_for_name(store, rank, last)

    def in_a_thread(rank: int, last: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.append(ask(rank, last)))
        thread.start()
        return thread

    for rank in (1, 2):
        store.set(f"zeroshard/names/ask-{rank}", '["", "of one that has ended"]')
    answers = names.Answers(store, 3, "first")
    assert ask(1, "") == "first"
    assert ask(1, "of a start that has failed") == "first"  # not yet in the group: it may ask again
    early = in_a_thread(1, "first")
    assert not answers.wait(0.3) and not found
    assert ask(2, "") == "first"
    assert answers.wait(60.0) and not found  # all have the name, or had it
    second = names.Answers(store, 3, "second")
    early.join()
    assert found == ["second"] and ask(2, "first") == "second"
    assert second.wait(60.0)


def comes_late(rank: int, port: int) -> str:
    launched(rank, 2, port, None)
    init_process_group = dist.init_process_group
    dist.init_process_group = lambda backend, **options: init_process_group("fake", **options)  # waits for nobody
    if rank == 1:
        wait_until(lambda: not free(port))  # rank 0 has come
        time.sleep(0.3)
    try:
        zeroshard.init(timeout=60.0 if rank == 1 else 120.0)
    finally:
        dist.init_process_group = init_process_group
    return dist.get_backend()


def test_a_backend_that_connects_later_waits_for_nobody_and_all_have_the_name() -> None:
    assert run_ranks(comes_late, 2, free_port()) == ["fake", "fake"]


def starts_over_old_keys(rank: int) -> str:
    zeroshard.init()
    watch.stop()
    dist.barrier()  # both have left
    membership._numbers = itertools.count()  # as in a new process
    with pytest.raises(InvalidState) as found:
        zeroshard.init()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("zeroshard")]
    return str(found.value)


def test_a_file_with_the_keys_of_an_earlier_run_is_refused() -> None:
    """Each start ended with the failure of that run: a process that had died then."""
    for said in run_ranks(starts_over_old_keys, 2):
        assert "the store of the process group has the keys of an earlier run" in said
