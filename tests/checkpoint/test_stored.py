"""Checkpoints that an earlier version wrote load to the bit, and saving them again gives the same bytes."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.stored_runs import KINDS, SAVE_ID, STEP, file_digests, load_and_save, low_bit, unpack
from zeroshard.checkpoint import Reader, folders

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own
OF_TORCHAO = "zero3-adamw8bit"
"""Its state is decoded with a table (codebook) that torchao computes; the table's last bits depend on the CPU."""


def has_codebooks_of_the_writer() -> bool:
    """Whether torchao's codebooks are those of the machine that wrote the files: only then state and files are
    bit-equal."""
    optimizer = low_bit()([torch.nn.Parameter(torch.zeros(4096))])
    books = [optimizer._new_buffer(torch.zeros(4096), signed).qmap for signed in (True, False)]
    return hashlib.sha256(torch.cat(books).numpy().tobytes()).hexdigest()[:16] == "ff5a4c58a17762b2"


def ranks_of(name: str) -> set[int]:
    return {1, 2, KINDS[name].ranks}


@pytest.fixture(scope="module")
def saved_again(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[dict[str, Any]]]]:
    """A folder with each stored step under `stored/name`, and under `ranks/name` as that number of ranks saved it
    again; and, by number of ranks, what each rank loaded. Each number of ranks is started once, for all steps."""
    folder = tmp_path_factory.mktemp("stored")
    names = [name for name in KINDS if name != OF_TORCHAO or find_spec("torchao")]
    for name in names:
        unpack(name, folder / "stored" / name)
    loaded = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        patch.setattr(folders, "new_id", lambda: SAVE_ID)
        for ranks in sorted(set().union(*map(ranks_of, names))):
            chosen = [name for name in names if ranks in ranks_of(name)]
            loaded[ranks] = load_and_save(chosen, ranks, folder / "stored", folder / f"{ranks}")
    return folder, loaded


@pytest.mark.by_cpu
@pytest.mark.parametrize("name", KINDS)
def test_what_was_stored_loads_and_is_stored_again(
    name: str, saved_again: tuple[Path, dict[int, list[dict[str, Any]]]], tmp_path: Path
) -> None:
    if name == OF_TORCHAO:
        pytest.importorskip("torchao.optim")
    folder, loaded = saved_again
    kind = KINDS[name]
    stored, expected = unpack(name, tmp_path)
    assert len(stored.files) == kind.ranks
    exact = {key: value for key, value in expected["state"].items() if name != OF_TORCHAO or key[:9] != "state exp"}
    for ranks in sorted(ranks_of(name)):
        for rank, (state, counter) in enumerate(of_rank[name] for of_rank in loaded[ranks]):
            assert state.keys() == expected["state"].keys()
            assert {key: state[key] for key in exact} == exact, (ranks, rank)
            assert counter["rank"] == (rank if ranks == kind.ranks else 0)
        with Reader(folder / f"{ranks}" / name / f"step-{STEP}") as reader:
            assert {n: (e.shape, e.dtype) for n, e in reader.manifest.tensors.items() if n[:5] != "rank/"} == {
                n: (e.shape, e.dtype) for n, e in stored.tensors.items() if n[:5] != "rank/"
            }
            if name == OF_TORCHAO:
                with Reader(tmp_path / f"step-{STEP}") as old:
                    for key in ("optimizer/exp_avg/0.weight", "optimizer/exp_avg_sq/0.weight"):
                        torch.testing.assert_close(reader.tensor(key), old.tensor(key), rtol=1e-6, atol=0)
    if name == OF_TORCHAO and not has_codebooks_of_the_writer():
        return
    assert loaded[kind.ranks][0][name][0] == expected["state"]
    assert file_digests(folder / f"{kind.ranks}" / name) == expected["files"]
