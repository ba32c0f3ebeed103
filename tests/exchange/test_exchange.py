"""Export of a checkpoint to files of other tools, and import of their files, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model

import zeroshard
from tests.checkpoint.common import FULL, Awkward, Kind, Run, make, muon_and_adamw, read_all, same_bits, seed_all
from tests.checkpoint.faults import faulty
from tests.checkpoint.test_faults import SEED
from tests.late import late
from tests.opened import in_its_own_process, opened_by
from zeroshard.checkpoint import Reader, folders, newest_good
from zeroshard.exchange import export, export_dcp, import_model
from zeroshard.io.tensor_file import open_model
from zeroshard.layout.interval import Interval
from zeroshard.testing import run_ranks

if TYPE_CHECKING:
    from tests.real_models.real import ROWS, Row

NAMES = ("Llama", "GPT-2", "T5")


_late = late(globals(), {"tests.real_models.real": "ROWS"}, autouse=False)


def logits(row: Row, model: Any) -> torch.Tensor:
    model.eval()
    with torch.inference_mode():
        result: torch.Tensor = model(**row.batch(0, 0, 9)).logits
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, _late: None) -> Path:
    """For each model: checkpoints of two steps, and in `<name>.full` the second one's weights for a plain model."""
    directory = tmp_path_factory.mktemp("trained")

    def check(rank: int) -> None:
        for name in NAMES:
            row = ROWS[name]
            model: Any = make(row.build)
            handle = zeroshard.shard(model, zeroshard.ZERO3, units=row.block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
            for step in (1, 2):
                optimizer.backward(row.loss(model, rank, 0, step))
                optimizer.step()
                zeroshard.save(directory / name, handle, optimizer, step=step)
            state = handle.full_state_dict(main=True)
            if rank == 0:
                torch.save(state, directory / f"{name}.full")
                model.config.save_pretrained(directory / f"{name}.config")

    run_ranks(check, 2)
    return directory


def plain(trained: Path, name: str) -> Any:
    """A plain model with the weights after two steps."""
    model = ROWS[name].build()
    model.load_state_dict(torch.load(trained / f"{name}.full"))
    return model


def outside(trained: Path, name: str, step: int, out: Path, **options: Any) -> Path:
    """A folder with an export and the model's configuration."""
    out.mkdir()
    (out / "config.json").write_bytes((trained / f"{name}.config" / "config.json").read_bytes())
    export(trained / name / f"step-{step}", out, **options)
    return out


# Out ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_an_export(name: str, trained: Path, tmp_path: Path) -> None:
    model, row = plain(trained, name), ROWS[name]
    expected = logits(row, model)
    single = outside(trained, name, 2, tmp_path / "single")
    split = outside(trained, name, 2, tmp_path / "split", max_file_bytes=6000)
    copies = outside(trained, name, 2, tmp_path / "copies", copies=True)
    other = outside(trained, name, 1, tmp_path / "other")
    assert sorted(os.listdir(single)) == ["config.json", "model.safetensors"]
    index = json.loads((split / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in split.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))] and len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    sizes = {file: sum(t.nbytes for t in load_file(split / file).values()) for file in files}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= 6000 or len(load_file(split / file)) == 1 for file, size in sizes.items())
    for folder in (single, split, copies):
        loaded = type(model).from_pretrained(folder, dtype=torch.float32)
        assert torch.equal(logits(row, loaded), expected) and same_bits(loaded.state_dict(), model.state_dict())
    assert not torch.equal(logits(row, type(model).from_pretrained(other)), expected)  # negative control
    loaded = row.build()
    load_model(loaded, single / "model.safetensors")
    assert torch.equal(logits(row, loaded), expected)
    loaded = row.build()
    loaded.load_state_dict(load_file(copies / "model.safetensors"), strict=True)
    assert torch.equal(logits(row, loaded), expected)
    tied = set(model.state_dict()) - set(load_file(single / "model.safetensors"))
    with safe_open(single / "model.safetensors", framework="pt") as file:
        assert {*file.metadata()} == {"format", *tied} and bool(tied) == (name != "Llama")
    if tied:
        with pytest.raises(RuntimeError, match="Missing key"):  # why there are copies
            loaded.load_state_dict(load_file(single / "model.safetensors"), strict=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_is_that_of_torch(dtype: torch.dtype, trained: Path, tmp_path: Path) -> None:
    (path,) = export(trained / "Llama" / "step-2", tmp_path, dtype=dtype)
    expected = {name: value.to(dtype) for name, value in torch.load(trained / "Llama.full").items()}
    assert same_bits(load_file(path), expected)


def test_values_that_do_not_fit_the_dtype_are_refused(tmp_path: Path) -> None:
    save_file({"big": torch.tensor([1.0, 1e6])}, tmp_path / "model.safetensors")
    step = import_model(tmp_path, tmp_path / "run", step=0).path
    for of_integers in (torch.int32, torch.bool, torch.float8_e4m3fn, "bf16"):  # it wrote zeros for most weights
        for one in (export, export_dcp):
            with pytest.raises(
                ValueError, match="weights are cast to floating-point numbers of 16 bits or more, found"
            ):
                one(step, tmp_path / "out", dtype=of_integers)
    assert not (tmp_path / "out").exists()
    for one in (export, export_dcp):  # the step is whole: no CheckpointError, with which the command ends with 1
        with pytest.raises(zeroshard.errors.InvalidValue, match=r"big has values that are too large for torch.float16"):
            one(step, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    export(step, tmp_path / "out", dtype=torch.bfloat16)


def test_every_shape_and_dtype_and_buffers(tmp_path: Path) -> None:
    """Empty, one-element and frozen parameters, buffers, and main weights, saved by three ranks."""

    def check(rank: int) -> Any:
        seed_all(rank)
        run = Run(rank, "zero2", "bf16-remainder", Kind(Awkward, groups=muon_and_adamw)).train(range(2))
        run.save(tmp_path, 2)
        return run.handle.full_state_dict(main=True)

    expected = run_ranks(check, 3)[0]
    (path,) = export(tmp_path / "step-2", tmp_path / "out", copies=True)
    with Reader(tmp_path / "step-2") as reader:
        stored = {n: reader.tensor(f"model/{reader.manifest.tied.get(n, n)}") for n in expected}
    found = load_file(path)
    assert same_bits(found, stored) and found["average"].shape == (5,) and found["empty"].shape == (0, 3)
    assert all(torch.equal(found[n].float(), expected[n].float()) for n in expected)


def test_an_export_that_fails_leaves_nothing_and_one_that_is_there_stays(trained: Path, tmp_path: Path) -> None:
    step, out = trained / "GPT-2" / "step-2", tmp_path / "out"
    export(step, out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match=r"holds model.safetensors already"):
        export(step, out, max_file_bytes=6000)
    damaged = tmp_path / "step-2"
    damaged.mkdir()
    for path in step.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    with Reader(step) as reader:
        *_, (number, chunk) = reader.chunks(reader.entry("model/transformer.h.2.mlp.c_proj.weight"))
        path = damaged / reader.manifest.files[number].name
    data = bytearray(path.read_bytes())
    data[chunk.offset] ^= 1
    path.write_bytes(data)
    for options in ({}, {"max_file_bytes": 6000}):
        with pytest.raises(zeroshard.CheckpointError, match=f"{path.name} is damaged"):
            export(damaged, out, force=True, **options)  # type: ignore[arg-type]
        assert os.listdir(out) == ["model.safetensors"] and (out / "model.safetensors").read_bytes() == before
    export(step, out, max_file_bytes=6000, force=True)
    assert "model.safetensors" not in os.listdir(out) and "model.safetensors.index.json" in os.listdir(out)
    export(step, out, force=True)
    assert os.listdir(out) == ["model.safetensors"] and (out / "model.safetensors").read_bytes() == before


def complete(out: Path) -> str:
    """The model that a reader finds in the folder: "none", or a checksum of its weights. An incomplete model raises."""
    if not any((out / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        return "none"
    found = open_model(out)
    state = {name: file.read(name, Interval(0, file.tensors[name].numel)) for name, file in sorted(found.items())}
    for file in set(found.values()):
        file.close()
    return str(sum(value.double().sum().item() for value in state.values()))


FEW_FILES = 9_000 if FULL else 30_000
"""Bytes of a file: of three layers there are several."""


@pytest.mark.parametrize(
    ("before", "after"), [(None, None), (None, FEW_FILES), (FEW_FILES, FEW_FILES), (FEW_FILES, None)]
)
def test_an_export_that_is_cut_off_anywhere_is_there_or_not(
    before: int | None, after: int | None, trained: Path, tmp_path: Path
) -> None:
    """Every file system call fails once: afterwards the folder holds the old model, the new one, or none."""
    first, second = trained / "Llama" / "step-1", trained / "Llama" / "step-2"
    out = tmp_path / "out"
    export(first, out, max_file_bytes=before)
    old = complete(out)
    with faulty() as calls:
        export(second, out, max_file_bytes=after, force=True)
    new = complete(out)
    assert old != new
    seen = set()
    interesting = [i for i, call in enumerate(calls) if call != "write" or i % 7 == 0]
    for at in interesting:
        export(first, out, max_file_bytes=before, force=True)
        with pytest.raises(OSError, match="injected"), faulty("fail", at):
            export(second, out, max_file_bytes=after, force=True)
        seen.add(found := complete(out))
        assert found in (old, new, "none"), f"call {at}, {calls[at]}"
        left = [name for name in os.listdir(out) if name.startswith(".")]
        assert left == [] or calls[at] == "remove_file", f"call {at}, {calls[at]}"
        for name in left:
            (out / name).unlink()
    assert old in seen and (new in seen or "none" in seen)


# In -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_files_of_transformers_become_a_step_that_any_plan_loads(name: str, trained: Path, tmp_path: Path) -> None:
    model, row = plain(trained, name), ROWS[name]
    expected = dict(model.state_dict())
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "split", max_shard_size=10_000)
    save_model(model, str(tmp_path / "model"))  # keeps the alphabetically first of tied names, unlike our export
    (tmp_path / "copies").mkdir()
    save_file({n: v.clone() for n, v in expected.items()}, tmp_path / "copies" / "model.safetensors")
    sources = ("single", "split", "model", "copies")
    for step, source in enumerate(sources):
        done = import_model(tmp_path / source, tmp_path / "run", step=step)
        assert done.path == tmp_path / "run" / f"step-{step}" and done.left_out == ()
        zeroshard.verify(tmp_path / "run" / f"step-{step}")
    assert folders.latest(tmp_path / "run") == len(sources) - 1
    (again,) = export(tmp_path / "run" / "step-2", tmp_path / "again", copies=True)
    assert same_bits(load_file(again), expected)

    def check(rank: int) -> None:
        cases = (("zero3", "fp32"), ("ddp", "bf16"), ("zero1", "bf16-remainder"), ("zero2", "fp32"))
        for step, (plan, precision) in enumerate(cases):
            policy: Any = precision
            other: Any = make(row.build, 1)
            handle = zeroshard.shard(other, getattr(zeroshard, plan.upper()), units=row.block, precision=policy)
            zeroshard.load(tmp_path / "run", handle, step=step, allow_rounding=precision == "bf16")
            found = handle.full_state_dict(main=True)
            assert same_bits({n: v.float() for n, v in found.items()}, expected)

    run_ranks(check, 2)


def test_names_that_are_one_parameter_here_must_agree(trained: Path, tmp_path: Path) -> None:
    state = {n: v.clone() for n, v in plain(trained, "GPT-2").state_dict().items()}
    state["lm_head.weight"][3] += 1
    save_file(state, tmp_path / "model.safetensors")
    import_model(tmp_path, tmp_path / "run", step=0)

    def check(rank: int) -> None:
        handle = zeroshard.shard(make(ROWS["GPT-2"].build), zeroshard.ZERO2)
        before = handle.full_state_dict()
        with pytest.raises(zeroshard.CheckpointError, match=r"are one parameter here, and two different ones in /"):
            zeroshard.load(tmp_path / "run", handle)
        assert same_bits(handle.full_state_dict(), before)

    run_ranks(check, 2)


def test_an_import_replaces_a_step_only_when_asked(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        save_file({"w": torch.full((3,), value)}, tmp_path / f"{value}.safetensors")
    import_model(tmp_path / "1.0.safetensors", tmp_path / "run", step=5)
    with pytest.raises(FileExistsError, match="holds step 5 already"):
        import_model(tmp_path / "2.0.safetensors", tmp_path / "run", step=5)
    assert read_all(tmp_path / "run" / "step-5")["model/w"].tolist() == [1.0] * 3
    import_model(tmp_path / "2.0.safetensors", tmp_path / "run", step=5, force=True)
    assert read_all(tmp_path / "run" / "step-5")["model/w"].tolist() == [2.0] * 3
    assert sorted(os.listdir(tmp_path / "run")) == ["latest", "step-5"]


def test_the_newest_good_step_is_the_one_saved_last(tmp_path: Path) -> None:
    """The step saved last is chosen, also if it has the number 0 and an earlier run left a step with a higher
    number."""
    save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    for step in (5, 0):
        import_model(tmp_path / "x.safetensors", tmp_path / "run", step=step)
    manifest, problems = newest_good(tmp_path / "run")
    assert manifest is not None and (manifest.step, problems) == (0, [])
    (tmp_path / "run" / "step-0" / "rank-00000.safetensors").write_bytes(b"")
    manifest, problems = newest_good(tmp_path / "run")
    assert manifest is not None and manifest.step == 5 and len(problems) == 1 and "step-0" in problems[0]


def test_a_checkpoint_is_not_taken_for_the_files_of_others(tmp_path: Path) -> None:
    """The file of one rank was imported as a model: parts of tensors, under names like `model/w[0:3]`."""
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "manifest.json").write_text("{}")  # of another tool
    step = import_model(tmp_path, tmp_path / "run", step=1).path
    shutil.copytree(step, tmp_path / "best")
    for source in (step, tmp_path / "run", tmp_path / "best", step / "rank-00000.safetensors"):
        with pytest.raises(ValueError, match=r"is a .*zeroshard checkpoint: load the folder with"):
            import_model(source, tmp_path / "other", step=1)
    assert not (tmp_path / "other").exists()
    before = sorted(tmp_path.rglob("*"))
    for out in (step, tmp_path / "run", tmp_path / "best"):
        for work in (export, export_dcp):
            with pytest.raises(ValueError, match="holds checkpoints: name another folder"):
                work(step, out, force=True)
    assert sorted(tmp_path.rglob("*")) == before
    export(step, tmp_path, force=True)


def test_files_of_torch_save_are_named_as_such(tmp_path: Path) -> None:
    """They were said to be safetensors files with a header of 578712552184433488 bytes."""
    for number, old in enumerate((False, True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        torch.save({"w": torch.ones(3)}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
        for source in (folder, folder / "pytorch_model.bin"):
            with pytest.raises(ValueError, match=r"pytorch_model.bin is a file of torch\.save, a pickle"):
                import_model(source, tmp_path / "run", step=1)
        save_file({"w": torch.ones(3)}, folder / "model.safetensors")  # many models have both
        import_model(folder, tmp_path / "run", step=number)
    (tmp_path / "model.py").write_text("import torch\n")
    with pytest.raises(zeroshard.CheckpointError, match=r"model\.py is no safetensors file: its first 8 bytes say"):
        import_model(tmp_path / "model.py", tmp_path / "run", step=2)


def test_links_are_followed_only_when_asked(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "blob")
    (tmp_path / "cache").mkdir()
    os.symlink("../blob", tmp_path / "cache" / "model.safetensors")
    with pytest.raises(zeroshard.CheckpointError, match="it is a link, and an import follows links with"):
        import_model(tmp_path / "cache", tmp_path / "run", step=0)
    assert not (tmp_path / "run").exists()
    import_model(tmp_path / "cache", tmp_path / "run", step=0, follow_links=True)
    assert read_all(tmp_path / "run" / "step-0")["model/w"].tolist() == [1.0] * 3


# Enemies --------------------------------------------------------------------------------------------------------------


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def hostile() -> Iterator[tuple[str, bytes]]:
    """Files made by hand: (description, bytes)."""
    eight = bytes(8)
    for length in (0, 1, 7, 1 << 31, 1 << 62, (1 << 64) - 1):
        yield f"length {length}", file_of({"a": entry()}, eight, length)
    for key, values in {
        "dtype": ("F31", "", None, 3, "O", "I64", "PICKLE"),
        "shape": ([-2], [1 << 63], [1 << 40] * 40, [2] * 100, "ab", [2.0], None, {}, [], [0], [True, 2], [[2]], [1]),
        "data_offsets": (
            [8, 0],
            [0, 9],
            [1, 9],
            [0, 1 << 62],
            [-8, 0],
            [0],
            [0, 8, 16],
            "08",
            None,
            [0.0, 8],
            [0, True],
        ),
    }.items():
        for value in values:
            yield f"{key} {value!r:.20}", file_of({"a": entry(**{key: value})}, eight)
    yield "an entry that is none", file_of({"a": 7}, eight)
    yield "a part too many", file_of({"a": entry(code="x")}, eight)
    yield "a part too few", file_of({"a": {"dtype": "F32", "shape": [2]}}, eight)
    yield "overlap", file_of({"a": entry(), "b": entry()}, eight)
    yield "half overlap", file_of({"a": entry(), "b": entry(data_offsets=[4, 12])}, bytes(12))
    yield "gap", file_of({"a": entry(), "b": entry(data_offsets=[12, 20])}, bytes(20))
    yield "gap in front", file_of({"a": entry(data_offsets=[4, 12])}, bytes(12))
    yield "more at the end", file_of({"a": entry()}, bytes(9))
    yield "less", file_of({"a": entry()}, bytes(7))
    yield "a byte that is no bool", file_of({"a": entry(dtype="BOOL", shape=[8])}, b"\2" * 8)
    for metadata in (7, [], {"a": 7}, {"a": {"b": "c"}}, None):
        yield f"metadata {metadata!r}", file_of({"__metadata__": metadata, "a": entry()}, eight)
    for text in (
        b"[]",
        b"{",
        b"{}x",
        b"\xff\xff",
        b'"a"',
        b"NaN",
        b"[" * 100_000,
        b'{"a": ' * 50_000,
        b"cos\nsystem\n",
    ):
        yield f"text {text[:9]!r}", file_of(text)
    one = json.dumps(entry())
    yield "twice", file_of(f'{{"a": {one}, "a": {one}}}'.encode(), eight)
    yield "empty", b""
    yield "short", b"\0" * 7


def refused(source: Path, tmp_path: Path) -> str:
    """The message of the CheckpointError that `import_model` must raise. No file outside of the source and the run may
    be opened, and no step may remain."""
    messages: list[str] = []

    def work() -> None:
        with pytest.raises(zeroshard.CheckpointError) as raised:
            import_model(source, tmp_path / "run", step=0)
        messages.append(str(raised.value))

    paths = opened_by(work)
    metadata = str(
        Path(__file__).parents[2] / "zeroshard.egg-info"
    )  # `pip install path/to/clone` leaves it, and importlib.metadata reads it
    fine = (str(source), str(tmp_path / "run"), sys.prefix, sys.base_prefix, metadata)
    assert [path for path in paths if not path.startswith(fine) and path != str(tmp_path)] == []
    assert zeroshard.checkpoint.steps(tmp_path / "run") == {}
    return messages[0]


@in_its_own_process
def test_hostile_headers_made_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "model" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(file_of({"a": entry(), "e": entry(shape=[0, 3], data_offsets=[8, 8])}, bytes(8)))
    import_model(path, tmp_path / "valid", step=0)
    import_model(path.parent, tmp_path / "valid", step=1)
    bad, count = [], 0
    for what, data in hostile():
        path.write_bytes(data)
        tracemalloc.start()
        try:
            assert str(path) in refused(path.parent, tmp_path)
            if (used := tracemalloc.get_traced_memory()[1]) > 40 * len(data) + (4 << 20):
                bad.append(f"{what}: {used} bytes")
        except BaseException as error:
            bad.append(f"{what}: {error!r:.200}")
        tracemalloc.stop()
        count += 1
    print(f"{count} hostile files: {len(bad)} bad")
    assert bad == []


@in_its_own_process
def test_hostile_indices_made_by_hand(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    for name in ("../outside.safetensors", "1.safetensors", "2.safetensors"):
        (source / name).write_bytes(file_of({name[:1]: entry()}, bytes(8)))
    os.symlink("../outside.safetensors", source / "link.safetensors")
    os.mkfifo(source / "pipe")
    (source / "folder").mkdir()
    index = source / "model.safetensors.index.json"

    def write(*parts: tuple[str, Any]) -> None:
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict(parts)}))

    write(("1", "1.safetensors"), ("2", "2.safetensors"))
    assert set(read_all(import_model(source, tmp_path / "valid", step=0).path)) == {"model/1", "model/2"}
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "link.safetensors", "pipe", "folder",
                 "gone", "", ".", "..", "a/b", "a\0b", 7, None, ["1.safetensors"], "2.safetensors"):  # fmt: skip
        write(("1", name), ("2", "2.safetensors"))
        refused(source, tmp_path)
    write(("1", "1.safetensors"))  # without 2.safetensors it is another, complete model
    import_model(source, tmp_path / "valid", step=1)
    single = source / "model.safetensors"
    single.write_bytes(file_of({"1": entry()}, bytes(8)))
    assert "has both model.safetensors and" in refused(source, tmp_path)  # transformers would read it
    import_model(single, tmp_path / "valid", step=2)
    write(("1", "model.safetensors"))
    import_model(source, tmp_path / "valid", step=3)
    single.unlink()
    write(("1", "1.safetensors"), ("3", "1.safetensors"))
    assert "do not agree" in refused(source, tmp_path)
    for text in ("", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"1": "1.safetensors"}', "[" * 100_000):
        index.write_text(text)
        assert str(index) in refused(source, tmp_path)
    index.unlink()
    assert "there is no file" in refused(source, tmp_path)
    assert "there is no file" in refused(tmp_path / "nowhere", tmp_path)


def test_fuzzed_files(trained: Path, tmp_path: Path) -> None:
    """Header bits flipped, files truncated: refused, or read as other values (the format has no digests)."""
    rng = random.Random(SEED)
    (valid,) = export(trained / "Llama" / "step-1", tmp_path / "out")
    data = valid.read_bytes()
    length = 8 + struct.unpack("<Q", data[:8])[0]
    outcomes = {"refused": 0, "step": 0}
    for trial in range(3000 if FULL else 300):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(8 if trial % 7 == 0 else length)] ^= 1 << rng.randrange(8)
        valid.write_bytes(changed[: rng.randrange(len(changed))] if trial % 5 == 0 else changed)
        try:
            import_model(valid, tmp_path / "run", step=0, force=True)
            outcomes["step"] += 1
        except zeroshard.CheckpointError:
            outcomes["refused"] += 1
    print(outcomes)
    assert outcomes["refused"] > 100
