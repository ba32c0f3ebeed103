"""Checkpoints that an earlier version wrote load to the bit, and are then saved as it saved them, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.stored_runs import KINDS, SAVE_ID, STEP, file_digests, load_and_save, unpack
from zeroshard.checkpoint import Reader, folders

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own


@pytest.mark.parametrize("name", KINDS)
def test_what_was_stored_loads_and_is_stored_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[name]
    if name.endswith("8bit"):
        pytest.importorskip("torchao.optim")
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(folders, "new_id", lambda: SAVE_ID)
    stored, expected = unpack(name, tmp_path / "stored")
    assert len(stored.files) == kind.ranks
    for ranks in sorted({1, 2, kind.ranks}):
        for rank, (state, counter) in enumerate(load_and_save(kind, ranks, tmp_path / "stored", tmp_path / f"{ranks}")):
            assert state == expected["state"], (ranks, rank)
            assert counter["rank"] == (rank if ranks == kind.ranks else 0)
        with Reader(tmp_path / f"{ranks}" / f"step-{STEP}") as reader:
            assert {n: (e.shape, e.dtype) for n, e in reader.manifest.tensors.items() if n[:5] != "rank/"} == {
                n: (e.shape, e.dtype) for n, e in stored.tensors.items() if n[:5] != "rank/"
            }
    assert file_digests(tmp_path / f"{kind.ranks}") == expected["files"]
