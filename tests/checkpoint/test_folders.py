"""The folders of a run: list of steps, `latest`, `prune`, `sweep`; and values that are no tensors."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zeroshard
from tests.checkpoint.common import same_bits
from tests.kit import State
from zeroshard.checkpoint import files, folders, newest_good, pruning
from zeroshard.checkpoint.folders import LATEST, find, latest, steps
from zeroshard.checkpoint.pruning import sweep
from zeroshard.io.values import decode, encode
from zeroshard.testing import run_ranks


def save_steps(directory: Path, numbers: list[int]) -> None:
    def check(rank: int) -> None:
        model = nn.Linear(3, 3)
        handle = zeroshard.shard(model, "ddp")
        for step in numbers:
            zeroshard.save(directory, handle, step=step)

    run_ranks(check, 1)


@pytest.mark.parametrize("names", [("notes.txt",), ("notes.txt", "manifest.json"), ("manifest.json",), ()])
def test_what_has_the_name_of_a_step_and_is_none_is_not_replaced_nor_pruned(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """A save removed a folder of the user's of that name, and `prune` one with a file manifest.json. `()`: a file."""
    paths = [tmp_path / "step-1" / name for name in names] or [tmp_path / "step-1"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")

    def check(rank: int) -> None:
        handle = zeroshard.shard(nn.Linear(3, 3), "ddp")
        with pytest.raises(zeroshard.CheckpointError, match=r"step-1 is no step of a checkpoint.* rename it"):
            zeroshard.save(tmp_path, handle, step=1)
        assert os.listdir(tmp_path) == ["step-1"]

    run_ranks(check, 2)
    save_steps(tmp_path, [2, 3])
    assert zeroshard.prune(tmp_path) == [2]
    assert [path.read_text() for path in paths] == ["{}"] * len(paths)


def test_a_step_without_manifest_and_an_empty_folder_are_replaced(tmp_path: Path) -> None:
    save_steps(tmp_path, [1])
    (tmp_path / "step-1" / "manifest.json").unlink()
    (tmp_path / "step-2").mkdir()
    save_steps(tmp_path, [1, 2])
    assert list(steps(tmp_path)) == [1, 2]


def test_prune_keeps_the_last_and_every_nth(tmp_path: Path) -> None:
    save_steps(tmp_path, list(range(10)))
    assert zeroshard.prune(tmp_path, keep_last=2, keep_every=4) == [1, 2, 3, 5, 6, 7]
    assert list(steps(tmp_path)) == [0, 4, 8, 9]
    assert zeroshard.prune(tmp_path) == [0, 4, 8]
    assert sorted(os.listdir(tmp_path)) == [LATEST, "step-9"]
    with pytest.raises(ValueError, match="at least 1"):
        zeroshard.prune(tmp_path, keep_last=0)


def test_the_latest_is_the_one_saved_last(tmp_path: Path) -> None:
    """The latest step need not be the highest: a run may go back to an earlier step and continue from there."""
    save_steps(tmp_path, [4, 10, 5])
    assert latest(tmp_path) == 5 and find(tmp_path, None).name == "step-5"
    assert zeroshard.prune(tmp_path, keep_last=1) == [4], "what `latest` names stays"
    files.remove_folder(tmp_path / "step-5")
    assert find(tmp_path, None).name == "step-10"
    (tmp_path / LATEST).write_text("step-1\n")
    with pytest.raises(zeroshard.CheckpointError, match="latest is damaged"):
        find(tmp_path, None)
    assert find(tmp_path, 10).name == "step-10"
    (tmp_path / LATEST).unlink()
    assert find(tmp_path, None).name == "step-10"
    with pytest.raises(zeroshard.CheckpointError, match="holds no checkpoint"):
        find(tmp_path / "nowhere", None)


def test_what_is_no_file_latest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while it was read was no CheckpointError (over NFS: another host has just replaced it)."""
    save_steps(tmp_path, [1])
    path = tmp_path / LATEST
    with monkeypatch.context() as patched:
        for name in ("read", "preadv"):
            patched.setattr(os, name, lambda *args: os.stat(path / "stale"))
        with pytest.raises(zeroshard.CheckpointError, match=f"{LATEST} cannot be read: .*Not a directory"):
            latest(tmp_path)
    for size in (0, 10**4, 10**7):
        path.write_bytes(b"x" * size)
        with pytest.raises(zeroshard.CheckpointError, match=f"{LATEST} (is damaged; remove it|has {size} bytes)"):
            latest(tmp_path)


def test_a_latest_step_without_its_manifest_is_not_passed_over(tmp_path: Path) -> None:
    """`find` silently took an older step, from which a run would have continued."""
    save_steps(tmp_path, [3, 6, 12, 9])
    (tmp_path / "step-9" / "manifest.json").unlink()
    told = r"latest names step-9, which has no manifest\.json and cannot be read; name an earlier step: "
    with pytest.raises(zeroshard.CheckpointError, match=told + r"it has the steps \[3, 6, 12\]"):
        find(tmp_path, None)
    assert find(tmp_path, 6).name == "step-6"
    manifest, problems = newest_good(tmp_path)
    assert manifest is not None and manifest.step == 6, "an earlier step, not a later one of a previous run"
    assert len(problems) == 1 and "step-9/manifest.json does not exist" in problems[0]
    pruning.sweep(tmp_path)
    assert (tmp_path / "step-9").is_dir()  # it has not been taken for what an interrupted save has left
    files.remove_folder(tmp_path / "step-9")
    assert find(tmp_path, None).name == "step-12"
    assert newest_good(tmp_path)[1] == []


def test_a_damaged_step_does_not_push_out_a_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `keep_last=1` the only good step was removed, and the damaged one kept."""
    save_steps(tmp_path, [1, 2, 3, 4, 5])
    (tmp_path / LATEST).unlink()
    manifest = tmp_path / "step-4" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 4', b'"step": 7'))
    (tmp_path / "step-5" / "manifest.json").write_text("{}")
    seen: list[str] = []

    def noted(path: Path, limit: int) -> bytes:
        seen.extend([path.parent.name] * (path.name != LATEST))
        return path.read_bytes()

    monkeypatch.setattr(folders, "read_whole", noted)
    assert pruning.to_prune(tmp_path, keep_last=1) == [1, 2] and seen == ["step-5", "step-4", "step-3"]
    assert pruning.to_prune(tmp_path, keep_last=2) == [1]
    assert zeroshard.prune(tmp_path, keep_last=1) == [1, 2]
    assert list(steps(tmp_path)) == [3, 4, 5] and zeroshard.prune(tmp_path, keep_last=3) == []


def test_what_a_link_leads_to_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    """A step that was moved to another disk, say."""
    save_steps(tmp_path, [1, 2, 3])
    moved = (tmp_path / "step-1").rename(tmp_path / "elsewhere")
    for name in ("step-1", ".trash-step-0-ab"):
        (tmp_path / name).symlink_to(moved)
    assert zeroshard.prune(tmp_path, keep_last=1) == [2]

    def check(rank: int) -> None:
        with pytest.raises(zeroshard.CheckpointError, match="step-1 is no step of a checkpoint"):
            zeroshard.save(tmp_path, zeroshard.shard(nn.Linear(3, 3), "ddp"), step=1)

    run_ranks(check, 1)
    assert sorted(os.listdir(tmp_path)) == [".trash-step-0-ab", "elsewhere", LATEST, "step-1", "step-3"]
    moved.rename(tmp_path / "step-01")
    assert zeroshard.verify(tmp_path / "step-01").step == 1


def test_prune_of_a_directory_that_does_not_exist_raises(tmp_path: Path) -> None:
    assert zeroshard.prune(tmp_path) == []
    for work in (zeroshard.prune, pruning.to_prune):
        with pytest.raises(zeroshard.CheckpointError, match="holds no checkpoint: there is no such folder"):
            work(tmp_path / "nowhere")


def test_sweep_leaves_what_a_living_save_holds_and_what_is_not_ours(tmp_path: Path) -> None:
    save_steps(tmp_path, [1])
    for name in ("step-2.tmp-ab", "step-3.tmp-cd", ".trash-step-0-ef", "my notes", "step-1.old-ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    (tmp_path / ".latest.tmp-ab").write_text("x")
    lock = files.lock_folder(tmp_path / "step-3.tmp-cd")
    assert lock is not None
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [LATEST, "my notes", "step-1", "step-3.tmp-cd"]
    files.unlock(lock)
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [LATEST, "my notes", "step-1"]


@pytest.mark.parametrize("call", ["lock_folder", "rename", "remove_file"])
def test_what_another_user_has_left_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """An interrupted save of a colleague, in a directory of both: no step was saved there any more."""
    (tmp_path / "step-9.tmp-ab").mkdir()
    (tmp_path / "step-9.tmp-ab" / "rank-00000.safetensors").touch()
    own = getattr(files, call)

    def refuse(path: Path, *others: Path) -> object:
        if "step-9.tmp-ab" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return own(path, *others)

    monkeypatch.setattr(files, call, refuse)
    save_steps(tmp_path, [1, 2])
    assert zeroshard.prune(tmp_path, keep_last=1) == [1]
    assert list(steps(tmp_path)) == [2] and any(tmp_path.glob("*step-9.tmp-ab*"))


def test_an_old_step_counts_until_the_new_one_is_there(tmp_path: Path) -> None:
    save_steps(tmp_path, [1])
    for follow in (lambda: sweep(tmp_path), lambda: save_steps(tmp_path, [1]), lambda: save_steps(tmp_path, [2])):
        os.rename(tmp_path / "step-1", tmp_path / "step-1.old-ab")
        assert find(tmp_path, 1).name == "step-1.old-ab"
        lock = files.lock_folder(tmp_path / "step-1.old-ab")
        assert lock is not None
        sweep(tmp_path)
        assert find(tmp_path, 1).name == "step-1.old-ab", "a living save is just replacing it"
        files.unlock(lock)
        follow()
        assert find(tmp_path, 1).name == "step-1"
    assert sorted(os.listdir(tmp_path)) == [LATEST, "step-1", "step-2"]


# Values ---------------------------------------------------------------------------------------------------------------

numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=5))
keys = st.one_of(st.text(max_size=5), st.integers(), st.sampled_from(["$dict", "$tensor", "$", "$float"]))
values = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter),
        st.sets(st.one_of(st.integers(), st.text(max_size=5), st.frozensets(st.integers(), max_size=2)), max_size=3),
        st.sampled_from([torch.float32, torch.int8, torch.complex128]),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))
    return bool(a == b)


@settings(max_examples=40)
@given(values)
def test_values_come_back_as_they_were(value: Any) -> None:
    import json

    text = json.dumps(encode(value, lambda tensor: "", "x"), allow_nan=False)
    assert same(decode(json.loads(text), lambda name: torch.zeros(0)), value)


def test_what_is_no_value_is_refused() -> None:
    for value in (object(), 1j, b"x", lambda: 0, {(1, 2): 3}, [torch.nn.Linear(1, 1)], torch.eye(2).to_sparse()):
        with pytest.raises(ValueError, match="x"):
            encode(value, lambda tensor: "", "x")
    for key in (math.inf, math.nan):  # JSON has none, and said so without a word of where they are
        with pytest.raises(ValueError, match=r"x\['a'\] has keys that are neither texts nor finite numbers"):
            encode({"a": {key: 1, 2.5: 2}}, lambda tensor: "", "x")


class Keeps:
    """The user's own state, different on every rank."""

    def __init__(self, rank: int) -> None:
        self.state: Any = {"rank": rank, "mean": torch.full((3,), float(rank)), "best": math.inf, 3: (1, [2])}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_extra_is_kept_for_each_rank_that_has_its_own(tmp_path: Path) -> None:
    class Shared(Keeps):
        def __init__(self) -> None:
            self.state = {"epoch": 3}

    def save(rank: int) -> None:
        model = nn.Linear(3, 3)
        handle = zeroshard.shard(model, "zero3")
        zeroshard.save(tmp_path, handle, step=1, extra={"own": Keeps(rank), "shared": Shared()})

    def load(rank: int) -> tuple[int, float, Any]:
        model = nn.Linear(3, 3)
        handle = zeroshard.shard(model, "zero3")
        own, shared = Keeps(99), Shared()
        zeroshard.load(tmp_path, handle, extra={"own": own, "shared": shared})
        assert shared.state == {"epoch": 3} and own.state[3] == (1, [2]) and own.state["best"] == math.inf
        told = (
            r"missing: extra 'other'; unexpected: extra 'shared'\. Pass the objects that were saved; with strict=False"
        )
        with pytest.raises(zeroshard.CheckpointError, match=told):
            zeroshard.load(tmp_path, handle, extra={"own": own, "other": shared})
        return own.state["rank"], float(own.state["mean"][0]), None

    run_ranks(save, 3)
    assert [result[0] for result in run_ranks(load, 3)] == [0, 1, 2]
    assert [result[:2] for result in run_ranks(load, 2)] == [(0, 0.0), (0, 0.0)], "other ranks than before: rank 0's"


def test_objects_in_extra_may_be_numbered(tmp_path: Path) -> None:
    """Names that are no texts, or begin with "$": what had been saved under them did not fit any `extra=`."""

    def check(rank: int) -> None:
        handle, before = zeroshard.shard(nn.Linear(2, 2), "ddp"), {0: Keeps(0), "$x": Keeps(1), None: Keeps(2)}
        zeroshard.save(tmp_path, handle, step=1, extra=before)  # type: ignore[arg-type]
        after = {name: Keeps(9) for name in reversed(before)}
        zeroshard.load(tmp_path, handle, extra=after)  # type: ignore[arg-type]
        assert {name: one.state["rank"] for name, one in after.items()} == {0: 0, "$x": 1, None: 2}
        with pytest.raises(zeroshard.CheckpointError, match=r"missing: extra '1'; unexpected: extra '0'"):
            zeroshard.load(tmp_path, handle, extra={1: Keeps(9), "$x": Keeps(9), None: Keeps(9)})  # type: ignore[dict-item]

    run_ranks(check, 1)


class Whole:
    """Of docs/checkpoints.md."""

    def __init__(self, handle: zeroshard.Handle) -> None:
        self.handle = handle

    def state_dict(self) -> Any:
        return self.handle.full_state_dict(main=True)

    def load_state_dict(self, state: Any) -> None:
        self.handle.load_full_state_dict(state)


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_a_second_sharded_model_may_be_in_extra(plan: str, tmp_path: Path) -> None:
    def check(rank: int) -> None:
        teacher = nn.Linear(3, 3)
        handle, of_teacher = zeroshard.shard(nn.Linear(3, 3), plan), zeroshard.shard(teacher, plan, precision="bf16")
        before = of_teacher.full_state_dict(main=True)
        zeroshard.save(tmp_path, handle, step=1, extra={"teacher": Whole(of_teacher)})
        with of_teacher.unsharded(write=True), torch.no_grad():
            teacher.weight.zero_()
        with pytest.raises(zeroshard.CheckpointError, match=r"inside `with handle\.unsharded\(write=True\):`"):
            zeroshard.load(tmp_path, handle, extra={"teacher": teacher})
        zeroshard.load(tmp_path, handle, extra={"teacher": Whole(of_teacher)})
        assert same_bits(of_teacher.full_state_dict(main=True), before)

    run_ranks(check, 2)


class Raises:
    """`what`: the method that raises, on rank 1."""

    def __init__(self, rank: int, what: str) -> None:
        self.what = what if rank else ""

    def state_dict(self) -> Any:
        return {"epoch": {"save": {}}.get(self.what, {"at": 3})["at"]}

    def load_state_dict(self, state: Any) -> None:
        _ = state["of" if self.what == "load" else "epoch"]


def test_an_extra_that_raises_is_named(tmp_path: Path) -> None:
    """The messages were "save: KeyError: 'at'" and "load: KeyError: 'of'"."""

    def check(rank: int) -> None:
        handle = zeroshard.shard(nn.Linear(3, 3), "zero3")
        message = r"save \(on rank 1\): state_dict\(\) of extra 'loader' raised KeyError: 'at'"
        with pytest.raises(zeroshard.CheckpointError, match=message):
            zeroshard.save(tmp_path, handle, step=1, extra={"loader": Raises(rank, "save")})
        zeroshard.save(tmp_path, handle, step=1, extra={"loader": Raises(rank, "")})
        message = r"load \(on rank 1\): load_state_dict\(\) of extra 'loader' raised KeyError: 'of'\. Some values have"
        with pytest.raises(zeroshard.CheckpointError, match=message):
            zeroshard.load(tmp_path, handle, extra={"loader": Raises(rank, "load")})

    run_ranks(check, 2)


def test_bad_arguments_raise_on_every_rank(tmp_path: Path) -> None:
    class Bad:
        def state_dict(self) -> Any:
            return {"function": lambda: 0}

        def load_state_dict(self, state: Any) -> None: ...

    def check(rank: int) -> None:
        model = nn.Linear(3, 3)
        handle = zeroshard.shard(model, "zero3")
        state = handle.full_state_dict()
        with pytest.raises(ValueError, match="the ranks save different steps"):
            zeroshard.save(tmp_path, handle, step=rank)
        for step in (-1, 10**15, True, 1.0, "1"):
            with pytest.raises(ValueError, match="step must be an integer from 0"):
                zeroshard.save(tmp_path, handle, step=step)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"extra\['bad'\]\['function'\] is of type function"):
            zeroshard.save(tmp_path, handle, step=1, extra={"bad": Bad()})
        (tmp_path / "file").write_text("x")
        with pytest.raises(zeroshard.CheckpointError, match="on rank 0"):
            zeroshard.save(tmp_path / "file" / "steps", handle, step=1)
        assert same_bits(state, handle.full_state_dict()) and os.listdir(tmp_path) == ["file"]
        handle.close()
        with pytest.raises(RuntimeError, match="closed"):
            zeroshard.save(tmp_path, handle, step=1)

    run_ranks(check, 2)


def test_several_optimizers_are_saved_together(tmp_path: Path) -> None:
    def check(rank: int) -> list[Any]:
        def started(seed: int) -> Any:
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            handle = zeroshard.shard(model, "zero2")
            first = zeroshard.ShardedOptimizer(model[0].parameters(), torch.optim.AdamW, lr=0.1)
            second = zeroshard.ShardedOptimizer(model[1].parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
            return model, handle, first, second

        def step(model: Any, handle: Any, first: Any, second: Any) -> Any:
            first.backward(model(torch.ones(3)).square().sum())
            first.step(), second.step()
            return handle.full_state_dict()

        one = started(0)
        step(*one)
        with pytest.raises(ValueError, match="this model has several optimizers"):
            zeroshard.save(tmp_path, one[1], one[2], step=0)
        zeroshard.save(tmp_path, one[1], [one[2], one[3]], step=0)
        expected = step(*one)
        other = started(1)
        with pytest.raises(
            zeroshard.CheckpointError, match=r"unexpected: optimizer number 1 \(pass as many as were saved, in a list\)"
        ):
            zeroshard.load(tmp_path, other[1], other[2])
        with pytest.raises(zeroshard.CheckpointError, match=r"state of SGD for AdamW|optimizer state of"):
            zeroshard.load(tmp_path, other[1], [other[3], other[2]])
        zeroshard.load(tmp_path, other[1], [other[2], other[3]])
        return [same_bits(expected, step(*other))]

    assert run_ranks(check, 2) == [[True], [True]]


def test_weights_that_were_saved_alone_are_loaded_alone(tmp_path: Path) -> None:
    """The message named "optimizer number 0" as missing, and not what to do."""

    def check(rank: int) -> None:
        def started(seed: int) -> Any:
            torch.manual_seed(seed)
            model = nn.Linear(3, 3)
            handle = zeroshard.shard(model, "zero2")
            return model, handle, zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)

        _, handle, optimizer = started(0)
        zeroshard.save(tmp_path, handle, step=0)
        model, other, optimizer = started(1)
        with pytest.raises(zeroshard.CheckpointError, match=r"optimizer number 0 \(no optimizer was saved"):
            zeroshard.load(tmp_path, other, optimizer)
        zeroshard.load(tmp_path, other)
        assert same_bits(other.full_state_dict(), handle.full_state_dict())
        optimizer.backward(model(torch.ones(3)).sum())
        assert optimizer.step().applied and optimizer.state_dict()["state"][0]["step"] == 1

    run_ranks(check, 2)


def test_hyper_parameters_follow_their_parameters(tmp_path: Path) -> None:
    def flat(state: dict[int, Any]) -> State:
        return {f"{number} {key}": value for number, of_one in state.items() for key, value in of_one.items()}

    def check(rank: int) -> list[Any]:
        def started(cut: int, lr: Any) -> Any:
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            handle = zeroshard.shard(model, "zero1")
            parameters = list(model.parameters())
            groups = [{"params": parameters[:cut], "weight_decay": 0.5}, {"params": parameters[cut:]}]
            return model, handle, zeroshard.ShardedOptimizer(groups, torch.optim.AdamW, lr=lr, betas=(0.8, 0.9))

        _, handle, optimizer = kept = started(2, 0.1)
        optimizer.param_groups[1]["lr"] = 0.03
        optimizer.backward(kept[0](torch.ones(3)).sum())
        optimizer.step()
        zeroshard.save(tmp_path, handle, optimizer, step=0)
        same, moved = started(2, torch.tensor(0.7)), started(1, 0.7)
        zeroshard.load(tmp_path, same[1], same[2])
        with pytest.raises(zeroshard.CheckpointError, match=r"param groups that are divided in another.*strict=False"):
            zeroshard.load(tmp_path, moved[1], moved[2])
        assert not moved[2].state_dict()["state"]
        zeroshard.load(tmp_path, moved[1], moved[2], strict=False)
        states = [one.state_dict()["state"] for one in (optimizer, moved[2])]
        assert len(states[0]) == 4 and same_bits(*(flat(one) for one in states))
        assert [group["lr"] for group in moved[2].param_groups] == [0.7, 0.7]
        del kept
        first, second = same[2].param_groups
        assert isinstance(second["lr"], torch.Tensor)
        return [round(float(first["lr"]), 6), first["weight_decay"], round(float(second["lr"]), 6), second["betas"]]

    assert run_ranks(check, 2)[1] == [0.1, 0.5, 0.03, (0.8, 0.9)]


def test_state_that_no_file_holds_is_refused_by_name(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["history"] = range(2)

    def check(rank: int) -> None:
        model = nn.Linear(3, 3)
        handle = zeroshard.shard(model, "zero1")
        optimizer = zeroshard.ShardedOptimizer(handle, Odd, lr=0.1, elementwise=True)
        optimizer.backward(model(torch.ones(3)).sum())
        optimizer.step()
        with pytest.raises(ValueError, match=r"history.* is of type range: a checkpoint holds numbers"):
            zeroshard.save(tmp_path, handle, optimizer, step=0)

    run_ranks(check, 2)


def test_a_step_may_be_given_by_its_own_folder(tmp_path: Path) -> None:
    """`load("runs/a/step-1")` once said that the step's own folder holds no checkpoint. And a step whose manifest was
    missing got the same message as an empty folder."""

    def check(rank: int) -> None:
        model = nn.Linear(3, 2)
        handle = zeroshard.shard(model, "zero3")
        zeroshard.save(tmp_path, handle, step=1)
        zeroshard.save(tmp_path, handle, step=2)
        saved = handle.full_state_dict()

        def lost() -> None:
            handle.load_full_state_dict({name: value + 1 for name, value in saved.items()})

        lost()
        found = zeroshard.load(tmp_path / "step-1", handle)
        assert (found.step, found.path) == (1, tmp_path / "step-1")
        assert all(torch.equal(value, saved[name]) for name, value in handle.full_state_dict().items())
        assert zeroshard.load(tmp_path / "step-1", handle, step=1).step == 1
        dist.barrier()
        if rank == 0:
            shutil.copytree(tmp_path / "step-1", tmp_path / "best")
            (tmp_path / "step-1" / "manifest.json").unlink()
            torch.save(saved, tmp_path / "weights.pt")
        dist.barrier()
        assert zeroshard.load(tmp_path / "best", handle).step == 1
        for path, step, told in [
            (tmp_path / "step-2", 1, f"step-2 is one step already: pass {tmp_path}, or leave out step=1"),
            (tmp_path / "step-1", None, r"step-1 holds no checkpoint: it has no manifest\.json"),
            (tmp_path, 1, r"holds no step 1 \(its folder has no manifest\.json\); it has the steps \[2\]"),
            (tmp_path, 7, r"holds no step 7; it has the steps \[2\]"),
            (tmp_path / "weights.pt", None, r"is a file, .*load_full_state_dict\(torch\.load"),
            (tmp_path / "nowhere", None, "holds no checkpoint: there is no such folder"),
            (tmp_path.parent, None, r"holds no checkpoint \(no folder step-N\)"),
        ]:
            with pytest.raises(zeroshard.CheckpointError, match=told):
                zeroshard.load(path, handle, step=step)
        for folder in (tmp_path / "weights.pt", tmp_path / "weights.pt" / "run"):  # it was "[Errno 17] File exists"
            with pytest.raises(zeroshard.CheckpointError, match=r"weights\.pt is a file: expected a folder"):
                zeroshard.save(folder, handle, step=3)
        dist.barrier()
        if rank == 0:
            (tmp_path / "step-2" / "manifest.json").unlink()
        dist.barrier()
        with pytest.raises(zeroshard.CheckpointError, match=r"holds no checkpoint: step-2 has no manifest\.json"):
            zeroshard.load(tmp_path, handle)

    run_ranks(check, 2)


def test_folders_that_the_ranks_do_not_share_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """On machines without a common file system: every rank raised "No such file or directory"."""

    def check(rank: int) -> list[str]:
        model = nn.Linear(4, 4)
        handle = zeroshard.shard(model, "zero3")
        own, said = tmp_path / f"host-{rank}", []
        for background in (False, True):
            with pytest.raises(zeroshard.checkpoint.CheckpointError) as caught:
                zeroshard.save(own, handle, step=1, background=background).wait()
            said.append(str(caught.value))
        assert steps(own) == {} and (rank or os.listdir(own) == [])
        zeroshard.save(tmp_path / "shared", handle, step=1)
        if rank == 0:
            shutil.copytree(tmp_path / "shared", own, dirs_exist_ok=True)
        with pytest.raises(zeroshard.checkpoint.CheckpointError) as caught:
            zeroshard.load(own, handle)
        if rank:
            shutil.copytree(tmp_path / "shared", own)
        zeroshard.load(own, handle)
        return [*said, str(caught.value)]

    for said in run_ranks(check, 2):
        for text in said:
            assert re.search(
                r"rank 1\)?: .*/step-1.*, which rank 0 has (made|found), does not exist on \S+: "
                "checkpoints need a folder on a file system that all machines share",
                text,
            ), text
