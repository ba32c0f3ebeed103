"""The device of `tests/apart` refuses what a GPU refuses, and the engine trains on it."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import apart
from tests.apart.one_interpreter import PIECES
from tests.gpu.checks import ROOT, read_rows
from tests.grids import EVERYTHING
from tests.on_device import ranks_on_cuda
from zeroshard.testing import RankError, run_ranks


def on_device(check: Callable[[], Any]) -> Any:
    """What it returns, in a process of its own that knows the device."""

    def run(rank: int) -> Any:
        apart.load()
        return check()

    return run_ranks(run, 1)[0]


def test_tensors_of_the_host_are_refused() -> None:
    def check() -> None:
        here, there = torch.ones(3), torch.ones(3, device=apart.NAME)
        for mixed in (lambda: there + here, lambda: torch.dot(there, here), lambda: there.copy_(here).add_(here)):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                mixed()
        assert (there + torch.tensor(2.0)).tolist() == [3.0] * 3  # a number of the host, as with CUDA

    on_device(check)


def test_generators_of_the_host_are_refused() -> None:
    def check() -> None:
        with pytest.raises(RuntimeError, match="Expected a generator of"):
            torch.randn(3, device=apart.NAME, generator=torch.Generator())

    on_device(check)


def test_the_host_cannot_follow_its_addresses() -> None:
    def check() -> None:
        faulthandler.disable()  # pytest's would show a traceback
        ctypes.string_at(torch.ones(3, device=apart.NAME).data_ptr(), 12)

    with pytest.raises(RankError, match="killed by signal 11"):
        on_device(check)


def test_memory_that_nobody_has_written_is_nan() -> None:
    def check() -> None:
        assert torch.empty(1000, device=apart.NAME).isnan().all()
        freed = torch.ones(1000, device=apart.NAME)
        kept = freed.as_strided((1000,), (1,))
        freed.untyped_storage().resize_(0)
        freed.untyped_storage().resize_(4000)
        assert kept.isnan().all()

    on_device(check)


def test_waits_of_the_host_are_counted_and_can_be_forbidden() -> None:
    def check() -> None:
        values = torch.arange(4.0, device=apart.NAME)
        waits, launches = apart.num_waits(), apart.num_launches()
        total = (values * 2).sum()
        assert (apart.num_waits() - waits, apart.num_launches() - launches) == (0, 2)
        assert total.item() == 12.0 and apart.num_waits() == waits + 1
        with apart.waits_are(False):
            (values * 2).sum()
            for wait in (total.item, values.cpu, values.nonzero, lambda: torch.equal(values, values)):
                with pytest.raises(RuntimeError, match="the host waits for the device"):
                    wait()
        assert values.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]

    on_device(check)


@pytest.mark.parametrize("value", [lambda x: x, lambda x: torch.nn.Parameter(x)[:, 1]])
def test_results_of_ranks_come_back_in_the_hosts_memory(value: Callable[[torch.Tensor], Any]) -> None:
    with ranks_on_cuda():
        found = on_device(lambda: value(torch.arange(6.0).view(2, 3).to(apart.NAME)))
    expected = value(torch.arange(6.0).view(2, 3))
    assert found.device.type == "cpu" and torch.equal(found, expected)


def test_its_memory_is_counted() -> None:
    def check() -> None:
        before = torch.accelerator.memory_allocated()
        values = torch.ones(1 << 20, device=apart.NAME)
        assert torch.accelerator.memory_allocated() - before == 4 << 20
        torch.accelerator.reset_peak_memory_stats()
        values = values + 1
        assert torch.accelerator.max_memory_allocated() - before == 8 << 20
        assert torch.accelerator.memory_allocated() - before == 4 << 20

    on_device(check)


def test_a_plain_model_has_the_bits_of_the_cpu() -> None:
    def check() -> None:
        def trained(device: str) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for step in range(3):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device)
                with torch.autocast(device, torch.bfloat16, enabled=step == 2):
                    out = model(x).float()
                for parameter in model.parameters():  # no backward: this process was forked from one that has run one
                    parameter.grad = torch.full_like(parameter, out.square().mean().item())
                optimizer.step()
            return [parameter.detach().cpu() for parameter in model.parameters()]

        for here, there in zip(trained("cpu"), trained(apart.NAME), strict=True):
            torch.testing.assert_close(there, here)

    on_device(check)


ROUND_TRIPS, WHOLE, LIFE = (
    "tests/checkpoint/test_round_trips.py",
    "tests/parity/test_whole.py",
    "tests/runtime/test_life.py",
)
SUITES = [
    f"{ROUND_TRIPS}::test_every_plan_and_format_of_main_goes_on_bit_for_bit[2]",
    f"{ROUND_TRIPS}::test_an_optimizer_without_a_handle",
    f"{WHOLE}::test_every_precision_and_plan_computes_what_one_process_does[2]",
    f"{WHOLE}::test_stepping_pieces_instead_is_seen",
]


@pytest.mark.long
@pytest.mark.by_gloo
def test_pieces_for_gpus_and_suites_pass_on_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.apart.one_interpreter", str(tmp_path / "report.md")]
    suites = [ROUND_TRIPS, WHOLE, LIFE] if EVERYTHING else SUITES
    variables = {**os.environ, "ZEROSHARD_TEST_DEVICE": apart.NAME}
    found = subprocess.run([*command, *suites], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr
    assert EVERYTHING or f"{len(SUITES)} passed" in found.stdout
    for name in PIECES:
        assert any(row["kind"] == "check" for row in read_rows(tmp_path / f"{name}.jsonl")), name
