"""A manifest of more than 256 MiB (large values in `extra`, very many tensors) once was committed, and could not be
read again. Now every rank refuses it before the commit, with its size; and an index before anything is written. The
tests lower the limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.checkpoint import Reader
from zeroshard.exchange import import_model
from zeroshard.testing import run_ranks

LIMIT = 9000


class Values:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def lower(monkeypatch: pytest.MonkeyPatch, limit: int = LIMIT) -> None:
    for module in ("manifest", "reader"):
        monkeypatch.setattr(f"zeroshard.checkpoint.{module}.MAX_MANIFEST_BYTES", limit)


def shard(depth: int = 2) -> Any:
    return zeroshard.shard(nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth))), "zero2")


def test_nothing_is_committed_that_cannot_be_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lower(monkeypatch)

    def check(rank: int, folder: str) -> None:
        handle = shard()
        zeroshard.save(folder, handle, step=1, extra={"data": Values("x" * 100)})
        large = {"data": Values("x" * LIMIT)}
        for background in (False, True):
            with pytest.raises(zeroshard.CheckpointError, match=r"manifest would have at least \d+ bytes"):
                zeroshard.save(folder, handle, step=2, extra=large, background=background).wait()
        many = shard(60)  # the exact size of this manifest is known once all ranks have reported
        with pytest.raises(zeroshard.CheckpointError, match=r"step 3 was not saved: the manifest has \d+ bytes"):
            zeroshard.save(folder, many, step=3)
        with pytest.raises(zeroshard.CheckpointError, match=r"step 3 was not saved: the manifest has \d+ bytes"):
            zeroshard.save(folder, many, step=3, background=True).wait()
        assert [path.name for path in sorted(Path(folder).iterdir()) if path.is_dir()] == ["step-1"]
        taken = Values(None)
        zeroshard.load(folder, handle, extra={"data": taken})
        assert taken.value == "x" * 100

    run_ranks(check, 2, str(tmp_path))


def test_without_the_check_it_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("zeroshard.checkpoint.reader.MAX_MANIFEST_BYTES", LIMIT)  # the reader's only

    def check(rank: int, folder: str) -> None:
        zeroshard.save(folder, shard(60), step=3)
        with pytest.raises(zeroshard.CheckpointError, match=r"manifest.json has \d+ bytes, more than 9000"):
            Reader(Path(folder) / "step-3")

    run_ranks(check, 1, str(tmp_path))


def test_what_is_imported_is_checked_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    lower(monkeypatch)
    save_file({f"tensor {number}": torch.zeros(2) for number in range(200)}, tmp_path / "model.safetensors")
    expected = r"the index of rank-00000.safetensors would have \d+ bytes, and no reader takes more than 9000"
    with pytest.raises(zeroshard.CheckpointError, match=expected):
        import_model(tmp_path / "model.safetensors", tmp_path / "steps", step=0)
    assert not (tmp_path / "steps").exists()


def test_the_header_of_a_file_has_a_limit_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("zeroshard.checkpoint.writer.MAX_HEADER_BYTES", 1500)

    def check(rank: int, folder: str) -> None:
        with pytest.raises(ValueError, match=r"would have a header of \d+ bytes, and safetensors files 1500"):
            zeroshard.save(folder, shard(60), step=1)
        assert not list(Path(folder).glob("step-*"))

    run_ranks(check, 2, str(tmp_path))
