"""Damaged and malicious checkpoints are refused with the file's name: not loaded, no link followed, no code run."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import zeroshard
from tests.checkpoint.common import (
    FULL,
    Awkward,
    Kind,
    Run,
    muon_and_adamw,
    read_all,
    same_bits,
    seed_all,
    signed,
)
from tests.checkpoint.test_faults import SEED
from tests.opened import in_its_own_process, opened_by
from tests.patience import AT_ONCE
from zeroshard.checkpoint import files, reader
from zeroshard.checkpoint.index import digest_of
from zeroshard.checkpoint.manifest import DTYPE_NAMES, MANIFEST_NAME
from zeroshard.checkpoint.saved_state import saved_groups
from zeroshard.testing import run_ranks

PREFIX, MIDDLE = b'{"digest": "', b'", "manifest": '


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of two ranks."""
    directory = tmp_path_factory.mktemp("saved")

    def check(rank: int) -> None:
        seed_all(rank)
        run = Run(rank, "zero3", "bf16-remainder", Kind(Awkward, groups=muon_and_adamw)).train(range(1))
        run.save(directory, 1)
        run.train(range(1, 2)).save(directory, 2)

    run_ranks(check, 2)
    return directory


def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy", dirs_exist_ok=True))


def refused(step: Path, name: str) -> str:
    """ "" if `verify` raised and named the file; otherwise a text that says what is wrong."""
    try:
        zeroshard.verify(step)
    except zeroshard.CheckpointError as error:
        return "" if name in str(error) else f"{name} is not named: {error}"
    return f"{name} was accepted"


# The format -----------------------------------------------------------------------------------------------------------


def test_files_are_read_by_the_safetensors_library(saved: Path) -> None:
    values, manifest = read_all(saved / "step-2"), zeroshard.verify(saved / "step-2")
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in manifest.files:
        with safe_open(saved / "step-2" / file.name, framework="pt") as opened:
            assert opened.metadata()["zeroshard"].startswith("step 2, ")
            for key in opened.keys():  # noqa: SIM118  not a dict
                name, _, interval = key.rpartition("[")
                parts.setdefault(name, []).append((int(interval.split(":")[0]), opened.get_tensor(key)))
    for name, value in values.items():
        pieces = [piece for _, piece in sorted(parts.get(name, []), key=lambda pair: pair[0])]
        flat = torch.cat(pieces) if pieces else torch.empty(0, dtype=value.dtype)
        assert torch.equal(flat, value.reshape(-1)) and flat.dtype == value.dtype
    assert values["model/empty"].shape == (0, 3) and values["model/gain"].shape == ()


def test_nothing_is_pickled_and_the_manifest_is_json(saved: Path) -> None:
    files = [f"rank-0000{rank}.safetensors" for rank in range(2)]
    indices = [f"{name}.index.json" for name in files]
    assert sorted(os.listdir(saved / "step-2")) == sorted([MANIFEST_NAME, *files, *indices])
    assert json.loads((saved / "step-2" / indices[1]).read_text())["tensors"]["model/embed.weight"]
    body = json.loads((saved / "step-2" / MANIFEST_NAME).read_text())["manifest"]
    assert body["step"] == 2 and set(body["versions"]) == {"zeroshard", "torch", "python"}
    assert body["tensors"]["model/embed.weight"]["dtype"] == "F32"
    classes = [group["class"] for group in body["values"]["optimizers"][0]["groups"]]
    assert classes == ["Muon", "AdamW", "AdamW"]


# Damage ---------------------------------------------------------------------------------------------------------------


def test_single_bits_are_found(saved: Path, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    step = copied(saved, tmp_path) / "step-2"
    paths = sorted(step.iterdir())
    total = sum(path.stat().st_size for path in paths)
    bad, per_file = [], dict.fromkeys((path.name for path in paths), 0)
    trials = 1000 if FULL else 300
    for trial in range(trials):
        # Choose a file half in proportion to its size, half with equal chances.
        path = rng.choices(paths, [p.stat().st_size / total + 1 for p in paths])[0]
        with open(path, "r+b") as file:
            at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ bit]))
            file.flush()
            per_file[path.name] += 1
            if problem := refused(step, path.name):
                bad.append(f"trial {trial}, byte {at}: {problem}")
            file.seek(at)
            file.write(bytes([byte]))
    print(f"{trials} bit flips {per_file}: {len(bad)} not found")
    assert bad == []
    zeroshard.verify(step)


def test_what_changes_between_two_readings_is_found(saved: Path, tmp_path: Path) -> None:
    """A load reads everything twice. It compares the second reading to a checksum of the first one, whose digest was
    right."""
    step = copied(saved, tmp_path) / "step-2"
    name = "model/embed.weight"
    with reader.Reader(step) as opened:
        first = opened.tensor(name)
        assert torch.equal(opened.tensor(name), first)
        number, chunk = next(opened.chunks(opened.entry(name)))
        path = step / opened.manifest.files[number].name
        flip(path, chunk.offset)
        with pytest.raises(zeroshard.CheckpointError, match=path.name):
            opened.tensor(name)


def test_negative_control_without_digests_flips_pass(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = copied(saved, tmp_path) / "step-2"
    path = step / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert refused(step, path.name) == ""

    class Equal(str):
        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = str.__hash__

    monkeypatch.setattr(reader, "digest_of", lambda data: Equal(digest_of(data)))
    assert refused(step, path.name).endswith("was accepted")


def test_truncated_files_are_found(saved: Path, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    step = copied(saved, tmp_path) / "step-2"
    bad = []
    trials = 200 if FULL else 60
    for trial in range(trials):
        path = rng.choice(sorted(step.iterdir()))
        data = path.read_bytes()
        path.write_bytes(data[: rng.choice([0, 1, 7, 8, len(data) - 1, rng.randrange(len(data))])])
        if problem := refused(step, path.name):
            bad.append(f"trial {trial}: {problem}")
        path.write_bytes(data + b"x")
        if problem := refused(step, path.name):
            bad.append(f"trial {trial}, longer: {problem}")
        path.unlink()
        if problem := refused(step, path.name):
            bad.append(f"trial {trial}, gone: {problem}")
        path.write_bytes(data)
    print(f"{trials} truncations, {trials} longer by one byte, {trials} gone: {len(bad)} not found")
    assert bad == []


def test_a_file_that_was_refused_is_refused_again(saved: Path, tmp_path: Path) -> None:
    """Whoever went on with the same reader was given the values: the file was open, so its size and header were not
    checked again."""
    step = copied(saved, tmp_path) / "step-2"
    path = step / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[20] ^= 1  # in the header
    path.write_bytes(data)
    with zeroshard.checkpoint.Reader(step) as opened:
        name = next(name for name, entry in opened.manifest.tensors.items() if entry.runs and entry.runs[0].file == 0)
        for _ in range(2):
            with pytest.raises(zeroshard.CheckpointError, match="its header has another digest"):
                opened.tensor(name)


def test_files_swapped_between_steps_are_found(saved: Path, tmp_path: Path) -> None:
    directory, bad, trials = copied(saved, tmp_path), [], 0
    for _ in range(34 if FULL else 1):
        for name in ("rank-00000.safetensors", "rank-00001.safetensors", MANIFEST_NAME):
            a, b = directory / "step-1" / name, directory / "step-2" / name
            for _back in range(2):
                os.rename(a, directory / "aside"), os.rename(b, a), os.rename(directory / "aside", b)
                if not _back:
                    trials += 1
                    bad += [p for s in ("step-1", "step-2") if (p := refused(directory / s, name))]
    print(f"{trials} swaps: {len(bad)} not found")
    assert bad == []


class Refuses:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("not mine")


def fails_late(rank: int, directory: Path) -> tuple[int, list[bool]]:
    """One read of rank 1 fails, each in turn. Returns how many there are, and for each whether the error told that
    values had been replaced."""
    fill, count, told, unchanged = files.fill, 0, list[bool](), list[bool]()
    run = Run(rank, "zero2", "fp32").train([0])
    run.save(directory, 1)

    def failing(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise OSError(errno.EIO, "Input/output error (injected)")
        fill(*arguments)

    def load(extra: Any = None) -> str | None:
        nonlocal count
        count, before = 0, run.train([1]).state()
        try:
            run.load(directory, extra=extra)
        except zeroshard.CheckpointError as error:
            told.append("Some values have been replaced already: load a step before you train" in str(error))
            unchanged.append(same_bits(run.state(), before))
            return str(error)
        return None

    at = -1
    files.fill = failing if rank == 1 else fill
    assert load() is None
    reads = run.handle.engine.collectives.exchange_objects(count)[1]
    for number in range(1, reads + 1):
        at = number
        error = load()
        assert error is not None and "(on rank 1)" in error and "injected" in error
        at = -1
        run.load(directory, extra=None)
    files.fill = fill
    zeroshard.save(directory, run.handle, run.optimizer, step=2, extra={"it": Refuses()})
    error = load({"it": Refuses()})
    assert error is not None and "not mine" in error and told.pop()
    assert all(one or other for one, other in zip(told, unchanged, strict=False))
    return reads, told


def test_a_load_that_fails_in_its_second_reading_says_what_has_changed(tmp_path: Path) -> None:
    """The error was that of a load which has changed nothing: whoever caught it trained on with a mixture."""
    reads, told = run_ranks(fails_late, 2, tmp_path)[0]
    first = told.index(True)
    assert first > reads // 3 and told == [False] * first + [True] * (reads - first), told


def test_a_load_on_ranks_refuses_damage_and_another_step_still_loads(saved: Path, tmp_path: Path) -> None:
    """All ranks refuse at once, even if only one of them reads the damaged block, and no value has been changed."""
    directory = copied(saved, tmp_path)
    kind = Kind(Awkward, groups=muon_and_adamw)

    def check(rank: int) -> list[str]:
        rng, bad = random.Random(SEED), []
        expected = None
        for trial in range(12):
            path = directory / "step-2" / f"rank-0000{trial % 2}.safetensors"
            at = rng.randrange(path.stat().st_size)
            run = Run(rank, ("zero3", "ddp")[trial % 2], ("fp32", "bf16")[trial // 2 % 2], kind)
            flip(path, at) if rank == 0 else None
            run.handle.engine.collectives.exchange_objects(None)
            before = run.state()
            start = time.perf_counter()
            try:
                run.load(directory, allow_rounding=True)
                bad.append(f"byte {at} of {path.name} was accepted")
            except zeroshard.CheckpointError as error:
                if path.name not in str(error) or time.perf_counter() - start > AT_ONCE:
                    bad.append(str(error))
            bad += [] if same_bits(run.state(), before) else ["something has been changed"]
            flip(path, at) if rank == 0 else None
            run.handle.engine.collectives.exchange_objects(None)
            run.load(directory, step=1, allow_rounding=True)
            state = {k: v for k, v in run.state().items() if not k.startswith(("weights", "main frozen"))}
            bad += [] if expected is None or same_bits(state, expected) else ["step 1 is another"]
            expected = state
        return bad

    assert run_ranks(check, 2) == [[], []]


class Frozen(Awkward):
    """With a parameter that an optimizer has, and that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.gain.requires_grad_(False)


def all_groups(model: nn.Module) -> list[dict[str, Any]]:
    """As `muon_and_adamw`, with the frozen parameters."""
    matrices = muon_and_adamw(model)[0]
    chosen = {id(p) for p in matrices["params"]}
    return [matrices, {"params": [p for p in model.parameters() if id(p) not in chosen]}]


class Holding(Run):
    """With a tensor among the hyper-parameters, and one in `extra`."""

    def __init__(self, rank: int, model: type[nn.Module] = Awkward) -> None:
        super().__init__(rank, "zero1", "fp32", Kind(model, groups=all_groups))
        self.optimizer.param_groups[0]["more"] = torch.arange(3.0)
        self.average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))

    @property
    def extra(self) -> dict[str, Any]:
        return {**super().extra, "average": self.average}

    def everything(self) -> dict[str, torch.Tensor]:
        groups = {f"group {n}": group["more"] for n, group in enumerate(self.optimizer.param_groups) if "more" in group}
        numbers = {"torch": torch.get_rng_state(), "python": random.getstate()[1], "numpy": np.random.get_state()[1]}  # noqa: NPY002
        state = {**self.state(), **dict(self.model.named_buffers()), **self.average.state_dict(), **groups, **numbers}
        return {name: torch.as_tensor(value).clone() for name, value in state.items()}


def test_damage_of_any_tensor_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    """Parameters, buffers, states, hyper-parameters, `extra` and random numbers: each is damaged in turn."""

    def check(rank: int) -> list[str]:
        seed_all(rank)
        saved = Holding(rank).train(range(2))
        saved.optimizer.param_groups[0]["more"] = torch.ones(3)
        saved.average.module.weight.data.fill_(7.0)
        np.random.seed(rank)  # noqa: NPY002
        saved.save(tmp_path, 1)
        expected, bad = saved.everything(), []
        run = Holding(rank, Frozen)
        random.seed(5), np.random.seed(5), torch.manual_seed(5)  # noqa: NPY002
        with reader.Reader(tmp_path / "step-1") as opened:
            entries = opened.manifest.tensors.items()
            found = [(name, *next(opened.chunks(entry))) for name, entry in entries if entry.numel]
            files = [tmp_path / "step-1" / file.name for file in opened.manifest.files]
        assert {name.split("/")[0] for name, *_ in found} == {"model", "optimizer", "scalar", "group", "extra", "rank"}
        before, meet = run.everything(), run.handle.engine.collectives.wait_for_all
        for name, number, chunk in found:
            meet()
            flip(files[number], chunk.offset) if rank == 0 else None
            meet()
            try:
                run.load(tmp_path)
                bad.append(f"{name} was accepted")
            except zeroshard.CheckpointError as error:
                bad += [] if files[number].name in str(error) else [str(error)]
            bad += [] if same_bits(run.everything(), before) else [f"{name}: something has been changed"]
            meet()
            flip(files[number], chunk.offset) if rank == 0 else None
        meet()
        run.load(tmp_path)
        after = run.everything()
        return bad + [name for name in expected if not same_bits({"": after[name]}, {"": expected[name]})]

    assert run_ranks(check, 2) == [[], []]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_step_under_the_name_of_another_is_refused(saved: Path, tmp_path: Path) -> None:
    directory = copied(saved, tmp_path)
    os.rename(directory / "step-2", directory / "step-21")  # "step-21" starts like "step-2"

    def check(rank: int) -> None:
        run = Run(rank, "zero3", "fp32", Kind(Awkward, groups=muon_and_adamw))
        with pytest.raises(zeroshard.CheckpointError, match=r"manifest.json is that of step 2"):
            run.load(directory, step=21)

    run_ranks(check, 1)


# Enemies --------------------------------------------------------------------------------------------------------------


CHANGES_OF_A_RUN = [(0, 99), (0, -1), (0, 1), (0, True), (1, 1), (1, -1), (1, 1 << 47), (2, 0), (2, 1 << 47), (2, -8),
                    (3, 0), (3, 2), (3, 1 << 47), (3, None), (2, "0"), (1, 0.5)]  # fmt: skip


def hostile(valid: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Manifests made by hand: (description, bytes)."""

    def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
        body = json.loads(json.dumps(valid))
        change(body)
        return signed(json.dumps(body).encode())

    first = "model/embed.weight"
    for name in ("../secret", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "link", "pipe", "x" * 500, "a\0b", "a\\b",
                 "manifest.json", "rank-00009.safetensors", "folder", 7, None, ["a"]):  # fmt: skip
        yield f"file {name!r}", changed(lambda body, name=name: body["files"][0].update(name=name))
    for key in ("bytes", "index_bytes"):
        for number in (-1, 0, 7, 1 << 62, 1 << 63, 10**400, 1.5, True, "8", None):
            yield (
                f"{key} {number!r:.20}",
                changed(lambda body, key=key, number=number: body["files"][0].update({key: number})),
            )
    for shape in ([-1], [1 << 63], [10**300], [1 << 40] * 40, [2] * 100, "ab", [1.0], [None], [[1]], {}, [], [0]):
        yield f"shape {shape!r:.30}", changed(lambda body, shape=shape: body["tensors"][first].update(shape=shape))
    for dtype in ("F31", "", None, 3, "O", "PICKLE", "I8"):
        yield f"dtype {dtype!r}", changed(lambda body, dtype=dtype: body["tensors"][first].update(dtype=dtype))
    for part, value in CHANGES_OF_A_RUN:
        yield (
            f"runs part {part} {value!r:.30}",
            changed(lambda body, part=part, value=value: body["tensors"][first]["runs"][0].__setitem__(part, value)),
        )
    yield "runs twice", changed(lambda body: body["tensors"][first]["runs"].append(body["tensors"][first]["runs"][0]))
    yield "no runs", changed(lambda body: body["tensors"][first].update(runs=[]))
    yield "overlap", changed(lambda body: body["tensors"].update(other=body["tensors"][first]))
    yield "tensor left out", changed(lambda body: body["tensors"].pop(first))
    yield "file twice", changed(lambda body: body["files"].append(body["files"][0]))
    yield "no files", changed(lambda body: body.update(files=[]))
    for key in ("format", "step", "files", "tensors", "values", "id", "versions"):
        for value in (None, -1, [], "x", {"a": 1}, 10**30):
            if not (isinstance(value, dict) and key in ("values", "versions")) and not (key == "id" and value == "x"):
                yield f"{key} {value!r}", changed(lambda body, key=key, value=value: body.update({key: value}))
    for tied in ([], "x", None, {"a": 1}, {"a": None}, {"a": "nowhere"}, {"embed.weight": "gain"}, {"gain": "gain"}):
        yield f"tied {tied!r}", changed(lambda body, tied=tied: body["values"].update(tied=tied))
    yield "format 1", changed(lambda body: body.update(format=1))
    yield "format 3", changed(lambda body: body.update(format=3))
    text = json.dumps(valid).encode()
    yield "duplicate key", signed(text[:-1] + b', "step": 9}')
    yield "deep", signed(b'{"format": 2, "values": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    yield "huge number", signed(text.replace(b'"step": 2', b'"step": ' + b"9" * 100_000))
    yield "NaN", signed(text.replace(b'"step": 2', b'"step": NaN'))
    yield "not UTF-8", signed(text[:-1] + b', "\xff": 1}')
    yield "not JSON", signed(b"cos\nsystem\n(S'echo'\ntR.")
    yield "a list", signed(b"[]")
    yield "pickle", b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR."
    yield "empty", b""
    yield "unsigned", text
    yield "half", signed(text)[: len(text) // 2]


@pytest.fixture
def trap(saved: Path, tmp_path: Path) -> Path:
    """A step's folder that also contains a link, a pipe and a folder."""
    step = copied(saved, tmp_path) / "step-2"
    (tmp_path / "copy" / "secret").write_bytes((step / "rank-00000.safetensors").read_bytes())
    os.symlink("../secret", step / "link")
    os.mkfifo(step / "pipe")
    (step / "folder").mkdir()
    return step


@in_its_own_process
def test_hostile_manifests_made_by_hand(trap: Path) -> None:
    valid = json.loads((trap / MANIFEST_NAME).read_text())["manifest"]
    assert refused(trap, "") != ""
    expect_refused(trap, hostile(valid), lambda data: (trap / MANIFEST_NAME).write_bytes(data))


def expect_refused(trap: Path, cases: Iterator[tuple[str, bytes]], put: Callable[[bytes], object]) -> None:
    """Each case is refused; nothing outside the folder is opened, and memory stays in proportion."""
    bad, count = [], 0
    tracemalloc.start()
    for what, data in cases:
        put(data)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        outcome: list[str] = []
        paths = opened_by(lambda outcome=outcome: outcome.append(refused(trap, "")))  # type: ignore[misc]
        used = tracemalloc.get_traced_memory()[1] - before
        outside = [path for path in paths if not path.startswith(str(trap))]
        if outcome != [""] or outside or not paths or used > 40 * len(data) + (4 << 20):
            bad.append(f"{what}: {outcome} {outside} {used} bytes")
        count += 1
    tracemalloc.stop()
    print(f"{count} made by hand: {len(bad)} bad")
    assert bad == [] and count > 50


def hostile_indices(valid: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Indices made by hand: (description, bytes)."""

    def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
        body = json.loads(json.dumps(valid))
        change(body)
        return json.dumps(body).encode()

    first = "model/embed.weight"
    for size in (-1, 0, 7, 8, 1 << 62, 10**400, 1.5, True, "8", None):
        yield f"header of {size!r:.20}", changed(lambda body, size=size: body.update(header_bytes=size))
    for digest in ("", "0" * 31, "0" * 32, "g" * 32, "0" * 64, None, 3, ["0" * 32]):
        yield f"digest {digest!r}", changed(lambda body, digest=digest: body.update(digest=digest))
    for tensors in (None, [], "x", {}, {first: []}, {first: None}, {first: [[]]}, {first: [None]}, {"other": []}):
        yield f"tensors {tensors!r}", changed(lambda body, tensors=tensors: body.update(tensors=tensors))
    for part, value in ((0, 0), (0, 8), (0, -8), (0, 1 << 61), (0, True), (1, 1), (1, -1), (1, 1 << 61), (2, 0),
                        (2, 1 << 47), (2, None), (3, ""), (3, "0" * 33), (3, "g" * 32), (3, ["0" * 32]),
                        (3, "0" * 32), (3, "0" * 64)):  # fmt: skip
        yield (
            f"chunk part {part} {value!r:.30}",
            changed(lambda body, part=part, value=value: body["tensors"][first][0].__setitem__(part, value)),
        )
    yield "chunk twice", changed(lambda body: body["tensors"][first].append(body["tensors"][first][0]))
    yield "tensor left out", changed(lambda body: body["tensors"].pop(first))
    yield "tensor of nobody", changed(lambda body: body["tensors"].update(other=body["tensors"].pop(first)))
    one, other = (valid["tensors"][f"optimizer/{key}/embed.weight"][0] for key in ("exp_avg", "exp_avg_sq"))
    bytes_of_other = [other[0], *one[1:3], other[3]]  # its own bytes are then nobody's
    yield (
        "bytes twice",
        changed(lambda body: body["tensors"].update({"optimizer/exp_avg/embed.weight": [bytes_of_other]})),
    )
    yield "tensor of another", changed(lambda body: body["tensors"].update(moved(body["tensors"], first)))
    text = json.dumps(valid).encode()
    yield "duplicate key", text[:-1] + b', "digest": ""}'
    yield "deep", b'{"tensors": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    yield "NaN", text[:-1] + b', "more": NaN}'
    yield "not UTF-8", text[:-1] + b', "\xff": 1}'
    yield "a list", b"[]"
    yield "pickle", b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR."
    yield "empty", b""
    yield "half", text[: len(text) // 2]


def moved(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    """The chunks of two tensors, exchanged."""
    other = next(key for key in tensors if key != name)
    return {name: tensors[other], other: tensors[name]}


def put_index(step: Path, data: bytes) -> None:
    """Replace the index of file 0, with its right size and digest in the manifest."""
    body = json.loads((step / MANIFEST_NAME).read_text())["manifest"]
    body["files"][0] |= {"index_bytes": len(data), "index_digest": digest_of(data)}
    (step / MANIFEST_NAME).write_bytes(signed(json.dumps(body).encode()))
    (step / "rank-00000.safetensors.index.json").write_bytes(data)


@in_its_own_process
def test_hostile_indices_made_by_hand(trap: Path) -> None:
    text = (trap / "rank-00000.safetensors.index.json").read_bytes()
    put_index(trap, text + b" ")
    zeroshard.verify(trap)  # the control: a change that does not matter
    expect_refused(trap, hostile_indices(json.loads(text)), lambda data: put_index(trap, data))


def test_links_in_place_of_files_are_refused(saved: Path, tmp_path: Path) -> None:
    directory = copied(saved, tmp_path)
    for name in ("rank-00000.safetensors", "rank-00000.safetensors.index.json", MANIFEST_NAME):
        os.rename(directory / "step-2" / name, directory / name)
        os.symlink(directory / name, directory / "step-2" / name)
        assert refused(directory / "step-2", name) == ""
        os.replace(directory / name, directory / "step-2" / name)
    os.symlink("step-2", directory / "step-3")
    with pytest.raises(zeroshard.CheckpointError, match="it is a link"):
        zeroshard.verify(directory / "step-3")


def mutated(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """A copy of the value with one random change."""
    odd = [None, True, -1, 0, 1, 1 << 31, 1 << 63, 10**40, 0.5, "", "..", "/", "F64", [], {}, [[]], "0" * 32]
    if isinstance(value, dict) and value and (depth < 1 or rng.random() < 0.9):
        key = rng.choice(sorted(value))
        action = rng.random()
        if action < 0.08:
            return {k: v for k, v in value.items() if k != key}
        if action < 0.12:
            return {**value, rng.choice(sorted(value)): value[key]}
        return {**value, key: mutated(rng, value[key], depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        action = rng.random()
        if action < 0.1:
            return value[:index] + value[index + 1 :]
        if action < 0.2:
            return [*value, value[index]]
        return [*value[:index], mutated(rng, value[index], depth + 1), *value[index + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-8, -1, 1, 8, 1 << 20])
    return rng.choice(odd)


def outcome_of(step: Path, values: dict[str, Any]) -> str:
    try:
        zeroshard.verify(step)
        # Names, shapes with the same number of elements and other values may differ: anyone can compute the digest.
        now = read_all(step)
    except zeroshard.CheckpointError:
        return "refused"
    same = [k for k in now if k in values and now[k].dtype == values[k].dtype]
    return "whole" if len(same) > len(values) - 3 else "other"


def test_fuzzed_manifests(saved: Path, trap: Path) -> None:
    """Manifests with a random change and a right digest: refused, or, where the change does not matter, read as
    before. A half of the changes are in an index."""
    rng = random.Random(SEED)
    path = trap / "rank-00000.safetensors.index.json"
    index = path.read_bytes()
    text = (trap / MANIFEST_NAME).read_bytes()
    valid, values = json.loads(text)["manifest"], read_all(saved / "step-2")
    count, outcomes, bad = 10_000 if FULL else 300, {"refused": 0, "whole": 0, "other": 0}, []
    for trial in range(count):
        if trial % 2:
            (trap / MANIFEST_NAME).write_bytes(text)
            put_index(trap, json.dumps(mutated(rng, json.loads(index))).encode())
            try:
                outcomes[outcome_of(trap, values)] += 1
            except Exception as error:
                bad.append(f"trial {trial}, index: {error!r}")
            path.write_bytes(index)
            continue
        if trial % 5:
            data = signed(json.dumps(mutated(rng, valid)).encode())
        else:
            body = bytearray(text[len(PREFIX) + 32 + len(MIDDLE) : -2])
            for _ in range(rng.randrange(1, 4)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            data = signed(bytes(body))
        (trap / MANIFEST_NAME).write_bytes(data)
        try:
            outcomes[outcome_of(trap, values)] += 1
        except Exception as error:
            bad.append(f"trial {trial}: {error!r}")
    print(f"{count} fuzzed manifests: {outcomes}, {len(bad)} other errors")
    assert bad == [] and outcomes["other"] == 0 and outcomes["refused"] > count / 3


def test_fuzzed_headers_of_files(saved: Path, trap: Path) -> None:
    """The header of a safetensors file has a digest. A file whose header differs in any bit is refused."""
    rng = random.Random(SEED + 1)
    path = trap / "rank-00001.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for trial in range(1000 if FULL else 100):
        header = bytearray(data[: 8 + length])
        for _ in range(rng.randrange(1, 5)):
            header[rng.randrange(8 if trial % 2 else len(header))] ^= 1 << rng.randrange(8)
        if bytes(header) != data[: 8 + length]:
            path.write_bytes(bytes(header) + data[8 + length :])
            assert refused(trap, path.name) == ""


def test_hostile_values_raise_our_error_on_load(saved: Path, tmp_path: Path) -> None:
    """Bad hyper-parameters, random states and user state raise CheckpointError, and no other kind of error."""
    directory = copied(saved, tmp_path)
    path = directory / "step-2" / MANIFEST_NAME
    valid = json.loads(path.read_text())["manifest"]

    def check(rank: int) -> list[str]:
        rng, bad = random.Random(SEED + 2), []
        run = Run(rank, "zero2", "fp32", Kind(Awkward, groups=muon_and_adamw))
        for trial in range(400 if FULL else 30):
            values = mutated(rng, valid["values"])
            if rank == 0:
                path.write_bytes(signed(json.dumps({**valid, "values": values}).encode()))
            run.handle.engine.collectives.exchange_objects(None)
            try:
                run.load(directory)
            except zeroshard.CheckpointError:
                pass
            except Exception as error:
                bad.append(f"trial {trial}: {error!r}")
        return bad

    assert run_ranks(check, 2) == [[], []]


def test_hostile_param_groups_are_refused() -> None:
    valid: dict[str, Any] = {"class": "SGD", "params": ["weight"], "options": {"lr": 0.1}}
    assert saved_groups({"groups": [valid]}) == [valid]  # the control
    for key, value in (("class", 3), ("class", None), ("params", "weight"), ("params", [3]), ("options", [])):
        with pytest.raises(zeroshard.CheckpointError, match="the manifest's param groups are damaged"):
            saved_groups({"groups": [valid, {**valid, key: value}]})
    for saved in (None, [], {"groups": {}}, {"groups": [[]]}, {"groups": [None]}):
        with pytest.raises(zeroshard.CheckpointError, match="the manifest's param groups are damaged"):
            saved_groups(saved)


def test_dtypes_have_the_names_of_the_library() -> None:
    assert DTYPE_NAMES[torch.bfloat16] == "BF16" and nn.Linear(1, 1).weight.dtype in DTYPE_NAMES
