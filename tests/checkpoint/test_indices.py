"""The manifest says which file has which part of a tensor, in runs; each file has an index of its own. A checkpoint of
64 ranks is written here by one process, rank by rank."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zeroshard
from zeroshard.checkpoint import Reader, index, reader, writer
from zeroshard.checkpoint.commit import combined, file_name, merged, part_of, sizes_of
from zeroshard.checkpoint.manifest import MANIFEST_NAME, Manifest, Run, TensorEntry, joined
from zeroshard.checkpoint.writer import FilePlan, Item, write_with_index
from zeroshard.io import tensor_file
from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import BufferLayout
from zeroshard.planning.disk import _runs_of

RANKS = 64
SHAPES = {"a": (1000,), "one": (1,), "empty": (0, 3), "matrix": (70, 31), "last": (5,)}


@pytest.mark.parametrize("seed", range(5))
def test_runs_are_the_parts_that_shards_hold(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        shard, start, numel = rng.randrange(1, 9), rng.randrange(0, 30), rng.randrange(1, 60)
        world = Interval(start, start + numel)
        shards = ((rank, Interval(rank * shard, (rank + 1) * shard)) for rank in range((world.stop - 1) // shard + 1))
        parts = [(rank, held.relative_to(start)) for rank, one in shards if (held := world & one)]
        runs = _runs_of(world, shard)
        assert runs == joined(Run(rank, part.start, part.numel) for rank, part in rng.sample(parts, len(parts)))
        assert len(runs) <= 3
        entry = TensorEntry("x", (numel,), torch.float32, runs)
        assert list(entry.parts(Interval(0, numel))) == parts and entry.num_parts == len(parts)
        first = rng.randrange(numel + 1)
        wanted = Interval(first, rng.randrange(first, numel + 1))
        assert list(entry.parts(wanted)) == [(rank, part) for rank, part in parts if part & wanted]


def values_of(name: str) -> Tensor:
    """Different for each tensor and element."""
    numel = torch.Size(SHAPES[name]).numel()
    return torch.arange(numel, dtype=torch.float32) + 1000 * len(name)


def items_of(layout: BufferLayout, rank: int) -> list[Item]:
    """Main in one interval, and a moment in pieces of at most 7 elements, as an optimizer has them."""
    empty = [slot for slot in layout.slots if not slot.world]
    items = [Item(f"model/{slot.name}", slot.shape, torch.float32, Interval(0, 0), values_of) for slot in empty]
    for fragment in layout.fragments(rank):
        slot, param, values = fragment.slot, fragment.param, values_of(fragment.slot.name)
        items.append(Item(f"model/{slot.name}", slot.shape, torch.float32, param, lambda part, v=values: v[part.slice]))
        for start in range(param.start, param.stop, 7):
            piece = Interval(start, min(start + 7, param.stop))
            name = f"optimizer/exp_avg/{slot.name}"
            items.append(Item(name, slot.shape, torch.float64, piece, lambda part, v=values: -v[part.slice].double()))
    return items


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indices") / "step-1"
    folder.mkdir()
    layout = BufferLayout.pack(SHAPES.items(), RANKS, alignment=1, slot_alignment=1)
    parts, sizes = [], 0
    for rank in range(RANKS):
        plan = FilePlan.of(items_of(layout, rank), {})
        planned = sizes_of(plan, rank)
        entry = write_with_index(folder / file_name(rank), plan, lambda: None)
        assert (entry.num_bytes, entry.index_bytes) == planned[:2]
        assert [(folder / name).stat().st_size for name in (entry.name, entry.index_name)] == [*planned[:2]]
        parts.append(part_of(plan, entry, rank))
        sizes += planned[2]
    base = Manifest(1, "id", (), {}, {"tied": {}}, {})
    manifest = merged(base, parts)
    by_leaders = [combined(parts[first : first + 9]) for first in range(0, RANKS, 9)]
    assert merged(base, by_leaders) == manifest and len(manifest.encode()) < sizes
    (folder / MANIFEST_NAME).write_bytes(manifest.encode())
    return folder


def test_what_many_ranks_have_written_is_read(step: Path) -> None:
    assert len(zeroshard.verify(step).files) == RANKS
    rng = random.Random(0)
    with Reader(step) as opened:
        assert max(len(entry.runs) for entry in opened.manifest.tensors.values()) == 3
        for name, shape in SHAPES.items():
            expected = values_of(name)
            assert torch.equal(opened.tensor(f"model/{name}"), expected.view(shape))
            if expected.numel():
                assert torch.equal(opened.tensor(f"optimizer/exp_avg/{name}"), -expected.double().view(shape))
                first = rng.randrange(expected.numel())
                part = Interval(first, rng.randrange(first, expected.numel()) + 1)
                out = torch.empty(part.numel, dtype=torch.float64)
                opened.read_into(f"optimizer/exp_avg/{name}", part, out)
                assert torch.equal(out, -expected.double()[part.slice])


def test_only_the_indices_that_are_needed_are_read(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "MAX_OPEN_FILES", 2)
    with Reader(step) as opened:
        opened.tensor("model/last")
        assert list(opened._indices) == [(1000 + 1 + 2170) // 50]  # 50 elements a shard
        opened.tensor("model/a")
        assert len(opened._indices) == 21 and len(opened._open) == 2


def test_an_index_that_is_gone_is_named(step: Path, tmp_path: Path) -> None:
    copy = tmp_path / "step-1"
    copy.mkdir()
    for path in step.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    gone = copy / "rank-00007.safetensors.index.json"
    gone.unlink()
    with pytest.raises(zeroshard.CheckpointError, match=gone.name):
        zeroshard.verify(copy)
    with Reader(copy) as opened:
        opened.tensor("model/last")  # the control: others are not affected
        with pytest.raises(zeroshard.CheckpointError, match=gone.name):
            opened.tensor("model/a")


def test_parts_that_do_not_touch_are_two_runs_and_only_blocks_that_are_wanted_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (index, reader, writer):
        monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    (folder := tmp_path / "step-1").mkdir()
    values = torch.arange(40.0)
    parts = []
    for rank, cuts in enumerate(((0, 14, 30, 40), (14, 30))):
        held = [Interval(*cuts[at : at + 2]) for at in range(0, len(cuts), 2)]
        plan = FilePlan.of([Item("x", (40,), torch.float32, one, lambda part: values[part.slice]) for one in held], {})
        parts.append(part_of(plan, write_with_index(folder / file_name(rank), plan, lambda: None), rank))
    manifest = merged(Manifest(1, "id", (), {}, {"tied": {}}, {}), parts)
    assert manifest.tensors["x"].runs == (Run(0, 0, 14), Run(1, 14, 16), Run(0, 30, 10))
    (folder / MANIFEST_NAME).write_bytes(manifest.encode())
    zeroshard.verify(folder)
    with Reader(folder) as opened:
        assert torch.equal(opened.tensor("x"), values)
        opened.num_bytes, out = 0, torch.empty(2)
        opened.read_into("x", Interval(15, 17), out)
        assert out.tolist() == [15.0, 16.0] and opened.num_bytes == 16
