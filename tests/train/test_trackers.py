"""Observers by name: entry points, module:factory, one that fails; wandb and mlflow offline, if installed."""

import importlib
import logging
import os
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_progress import RECORD
from zeroshard.train import trackers
from zeroshard.train.config import UserError
from zeroshard.train.metrics import Observer, Observers, StepRecord, ValidationRecord, scalars
from zeroshard.train.trackers import BUILT_IN, GROUP, RunInfo, attach, expect_observers

ROOT = Path(__file__).parents[2]


class Collects:
    def __init__(self, about: RunInfo) -> None:
        self.about, self.seen = about, list[Any]()
        KEPT.append(self)

    def on_step(self, record: StepRecord) -> None:
        if record.step == 3:
            raise ConnectionError("the tracker is away")
        self.seen.append(record)

    def on_validation(self, record: ValidationRecord) -> None:
        self.seen.append(record)

    def close(self) -> None:
        self.seen.append("closed")


KEPT: list[Collects] = []


def info(folder: Path) -> RunInfo:
    return RunInfo(folder, {"optimizer.lr": 1e-3, "run.out": ""}, 0)


def record_some(observers: list[Observer], steps: int = 2, first: int = 1) -> None:
    with Observers(observers) as watching:
        for step in range(first, first + steps):
            watching.on_step(replace(RECORD, step=step))
        watching.on_validation(ValidationRecord(first + steps - 1, 1.5))


def test_an_observer_by_entry_point_and_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = "tests.train.test_trackers:Collects"
    monkeypatch.setattr(trackers, "entry_points", lambda group: [EntryPoint("mine", value, group)])
    importlib.import_module("tests.train.test_trackers").KEPT.clear()
    kept = importlib.import_module("tests.train.test_trackers").KEPT
    record_some(attach(f"mine, {value}", info(tmp_path)))
    assert [one.about.folder for one in kept] == [tmp_path] * 2
    for one in kept:
        assert [getattr(seen, "step", seen) for seen in one.seen] == [1, 2, 2, "closed"]
    assert attach("", info(tmp_path)) == []


def test_what_fails_is_told_once_and_gets_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = importlib.import_module("tests.train.test_trackers").KEPT
    kept.clear()
    with caplog.at_level(logging.WARNING, logger="zeroshard"):
        record_some(attach("tests.train.test_trackers:Collects", info(tmp_path)), steps=5)
    assert [getattr(seen, "step", seen) for seen in kept[0].seen] == [1, 2, "closed"]
    assert [line.getMessage() for line in caplog.records] == [
        "run.observers: tests.train.test_trackers:Collects gets no more records: ConnectionError: the tracker is away"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wnadb", "there is no observer 'wnadb': expected wandb, mlflow"),
        ("tests.nowhere:Collects", "cannot be started: ModuleNotFoundError: No module named 'tests.nowhere'"),
        ("tests.train.test_trackers:Absent", "cannot be started: AttributeError"),
        ("a_tracker:Tracker", r"cannot be started: it called sys.exit\(5\): what only a script does"),
    ],
)
def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    """The current directory is searched as well."""
    (tmp_path / "a_tracker.py").write_text("import sys\nsys.exit(5)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserError, match=message):
        attach(name, info(tmp_path))
    with pytest.raises(UserError, match=message):
        expect_observers(f"tests.train.test_trackers:Collects, {name}")


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BUILT_IN:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=rf"{name} is not installed: pip install 'zeroshard\[{name}\]'"):
            expect_observers(name)


def test_the_entry_points_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == BUILT_IN
    assert BUILT_IN.keys() <= project["optional-dependencies"].keys()


def test_numbers_have_names() -> None:
    assert scalars(ValidationRecord(3, 1.0)).keys() == {"validation/loss", "validation/bits_per_byte"}
    assert scalars(RECORD)["train/tokens"] == RECORD.tokens
    assert "train/mfu" not in scalars(RECORD) and "train/mfu" in scalars(replace(RECORD, mfu=0.5))


def test_the_kept_id_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that was killed there left an empty file, and those that continued it had no id."""
    kept = tmp_path / "wandb-id"

    def killed(*files: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            trackers._kept_id(kept, lambda: "first")
    assert not kept.exists()
    kept.touch()  # as that was left by it
    ids = iter(["second", "third"])
    assert [trackers._kept_id(kept, lambda: next(ids)) for _ in range(2)] == ["second"] * 2
    assert kept.read_text() == "second"


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = attach("wandb", info(tmp_path))
    assert wandb.run is not None and wandb.run.config["optimizer.lr"] == 1e-3
    kept_id = (tmp_path / "wandb-id").read_text()
    assert (wandb.run.id, wandb.run.project, wandb.run.name) == (kept_id, "zeroshard", tmp_path.name)
    record_some(run)
    (written,) = tmp_path.glob(f"wandb/offline-run-*-{kept_id}/run-{kept_id}.wandb")
    assert b"train/loss" in written.read_bytes()


@pytest.mark.filterwarnings("ignore")
def test_mlflow_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in a folder; a second session continues the run of the first."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    record_some(attach("mlflow", info(tmp_path)))
    record_some(attach("mlflow", info(tmp_path)), first=3)
    client = mlflow.MlflowClient()
    run = client.get_run((tmp_path / "mlflow-id").read_text())
    assert run.data.params == {"optimizer.lr": "0.001"}
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2, 3, 4]
    assert run.data.metrics["validation/loss"] == 1.5
