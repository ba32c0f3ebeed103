"""Operations per token, compared with what torch counts; the peak rates of devices."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zeroshard.train.config import ModelConfig
from zeroshard.train.flops import flops_per_token, peak_flops
from zeroshard.train.model import GPT

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    shape = ModelConfig(layers=2, width=64, heads=2, context=32, tied=tied)
    with torch.device("meta"):
        model = GPT(shape, vocabulary=256)
        tokens = torch.zeros(1, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        model(tokens, tokens).backward()
    found = flops_per_token(model, layers=2, width=64, context=32, tied=tied)
    assert found == pytest.approx(counted.get_total_flops() / 32, rel=2e-3)
    without_head = flops_per_token(model, layers=2, width=64, context=32)
    assert (without_head == found) == (not tied)


def test_experts_count_as_far_as_a_token_uses_them() -> None:
    model = nn.ModuleDict({"router": nn.Linear(8, 4), "experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))})
    shape = {"layers": 1, "width": 0, "context": 0}
    assert flops_per_token(model, **shape) == 6 * (32 + 256)
    assert flops_per_token(model, **shape, active=0.25) == 6 * (32 + 64)


def test_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(CPU, "bf16", None) is None
    assert peak_flops(CPU, "fp32", 2.0) == 2e12
    for name, peak in {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA L40S": 362e12}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda", 0), "bf16", None) == peak
        assert peak_flops(torch.device("cuda", 0), "fp32", None) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device of next year")
    assert peak_flops(torch.device("cuda", 0), "bf16", None) is None
