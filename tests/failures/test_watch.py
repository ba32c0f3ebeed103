"""A rank fails in any phase and in any way: all ranks soon end, and report which rank caused it."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch

import zeroshard
from tests.checkpoint.common import Run, seed_all
from tests.failures.common import FULL, SEED, Ended, Ranks, finish_all, wait_until_noted
from tests.forked import Forked, LastOfTwoAnInterpreter
from tests.patience import AT_ONCE, wait_until
from zeroshard.failures import watch
from zeroshard.testing import run_ranks

Place = Literal["data", "forward", "backward", "step", "save", "load"]
Way = Literal["raises", "lingers", "dies"]
PLACES: tuple[Place, ...] = ("data", "forward", "backward", "step", "save", "load")
WAYS: tuple[Way, ...] = ("raises", "lingers", "dies")
AT_STEP = 2


class Injected(Exception):
    pass


class Trouble:
    """Fails at one place: the code calls it at every place, and it raises or kills the process where `place`
    matches."""

    def __init__(self, place: Place, way: Way, mark: Callable[[], Any]) -> None:
        self.place, self.way, self.mark, self.armed = place, way, mark, False

    def __call__(self, place: Place) -> None:
        if self.armed and place == self.place:
            self.mark()
            if self.way == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise Injected(f"injected into {place}")

    def state_dict(self) -> dict[str, Any]:
        self("save")
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self("load")


def work(run: Run, trouble: Trouble, directory: Path) -> None:
    """Some steps, a save and a load."""
    run.model.register_forward_pre_hook(lambda module, inputs: trouble("forward"))
    next(run.model.parameters()).register_hook(lambda grad: trouble("backward"))
    step = torch.optim.AdamW.step

    def troubled(self: Any, *args: Any) -> Any:
        trouble("step")
        return step(self, *args)

    torch.optim.AdamW.step = troubled  # type: ignore[method-assign,assignment]
    for number in range(AT_STEP + 1):
        trouble.armed = number == AT_STEP
        trouble("data")
        run.train([number])
    zeroshard.save(directory, run.handle, run.optimizer, step=1, extra={"trouble": trouble})
    zeroshard.load(directory, run.handle, run.optimizer, extra={"trouble": trouble})
    run.train([AT_STEP + 1])


def failing_rank(
    rank: int, mark: Callable[[], Any], plan: str, culprit: int, place: Place, way: Way, directory: Path, watched: bool
) -> None:
    if watched:
        zeroshard.init()
    seed_all(rank)
    run = Run(rank, plan, "fp32")
    trouble = Trouble(place, way, mark if rank == culprit else lambda: None)
    if rank != culprit:
        trouble.place = None  # type: ignore[assignment]
    if way != "lingers" or rank != culprit:
        work(run, trouble, directory)
        return
    try:
        with zeroshard.abort_on_error():
            work(run, trouble, directory)
    except Exception:
        time.sleep(2 * AT_ONCE)


def expect_culprit_named(ended: Ended, culprit: int, place: Place, way: Way, words: str = "injected into") -> None:
    assert None not in ended.statuses, ended
    assert 0 not in ended.statuses, ended
    assert max(ended.seconds) < AT_ONCE, ended
    said = ended.said
    if way == "dies":
        # No rank can tell these apart: `os._exit(0)` was told as "killed, possibly out of memory".
        for why in ("killed, often out of memory", "a crash in native code", "os._exit"):
            assert re.search(rf"because rank {culprit} died without reporting an error .*{why}", said), said
        return
    first = next(line for line in said.splitlines() if line)
    if place in ("save", "load"):  # all ranks raise together, with the failed rank's reason
        assert re.fullmatch(r"zeroshard: rank \d of \d failed first:", first), said
        assert re.search(
            rf"CheckpointError: .*\(on rank {culprit}\): .*raised Injected: injected into {place}", said
        ), said
    else:
        assert re.fullmatch(rf"zeroshard: rank {culprit} of \d failed first:", first), said
        assert said.count("Traceback") == 1, said
        assert f"Injected: {words}" in said.split("exits because")[0], said
        others = len(ended.statuses) - 1
        assert len(re.findall(rf"exits because rank {culprit} failed: .*{words}", said)) == others, said


def test_one_rank_fails_and_all_leave_in_seconds(tmp_path: Path) -> None:
    """With the full counts 200 failures: every place, every way, 2 and 3 ranks, every plan."""
    chosen = random.Random(SEED)
    kinds = list(itertools.product(PLACES, WAYS))
    trials = 200 if FULL else len(PLACES)
    together = 1 if FULL else 6
    for first in range(0, trials, together):
        groups, expected = [], []
        for trial in range(first, first + together):
            place, way = kinds[trial % len(kinds)] if FULL else (PLACES[trial], WAYS[trial % 3])
            num_ranks = chosen.choice([2, 3])
            culprit, plan = chosen.randrange(num_ranks), chosen.choice(["ddp", "zero1", "zero2", "zero3"])
            groups.append(Ranks(failing_rank, num_ranks, plan, culprit, place, way, tmp_path / str(trial), True))
            expected.append((culprit, place, way))
        for ended, (culprit, place, way) in zip(finish_all(groups), expected, strict=True):
            expect_culprit_named(ended, culprit, place, way)
    if FULL:
        print(f"\n{200} failures: all ranks out in under 5 s, the culprit named")


def waiting_rank(rank: int, mark: Callable[[], Any], how: str) -> None:
    zeroshard.init()
    run = Run(rank, "zero3", "fp32").train([0])
    wait_until_noted()
    if rank == 1:
        mark()
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elsewhere()
    run.train([1, 2])


def elsewhere() -> None:
    time.sleep(2 * AT_ONCE)


def rank_without_a_collective(rank: int, mark: Callable[[], Any]) -> None:
    zeroshard.init()
    if rank == 1:
        mark()
        os.kill(os.getpid(), signal.SIGSTOP)
        elsewhere()
    watch.wait_for_all()


@pytest.mark.long
def test_a_rank_that_the_others_wait_for_in_vain_is_named(tmp_path: Path) -> None:
    """The negative control: without the watch, ranks wait the whole timeout for a rank that has raised."""
    timeout = 3.0
    groups = [Ranks(waiting_rank, 3, how, timeout=timeout) for how in ("stopped", "elsewhere")]
    by_watch = Ranks(rank_without_a_collective, 2, timeout=timeout)
    unwatched = Ranks(failing_rank, 2, "zero3", 1, "forward", "lingers", tmp_path, False, timeout=5.5, awaited=[0])
    stopped, elsewhere, without, control = finish_all([*groups, by_watch, unwatched])
    for ended, names in (
        (stopped, r"rank 1 \(process \d+ on .*\) has stopped \(no heartbeat\), last seen at "),
        (elsewhere, r"rank 1 \(process \d+ on .*\) is at test_watch.py:\d+ in elsewhere"),
    ):
        assert ended.statuses == [1, 1, 1]
        first = min(ended.seconds)
        assert first < timeout + AT_ONCE and max(ended.seconds) < first + AT_ONCE, ended  # the others are told
        assert re.search(f"zeroshard: {names}", ended.said), ended
        assert len(re.findall(f"exits because rank . failed while waiting: {names}", ended.said)) >= 1, ended
    assert control.seconds[0] > 5.0 and control.statuses[1] is None
    assert without.statuses == [1, 1], without  # no wait of its own has a timeout
    assert re.search(r"LostPeer: rank 1 \(process \d+ on .*\) has stopped \(no heartbeat\)", without.said), without


def survivor(rank: int, mark: Callable[[], Any]) -> None:
    """Rank 1 is killed. Rank 0 has no round of its watch in time, as on a busy machine."""
    zeroshard.init()
    run = Run(rank, "zero3", "fp32").train([0])
    current = watch.current()
    assert current is not None
    current.line._beat_seconds = 1000.0
    before = current.beats
    wait_until(lambda: current.beats > before)  # the last round that is due
    if rank == 1:
        mark()
        os.kill(os.getpid(), signal.SIGKILL)
    run.train([1, 2])


def test_a_death_is_named_also_before_the_next_round_of_the_watch() -> None:
    """It was said to have "ended", without a reason, when the machine was too busy for a round within a second."""
    ended = Ranks(survivor, 2).finish()
    assert ended.statuses == [1, -signal.SIGKILL], ended
    assert "rank 0 exits because rank 1 died without reporting an error" in ended.said, ended


def rank_that_trains_on_a_thread(rank: int, mark: Callable[[], Any], *, joins: bool, in_training: bool) -> None:
    """`in_training`: whether the error is one of the thread that trains, or of another one."""
    zeroshard.init()

    def fail() -> None:
        raise Injected("no such file: data/7")

    def work() -> None:
        run = Run(rank, "zero3", "fp32").train([0, 1])
        if rank == 1:
            mark()
            if in_training:
                fail()
            other = threading.Thread(target=fail)
            other.start()
            other.join()
        run.train([2])
        run.handle.close()

    worker = threading.Thread(target=work)
    worker.start()
    if joins:
        worker.join()
    else:
        wait_until(lambda: not worker.is_alive())
        time.sleep(0.0 if not in_training else 10 * AT_ONCE)  # the main thread has other work


@pytest.mark.parametrize("joins", [True, False])
def test_an_uncaught_error_of_a_thread_that_trains_ends_all_ranks(joins: bool) -> None:
    """The other ranks waited until the timeout, or were told of a deadlock; and all had the exit status 0."""
    ended = Ranks(partial(rank_that_trains_on_a_thread, joins=joins, in_training=True), 3).finish()
    expect_culprit_named(ended, 1, "data", "raises", words="no such file")


def test_an_uncaught_error_of_another_thread_ends_none() -> None:
    """As in plain torch."""
    ended = Ranks(partial(rank_that_trains_on_a_thread, joins=True, in_training=False), 2).finish()
    assert ended.statuses == [0, 0], ended
    assert "Injected: no such file: data/7" in ended.said
    assert "exits because" not in ended.said


def rank_that_nobody_reads(rank: int, mark: Callable[[], Any]) -> None:
    """As behind `2>&1 | head`, or in a terminal that has been closed. Rank 1 stays until its watch ends it."""
    zeroshard.init()
    if rank == 1:
        reader, writer = os.pipe()
        os.close(reader)
        sys.stderr = open(writer, "w", buffering=1)  # noqa: SIM115
        mark()
        with pytest.raises(BrokenPipeError):  # of the traceback
            zeroshard.abort(Injected("no such file: data/7"))
        sys.stderr = sys.__stderr__
    wait_until(lambda: False)


def test_a_rank_whose_output_nobody_reads_tells_the_others() -> None:
    """It raised in its first line, and no other rank could announce the failure in its place: all waited on."""
    ended = Ranks(rank_that_nobody_reads, 2).finish(AT_ONCE)
    assert ended.statuses == [1, 1], ended
    assert "rank 0 exits because rank 1 failed: " in ended.said and "data/7" in ended.said, ended


def test_the_exit_status_tells_of_a_failure_also_if_stdout_is_closed() -> None:
    """It was 0 if a thread that trains had failed."""
    if (child := os.fork()) == 0:
        sys.stdout, watch._hooks.has_failed = None, True  # type: ignore[assignment]
        try:
            watch.at_exit()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def rank_that_joins_again(rank: int, mark: Callable[[], Any], *, by_thread: bool) -> None:
    zeroshard.init()
    watch.wait_for_all()
    watch.stop()
    group = torch.distributed.group.WORLD
    store = torch.distributed.PrefixStore("again", torch.distributed.distributed_c10d._get_default_store())
    torch.distributed.destroy_process_group(group)
    for module in (sys, threading):  # as torch does, and libraries that report errors

        def of_library(*ended: Any, there: Callable[..., Any] = module.excepthook) -> None:
            there(*ended)

        module.excepthook = of_library
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    zeroshard.init()

    def fail() -> None:
        zeroshard.shard(torch.nn.Linear(1, 1), "ddp")
        if rank == 1:
            mark()
            raise Injected("no such file: data/7")
        wait_until(lambda: False)

    if by_thread:
        worker = threading.Thread(target=fail, daemon=True)
        worker.start()
        worker.join()
    else:
        fail()


@pytest.mark.parametrize("by_thread", [False, True])
def test_a_rank_that_has_joined_twice_shows_its_error(by_thread: bool) -> None:
    """Its traceback was missing: the hooks for uncaught errors called each other. Without a watch, they did not end."""
    ended = Ranks(partial(rank_that_joins_again, by_thread=by_thread), 2).finish()
    assert ended.statuses == [1, 1] and ended.said.count("Injected: no such file: data/7\n") == 2, ended
    assert "Traceback" in ended.said and "rank 0 exits because rank 1 failed" in ended.said, ended


def rank_that_shows_its_errors_itself(rank: int, mark: Callable[[], Any]) -> None:
    sys.last_value = KeyError("of an earlier program")
    zeroshard.init()
    sys.excepthook = lambda kind, error, trace: print("of a library:", error, file=sys.stderr)
    watch.wait_for_all()
    if rank == 1:
        mark()
        raise Injected("no such file: data/7")
    wait_until(lambda: False)


def test_an_error_that_another_hook_shows_ends_all_ranks() -> None:
    """`rich.traceback.install()` behind `init`: the rank was taken for one that had ended its work."""
    ended = Ranks(rank_that_shows_its_errors_itself, 2).finish()
    assert ended.statuses == [1, 1], ended
    said = ended.said.splitlines()
    assert said[:2] == ["of a library: no such file: data/7", "zeroshard: rank 1 of 2 failed first:"], ended
    assert said[2].endswith("Injected: no such file: data/7") and said[3] == (
        "zeroshard: rank 0 exits because rank 1 failed: " + said[2]
    ), ended


def test_a_forked_copy_of_a_rank_does_not_ask_the_watch_of_its_parent() -> None:
    """Its threads are not there: the copy waited for five seconds, and then blamed the store."""

    def check(rank: int) -> None:
        zeroshard.init()
        watch.wait_for_all()
        if (child := os.fork()) == 0:
            error, status = RuntimeError("connection closed"), 1
            try:
                zeroshard.abort(error, quiet=True)
                watch.wait_for_all()
                status = int(watch.explain(error) is not None or hasattr(error, "__notes__"))
                watch.stop()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        watch.wait_for_all()

    run_ranks(check, 2)


def leaving_rank(rank: int, mark: Callable[[], Any]) -> None:
    """Rank 1 stays until its watch has looked at the others after their end."""
    zeroshard.init()
    run = Run(rank, "zero1", "fp32").train([0])
    pids = run.handle.engine.collectives.exchange_objects(os.getpid())
    run.handle.close()
    if rank == 1:
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids if pid != os.getpid()))
        wait_until_noted()
        current = watch.current()
        assert current is not None and current._cause is None, current


def test_who_has_done_its_work_may_leave_before_the_others() -> None:
    ended = Ranks(leaving_rank, 3).finish()
    assert (ended.statuses, ended.said) == ([0, 0, 0], "")


def test_ranks_wait_for_each_other_also_in_a_second_group_with_another_store(tmp_path: Path) -> None:
    """They waited for ever for the calls in the first group, of which the new store knows nothing."""

    def check(rank: int) -> None:
        for number in range(2):
            zeroshard.init()
            watch.wait_for_all()
            watch.stop()
            torch.distributed.destroy_process_group()
            store = torch.distributed.FileStore(str(tmp_path / f"store-{number}"), 2)
            torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)

    run_ranks(check, 2, timeout=60)


def test_started_twice_it_is_one() -> None:
    def rank_main(rank: int, mark: Callable[[], Any]) -> None:
        zeroshard.init()
        first = watch._current
        zeroshard.init()
        assert watch._current is first is not None
        torch.distributed.barrier()
        watch.stop()
        watch.stop()
        zeroshard.abort(ValueError("nobody listens"))

    assert Ranks(rank_main, 2).finish().statuses == [0, 0]


SCRIPT = """
import sys, time, torch, zeroshard
zeroshard.init()
rank = torch.distributed.get_rank()
model = torch.nn.Linear(4, 4)
handle = zeroshard.shard(model, "zero3")
optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW)
step = 0
while True:
    step += 1
    if step == 3:
        open(f"{sys.argv[2]}-{rank}", "w").close()
        if sys.argv[1] == "raise" and rank == 1:
            print(f"at {time.time()}", flush=True)
            raise ValueError("no such file: data/7")
    if step > 3:
        time.sleep(0.02)  # this run waits for its end while the other one starts
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.long
def test_ordinary_scripts_under_torchrun(tmp_path: Path) -> None:
    """Two runs: in one a rank raises, in the other the launcher is killed."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=localhost",
        "--nproc-per-node=2",
        str(script),
    ]
    with open(tmp_path / "said", "w+") as said:
        orphans = Forked([*launcher, "go on", str(tmp_path / "on")], stdout=said, stderr=subprocess.STDOUT)
        try:
            raising, pipe = [*launcher, "raise", str(tmp_path / "raise")], subprocess.PIPE
            done = Forked(raising, ranks=LastOfTwoAnInterpreter, stdout=pipe, stderr=pipe, text=True)
            out, err = done.communicate()
            ended = time.time()
            wait_until(lambda: len(list(tmp_path.glob("on-*"))) == 2 or orphans.poll() is not None)
        finally:
            ranks = psutil.Process(orphans.pid).children()
            orphans.kill()
            orphans.wait()
            _, alive = psutil.wait_procs(ranks, timeout=AT_ONCE)
        assert alive == []
        said.seek(0)
        assert "exits because the launcher is gone" in said.read()
    assert done.returncode == 1
    assert ended - float(out.split("at ")[1]) < AT_ONCE
    first = err.index("zeroshard: rank 1 of 2 failed first:")
    assert "ValueError: no such file: data/7" in err[first:]
    ours = err.split("torch/distributed/elastic")[0]  # the rest is the launcher's output
    assert ours.count("Traceback (most recent call last)") == 1
