"""Views that conjugate or negate: their memory has other values than they have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import zeroshard
from tests.kit import plans_of
from zeroshard.exchange import export
from zeroshard.testing import run_ranks


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        numbers = torch.view_as_complex(torch.arange(1.0, 13.0).view(6, 2))
        self.register_buffer("conjugated", numbers.conj())
        self.register_buffer("negated", numbers.conj().imag)


class Holds:
    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


@pytest.mark.by_cpu
def test_their_values_are_broadcast_saved_loaded_and_exported(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        for number, plan in enumerate(plans_of(1)):
            model, folder = Turned(), tmp_path / str(number)
            truth = {name: buffer.clone().resolve_conj().resolve_neg() for name, buffer in model.named_buffers()}
            assert model.conjugated.is_conj() and model.negated.is_neg()
            handle = zeroshard.shard(model, plan)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            held = Holds(truth["conjugated"].conj())
            zeroshard.save(folder, handle, optimizer, step=1, extra={"held": held})
            with torch.no_grad():
                model.conjugated.zero_()
                model.negated.zero_()
            found = Holds(None)
            zeroshard.load(folder, handle, optimizer, extra={"held": found})
            for name, value in truth.items():
                assert torch.equal(model.get_buffer(name), value), name
            assert torch.equal(found.value, truth["conjugated"].conj())
            assert not torch.equal(found.value, truth["conjugated"])  # the control

    run_ranks(check, 2)
    (file,) = export(tmp_path / "0" / "step-1", tmp_path / "exported.safetensors")
    with safe_open(file, "pt") as exported:
        for name, buffer in Turned().named_buffers():
            assert torch.equal(exported.get_tensor(name), buffer), name
