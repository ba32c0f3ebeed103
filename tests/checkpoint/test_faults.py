"""Whatever happens during a save, afterwards either the old state of the folder or the complete new step is there."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import shutil
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zeroshard
from tests.checkpoint.common import FULL, Run, read_all, same_bits, seed_all
from tests.checkpoint.faults import Ranks, disk_with, faulty, left_over
from tests.patience import AT_ONCE
from zeroshard.checkpoint import files, folders, publishing
from zeroshard.checkpoint.folders import find, steps
from zeroshard.testing import run_ranks

SEED = int(os.environ.get("ZEROSHARD_SEED", "20261121"))
STEP_OF = {"new folder": 2, "overwrite": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder to copy, whose `step-1` has the old values (`new/step-1` beside it has the new ones); the old values;
    the new values."""
    directory = tmp_path_factory.mktemp("saved") / "old"

    def calm(rank: int) -> None:
        seed_all(rank)
        run = Run(rank, "zero3", "bf16-remainder")
        run.save(directory, 1)
        run.train(range(1))
        run.save(directory.with_name("new"), 1)

    run_ranks(calm, 2)
    return directory, read_all(directory / "step-1"), read_all(directory.with_name("new") / "step-1")


def save_new(rank: int, ready: Any, directory: Path, step: int, background: bool = False) -> None:
    seed_all(rank)
    run = Run(rank, "zero3", "bf16-remainder").train(range(1))
    ready()
    run.save(directory, step, background=background).wait()


def problems_after(directory: Path, old: Any, new: Any, mode: str) -> list[str]:
    """Errors found in a directory in which a save of step 1 or 2 was interrupted."""
    found = steps(directory)
    problems = [] if 1 in found else ["step 1 is gone"]
    try:
        values = {step: read_all(path) for step, path in found.items()}
        for path in found.values():
            zeroshard.verify(path)
        find(directory, None)
    except zeroshard.CheckpointError as error:
        return [*problems, str(error)]
    for step, is_now in values.items():
        is_old, is_new = same_bits(is_now, old), same_bits(is_now, new)
        if not (is_old or is_new) or (mode == "new folder" and is_old != (step == 1)):
            problems.append(f"step {step} is mixed, or another one")
    return problems


def recovers(directory: Path, old: Any, new: Any) -> list[str]:
    """Errors of the next save and load, which must work and remove temporary files."""

    def save_and_load(rank: int) -> int:
        save_new(rank, lambda: None, directory, 3)
        return int(Run(rank, "zero1", "fp32", seed=4).load(directory).step)

    found = run_ranks(save_and_load, 2)
    problems = [] if found == [3, 3] else [f"loaded {found}"]
    problems += [f"left over: {left_over(directory)}"] if left_over(directory) else []
    return problems if same_bits(read_all(directory / "step-3"), new) else [*problems, "the next save is wrong"]


@pytest.mark.by_cpu
@pytest.mark.parametrize("mode", list(STEP_OF))
def test_ranks_killed_at_random_moments(saved: tuple[Path, Any, Any], tmp_path: Path, mode: str) -> None:
    source, old, new = saved
    rng = random.Random(SEED)
    ranks = Ranks(save_new, 2, shutil.copytree(source, tmp_path / "calm"), STEP_OF[mode])
    ranks.wait_ready()
    start = time.perf_counter()
    assert ranks.finish() == [0, 0]
    duration = time.perf_counter() - start
    trials, committed, bad = 1000 if FULL else 2, 0, []
    for trial in range(trials):
        directory = Path(shutil.copytree(source, tmp_path / "trial"))
        ranks = Ranks(save_new, 2, directory, STEP_OF[mode], rng.random() < 0.3)
        ranks.wait_ready()
        time.sleep(rng.uniform(0, duration))
        ranks.kill(rng.choice([[0], [1], [0, 1]]))
        ranks.finish()
        problems = problems_after(directory, old, new, mode)
        committed += same_bits(read_all(find(directory, None)), new) if not problems else 0
        if trial % 25 == 0:
            problems += recovers(directory, old, new)
        bad += [f"trial {trial}: {problem}" for problem in problems]
        shutil.rmtree(directory)
    print(f"{mode}: {trials} kills, {committed} after the commit, {len(bad)} bad")
    assert bad == []


@pytest.mark.by_cpu
@pytest.mark.parametrize("mode", list(STEP_OF))
def test_killed_at_every_call_of_a_save(saved: tuple[Path, Any, Any], tmp_path: Path, mode: str) -> None:
    source, old, new = saved
    bad, trials = [], 0

    def doomed(rank: int, ready: Any, directory: Path, victim: int, at: int, action: Any) -> None:
        if rank != victim:
            return save_new(rank, ready, directory, STEP_OF[mode])
        with faulty(action, at):
            save_new(rank, ready, directory, STEP_OF[mode])

    def count(rank: int) -> int:
        with faulty() as seen:
            save_new(rank, lambda: None, shared, STEP_OF[mode])
        return len(seen)

    shared = Path(shutil.copytree(source, tmp_path / "count"))
    calls = run_ranks(count, 2)
    first = 24 * list(STEP_OF).index(mode)  # by default the two modes take turns
    for victim, num_calls in enumerate(calls):
        last = range(num_calls - (4 if victim else 7), num_calls, 3)  # around the commit, which is rank 0's
        interesting = range(num_calls) if FULL else sorted({*range(first, num_calls, 48), *last})
        for at in interesting:
            for action in ("kill before", "kill half way", "kill after") if FULL else ("kill half way",):
                directory = Path(shutil.copytree(source, tmp_path / "trial"))
                statuses = Ranks(doomed, 2, directory, victim, at, action).finish()
                trials += 1
                problems = problems_after(directory, old, new, mode)
                if at == interesting[0] or (FULL and action == "kill half way"):
                    problems += recovers(directory, old, new)
                if statuses[victim] != 9:
                    problems.append("nobody was killed")
                bad += [f"rank {victim}, call {at}, {action}: {problem}" for problem in problems]
                shutil.rmtree(directory)
    print(f"{mode}: {calls} calls on the ranks, {trials} kills, {len(bad)} bad")
    assert bad == []


@pytest.mark.parametrize("mode", list(STEP_OF))
def test_an_error_at_every_call_on_each_rank(saved: tuple[Path, Any, Any], tmp_path: Path, mode: str) -> None:
    """All ranks raise the same error at once; no temporary files remain; the old step or all of the new one is
    there."""
    source, old, new = saved

    def check(rank: int) -> list[str]:
        seed_all(rank)
        run = Run(rank, "zero3", "bf16-remainder").train(range(1))
        exchange = run.handle.engine.collectives.exchange_objects
        bad: list[str] = []
        trials = 0
        with faulty() as seen:
            run.save(tmp_path / "count", 1)
            run.save(tmp_path / "count", STEP_OF[mode])
        per_save = exchange(len(seen))
        for victim, num_calls in enumerate(per_save):
            for at in range(num_calls) if FULL else range(victim, num_calls, 9):
                # By default in turn, and with the other mode the other way round.
                turn = (at // 9 + list(STEP_OF).index(mode)) % 2 == 1
                for background in (False, True) if FULL else (turn,):
                    if rank == 0:
                        shutil.rmtree(tmp_path / "trial", ignore_errors=True)
                        shutil.copytree(source, tmp_path / "trial")
                    exchange(None)
                    start, message = time.perf_counter(), ""
                    with faulty("fail" if rank == victim else "count", at) as called:
                        try:
                            run.save(tmp_path / "trial", STEP_OF[mode], background=background)
                            run.handle.finish_background()
                        except zeroshard.CheckpointError as error:
                            message = str(error)
                    seconds = time.perf_counter() - start
                    messages, hit = exchange(message), exchange(len(called) > at)[victim]
                    if not hit:
                        continue  # this save has fewer calls than the counted ones
                    trials += 1
                    if rank == 0:
                        problems = problems_after(tmp_path / "trial", old, new, mode)
                        problems += [f"left over {name}" for name in left_over(tmp_path / "trial")]
                        if "is in place" in message:  # the removal of temporary files failed: the step is saved
                            problems = [problem for problem in problems if "left over" not in problem]
                    else:
                        problems = []
                    if len(set(messages)) != 1 or "injected" not in message or seconds > AT_ONCE:
                        problems.append(f"{messages} after {seconds:.1f} s")
                    bad += [f"{mode}, rank {victim}, call {at}, {background=}: {problem}" for problem in problems]
        return [f"{trials} errors", *bad]

    results = run_ranks(check, 2, timeout=1200)
    print(mode, [result[0] for result in results])
    assert [problem for result in results for problem in result[1:]] == []


def test_a_full_disk(saved: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """The disk is full at twenty fill levels (ten by default), on each rank, in foreground and background saves."""
    source, old, new = saved
    shutil.copytree(source, tmp_path / "old")
    size = [os.path.getsize(source.with_name("new") / "step-1" / f"rank-0000{rank}.safetensors") for rank in range(2)]

    def check(rank: int) -> list[str]:
        seed_all(rank)
        run = Run(rank, "zero3", "bf16-remainder").train(range(1))
        bad = []
        for number, level in enumerate(range(0, 20, 1 if FULL else 2)):
            for victim in range(2):
                background = bool((number + victim) % 2)
                start, message = time.perf_counter(), ""
                with disk_with(size[victim] * level // 20 if rank == victim else 1 << 40):
                    try:
                        run.save(tmp_path / "old", 2, background=background).wait()
                    except zeroshard.CheckpointError as error:
                        message = str(error)
                seconds = time.perf_counter() - start
                if "No space left" not in message or f"rank {victim}" not in message or seconds > AT_ONCE:
                    bad.append(f"level {level}: {message!r} after {seconds:.1f} s")
                run.handle.engine.collectives.exchange_objects(None)
                if rank == 0 and (left_over(tmp_path / "old") or list(steps(tmp_path / "old")) != [1]):
                    bad.append(f"level {level}: {os.listdir(tmp_path / 'old')}")
                run.handle.engine.collectives.exchange_objects(None)
        return bad

    assert run_ranks(check, 2) == [[], []]
    assert problems_after(tmp_path / "old", old, new, "new folder") == []


def test_an_interrupt_stays_one_and_the_other_ranks_are_told(tmp_path: Path) -> None:
    """Control-C on one rank, in each part of a save."""

    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    def check(rank: int) -> None:
        handle = zeroshard.shard(nn.Linear(2, 2), "zero1")
        publish = publishing.publish

        def behind_the_rename(*arguments: Any) -> None:
            publish(*arguments)
            raise KeyboardInterrupt

        in_place = "step . is in place, but rank 0 failed .*: KeyboardInterrupt"
        for step, (victim, module, name, told, *other) in enumerate(
            [
                (1, files, "write", "step 0 was not saved: rank 1: KeyboardInterrupt"),
                (0, files, "write", "step 1 was not saved: rank 0: KeyboardInterrupt"),
                (0, publishing, "publish", "step 2 was not saved: KeyboardInterrupt"),
                (0, publishing, "set_latest", in_place),
                (0, publishing, "publish", in_place, behind_the_rename),
            ]
        ):
            with pytest.MonkeyPatch.context() as patch:
                if rank == victim:
                    patch.setattr(module, name, *other or [interrupted])
                with pytest.raises(KeyboardInterrupt if rank == victim else zeroshard.CheckpointError) as caught:
                    zeroshard.save(tmp_path, handle, step=step)
            assert rank == victim or re.search(told, str(caught.value))
        handle.engine.collectives.exchange_objects(None)
        assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]
        zeroshard.save(tmp_path, handle, step=3)

    run_ranks(check, 2)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The operating system refuses a write (RLIMIT_FSIZE)."""

    def check(rank: int) -> None:
        model = nn.Linear(700, 700)
        handle = zeroshard.shard(model, "zero3")
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
        with pytest.raises(zeroshard.CheckpointError, match=r"rank 1: OSError: .*File too large"):
            zeroshard.save(tmp_path, handle, step=1)
        assert os.listdir(tmp_path) == []

    run_ranks(check, 2)


def test_a_file_system_without_fsync_of_folders(tmp_path: Path) -> None:
    """Some have none (folders of a host in its virtual machine), and no step was saved there."""

    def check(rank: int) -> None:
        sync = files.sync

        def of_files(file: int) -> None:
            if stat.S_ISDIR(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            sync(file)

        files.sync = of_files
        handle = zeroshard.shard(nn.Linear(2, 2), "zero1")
        for step in (1, 2, 2):
            zeroshard.save(tmp_path / "new" / "steps", handle, step=step)
        if rank == 0:
            assert zeroshard.prune(tmp_path / "new" / "steps") == [1]

    run_ranks(check, 2)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre, say, mounted without the option: `prune`, and any other save, removed the folder of a save in progress,
    which failed. What an interrupted save has left is removed later."""

    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refuse)

    def check(rank: int) -> None:
        handle, others, pruned, create = zeroshard.shard(nn.Linear(2, 2), "ddp"), [], threading.Event(), files.create
        for name in ("step-1.tmp-ab", "step-2.old-ab", ".trash-step-3-ab"):
            others.append(tmp_path / name)
            others[-1].mkdir()
            (others[-1] / "manifest.json").touch(), (others[-1] / "rank-00000.safetensors").touch()
        files.create = lambda path: (pruned.wait(), create(path))[1]
        saving = zeroshard.save(tmp_path, handle, step=4, background=True)
        zeroshard.prune(tmp_path)
        assert [one.exists() for one in others] == [True, True, False]
        pruned.set()
        saving.wait()
        an_hour = time.time() - 3700
        for one in others[:2]:
            for path in (*one.iterdir(), one):
                os.utime(path, (an_hour, an_hour))
        monkeypatch.setattr(time, "time", lambda: an_hour + 7400)  # the clock of this host is wrong
        zeroshard.prune(tmp_path)
        assert others[0].exists()
        monkeypatch.setattr(files, "now", lambda folder: an_hour + 7400)  # nobody can set the time of the rename
        zeroshard.prune(tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["latest", "step-4"]

    run_ranks(check, 1)


def test_a_file_system_that_does_not_tell_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in user space (FUSE) without a call for it: all is zero, and no step was saved for want of space."""
    zeros = os.statvfs_result((512, 0, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: zeros)

    def check(rank: int) -> None:
        zeroshard.save(tmp_path, zeroshard.shard(nn.Linear(2, 2), "ddp"), step=1)

    run_ranks(check, 1)


def test_space_is_checked_to_the_byte(tmp_path: Path) -> None:
    def check(rank: int) -> int:
        model = nn.Linear(70, 70)
        handle = zeroshard.shard(model, "zero2")
        free: list[int] = [0]
        original, files.free_bytes = files.free_bytes, lambda path: free[0]
        with pytest.raises(zeroshard.CheckpointError, match=r"has 0 bytes free, step 1 needs \d+") as caught:
            zeroshard.save(tmp_path, handle, step=1)
        needed = int(str(caught.value).split()[-1])
        free[0] = needed - 1
        with pytest.raises(zeroshard.CheckpointError, match="bytes free"):
            zeroshard.save(tmp_path, handle, step=1)
        assert left_over(tmp_path) == []
        free[0] = needed
        zeroshard.save(tmp_path, handle, step=1)
        files.free_bytes = original
        return needed

    needed = run_ranks(check, 2)[0]
    sizes = [path.stat().st_size for path in (tmp_path / "step-1").iterdir()]
    on_disk = [files.bytes_on_disk(tmp_path, size) for size in sizes]
    assert 0 <= needed - sum(on_disk) <= 4096, "what the manifest is reckoned with may exceed it by a few commas"


@pytest.mark.by_cpu
def test_negative_control_writing_in_place_loses_both(saved: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """Without the rename (files are written directly under the final name) the same kills leave unreadable steps."""
    source, old, new = saved
    bad = []

    def in_place(rank: int, ready: Any, directory: Path, at: int) -> None:
        original = files.make_folder

        def make_folder(path: Path) -> None:
            shutil.rmtree(directory / "step-1")
            original(path)
            os.symlink(path.name, directory / "step-1")

        files.make_folder = make_folder
        with faulty("kill half way" if rank == 0 else "count", at):
            save_new(rank, ready, directory, 1)

    for at in (5, 20):
        directory = Path(shutil.copytree(source, tmp_path / "trial"))
        Ranks(in_place, 2, directory, at).finish()
        bad.append(problems_after(directory, old, new, "overwrite"))
        shutil.rmtree(directory)
    assert all(bad), bad


def test_killed_at_every_call_of_a_prune(tmp_path: Path) -> None:
    def make(rank: int) -> None:
        model = nn.Linear(5, 5)
        handle = zeroshard.shard(model, "ddp")
        for step in range(5):
            zeroshard.save(tmp_path / "old", handle, step=step)

    run_ranks(make, 1)
    with faulty() as seen:
        assert zeroshard.prune(shutil.copytree(tmp_path / "old", tmp_path / "calm"), keep_last=2) == [0, 1, 2]
    # Before each call (which is also after the previous call), and after the last one.
    moments = [*((at, "kill before") for at in range(len(seen))), (len(seen) - 1, "kill after")]
    for at, action in moments:
        directory = Path(shutil.copytree(tmp_path / "old", tmp_path / f"{at} {action}"))
        pid = os.fork()
        if pid == 0:
            with faulty(action, at):  # type: ignore[arg-type]
                zeroshard.prune(directory, keep_last=2)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 9
        found = steps(directory)
        assert {3, 4} <= set(found)
        for path in found.values():
            zeroshard.verify(path)
        zeroshard.prune(directory, keep_last=2)
        assert sorted(os.listdir(directory)) == ["latest", "step-3", "step-4"]
    print(f"prune: {len(moments)} kills")
    assert folders.latest(directory) == 4
