"""A rank ends early, for example with fewer batches: the others once failed with gloo's "Connection closed by peer". A
rank that calls `optimizer.state_dict()` under `if rank == 0:` waited for the whole timeout and got an error of gloo.
Now all ranks soon report which rank is in which call, and which calls are collective."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.checkpoint.common import Run
from tests.failures.common import Ended, Ranks, finish_all, has_ended, wait_until_noted
from tests.patience import AT_ONCE, wait_until
from tests.ports import free_port
from tests.together import on_ranks
from zeroshard.checkpoint import files
from zeroshard.errors import InvalidState
from zeroshard.failures import positions, watch
from zeroshard.failures.blame import describe_knot
from zeroshard.failures.positions import HERE, Here, Position, Wait, knot
from zeroshard.failures.whereabouts import SAVES, only_saves
from zeroshard.testing import run_ranks


def early(rank: int, mark: Callable[[], Any], plan: str, last: int, case: str, folder: Path) -> None:
    """The rank `last` ends after two steps, or calls something else than the others."""
    zeroshard.init()
    run = Run(rank, plan, "fp32").train([0, 1])
    if rank == last:
        mark()
        in_its_own_way(run, case, folder)
    else:
        run.train([2, 3])


def in_its_own_way(run: Run, case: str, folder: Path) -> None:
    if case == "saves":
        zeroshard.save(folder, run.handle, run.optimizer, step=1)
    elif case == "asks for the state":
        run.optimizer.state_dict()
    elif case == "asks for the weights":
        run.handle.full_state_dict()
    elif case == "meets":
        dist.barrier()
    elif case == "sends":
        dist.broadcast_object_list([3], src=1)
    elif case == "receives":
        dist.broadcast_object_list([None], src=0)


def expect(ended: Ended, *patterns: str) -> None:
    assert ended.statuses[0] == 1 and None not in ended.statuses, ended
    assert max(ended.seconds) < AT_ONCE, ended
    for pattern in patterns:
        assert re.search(pattern, ended.said), (pattern, ended.said)


def test_ranks_that_go_their_own_way_are_named_in_seconds(tmp_path: Path) -> None:
    cases = [
        ("zero3", "ends"),
        ("ddp", "ends"),
        ("zero1", "asks for the state"),
        ("zero3", "asks for the state"),
        ("zero3", "asks for the weights"),
        ("zero2", "saves"),
        ("zero3", "meets"),
        ("ddp", "meets"),
        ("zero3", "receives"),
        ("zero1", "sends"),
    ]
    groups = [Ranks(early, 2, plan, 1, case, tmp_path / str(i)) for i, (plan, case) in enumerate(cases)]
    everybody = dict(zip(cases, finish_all(groups), strict=True))
    for (plan, case), ended in everybody.items():
        if case == "ends":
            # On a busy machine rank 0 may have waited for long before it finds why its wait has failed: then its watch
            # is first, and says what it waits for.
            expect(
                ended,
                r"rank 0 of 2 failed while waiting for another rank:\nzeroshard: rank 1 .*has reached the end of|"
                r"exits because ranks wait for each other \(deadlock\): rank 0 waits in .*; rank 1 has reached the end",
                r"(failed while waiting( in (all_gather|reduce_scatter|an exchange).*)?: rank 1 \(process \d+ on .*\)|"
                r"rank 1) has reached the end of its program, or called sys.exit or destroy_process_group; it was last "
                r"seen .*are collective:",
                r"use `with handle.join\(\):`",
            )
        elif case in ("meets", "sends", "receives"):
            call = "barrier" if case == "meets" else "broadcast"
            expect(
                ended,
                r"exits because ranks wait for each other \(deadlock\): rank 0 waits in \w+ of unit \S+ \(\w+\), "
                r"at test_left_alone.py:\d+ in early|exits because ranks wait .*rank 0 waits in \w+ of unit",
                rf"rank 1 waits in torch.distributed.{call}, at test_left_alone.py:\d+ in in_its_own_way",
                r"are collective: every rank has to call them",
            )
        else:
            assert 0 not in ended.statuses and max(ended.seconds) < AT_ONCE, ended
            assert re.search(
                r"ranks wait for each other \(deadlock\): .*are collective|is at unit .*must run the same units",
                ended.said,
            ), (plan, case, ended.said)
        if case.startswith("asks"):  # the message names the call and its line
            call = "ShardedOptimizer.state_dict" if case.endswith("state") else "Handle.full_state_dict"
            expect(ended, rf"rank 1 .*at test_left_alone\.py:\d+ in in_its_own_way \(in {call}\)")


class Meet(torch.autograd.Function):
    """A collective of the user's inside of a backward."""

    number = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total = grads[0].clone()
        Meet.number += 1
        dist.distributed_c10d._get_default_store().set(f"{dist.get_rank()} meets {Meet.number}", "")
        dist.all_reduce(total)
        return total


class Block(nn.Linear):
    def forward(self, x: torch.Tensor, used: bool = True) -> torch.Tensor:
        return torch.tanh(super().forward(x) if used else x * 1)


class Five(nn.Module):
    """Five blocks, and a collective between the third and the fourth. The fourth may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4, 4) for _ in range(5))

    def forward(self, x: torch.Tensor, used: bool) -> Any:
        for block in self.blocks[:3]:
            x = block(x)
        return self.blocks[4](self.blocks[3](Meet.apply(x), used)).sum()  # type: ignore[no-untyped-call]


def meets_in_backward(rank: int, mark: Callable[[], Any]) -> None:
    """Rank 1 keeps no gradient of the fourth block from the first backward, so it needs a bucket in the second one.
    Rank 0, which needs none, goes on to its collective before it has read what is in that bucket."""
    zeroshard.init()
    torch.manual_seed(0)
    model = Five()
    handle = zeroshard.shard(model, "zero3", units=Block)
    with handle.no_sync():
        model(torch.ones(3, 4), rank == 0).backward()
    mark()
    loss = model(torch.ones(3, 4), True)
    if rank == 1:
        store = dist.distributed_c10d._get_default_store()
        loss.register_hook(lambda grad: store.wait(["0 meets 2"], timedelta(seconds=AT_ONCE)))
    loss.backward()


def test_a_rank_that_does_not_read_while_it_waits_elsewhere_is_named_in_seconds() -> None:
    """It had begun the reduction for which the other one waited, so no deadlock was found before the timeout."""
    (ended,) = finish_all([Ranks(meets_in_backward, 2)])
    expect(
        ended,
        r"ranks wait for each other \(deadlock\): rank 0 waits in torch.distributed.all_reduce, at test_left_alone.py",
        r"rank 1 waits in reduce_scatter of unit blocks.4 \(backward\), until the other ranks have read it",
    )


def saves_at_last(rank: int, mark: Callable[[], Any], plan: str, case: str, folder: Path) -> None:
    """Rank 1 raises, and then waits for rank 0, which trains on."""
    zeroshard.init()
    run = Run(rank, plan, "fp32").train([0])
    try:
        if rank == 1:
            mark()
            raise ValueError("no such file: data/7")
        run.train([1, 2])
    finally:
        in_its_own_way(run, case, folder)


def test_the_error_that_a_rank_handles_while_it_waits_is_shown(tmp_path: Path) -> None:
    """A `finally:` that saves, or a callback of a trainer on exceptions: nothing told of the error."""
    cases = [("zero1", "saves"), ("zero3", "asks for the state"), ("ddp", "meets")]
    groups = [Ranks(saves_at_last, 2, plan, case, tmp_path / str(i)) for i, (plan, case) in enumerate(cases)]
    for (plan, case), ended in zip(cases, finish_all(groups), strict=True):
        assert 0 not in ended.statuses and max(ended.seconds) < AT_ONCE, (plan, case, ended)
        assert re.search(r"^(\[rank1\]: )?ValueError: no such file: data/7$", ended.said, re.MULTILINE), ended.said
        handles = r"rank 1 (waits in|is at) .*test_left_alone\.py:\d+ in .*, while it handles ValueError: no such file"
        assert re.search(handles, ended.said), (plan, case, ended.said)
        if case == "saves":
            first = "zeroshard: rank 1 of 2 waited for another rank while it handled this error:\nTraceback"
            assert first in ended.said and ended.said.count("\nValueError: ") == 1, ended.said


TIMEOUT = 4.0


def patient(rank: int, mark: Callable[[], Any], how: str) -> None:
    """Rank 0 works alone, for longer than the timeout of collectives, while the others wait."""
    store = dist.distributed_c10d._get_default_store()

    def meet(what: str) -> None:
        store.set(f"{rank} {what}", "")
        store.wait([f"{other} {what}" for other in range(3)], timedelta(seconds=AT_ONCE))

    meet("runs")  # on a busy machine ranks may start further apart than the timeout
    zeroshard.init()
    meet("waits")
    if rank == 0:
        mark()
        if how == "fails":
            raise ValueError("nothing to read")
        time.sleep(1.5 * TIMEOUT)  # no event could end this: how long the others wait is what is tested
    if how != "collective":
        zeroshard.wait_for_all()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3.0


def test_a_rank_that_works_alone_for_long_is_waited_for() -> None:
    """The negative control: ranks that wait in a collective give up. If rank 0 fails, the waiting ranks report its
    error."""
    groups = [Ranks(patient, 3, how, timeout=TIMEOUT) for how in ("patient", "collective", "fails")]
    waited, gave_up, failed = finish_all(groups)
    assert waited.statuses == [0, 0, 0] and waited.said == "", waited
    assert 0 not in gave_up.statuses, gave_up
    assert failed.statuses == [1, 1, 1] and "because rank 0 failed: ValueError: nothing to read" in failed.said, failed


# On a device, where the host waits for it, and no collective raises -------------------------------------------------


def on_a_device(rank: int, mark: Callable[[], Any], case: str) -> None:
    """Rank 1 does not come. The others wait for their device, as with NCCL: nothing but the end of the process ends
    that."""
    zeroshard.init()
    wait = Wait("exchange 1 of 0-2", HERE.begin("exchange 1 of 0-2"), (0, 1, 2), "a step") if rank != 1 else None
    forever = threading.Event()
    if wait is not None:
        with HERE.waiting(wait, on_device=True):
            forever.wait()
    mark()
    if case != "destroys":
        os.kill(os.getpid(), signal.SIGSTOP if case == "stops" else signal.SIGCONT)
        forever.wait()
    else:  # what it has queued needs the others
        try:
            raise ValueError("out of memory")
        finally:
            dist.distributed_c10d._world.comms.append(SimpleNamespace(finalize=forever.wait))
            dist.destroy_process_group()


def test_waits_for_a_device_end_before_the_timeout_and_the_culprit_is_named() -> None:
    """torch's watchdog ended the processes at the timeout of NCCL; the first one was named as the one that had died. A
    rank that destroyed its group in a `finally` never printed its error."""
    words = {
        "stops": r"rank 1 \(process \d+ on .*\) has stopped \(no heartbeat\)",
        "is elsewhere": r"rank 1 \(process \d+ on .*\) is at test_left_alone.py:\d+",
        "destroys": r"ranks wait for each other \(deadlock\): .*rank 1 waits in torch.distributed.destroy_process"
        r"_group, at .*while it handles ValueError: out of memory",
    }
    groups = [Ranks(on_a_device, 3, case, timeout=TIMEOUT if case != "destroys" else 600.0) for case in words]
    for ended, pattern in zip(finish_all(groups), words.values(), strict=True):
        assert ended.statuses == [1, 1, 1], ended
        assert re.search(pattern, ended.said), ended.said


# Without processes ----------------------------------------------------------------------------------------------------


def at(key: str, number: int, ranks: tuple[int, ...] = (0, 1, 2), **begun: int) -> Position:
    return Position(Wait(key, number, ranks, key), begun)


def test_a_knot_is_a_circle_of_ranks_that_need_each_other() -> None:
    gathers, reduces = at("gather", 7, gather=8, reduce=3), at("reduce", 3, gather=7, reduce=4)
    assert knot({0: gathers, 1: reduces}, {}) == [0, 1]
    assert knot({0: gathers}, {}) == []  # the others are not waiting yet
    assert knot({0: gathers, 1: at("gather", 7, gather=8, reduce=3)}, {}) == []  # both wait for the third
    slow = at("reduce", 3, gather=8, reduce=4)  # has begun the gather, and waits for a slow reduction
    assert knot({0: gathers, 1: slow, 2: slow}, {}) == []
    circle = {0: at("a", 0, (0, 1), a=1), 1: at("b", 0, (1, 2), b=1), 2: at("c", 0, (2, 0), c=1)}
    assert knot(circle, {}) == [0, 1, 2]
    outside = {0: at("a", 0, (0, 1), a=1), 1: at("b", 0, (1, 2), b=1), 2: at("c", 0, (2, 1), c=1)}
    assert knot(outside, {}) == [1, 2]  # rank 0 waits for both, and neither for it
    assert knot({1: gathers}, {2: {"gather": 7}}) == [1, 2]  # rank 2 has left without beginning the gather
    assert knot({1: gathers}, {2: {"gather": 8}}) == []


def test_counts_of_a_mesh_that_is_gone_are_kept_until_no_rank_is_in_it() -> None:
    """A rank that waits in its last collective would take a peer without these counts for one that never comes."""
    here, ranks = Here(), (0, 1)
    users: list[Any] = [nn.Module() for _ in range(4)]
    for number, user in enumerate(users):
        name, forgotten = here.name_of_mesh(ranks, user)
        assert name == f"{number + 1} of 0,1"
        for kind in ("exchange", "read_all_gather"):
            here.begin(f"{kind} {name}")
        here.begin(f"all {name} 0,1")
        del user
        if number == 0:
            users[0] = None
        assert forgotten == (["1 of 0,1"] if number == 2 else [])
        left = {key.split(" ")[1] for key in here.begun}
        assert left == {str(one) for one in range(1 if number < 2 else 2, number + 2)}
    others, _ = here.name_of_mesh((0, 2), here)
    assert others == "1 of 0,2"


@pytest.mark.parametrize("end", ["close", "abandon", ""])
def test_heartbeats_and_the_store_do_not_grow_with_the_handles_of_a_process(end: str) -> None:
    def check(rank: int) -> None:
        zeroshard.init()
        store, waits = dist.PrefixStore("zeroshard/watch", dist.distributed_c10d._get_default_store()), set[str]()

        def live() -> None:
            model = nn.Linear(3, 3)
            handle = zeroshard.shard(model, "zero3")
            model(torch.ones(1, 3)).sum().backward()
            waits.update(key for key in HERE.begun if key.startswith("all "))
            if end:
                getattr(handle, end)()

        def counted() -> tuple[int, int]:
            for _ in range(4):
                live()
                gc.collect()
            dist.barrier()
            found = len(HERE.begun), sum(store.check([f"come-{key}"]) for key in waits)
            dist.barrier()
            return found

        assert counted() == counted()
        assert len(waits) == 8

    run_ranks(check, 2)


def test_functions_of_torch_distributed_are_part_of_a_knot_if_all_members_wait() -> None:
    gathers, barrier = at("gather", 7, gather=8), at("torch.distributed.barrier", -1, gather=7)
    assert knot({0: gathers, 1: barrier, 2: barrier}, {}) == [0, 1]
    assert knot({0: gathers, 1: barrier}, {}) == []  # rank 2 may still begin either
    assert knot({0: barrier, 1: barrier, 2: barrier}, {}) == []
    assert knot({1: barrier, 2: barrier}, {0: {}}) == [0, 1]


def test_a_broadcast_is_part_of_a_knot_if_its_source_has_not_called_it() -> None:
    """Nothing was found before the timeout: a rank that has sent its part may have left the call long ago."""
    calls = "calls of the default group"
    receives = at(calls, 5, (0,), **{calls: 6})
    assert knot({0: at("gather", 7, gather=8, **{calls: 5}), 1: receives}, {}) == [0, 1]
    assert knot({0: at("gather", 7, gather=8, **{calls: 6}), 1: receives}, {}) == []  # has sent, and gone on
    assert knot({0: at("gather", 7, gather=8), 1: receives}, {}) == []  # not known
    assert knot({2: at("gather", 7, gather=8, **{calls: 5}), 1: receives}, {}) == []  # the source may still come
    assert knot({1: receives}, {0: {calls: 5}}) == [0, 1]
    assert knot({1: receives}, {0: {calls: 6}}) == knot({1: receives}, {0: {}}) == []


def test_ranks_in_one_exchange_after_different_collectives_never_leave_it() -> None:
    """On GPUs nothing compares what ranks have begun: they waited for torch's watchdog, and none was named."""

    def here(gathers: int, ranks: tuple[int, ...] = (0, 1, 2), number: int = 4) -> Position:
        begun = {"all_gather 1 of 0-2": gathers, "exchange 1 of 0-2": 5, "all_gather 2 of 0-2": gathers}
        return Position(Wait("exchange 1 of 0-2", number, ranks, "a step"), begun)

    apart = {0: here(7), 1: here(7), 2: here(6)}
    assert knot(apart, {}) == [0, 2]
    assert knot({0: here(7), 2: here(6)}, {}) == []  # rank 1 may still come
    assert knot({**apart, 1: here(7, number=3)}, {}) == []
    assert knot({rank: here(7) for rank in range(3)}, {}) == []  # of another mesh, or a slow network
    gathers = {rank: at("all_gather 1 of 0-2", 4, **{"all_gather 1 of 0-2": 5 + rank}) for rank in range(3)}
    assert knot(gathers, {}) == []
    told = describe_knot([0, 2], apart, {0: "at a.py:1", 2: "at b.py:2"})
    assert "different collectives (all_gather: rank 0 has begun 7, rank 2 has begun 6)" in told


def test_where_a_process_is() -> None:
    here = Here()
    names = [here.name_of_mesh(ranks, here)[0] for ranks in ((0, 1), (0, 1), (0, 2))]
    assert len(set(names)) == 3
    assert [here.begin("a"), here.begin("a"), here.begin("b")] == [0, 1, 0]
    wait = Wait("a", 1, (0, 1), "a thing")
    assert here.position() is None
    with here.waiting(wait):
        assert here.position() is None  # not waiting for long enough
        here._since -= 100.0
        found = here.position()
        assert found is not None and Position.of(found.as_list()) == found == Position(wait, {"a": 2, "b": 1})
        with here.waiting(Wait("b", 0, (0, 1), "another")):
            assert here.position() is None
        assert here.position() == found
    assert here.position() is None and here.wait is None


@on_ranks(2)
def test_the_look_at_a_call_keeps_nothing_of_its_callers(rank: int) -> None:
    """The frame that the watch had seen in a call of torch.distributed kept a graph, or a deleted model, until the next
    look: half a second."""
    here, inside, go_on = Here(), threading.Event(), threading.Event()
    code = "def barrier(group=None):\n    inside.set()\n    assert go_on.wait(60)\n"
    names: dict[str, Any] = {"inside": inside, "go_on": go_on}
    exec(compile(code, "distributed_c10d.py", "exec"), names)

    class Loss:
        pass

    losses = []

    def program() -> None:
        loss = Loss()
        losses.append(weakref.ref(loss))
        names["barrier"]()

    for _ in range(2):  # the second call is a new one
        thread = threading.Thread(target=program)
        thread.start()
        assert inside.wait(60)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "main_thread", lambda thread=thread: thread)
            assert here.position() is None and losses[-1]() is not None
            seen = time.monotonic
            patch.setattr(positions.time, "monotonic", lambda seen=seen: seen() + 100.0)
            found = here.position()
            patch.setattr(positions.time, "monotonic", seen)
            assert here.position() is None
        assert found is not None and found.wait.text == "torch.distributed.barrier"
        go_on.set()
        thread.join()
        inside.clear(), go_on.clear()
        assert losses[-1]() is None


def saving_at_its_end(rank: int, mark: Callable[[], Any], folder: Path) -> None:
    """Rank 1 ends its program while it saves in the background, on a disk that takes until the other rank has ended."""
    zeroshard.init()
    run = Run(rank, "zero1", "fp32").train([0])
    pids = run.handle.engine.collectives.exchange_objects(os.getpid())
    sync = files.sync

    def slow(file: int) -> None:
        wait_until(lambda: has_ended(pids[0]))
        sync(file)

    if rank == 1:
        files.sync = slow
    zeroshard.save(folder, run.handle, run.optimizer, step=1, background=True)
    if rank == 1:
        mark()
        threading._shutdown()  # as an interpreter does at its end
    run.train([1])


def test_who_ends_in_a_save_is_told_before_the_save_is_over(tmp_path: Path) -> None:
    """The others waited for the slow save as well, or for the timeout, before they were told."""
    ended = Ranks(saving_at_its_end, 2, tmp_path / "steps", timeout=600.0).finish(limit=60.0)
    expect(ended, r"rank 1 has reached the end of its program, or called sys.exit")


def test_only_a_save_in_the_background_may_outlive_the_program() -> None:
    """A program whose threads go on after its main thread has ended has not left."""

    def rank_main(rank: int, mark: Callable[[], Any], name: str, expected: bool) -> None:
        seen: list[bool] = []

        def look() -> None:
            wait_until(lambda: not threading.main_thread().is_alive())
            seen.append(only_saves())

        thread = threading.Thread(target=look, name=name)
        thread.start()
        assert not only_saves()
        threading._shutdown()
        assert seen == [expected] and not only_saves()

    saves, trains = Ranks(rank_main, 1, f"{SAVES} 3", True), Ranks(rank_main, 1, "trains", False)
    assert [one.statuses for one in finish_all([saves, trains])] == [[0], [0]]


def in_multiprocessing(rank: int, folder: Path, case: str) -> None:
    """Rank 1 ends its work. Rank 0 goes on for long enough to find that a process has died, or waits for rank 1."""
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    zeroshard.init()
    dist.barrier()
    if rank == 1 and case == "raises":
        raise ValueError("of rank 1 alone")
    if rank == 1 and case == "raises, and is caught":  # as torch.multiprocessing.spawn does
        try:
            raise ValueError("of rank 1 alone")
        except ValueError:
            sys.exit(1)
    current = watch.current()
    if rank == 0 and current is not None:
        if case == "returns":
            wait_until(lambda: has_ended(int((folder / "pid-1").read_text())))
            wait_until_noted()
            wait_until_noted()
            current.expect_alive([])
            (folder / "said").write_text("nothing")
        else:
            try:
                zeroshard.wait_for_all()
            except RuntimeError as error:
                (folder / "said").write_text(str(error))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("returns", "nothing"),
        ("raises", "rank 1 failed: ValueError: of rank 1 alone"),
        ("raises, and is caught", "rank 1 failed: ValueError: of rank 1 alone"),
    ],
)
def test_what_multiprocessing_has_forked_ends_like_other_processes(case: str, said: str, tmp_path: Path) -> None:
    """It calls os._exit, and neither the functions of `atexit` nor `sys.excepthook`. A rank that had returned was taken
    for dead, and its peers ended."""
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=in_multiprocessing, args=(rank, tmp_path, case)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    assert (tmp_path / "said").read_text() == said
    assert [process.exitcode for process in ranks] == [0, int(case != "returns")]


def test_a_process_that_inherits_the_place_of_a_rank_is_told() -> None:
    """It waited for minutes, as a second rank 1. `init` leaves a mark for the processes that a rank starts. With
    another port, those of all ranks make a group of their own."""
    first, second = free_port(), free_port()

    def started(port: int) -> int:
        """How a process ends that a rank has started, and that calls `init`."""
        if (child := os.fork()) == 0:
            code = 9
            try:
                os.environ["MASTER_PORT"] = str(port)
                zeroshard.init(timeout=60)
                dist.barrier()  # else one may end while the other one still connects
                code = dist.get_world_size()
            except InvalidState as error:
                code = 7 if f"(process {os.getppid()}) has started this" in str(error) else 8
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def check(rank: int) -> list[int]:
        dist.destroy_process_group()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(first)}
        zeroshard.init()
        dist.barrier()
        dist.destroy_process_group()  # (a copy of this process has no group)
        return [started(first), started(second)]

    assert run_ranks(check, 2) == [[7, 2], [7, 2]]
