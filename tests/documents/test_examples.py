"""The scripts in `examples/` do what they say. Those that need a library of models are run beside the other tests of
that library (`ELSEWHERE`)."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from tests.checkpoint.faults import StoreServer
from tests.examples import FOLDER, run_example
from tests.failures.hosts import on_hosts
from tests.forked import Forked
from tests.grids import EVERYTHING
from tests.hosts.namespaces import SHARED
from tests.house.pages import DOCS
from zeroshard.checkpoint import verify
from zeroshard.testing import run_ranks

KEPT = {
    "digits": ("accuracy",),
    "gan": ("radius",),
    "memory": ("at_rest", "lines"),
    "muon": ("losses",),
    "scalers": ("scales", "skipped", "losses"),
    "train_plain": ("loss",),
    "train_sharded": ("loss",),
}
"""Examples that run in one start of two ranks, and the variables to look at."""
ELSEWHERE = {
    "lora": "tests/real_models/test_finetuning.py",
    "with_accelerate": "tests/integrations/test_with_accelerate.py",
    "with_lightning": "tests/integrations/test_with_lightning.py",
    "with_trainer": "tests/integrations/test_with_transformers.py",
}


HAS_DIGITS = find_spec("sklearn") is not None


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[Any]]]:
    """Rank -> example -> its variables."""
    names = [name for name in KEPT if name != "digits" or HAS_DIGITS]
    if "digits" in names and EVERYTHING:
        import sklearn.datasets  # noqa: F401  before the ranks are forked

    def run(rank: int) -> dict[str, list[Any]]:
        if "digits" in names and not EVERYTHING:
            sys.modules.update({"sklearn": types.ModuleType("sklearn"), "sklearn.datasets": digits_alone()})
        results = {name: run_example(name) for name in names}
        return {name: [_plain(results[name][variable]) for variable in KEPT[name]] for name in names}

    return run_ranks(run, 2)


def digits_alone() -> types.ModuleType:
    """In place of `sklearn.datasets`, whose import takes two seconds: it has the digits, read from scikit-learn's
    file."""
    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None
    data = numpy.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    digits = SimpleNamespace(images=data[:, :-1].reshape(-1, 8, 8), target=data[:, -1].astype(int))
    module = types.ModuleType("sklearn.datasets")
    module.load_digits = lambda: digits  # type: ignore[attr-defined]
    return module


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value.item() if hasattr(value, "item") else value


@pytest.mark.skipif(not HAS_DIGITS, reason="scikit-learn is not installed")
def test_digits_are_read(found: list[dict[str, list[Any]]]) -> None:
    [accuracy], of_other = (of_rank["digits"] for of_rank in found)
    assert accuracy > 0.9 and of_other == [accuracy]  # by guessing, a tenth


def test_muon_and_adamw_learn(found: list[dict[str, list[Any]]]) -> None:
    for of_rank in found:
        [losses] = of_rank["muon"]
        assert losses[0] > 3.5 and losses[-1] < 0.5
    assert found[0]["muon"] != found[1]["muon"]  # each rank has data of its own


def test_the_gan_finds_the_ring(found: list[dict[str, list[Any]]]) -> None:
    for of_rank in found:
        [radius] = of_rank["gan"]
        assert 0.7 < radius < 1.3


def test_the_losses_are_those_of_the_readme(found: list[dict[str, list[Any]]]) -> None:
    """(What one rank prints is in `tests/gpu/correct.py`.)"""
    shown = map(float, re.findall(r"step 100 loss ([\d.]+)", (FOLDER.parent / "README.md").read_text()))
    plain, alone, first, second = shown
    assert alone == plain
    of_ranks = [*(of_rank["train_plain"][0] for of_rank in found), *(of_rank["train_sharded"][0] for of_rank in found)]
    assert of_ranks == pytest.approx([plain, plain, first, second], rel=1e-2)  # kernels differ


def test_each_loss_has_its_scale(found: list[dict[str, list[Any]]]) -> None:
    for of_rank in found:
        scales, skipped, losses = of_rank["scalers"]
        assert scales["small"] == 2.0**16 and scales["large"] < 2.0**12
        assert scales["large"] * 2**skipped == 2.0**16
        assert max(losses.values()) < 0.4  # at first 0.5


def test_memory_is_as_planned(found: list[dict[str, list[Any]]]) -> None:
    at_rest, lines = found[0]["memory"]
    assert at_rest["weights"] > 0
    assert len(lines) == 4 and "\n".join(f"    {line}" for line in lines) in (DOCS / "memory.md").read_text()


STEPS = 30 if EVERYTHING else 10
"""By default the scripts do 30."""


def resumed(rank: int, arguments: Sequence[str]) -> tuple[int, float]:
    names = run_example("resume", *arguments)
    return names["step"] + 1, names["mean"]


def test_a_run_goes_on_at_another_world_size(tmp_path: Path) -> None:
    parts, whole = ([str(tmp_path / name), "--steps"] for name in ("parts", "whole"))
    [first, *_], [second, *_] = (run_ranks(resumed, number, [*parts, str(STEPS)]) for number in (2, 3))

    def alone(rank: int) -> list[tuple[int, float]]:
        of_part = resumed(rank, [*parts, str(STEPS), "--plan", "zero1"])
        return [of_part, resumed(rank, [*whole, str(3 * STEPS)])]

    [[third, uninterrupted]] = run_ranks(alone, 1)
    assert [first[0], second[0], third[0]] == [STEPS, 2 * STEPS, 3 * STEPS]
    assert third == pytest.approx(uninterrupted, rel=1e-3)
    assert abs(second[1] - third[1]) > 0.02 * third[1]  # losses of other steps differ by more


def test_every_example_is_run_somewhere() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert scripts == {*KEPT, *ELSEWHERE, "resume", "two_machines"}
    for name, test in ELSEWHERE.items():
        assert name in (FOLDER.parent / test).read_text(), name
    listed = set(re.findall(r"\| \[`(\w+)\.py`\]", (FOLDER / "README.md").read_text()))
    assert listed == scripts


def test_two_machines_give_the_losses_of_one(tmp_path: Path) -> None:
    """Two simulated hosts with a network of their own between them."""
    steps = ["--steps", str(STEPS)]
    apart = on_hosts(resumed, [0, 1], [str(SHARED / "apart"), *steps])
    assert apart.statuses == [0, 0], apart.said
    assert apart.values == run_ranks(resumed, 2, [str(tmp_path / "together"), *steps])


def losses_of_two_machines(rank: int, folder: str) -> str:
    """What the example prints at its end: without torchrun, on one host."""
    names = run_example("two_machines", folder, "--steps", "10")
    return f"rank {rank}: step {names['step'] + 1} loss {names['loss'].item():.6f}"


def test_one_launcher_for_each_machine(tmp_path: Path) -> None:
    """Two launchers, as on two machines, and here on one. (`tests/hosts/test_hosts_example.py` has the machines.)"""
    store = StoreServer(2)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{store.port}", "--rdzv-conf=is_host=0"]
    launcher += ["--local-addr=localhost", str(FOLDER / "two_machines.py"), str(tmp_path / "run"), "--steps", "10"]
    pipe = subprocess.PIPE
    started = [Forked(launcher, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path) for _ in range(2)]
    said = [process.communicate() for process in started]
    store.close()
    assert [process.returncode for process in started] == [0, 0], said
    expected = run_ranks(losses_of_two_machines, 2, str(tmp_path / "reference"))
    assert sorted(out.splitlines()[-1] for out, _ in said) == expected
    assert verify(tmp_path / "run" / "step-10").step == 10
