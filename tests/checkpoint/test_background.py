"""A background save writes the values at the time of the call, reports its errors, and ends before the process ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

import zeroshard
from tests.checkpoint.common import FULL, Awkward, Kind, Run, muon_and_adamw, read_all, same_bits, seed_all
from tests.checkpoint.faults import faulty
from tests.forked import Forked
from tests.patience import wait_until
from zeroshard.checkpoint import files, meeting
from zeroshard.checkpoint.commit import Job
from zeroshard.checkpoint.folders import steps
from zeroshard.checkpoint.save import Saving, _Save
from zeroshard.checkpoint.writer import Item
from zeroshard.testing import run_ranks


def changing_at_once(rank: int, folder: Path, plan: str, precision: str, trials: int) -> tuple[int, int]:
    """Count the saves that hold the values at the time of the call, although later steps change everything
    meanwhile."""
    seed_all(rank)
    run = Run(rank, plan, precision, Kind(Awkward, groups=muon_and_adamw)).train(range(1))
    original, changed = files.write, threading.Event()

    def late(file: int, data: bytes) -> int:
        if threading.current_thread() is not threading.main_thread():
            changed.wait()
        return original(file, data)

    files.write = late
    good = 0
    for trial in range(trials):
        run.save(folder / "calm", trial)
        changed.clear()
        saving = run.save(folder / "busy", trial, background=True)
        run.train(range(trial + 1, trial + 2))
        if plan == "ddp":  # change the weights directly, too
            for unit in run.handle.engine.units:
                unit.weights.buffer.full.add_(1.0)
        changed.set()
        saving.wait()
        run.handle.engine.collectives.exchange_objects(None)
        try:
            good += same_bits(read_all(folder / f"calm/step-{trial}"), read_all(folder / f"busy/step-{trial}"))
        except zeroshard.CheckpointError:  # a value changed between its digest and its write
            continue
    files.write = original
    return good, trials


@pytest.mark.parametrize(("plan", "precision"), [("zero3", "bf16-remainder"), ("ddp", "fp32")])
def test_values_are_those_of_the_call(tmp_path: Path, plan: str, precision: str) -> None:
    results = run_ranks(changing_at_once, 2, tmp_path, plan, precision, 100 if FULL else 4)
    print(f"{plan}: {results[0]} hold the values of the call")
    assert all(good == trials for good, trials in results)


def test_negative_control_without_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Item, "copied", lambda self: self)
    results = run_ranks(changing_at_once, 2, tmp_path, "ddp", "fp32", 3)
    assert all(good < trials for good, trials in results)


def test_an_error_is_raised_by_the_next_call_and_once(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        model = nn.Linear(30, 30)
        handle = zeroshard.shard(model, "zero1")
        for follow in ("save", "load", "close"):
            zeroshard.save(tmp_path, handle, step=1)
            with faulty("fail" if rank == 1 else "count", 1):
                saving = zeroshard.save(tmp_path, handle, step=2, background=True)
                wait_until(lambda: saving.done)  # noqa: B023
            calls = {
                "save": lambda: zeroshard.save(tmp_path, handle, step=3),
                "load": lambda: zeroshard.load(tmp_path, handle),
                "close": handle.close,
            }
            with pytest.raises(
                zeroshard.CheckpointError, match=r"step 2 was not saved: rank 1: Injected: .*rank-00001\.safetensors"
            ):
                calls[follow]()
            assert list(steps(tmp_path)) == [1]
        handle.close()

    run_ranks(check, 2)


def fail(*arguments: object) -> int:
    raise OSError("the disk is gone")


def test_an_error_that_one_rank_has_caught_is_raised_on_all(tmp_path: Path) -> None:
    """By a `wait` on rank 0 alone, which writes the log: there the next call raised nothing, and waited for the other
    ranks, where it did."""

    def check(rank: int) -> None:
        handle, write = zeroshard.shard(nn.Linear(30, 30), "zero1"), files.write
        calls = [
            lambda: zeroshard.save(tmp_path, handle, step=2),
            lambda: zeroshard.load(tmp_path, handle),
            handle.close,
        ]
        zeroshard.save(tmp_path, handle, step=0)
        for call in calls:
            files.write = fail
            saving = zeroshard.save(tmp_path, handle, step=1, background=True)
            if rank == 0:
                with pytest.raises(zeroshard.CheckpointError, match="step 1 was not saved"):
                    saving.wait()
            wait_until(lambda: saving.done)  # noqa: B023
            files.write = write
            with pytest.raises(zeroshard.CheckpointError, match=r"\(on rank 1\): step 1 was not saved"):
                call()
            handle.full_state_dict()
        handle.close()

    run_ranks(check, 2, collective_timeout=20.0)


def test_a_rank_without_a_further_thread_writes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on threads, or a save while the interpreter ends: `save` raised there, and the other ranks waited for
    this one until the timeout."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def check(rank: int) -> str:
        handle = zeroshard.shard(nn.Linear(30, 30), "zero1")
        for step in (1, 2):
            with monkeypatch.context() as patch:
                if rank == 1:
                    patch.setattr(threading.Thread, "start", start)
                    patch.setattr(files, "write", files.write if step == 1 else fail)
                saving = zeroshard.save(tmp_path, handle, step=step, background=True)
                assert saving.done or rank == 0
            if step == 2:
                with pytest.raises(zeroshard.CheckpointError, match="step 2 was not saved: rank 1: OSError: the disk"):
                    saving.wait()
            else:
                saving.wait()
        assert list(steps(tmp_path)) == [1]
        return caplog.text

    texts = run_ranks(check, 2, collective_timeout=20.0)
    warning = "save returns when step 1 is saved, not before: can't start new thread"
    assert [warning in text for text in texts] == [False, True]


def test_who_keeps_what_save_returns_keeps_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a save that was not in the background, and after one that has failed there, the values stayed: those of
    `extra`, and the copies."""

    def check(rank: int) -> None:
        handle, jobs = zeroshard.shard(nn.Linear(30, 30), "zero1"), list[ref[Job]]()
        prepare = _Save.prepare
        monkeypatch.setattr(_Save, "prepare", lambda *of, **by: (job := prepare(*of, **by), jobs.append(ref(job)))[0])
        kept = [zeroshard.save(tmp_path, handle, step=1)]
        monkeypatch.setattr(files, "write", fail)
        kept.append(zeroshard.save(tmp_path, handle, step=2, background=True))
        with pytest.raises(zeroshard.CheckpointError, match="the disk is gone"):
            kept[1].wait()
        gc.collect()
        assert [job() for job in jobs] == [None, None]

    run_ranks(check, 2)


def test_at_most_one_is_under_way_and_training_does_not_wait(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        run = Run(rank, "zero2", "bf16").train(range(1))
        trained = threading.Event()
        original, files.sync = files.sync, lambda file: (trained.wait(), None)[1]
        first = run.save(tmp_path, 1, background=True)
        run.train(range(1, 4))
        assert not first.done
        trained.set()
        second = run.save(tmp_path, 2, background=True)
        assert first.done
        files.sync = original
        second.wait()
        assert list(steps(tmp_path)) == [1, 2]
        run.load(tmp_path, step=2)

    run_ranks(check, 2)


def test_a_worker_that_is_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    """A DataLoader's worker, which lives longer than the save. The next save of that step said that another process had
    saved it."""

    def check(rank: int) -> None:
        handle, forked, create = zeroshard.shard(nn.Linear(2, 2), "ddp"), threading.Event(), files.create
        files.create = lambda path: (forked.wait(), create(path))[1]
        saving = zeroshard.save(tmp_path, handle, step=1, background=True)
        reader, writer = os.pipe()
        if (worker := os.fork()) == 0:
            os.close(writer)
            os.read(reader, 1)  # until the rank has closed the pipe, or ended
            os._exit(0)
        forked.set()
        saving.wait()
        zeroshard.save(tmp_path, handle, step=1)
        assert sorted(os.listdir(tmp_path)) == ["latest", "step-1"]
        os.close(writer)
        os.waitpid(worker, 0)

    run_ranks(check, 1)


def test_a_save_that_has_begun_is_known_if_the_call_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Control-C: nobody waited for it then, and its error was lost."""

    def check(rank: int) -> None:
        def interrupted(*arguments: object) -> None:
            raise KeyboardInterrupt

        def fails(file: int) -> None:
            raise OSError("the disk is gone")

        handle = zeroshard.shard(nn.Linear(2, 2), "ddp")
        monkeypatch.setattr(files, "sync", fails)
        monkeypatch.setattr(sys.modules[Saving.__module__], "tell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            zeroshard.save(tmp_path, handle, step=1, background=True)
        with pytest.raises(zeroshard.CheckpointError, match="the disk is gone"):
            handle.close()

    run_ranks(check, 1)


SCRIPT = """
import atexit, pathlib, sys, threading, time
log = open(sys.argv[1] + sys.argv[3], "w")
log.write("open until the interpreter ends, ")
atexit.register(print, "a handler", file=log)
import torch, zeroshard
from zeroshard.checkpoint import files
steps, outcome, rank = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
port, over = steps.with_name("port"), threading.Event()
while rank == 1 and not port.exists():
    time.sleep(0.01)
number = 0 if rank == 0 else int(port.read_text())  # 0: any free port
store = torch.distributed.TCPStore("127.0.0.1", number, 2, rank == 0, wait_for_workers=False)
if rank == 0:
    port.with_name("new").write_text(str(store.port))
    port.with_name("new").rename(port)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
zeroshard.init()
model = torch.nn.Linear(100, 100)
handle = zeroshard.shard(model, "zero3")
original = files.sync
def sync(file):
    if threading.current_thread() is not threading.main_thread():
        over.wait()
    if outcome == "fail" and rank == 1:
        raise OSError("the disk is gone")
    original(file)
files.sync = sync
zeroshard.save(steps, handle, step=4, background=True)
torch.distributed.destroy_process_group()
over.set()
"""


@pytest.mark.long
@pytest.mark.parametrize("outcome", ["good", "fail"] if FULL else ["fail"])
def test_it_is_finished_before_the_process_ends(tmp_path: Path, outcome: str) -> None:
    """Two processes that end right after the call of `save`, whose writing waits for their last line. They finish the
    save; a failure sets their exit status. Rank 1, which fails, is an interpreter: what it has yet to do is done behind
    the save. (Its other exit handlers did not run, and files that were still open were not written.)"""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    processes = [
        start(
            [sys.executable, str(script), str(tmp_path / "steps"), outcome, str(rank)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, start in enumerate((Forked, subprocess.Popen))
    ]
    errors = [process.communicate()[1] for process in processes]
    statuses = [process.returncode for process in processes]
    if outcome == "good":
        assert statuses == [0, 0], errors
        assert zeroshard.verify(tmp_path / "steps" / "step-4").step == 4
    else:
        assert statuses[1] == 1, "the forked program leaves by os._exit, with its own status"
        message = "a save in the background failed: step 4 was not saved: rank 1: OSError: the disk is gone"
        ours = [line for line in errors[1].splitlines() if line.startswith("zeroshard")]  # torch may tell of the store
        assert message in errors[0] and ours == [f"zeroshard: {message}"] and "Traceback" not in errors[1], errors
        assert (tmp_path / "steps1").read_text() == "open until the interpreter ends, a handler\n"
        assert os.listdir(tmp_path / "steps") == []


def in_multiprocessing(path: Path, case: str) -> None:
    def work() -> None:
        time.sleep(0.2)  # the function that multiprocessing calls is over
        if case != "good":
            raise OSError("the disk is gone")
        path.write_text("saved")

    saving = Saving(7, work)
    saving.start(background=True)
    if case == "fail, and wait":
        with suppress(OSError):
            saving.wait()
    if case == "fail, and raise":
        raise ValueError("of the program")


@pytest.mark.parametrize(
    ("case", "status", "said"),
    [
        ("good", 0, ""),
        ("fail", 1, "zeroshard: a save in the background failed: the disk is gone"),
        ("fail, and wait", 0, ""),
        ("fail, and raise", 1, "ValueError: of the program"),
    ],
)
def test_what_multiprocessing_has_forked_tells_of_a_save_that_has_failed(
    case: str, status: int, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It calls no function of `atexit`: it ended with status 0, and said nothing."""
    process = multiprocessing.get_context("fork").Process(target=in_multiprocessing, args=(tmp_path / "step", case))
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == status
    told = capfd.readouterr().err
    assert said in told and bool(told) == bool(said)
    assert (tmp_path / "step").exists() == (case == "good")


def works_until_it_is_interrupted() -> None:
    while True:
        time.sleep(0.001)


@pytest.mark.parametrize(("work", "status"), [(threading.Event().wait, 1), (works_until_it_is_interrupted, 5)])
def test_the_exit_status_tells_of_a_save_that_was_interrupted(
    work: Any, status: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C while the interpreter waited for the save: it ended with status 0, without the step. Then it left at
    once, without the other exit handlers, also where the save can be interrupted."""
    module = sys.modules[Saving.__module__]
    monkeypatch.setattr(module, "INTERRUPTED_SECONDS", 60.0 if status == 5 else 0.0)
    monkeypatch.setattr(module, "_end_with", lambda number: os._exit(4 + number))  # behind the other handlers
    if (child := os.fork()) == 0:
        try:
            saving = Saving(7, work)
            saving.start(background=True)
            saving._at_exit()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    assert "a save in the background failed: step 7 was not saved: it was interrupted" in capfd.readouterr().err


def test_a_silent_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank hangs while it writes: the others name it after the group's timeout (one second here, for the save alone),
    and remove the unfinished step."""

    def check(rank: int) -> None:
        model = nn.Linear(30, 30)
        handle = zeroshard.shard(model, "zero1")
        hangs, told, steps = tmp_path / "hangs", tmp_path / "told", tmp_path / "steps"
        write, sync = files.write, files.sync
        if rank == 0:  # the silence of rank 1 is measured after this
            files.write = lambda file, data: (wait_until(hangs.exists), write(file, data))[1]
        else:
            files.sync = lambda file: (hangs.touch(), wait_until(told.exists), sync(file))[2]
        monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.4)
        monkeypatch.setattr(meeting, "timeout_of", lambda group, device: timedelta(seconds=1))
        with pytest.raises(zeroshard.CheckpointError, match="no heartbeat from rank 1 for 1 s"):
            zeroshard.save(steps, handle, step=1)
        assert os.listdir(steps) == []
        told.touch()

    run_ranks(check, 2)


def test_gradients_that_wait_for_a_step_are_refused(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        model = nn.Linear(3, 3)
        handle = zeroshard.shard(model, "zero2")
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        optimizer.backward(model(torch.ones(3)).sum())
        with pytest.raises(RuntimeError, match="gradients are waiting for a step"):
            zeroshard.save(tmp_path, handle, optimizer, step=0)
        optimizer.step()
        zeroshard.save(tmp_path, handle, optimizer, step=0)

    run_ranks(check, 2)
