"""Two processes use one directory of steps: another one makes folders, sweeps and prunes there at any moment of a
save or a prune."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.checkpoint import files, folders, pruning, publishing
from zeroshard.testing import run_ranks

CALLS = ("make_folder", "create", "sync", "rename", "replace", "remove_file", "remove_empty_folder", "lock_folder")


class AnotherProcess:
    """Acts once, before the `at`-th call of the file system. `calls`: how many there were."""

    def __init__(self, act: Callable[[], Any], at: int) -> None:
        self._act, self._at, self._acts, self.calls = act, at, False, 0
        self._own = {name: getattr(files, name) for name in CALLS}

    def __enter__(self) -> AnotherProcess:
        for name in CALLS:
            setattr(files, name, self._wrapped(self._own[name]))
        return self

    def __exit__(self, *error: object) -> None:
        for name, own in self._own.items():
            setattr(files, name, own)

    def _wrapped(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if not self._acts:
                self.calls += 1
                if self.calls == self._at:
                    self._acts = True
                    self._act()
                    self._acts = False
            return own(*arguments)

        return call


def prepare(directory: Path, handle: zeroshard.Handle) -> None:
    """Steps 1 to 3, a folder that an interrupted save has left, and one of an interrupted removal."""
    for step in (1, 2, 3):
        zeroshard.save(directory, handle, step=step)
    for name in ("step-4.tmp-0", ".trash-step-0-0"):
        (directory / name).mkdir()
        (directory / name / "rank-00000.safetensors").touch()


def check(rank: int, folder: Path) -> tuple[int, int, int]:
    """Returns how many calls the three things have made."""
    handle = zeroshard.shard(nn.Linear(2, 2), "ddp")
    count = [0, 0, 0]
    for at in itertools.count(1):
        new, again, pruned = (folder / f"{at}-{name}" / "steps" for name in ("new", "again", "pruned"))
        with AnotherProcess(lambda to=new: files.make_folders(to), at) as another:  # type: ignore[misc]
            zeroshard.save(new, handle, step=1)
        count[0] = another.calls
        prepare(again, handle)
        with AnotherProcess(lambda to=again: pruning.sweep(to), at) as another:  # type: ignore[misc]
            zeroshard.save(again, handle, step=3)
        count[1] = another.calls
        prepare(pruned, handle)
        with AnotherProcess(lambda to=pruned: zeroshard.prune(to, keep_last=1), at) as another:  # type: ignore[misc]
            zeroshard.prune(pruned, keep_last=1)
        count[2] = another.calls
        for directory, steps in ((new, [1]), (again, [1, 2, 3]), (pruned, [3])):
            assert sorted(os.listdir(directory)) == ["latest", *(f"step-{step}" for step in steps)], (at, directory)
            zeroshard.verify(directory / f"step-{steps[-1]}")
        if at > max(count):
            return count[0], count[1], count[2]
    raise AssertionError


def test_another_process_acts_at_every_call(tmp_path: Path) -> None:
    """A save said that what follows had failed, and a prune raised, as the other process had removed a left-over
    first. A save that made a folder at the same moment as another one raised that it exists."""
    torch.manual_seed(0)
    of_new, of_again, of_prune = run_ranks(check, 1, tmp_path)[0]
    assert of_new > 15 and of_again > 25 and of_prune > 15, (of_new, of_again, of_prune)


def tell_apart(rank: int, folder: Path) -> list[int]:
    """Two runs save the same step: the other one does so before each call of the first one's save. Returns how often
    the first, the second and both were refused."""
    handles = [zeroshard.shard(nn.Linear(2, 2), "ddp") for _ in range(2)]
    values = [handle.full_state_dict()["weight"].clone() for handle in handles]
    assert not torch.equal(*values)
    refused, said = [0, 0, 0], list[str]()

    def is_saved(directory: Path, number: int) -> bool:
        try:
            zeroshard.save(directory, handles[number], step=3)
        except zeroshard.CheckpointError as error:
            said.append(str(error))
            return False
        return True

    for existing in (False, True):
        for at in itertools.count(1):
            directory = folder / f"{existing}-{at}"
            if existing:
                zeroshard.save(directory, handles[0], step=3)
            saved: list[tuple[bool, bool]] = []

            def act(to: Path = directory, saved: list[tuple[bool, bool]] = saved) -> None:
                has_begun = any(to.glob("step-3.tmp-*"))
                saved.append((has_begun, is_saved(to, 1)))

            with AnotherProcess(act, at) as another:
                first = is_saved(directory, 0)
            if another.calls < at:
                break
            ((has_begun, second),) = saved
            assert first or second
            assert not (first and second and has_begun), at
            of_step = zeroshard.checkpoint.Reader(directory / "step-3").tensor("model/weight")
            assert torch.equal(of_step.cpu(), values[0 if first else 1].cpu()), at
            zeroshard.verify(directory / "step-3")
            pruning.sweep(directory)
            assert sorted(os.listdir(directory)) == ["latest", "step-3"], at
            refused = [refused[0] + (not first), refused[1] + (not second), refused[2] + 1]
    assert all("another process has saved" in text for text in said)
    return refused


def test_two_runs_save_the_same_step_at_the_same_moment(tmp_path: Path) -> None:
    """The one that was published later replaced the other, in silence."""
    first, second, tried = run_ranks(tell_apart, 1, tmp_path)[0]
    assert first > 10 and second > 2 and tried > 40, (first, second, tried)


def replace_while_read(rank: int, directory: Path) -> None:
    handle = zeroshard.shard(nn.Linear(2, 2), "ddp")
    for step in (1, 2):
        zeroshard.save(directory, handle, step=step)
    replaced, removed = (zeroshard.checkpoint.Reader(directory / f"step-{step}") for step in (2, 1))
    zeroshard.save(directory, handle, step=2)
    zeroshard.prune(directory, keep_last=1)
    for reader in (replaced, removed):
        with reader, pytest.raises(zeroshard.CheckpointError) as raised:
            reader.check_everything()
        assert str(raised.value) == f"{reader.folder} has been replaced or removed by another process while it was read"


def test_a_step_that_is_replaced_while_it_is_read_is_not_called_damaged(tmp_path: Path) -> None:
    run_ranks(replace_while_read, 1, tmp_path / "steps")


def replace_while_swept(rank: int, directory: Path) -> None:
    handle, names_in = zeroshard.shard(nn.Linear(2, 2), "ddp"), pruning.names_in
    final, aside, new = (directory / name for name in ("step-1", "step-1.old-ab", "step-1.tmp-ab"))

    def goes_on(directory: Path) -> list[str]:
        """Another process is between its two renames when a sweep looks, and then goes on."""
        shutil.copytree(final, new)
        os.rename(final, aside)
        found = names_in(directory)
        os.rename(new, final)
        return found

    def is_killed(directory: Path) -> list[str]:
        """It is killed between them, right after a sweep has begun."""
        os.rename(final, aside)
        return names_in(directory)

    for names in (goes_on, is_killed):
        zeroshard.save(directory, handle, step=1)
        pruning.names_in = names
        pruning.sweep(directory)
        pruning.names_in = names_in
        assert sorted(os.listdir(directory)) == ["latest", "step-1"], names
        zeroshard.verify(final)


def removed_before_it_is_opened(rank: int, directory: Path) -> None:
    """`removes`: the rank that finds the step and removes it; the manifest alone, or the whole step."""
    handle = zeroshard.shard(nn.Linear(2, 2), "zero1")
    expect_shared = folders.expect_shared
    for removes, remove in itertools.product((0, 1), (os.unlink, shutil.rmtree)):
        zeroshard.save(directory, handle, step=1)

        def behind_find(path: Path, *told: Any, removes: int = removes, remove: Callable[..., Any] = remove) -> None:
            if rank == removes:
                remove(path / "manifest.json" if remove is os.unlink else path)
            handle.engine.collectives.exchange_objects(None)
            expect_shared(path, *told)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folders, "expect_shared", behind_find)
            with pytest.raises(zeroshard.CheckpointError, match="step-1 has been replaced or removed by another proc"):
                zeroshard.load(directory, handle)
        handle.engine.collectives.exchange_objects(None)
        if rank == 0:
            shutil.rmtree(directory)
        handle.engine.collectives.exchange_objects(None)


def test_a_step_that_is_removed_before_all_ranks_have_opened_it(tmp_path: Path) -> None:
    """The message was that the machines share no file system, or that the manifest does not exist."""
    run_ranks(removed_before_it_is_opened, 2, tmp_path / "steps")


def test_a_step_that_is_replaced_while_another_process_sweeps_stays(tmp_path: Path) -> None:
    """The sweep, and the save or prune that it was part of, raised that the directory is not empty. If the process that
    replaced the step was killed, the sweep removed the step."""
    run_ranks(replace_while_swept, 1, tmp_path / "steps")


def keep_busy(rank: int, directory: Path) -> None:
    handle, remove_empty_folder = zeroshard.shard(nn.Linear(2, 2), "ddp"), files.remove_empty_folder

    def in_use(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    for step in (1, 2, 3):
        zeroshard.save(directory, handle, step=step)
    files.remove_empty_folder = in_use
    zeroshard.save(directory, handle, step=3)
    assert zeroshard.prune(directory, keep_last=2) == [1]
    assert len([name for name in os.listdir(directory) if name.startswith(".trash-")]) == 2
    files.remove_empty_folder = remove_empty_folder
    # What has the name of a step, and no manifest, does not let the one that was moved aside have its name.
    os.rename(directory / "step-2", directory / "step-2.old-ab")
    (directory / "step-2").mkdir()
    (directory / "step-2" / "notes").touch()
    zeroshard.save(directory, handle, step=4)
    assert sorted(os.listdir(directory)) == ["latest", "step-2", "step-2.old-ab", "step-3", "step-4"]


def test_what_cannot_be_removed_yet_is_left_to_the_next_sweep(tmp_path: Path) -> None:
    """As over NFS, where a reader has files of an old step open. A save that was in place said that it had failed, and
    every later one was refused."""
    run_ranks(keep_busy, 1, tmp_path / "steps")


def interrupt(rank: int, directory: Path) -> None:
    handle, rename = zeroshard.shard(nn.Linear(2, 2), "ddp"), files.rename

    def interrupted(source: Path, target: Path) -> None:
        rename(source, target)
        if target.name == "step-1":
            raise KeyboardInterrupt

    files.rename = interrupted
    with pytest.raises(KeyboardInterrupt):
        zeroshard.save(directory, handle, step=1)
    files.rename = rename
    zeroshard.verify(directory / "step-1")


def test_an_interrupt_in_the_last_rename_is_no_other_process(tmp_path: Path) -> None:
    """It became a CheckpointError, which said that another process had saved the step."""
    run_ranks(interrupt, 1, tmp_path / "steps")


class Interrupter:
    """A profile function that raises a KeyboardInterrupt at the n-th moment at which one can come: where a function of
    the files that give names and locks begins, and behind each call of the system there."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        of_locks = frame.f_code.co_name in ("lock_folder", "unlock", "release", "_made_and_locked")
        if (of_locks or frame.f_code.co_filename == publishing.__file__) and event in ("call", "c_return"):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def interrupt_everywhere(rank: int, base: Path) -> int:
    handle = zeroshard.shard(nn.Linear(2, 2), "zero1")
    for moment in itertools.count(1):
        directory, interrupter = base / str(moment), Interrupter(moment)
        zeroshard.save(directory, handle, step=1)
        with suppress(KeyboardInterrupt):
            sys.setprofile(interrupter)
            zeroshard.save(directory, handle, step=1)
        sys.setprofile(None)
        zeroshard.save(directory, handle, step=1)
        assert sorted(os.listdir(directory)) == ["latest", "step-1"], moment
        if interrupter.left > 0:
            return moment
    raise AssertionError


def test_an_interrupt_leaves_no_step_locked(tmp_path: Path) -> None:
    """From then on each save of that step said that another process had saved it."""
    assert run_ranks(interrupt_everywhere, 1, tmp_path)[0] > 30


def rename_again(rank: int, directory: Path) -> None:
    handle = zeroshard.shard(nn.Linear(2, 2), "ddp")
    rename = files.rename

    def twice(source: Path, target: Path) -> None:
        rename(source, target)
        rename(source, target)

    files.rename = twice
    for _ in range(2):  # the second one replaces the first
        zeroshard.save(directory, handle, step=1)
        zeroshard.verify(directory / "step-1")
    files.rename = rename
    with pytest.raises(FileNotFoundError):
        publishing.publish(directory / "step-2.tmp-ab", 2, "ab", None)
    (directory / "step-2.tmp-ab").mkdir()
    files.rename = lambda source, target: os.rmdir(source) or rename(source, target)
    with pytest.raises(FileNotFoundError):
        publishing.publish(directory / "step-2.tmp-ab", 2, "ab", None)
    files.rename = rename
    pruning.sweep(directory)
    assert sorted(os.listdir(directory)) == ["latest", "step-1"]


def test_a_rename_that_is_tried_again_after_it_was_done(tmp_path: Path) -> None:
    """As over NFS, when the first answer is lost: a step that was in place was said not to be saved."""
    run_ranks(rename_again, 1, tmp_path / "steps")
