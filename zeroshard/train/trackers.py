"""Observers that send a run's metrics to trackers: found by name as entry points, or by module:factory.

A package offers one in its `pyproject.toml`:

    [project.entry-points."zeroshard.observers"]
    mine = "package.module:factory"

`factory(about)` gets a `RunInfo` on rank 0 and returns a `metrics.Observer`. `--run.observers mine` attaches it.
"""

from __future__ import annotations

import importlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from zeroshard.errors import InvalidValue
from zeroshard.io.logger import LOGGER
from zeroshard.io.named import in_one_line, named
from zeroshard.io.whole import write_whole
from zeroshard.train.config import UserError
from zeroshard.train.metrics import Observer, StepRecord, ValidationRecord, scalars

GROUP = "zeroshard.observers"
BUILT_IN = {"wandb": "zeroshard.train.trackers:WandB", "mlflow": "zeroshard.train.trackers:MLflow"}
"""Entry points of this package. Here, too, so that they are found where the package is only on the path."""


@dataclass(frozen=True)
class RunInfo:
    """What an observer is told about the run. `values`: the configuration, "section.name" -> value. `first_step`: steps
    done before this session; an observer may get some steps again that an interrupted session has sent."""

    folder: Path
    values: Mapping[str, Any]
    first_step: int


def attach(names: str, about: RunInfo) -> list[Observer]:
    """The observers of `run.observers`, started. An error in one of them later ends that observer, not the run.

    Raises:
        UserError: a name is unknown, a package is missing, or an observer cannot be started.
    """
    found: list[Observer] = []
    for name in _listed(names):
        with _starting(name):
            found.append(Guarded(f"run.observers: {name}", _factory(name)(about)))
    return found


def expect_observers(names: str) -> None:
    """Check `run.observers` before there is a run.

    Raises:
        UserError: a name is unknown or leads nowhere, or its package is missing.
    """
    for name in _listed(names):
        with _starting(name):
            _factory(name)


def _listed(names: str) -> list[str]:
    return [name for part in names.split(",") if (name := part.strip())]


@contextmanager
def _starting(name: str) -> Iterator[None]:
    try:
        with in_one_line(f"run.observers: {name} cannot be started", passes=UserError):
            yield
    except InvalidValue as error:
        raise UserError(str(error)) from error


def _factory(name: str) -> Callable[[RunInfo], Observer]:
    known = {**BUILT_IN, **{entry.name: entry.value for entry in entry_points(group=GROUP)}}
    value = known.get(name, name)
    module, _, attribute = value.partition(":")
    if not attribute:
        raise UserError(f"run.observers: there is no observer {name!r}: expected {', '.join(known)} or module:factory")
    for package, built_in in BUILT_IN.items():
        if value == built_in:  # it imports its package when it starts, and then the run's folder has been made
            _expect_installed(package)
    factory: Callable[[RunInfo], Observer] = named(module, attribute)
    return factory


def _expect_installed(package: str) -> None:
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(f"run.observers: {package} is not installed: pip install 'zeroshard[{package}]'") from error


class Guarded:
    """An observer beside the run: if it raises, one line says so, and it gets no more records."""

    def __init__(self, name: str, observer: Observer) -> None:
        self._name = name
        self._observer = observer
        self._has_failed = False

    def on_step(self, record: StepRecord) -> None:
        self._call("on_step", record)

    def on_validation(self, record: ValidationRecord) -> None:
        self._call("on_validation", record)

    def close(self) -> None:
        self._has_failed = False  # so that what it has got is sent, or written
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        if self._has_failed:
            return
        try:
            getattr(self._observer, method)(*arguments)
        except Exception as error:
            self._has_failed = True
            LOGGER.warning("%s gets no more records: %s: %s", self._name, type(error).__name__, error)


class WandB:
    """A run of Weights & Biases, which a resumed session continues. Its own environment variables (WANDB_MODE=offline,
    WANDB_PROJECT, ...) hold."""

    def __init__(self, about: RunInfo) -> None:
        import wandb

        self._run = wandb.init(
            id=_kept_id(about.folder / "wandb-id", lambda: uuid.uuid4().hex[:8]),
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "zeroshard"),
            name=about.folder.name,
            dir=str(about.folder),
            config=dict(about.values),
        )

    def on_step(self, record: StepRecord | ValidationRecord) -> None:
        self._run.log(scalars(record), step=record.step)

    on_validation = on_step

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, which a resumed session continues. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME hold."""

    def __init__(self, about: RunInfo) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        params = [Param(name, str(value)) for name, value in about.values.items() if str(value)]
        self._run_id = _kept_id(about.folder / "mlflow-id", lambda: self._new_run(about.folder.name, params))

    def _new_run(self, name: str, params: Sequence[Any]) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "zeroshard")
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        run_id: str = self._client.create_run(number, run_name=name).info.run_id
        self._client.log_batch(run_id, params=params)
        return run_id

    def on_step(self, record: StepRecord | ValidationRecord) -> None:
        now = int(1000 * time.time())
        values = [self._metric(name, value, now, record.step) for name, value in scalars(record).items()]
        self._client.log_batch(self._run_id, metrics=values)

    on_validation = on_step

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _kept_id(path: Path, new: Callable[[], str]) -> str:
    """The id in a file of the run's folder, so that a resumed session continues the tracker's run. An empty file is
    none."""
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    if not kept:
        kept = new()
        write_whole(path, kept)  # a session that is killed here leaves no empty file
    return kept
