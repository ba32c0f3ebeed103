"""Whole runs of the trainer that are killed, or told to stop, at random moments: their checkpoints are good, and
resumed runs give the same bits as a run without interruption."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.failures.common import FULL, SEED, Ended, Ranks
from tests.forked import Forked
from tests.patience import AT_ONCE, wait_until
from zeroshard.checkpoint import Reader, newest_good, steps
from zeroshard.report import read_run
from zeroshard.train.config import Config, resolve
from zeroshard.train.loop import train

pytestmark = pytest.mark.long  # all of them, for one worker, as they share the calm run

STEPS = 12
SETTINGS = {
    "model.layers": 1,
    "model.width": 32,
    "model.heads": 2,
    "model.context": 32,
    "model.dropout": 0.2,
    "batch.sequences": 8,
    "batch.micro_batches": 2,
    "schedule.steps": STEPS,
    "schedule.warmup": 2,
    "evaluation.every": 7,
    "evaluation.windows": 4,
    "evaluation.sample_tokens": 4,
    "parallel.nproc": 2,
    "parallel.precision": "fp16",
    "optimizer.loss_scale": 2.0**18,
    "optimizer.loss_scale_growth": 4,
    "run.report": False,
    "run.save_every": 3,
}


def configuration(text: Path, out: Path, **more: Any) -> Config:
    values = {key.replace("__", "."): value for key, value in more.items()}
    return resolve([], {**SETTINGS, "data.path": str(text), "run.out": str(out), **values})


def training_rank(rank: int, mark: Callable[[], Any], config: Config) -> None:
    """Train as the command does: from the newest good step of the folder, or from the beginning."""
    mark()
    out = Path(config.run.out)
    train(config, resume=out if steps(out) else None, occupied=True)


def trained(config: Config) -> Ended:
    ended = Ranks(training_rank, 2, config).finish()
    assert ended.statuses == [0, 0], ended
    return ended


def history(out: Path) -> list[tuple[int, float, bool, float]]:
    """For each step: number, loss, whether it was applied, loss scale."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(x["step"], x["loss"], x["applied"], x["loss_scale"]) for x in lines if x["kind"] == "step"]


def expect_equal_states(a: Path, b: Path, but: str = "nothing") -> None:
    """Both steps have the same values and tensors, to the bit, except tensors whose names begin with `but`."""
    with Reader(a / f"step-{STEPS}") as first, Reader(b / f"step-{STEPS}") as second:
        names = first.manifest.tensors.keys()
        assert names == second.manifest.tensors.keys()
        assert all(torch.equal(first.tensor(name), second.tensor(name)) for name in names if not name.startswith(but))
        assert first.manifest.values == second.manifest.values


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, float]:
    """A text of which a run reads more than one epoch; a run without interruption; its duration in seconds."""
    folder = tmp_path_factory.mktemp("calm")
    text = folder / "text"
    text.mkdir()
    for index in range(5):
        lines = [f"def function_{index}_{line}(x):\n    return x * {index * line + 1}\n" for line in range(10)]
        (text / f"module_{index:02}.py").write_text("\n".join(lines))
    began = time.monotonic()
    trained(configuration(text, folder / "run"))
    return text, folder / "run", time.monotonic() - began


def test_killed_at_a_random_moment_and_resumed(calm: tuple[Path, Path, float], tmp_path: Path) -> None:
    """With dropout, shuffling, fp16 with overflows, accumulation, background saves, in mid-epoch: a run that was killed
    (one rank, or both) and resumed has the losses and bits of the calm run. 20 trials with the full counts."""
    text, whole, seconds = calm
    applied = [row[2] for row in history(whole)]
    assert not all(applied) and any(applied)
    chosen, resumed_at = random.Random(SEED), []
    trials = 20 if FULL else 1
    while len(resumed_at) < trials:
        out = Path(tempfile.mkdtemp(dir=tmp_path))
        config = configuration(text, out)
        ranks = Ranks(training_rank, 2, config)
        ranks.wait_mark()
        wait_until(lambda out=out: steps(out))  # type: ignore[misc]
        time.sleep(chosen.uniform(0.0, 0.4) * seconds)
        ranks.signal(chosen.choice([[0], [1], [0, 1]]), signal.SIGKILL)
        ended = ranks.finish()
        manifest, problems = newest_good(out)
        assert problems == []
        assert manifest is not None
        if manifest.step == STEPS:
            continue  # after the end
        assert ended.statuses != [0, 0]
        resumed_at.append(manifest.step)
        trained(config)
        assert history(out) == history(whole), resumed_at
        expect_equal_states(out, whole)
    assert len(set(resumed_at)) > 1 or not FULL
    if FULL:
        print(f"\n{trials} of {trials} killed runs went on bit for bit, from the steps {resumed_at}")


def test_another_dropout_is_another_run(calm: tuple[Path, Path, float], tmp_path: Path) -> None:
    """Negative control of the comparison."""
    text, whole, _ = calm
    trained(configuration(text, tmp_path / "other", model__dropout=0.21))
    assert history(tmp_path / "other") != history(whole)
    with pytest.raises(AssertionError):
        expect_equal_states(tmp_path / "other", whole)


def test_told_to_stop_at_a_random_moment(calm: tuple[Path, Path, float], tmp_path: Path) -> None:
    """SIGTERM to one rank or to all: they save the same step and exit with status 0 within `2 * AT_ONCE`. The resumed
    run equals the calm one. 100 trials with the full counts."""
    text, whole, seconds = calm
    chosen, stopped_at = random.Random(SEED), []
    trials = 100 if FULL else 1
    for trial in range(trials):
        out = tmp_path / str(trial)
        config = configuration(text, out, run__save_every=0)
        ranks = Ranks(training_rank, 2, config)
        ranks.wait_mark()
        wait_until((out / "metrics.jsonl").exists)
        time.sleep(chosen.uniform(0.0, 0.6) * seconds)
        ranks.signal(chosen.choice([[0], [1], [0, 1]]), signal.SIGTERM)
        ended = ranks.finish()
        assert ended.statuses == [0, 0], ended
        assert max(ended.seconds) < 2 * AT_ONCE
        manifest, problems = newest_good(out)
        assert manifest is not None and problems == []
        assert list(steps(out)) == [manifest.step]
        assert len(history(out)) == manifest.step
        stopped_at.append(manifest.step)
        if manifest.step < STEPS:
            trained(config)
        assert history(out) == history(whole)
        expect_equal_states(out, whole)
    if FULL:
        print(f"\n{trials} of {trials} stopped runs committed, after {min(stopped_at)} to {max(stopped_at)} steps")


def test_told_twice_they_leave_at_once(calm: tuple[Path, Path, float], tmp_path: Path) -> None:
    text, _, _ = calm
    config = configuration(text, tmp_path / "run", schedule__steps=100_000, run__save_every=0)
    ranks = Ranks(stubborn_rank, 2, config)
    ranks.wait_mark()
    for _ in range(2):  # the second signal comes too soon to count as a second one
        ranks.signal([1], signal.SIGTERM)
        ranks.wait_mark()
    ranks.signal([1], signal.SIGTERM)
    ended = ranks.finish()
    assert ended.statuses == [1, 128 + signal.SIGTERM], ended
    assert (
        "zeroshard: rank 0 exits because rank 1 failed: KeyboardInterrupt: told to stop twice (SIGTERM)" in ended.said
    )
    assert not steps(tmp_path / "run")


def stubborn_rank(rank: int, mark: Callable[[], Any], config: Config) -> None:
    """Train; rank 1 hangs in step 3. It marks this, and each signal that it has survived. The second signal comes at
    the same time as the first one, the third comes later, by the clock of the handler."""
    from zeroshard.train import loop

    take_step, note, told = loop.train_step, loop.Requests._note, []

    def noted(self: loop.Requests, number: int, frame: Any) -> None:
        told.append(number)
        self.SAME_SECONDS = math.inf if len(told) < 3 else -math.inf
        note(self, number, frame)
        mark()

    def endless(run: loop.Run, step: int) -> Any:
        while rank == 1 and step == 3:
            mark()
            time.sleep(60)
        return take_step(run, step)

    loop.train_step, loop.Requests._note = endless, noted
    train(config)


def test_the_launcher_starts_all_ranks_again(calm: tuple[Path, Path, float], tmp_path: Path) -> None:
    """`--max-restarts`: a rank is killed, and the command still ends with the results of the calm run."""
    text, whole, _ = calm
    out = tmp_path / "run"
    options = {**SETTINGS, "data.path": text, "run.out": out, "parallel.max_restarts": 1, "parallel.device": "cpu"}
    arguments = [f"--{key}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", "zeroshard", "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "out", "w+") as said:
        process = Forked(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        wait_until(lambda: steps(out) or process.poll() is not None)
        psutil.Process(process.pid).children()[-1].kill()
        assert process.wait() == 0
        said.seek(0)
        text_said = said.read()
    assert "resumed after step" in text_said, text_said
    assert [start.restarts for start in read_run(out).starts] == [0, 1]
    assert history(out) == history(whole)
    expect_equal_states(out, whole, but="rank/")  # the state of Python's `random`, which the trainer does not use
