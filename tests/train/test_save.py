"""The state file: gives back what it was given, and a failed write leaves the old one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from zeroshard.train import save as saves
from zeroshard.train.config import UserError
from zeroshard.train.save import FILE_NAME, Saved, by_name, by_number, load, save


def state(step: int) -> Saved:
    weight = torch.arange(6, dtype=torch.float32).view(2, 3) + step
    moments = {"exp_avg": weight.T, "step": torch.tensor(float(step)), "count": step}
    scaler = {"scale": 2.0**-149, "growth_tracker": 5, "hysteresis_left": 1, "skips_in_a_row": 2}
    model = {"a.weight": weight, "half": weight.bfloat16()}
    return Saved(step, step - 1, "digest", model, {"a.weight": moments}, scaler)


def test_gives_back_what_it_was_given(tmp_path: Path) -> None:
    save(tmp_path, state(3))
    found, expected = load(tmp_path), state(3)
    assert (found.step, found.updates, found.data_digest) == (3, 2, "digest")
    assert found.loss_scale == expected.loss_scale
    assert found.model.keys() == expected.model.keys()
    assert all(torch.equal(found.model[name], expected.model[name]) for name in expected.model)
    assert found.model["half"].dtype == torch.bfloat16
    assert found.optimizer["a.weight"]["count"] == 3
    assert torch.equal(found.optimizer["a.weight"]["exp_avg"], expected.optimizer["a.weight"]["exp_avg"])
    assert found.optimizer["a.weight"]["step"].shape == ()


def test_a_write_that_fails_half_way_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, state(1))

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saves, "save_file", half)
    with pytest.raises(UserError, match="No space left on device"):
        save(tmp_path, state(2))
    assert load(tmp_path).step == 1
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        load(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / FILE_NAME)
    with pytest.raises(UserError, match="is not a state that zeroshard saved"):
        load(tmp_path)


def test_optimizer_state_travels_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "lr": 0.5}])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    plain = optimizer.state_dict()
    named = by_name(plain, model, optimizer)
    assert named["1.bias"]["exp_avg"].shape == (1,)
    back = by_number(named, plain, model, optimizer)
    assert back["state"].keys() == plain["state"].keys()
    assert all(back["state"][number] is plain["state"][number] for number in plain["state"])
    with pytest.raises(UserError, match="parameters that the model lacks"):
        by_number({"2.weight": {}}, plain, model, optimizer)
