"""The power fails after any call of the file system in a save or a prune. A file has what was written before its last
fsync, or all; of the names that were changed in a folder since its last fsync, the last ones are lost, from any on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zeroshard
from tests.checkpoint.faults import left_over
from zeroshard.checkpoint import files, pruning
from zeroshard.checkpoint.folders import find, latest, steps
from zeroshard.exchange import export, export_dcp, import_model
from zeroshard.io.whole import write_whole
from zeroshard.testing import run_ranks


@dataclass
class File:
    data: bytes = b""
    synced: int = 0

    def sync(self) -> None:
        self.synced = len(self.data)


@dataclass
class Folder:
    """`synced`: the names that are on the disk; `changes`: of names since, in order, each a dict of them."""

    synced: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def after(self, number: int) -> dict[str, File | Folder]:
        """The names, if the first `number` changes have come to the disk."""
        names: dict[str, File | Folder | None] = dict(self.synced)
        for change in self.changes[:number]:
            names |= change
        return {name: of for name, of in names.items() if of is not None}

    def sync(self) -> None:
        self.synced, self.changes = self.after(len(self.changes)), []


class Disk:
    """What of one folder is on the disk, as far as POSIX promises it.

    Attributes:
        look: called after each call.
        heeds: of which an fsync counts, files and folders.
    """

    def __init__(self, root: Path) -> None:
        self.look: Callable[[], None] = lambda: None
        self.heeds: tuple[type, ...] = (File, Folder)
        self.calls, self.top, self._looks = list[str](), Folder(), False
        self._by_number: dict[int, File | Folder] = {root.stat().st_ino: self.top}

    def _changes(self, path: Path, **change: File | Folder | None) -> None:
        folder = self._by_number[path.parent.stat().st_ino]
        assert isinstance(folder, Folder)
        folder.changes.append(change)

    def _note(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        one = arguments[0]
        if name in ("make_folder", "create"):
            made = Folder() if name == "make_folder" else File()
            self._by_number[one.stat().st_ino] = made
            self._changes(one, **{one.name: made})
        elif name == "write":
            file = self._by_number[os.fstat(one).st_ino]
            assert isinstance(file, File)
            file.data += bytes(arguments[1][:result])
        elif name == "sync":
            of = self._by_number[os.fstat(one).st_ino]
            if isinstance(of, self.heeds):
                of.sync()
        elif name in ("rename", "replace"):
            of = self._by_number[arguments[1].stat().st_ino]
            self._changes(one, **{one.name: None, arguments[1].name: of})
        else:
            self._changes(one, **{one.name: None})

    def __enter__(self) -> Disk:
        names = ("make_folder", "create", "write", "sync", "rename", "replace", "remove_file", "remove_empty_folder")
        self._own = {name: getattr(files, name) for name in names}
        for name in names:
            setattr(files, name, self._wrapped(name))
        return self

    def __exit__(self, *error: object) -> None:
        for name, own in self._own.items():
            setattr(files, name, own)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = self._own[name](*arguments)
            if not self._looks:
                self._note(name, arguments, result)
                self.calls.append(name)
                self._looks = True
                self.look()
                self._looks = False
            return result

        return call

    def states(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """What may be on the disk: names, and whether files have all of their data, or only what is synced."""
        for has_data in (False, True):
            for names in _states_of(self.top):
                yield names, has_data


def _states_of(folder: Folder) -> Iterator[dict[str, Any]]:
    for number in range(len(folder.changes) + 1):
        names = folder.after(number)
        inner = [list(_states_of(of)) if isinstance(of, Folder) else [of] for of in names.values()]
        for chosen in itertools.product(*inner):
            yield dict(zip(names, chosen, strict=True))


def write(names: dict[str, Any], has_data: bool, to: Path) -> None:
    to.mkdir(parents=True)
    for name, of in names.items():
        if isinstance(of, File):
            (to / name).write_bytes(of.data if has_data else of.data[: of.synced])
        else:
            write(of, has_data, to / name)


def lose_power(rank: int, folder: Path, *heeds: type) -> tuple[int, list[str]]:
    """Returns how many states there were, and what is wrong with some."""
    handle = zeroshard.shard(nn.Linear(2, 2), "ddp")
    root, tried, wrong, needed = folder / "steps", 0, list[str](), {1, 2}

    def look() -> None:
        nonlocal tried
        for names, has_data in disk.states():
            tried += 1
            after = folder / f"{tried}"
            write(names, has_data, after)
            try:
                assert latest(after) is not None and find(after, None)
                for swept in (False, True):
                    assert needed <= set(steps(after)), f"there are {set(steps(after))}, after a sweep: {swept}"
                    for path in steps(after).values():
                        zeroshard.verify(path)
                    pruning.sweep(after)
                assert left_over(after) == []
            except (AssertionError, zeroshard.CheckpointError) as error:
                wrong.append(f"after call {len(disk.calls)}, {disk.calls[-1]}: {error}")

    root.mkdir(parents=True)
    with Disk(root) as disk:
        for step in (1, 2):
            zeroshard.save(root, handle, step=step)
        disk.look, disk.heeds = look, heeds
        zeroshard.save(root, handle, step=3)
        if len(heeds) == 2:
            needed = {1, 2, 3}
            zeroshard.save(root, handle, step=2)
            needed = {2, 3}
            assert zeroshard.prune(root, keep_last=1) == [1]
    return tried, wrong


def test_a_power_failure_leaves_whole_steps(tmp_path: Path) -> None:
    """A new step, one that is replaced, and a prune. The controls: without the fsyncs of files, or those of folders,
    steps are lost."""
    tried, wrong = run_ranks(lose_power, 1, tmp_path / "all", File, Folder)[0]
    print(f"{tried} states of the disk: {len(wrong)} not recovered")
    assert tried > 100 and wrong == []
    for heeds in (File, Folder):
        assert run_ranks(lose_power, 1, tmp_path / heeds.__name__, heeds)[0][1]


def test_files_for_others_get_their_names_when_they_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"weight": torch.arange(1000.0)}, tmp_path / "model.safetensors")
    step = import_model(tmp_path / "model.safetensors", tmp_path / "run", step=0).path
    synced, named, originals = dict[int, int](), list[str](), (os.fsync, os.replace)
    behind: list[int] = []  # what has been synced since the last name was given

    def fsync(file: int) -> None:
        found = os.fstat(file)
        synced[found.st_ino] = found.st_size
        behind.append(found.st_ino)
        originals[0](file)

    def replace(source: Path, target: Path) -> None:
        found = os.stat(source)
        assert synced.get(found.st_ino) == found.st_size, target
        named.append(Path(target).name)
        behind.clear()
        originals[1](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    for work in (export, export_dcp):
        for out in (tmp_path / work.__name__, tmp_path / work.__name__):
            work(step, out, force=True)
            assert behind == [out.stat().st_ino]
    write_whole(tmp_path / "text", "text")
    assert named == ["model.safetensors"] * 2 + ["__0_0.distcp", ".metadata"] * 2 + ["text"]
