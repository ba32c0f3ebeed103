"""The whole trainer on two ranks with a tiny model: every plan, resuming, and the written files."""

import gzip
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import zeroshard
from tests.checkpoint.faults import disk_with
from tests.grids import EVERYTHING
from tests.patience import AT_ONCE
from zeroshard.checkpoint import Reader, files, steps
from zeroshard.cli.main import run as run_command
from zeroshard.cli.runs import saved_run
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.shared_transport import SharedTransport
from zeroshard.failures import rank_watch
from zeroshard.io.logger import warnings_on_stderr
from zeroshard.testing import run_ranks
from zeroshard.train import loop, telling
from zeroshard.train.config import Config, ParallelConfig, ScheduleConfig, UserError, resolve, value_of, with_values
from zeroshard.train.language import Language, build_language
from zeroshard.train.loop import Outcome, process_memory, seed_of, train
from zeroshard.train.planned import Place, configuration_of, language_of
from zeroshard.train.ranks import joined
from zeroshard.train.resume import Found, Position
from zeroshard.train.run import learning_rate_factor, shard_model
from zeroshard.train.tokenizer import train_tokenizer

TINY = {
    "model.layers": 1,
    "model.width": 32,
    "model.heads": 2,
    "model.context": 32,
    "batch.sequences": 12,
    "optimizer.lr": 1e-2,
    "schedule.steps": 6,
    "schedule.warmup": 2,
    "evaluation.every": 3,
    "evaluation.windows": 6,
    "evaluation.sample_tokens": 4,
    "run.report": False,
}


FEW: dict[str, Any] = {"batch__sequences": 4}
"""For runs in 16 bits, which take a CPU several times as long as those in fp32."""


def tiny(text: Path, out: Path, **overrides: object) -> Config:
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    return resolve([], {**TINY, "parallel.nproc": 2, "data.path": str(text), "run.out": str(out), **values})


def train_rank(rank: int, config: Config, resume: Path | None = None, stop_at: int | None = None) -> Outcome:
    return train(config, resume=resume, stop_at=stop_at)


def train_in_turn(rank: int, runs: Sequence[tuple[Any, ...]]) -> list[Outcome]:
    """Several runs on the same ranks: (config, resume, stop_at) of each."""
    return [train_rank(rank, *run) for run in runs]


@pytest.fixture(scope="module")
def plain(shared_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `tiny` for tests to compare with, or to resume from an earlier step of it (`copy_until`)."""
    out = tmp_path_factory.mktemp("plain") / "run"
    run_ranks(train_rank, 2, of_plain(shared_text, out))
    return out


def of_plain(text: Path, out: Path) -> Config:
    """The configuration of `plain`: of six steps, the third and the last two stay."""
    return tiny(text, out, run__save_every=1, run__keep_last=2, run__keep_every=3)


def copy_until(step: int, out: Path, copy: Path) -> Path:
    """A copy of a run without its later checkpoints, as if it had crashed after many more steps."""
    shutil.copytree(out, copy)
    for number, folder in steps(copy).items():
        if number > step:
            shutil.rmtree(folder)
    assert step in steps(copy)
    return copy


def rows(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out, "step")]


def newest(out: Path) -> Reader:
    return Reader(list(steps(out).values())[-1])


def equal_states(a: Path, b: Path) -> bool:
    """Whether all tensors of the newest steps are equal, except those of single ranks."""
    return equal_steps(list(steps(a).values())[-1], list(steps(b).values())[-1])


def equal_steps(a: Path, b: Path) -> bool:
    with Reader(a) as first, Reader(b) as second:
        names = [name for name in first.manifest.tensors if not name.startswith("rank/")]
        same_names = names == [name for name in second.manifest.tensors if not name.startswith("rank/")]
        return same_names and all(torch.equal(first.tensor(name), second.tensor(name)) for name in names)


def updates_of(out: Path) -> int:
    with newest(out) as reader:
        return int(reader.manifest.values["extra"]["run"]["updates"])


def scaler_of(out: Path) -> Any:
    with newest(out) as reader:
        return reader.manifest.values["optimizers"][0]["loss_scale"]


def test_all_plans_learn_and_agree_bit_for_bit(shared_text: Path, tmp_path: Path) -> None:
    plans = ("ddp", "zero1", "zero2", "zero3") if EVERYTHING else ("ddp", "zero3")
    options: dict[str, dict[str, Any]] = {plan: {"parallel__plan": plan, "run__timeline": 3} for plan in plans}
    options["reduced every time"] = {"batch__reduce_every_micro_batch": True}
    runs = [(tiny(shared_text, tmp_path / out, batch__micro_batches=2, **of),) for out, of in options.items()]
    outcomes = run_ranks(train_in_turn, 2, runs)
    assert outcomes[0] == outcomes[1]
    assert [outcome.step for outcome in outcomes[0]] == [6] * len(runs)
    found = losses(tmp_path / "ddp")
    assert found[0] == pytest.approx(math.log(256), abs=0.05)
    assert found[-1] < found[0] - 0.5
    for plan in plans:
        held = rows(tmp_path / plan, "step")
        assert {row["engine_bytes"] for row in held} == {held[0]["planned_bytes"]}, plan
        for rank in (0, 1):
            trace = json.loads(gzip.decompress((tmp_path / plan / f"timeline-{rank}.json.gz").read_bytes()))
            assert {one["pid"] for one in trace["traceEvents"]} == {rank}
            assert sum(one["name"] == "step: agree" for one in trace["traceEvents"]) == 2  # to clip, and to step
    for plan in plans[1:]:
        assert losses(tmp_path / plan) == found
        assert equal_states(tmp_path / plan, tmp_path / "ddp")
        assert rows(tmp_path / plan, "validation")[-1]["loss"] == rows(tmp_path / "ddp", "validation")[-1]["loss"]
        assert (tmp_path / plan / "sample.txt").read_text() == (tmp_path / "ddp" / "sample.txt").read_text()
    assert losses(tmp_path / "reduced every time") == pytest.approx(found, **ROUNDING)


ROUNDING = {"abs": 2e-4}
"""Where sums are in another order. With other data losses would differ by 1e-2."""


def test_the_global_batch_does_not_depend_on_ranks_or_micro_batches(
    plain: Path, shared_text: Path, tmp_path: Path
) -> None:
    """Neither from the beginning, nor after a resume into another folder, under another plan."""
    expected = losses(plain)
    run_ranks(train_rank, 1, tiny(shared_text, tmp_path / "one", parallel__nproc=1))
    begun = tiny(shared_text, tmp_path / "three", parallel__nproc=3, batch__micro_batches=2)
    resumed = tiny(shared_text, tmp_path / "resumed", parallel__nproc=3, parallel__plan="zero1")
    run_ranks(train_in_turn, 3, [(begun,), (resumed, copy_until(3, plain, tmp_path / "two"))])
    assert losses(tmp_path / "one") == pytest.approx(expected, **ROUNDING)
    assert losses(tmp_path / "three") == pytest.approx(expected, **ROUNDING)
    assert [row["step"] for row in rows(tmp_path / "resumed", "step")] == [4, 5, 6]
    assert losses(tmp_path / "resumed") == pytest.approx(expected[3:], **ROUNDING)


RESUMED = [("zero2", "bf16"), ("zero3", "bf16-remainder"), *[("zero1", "fp32"), ("zero3", "fp16")] * EVERYTHING]
"""Plans and precisions. The plan and precision of `tiny`, ZERO3 and fp32, are those of
`test_a_crashed_run_goes_on_from_its_last_regular_save`; fp16 is that of `skipping`."""


@pytest.fixture(scope="module")
def resumed(shared_text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    """For each of `RESUMED`, a whole run, and one in two parts. Also the outcomes of the first parts."""
    folder, runs = tmp_path_factory.mktemp("resumed"), []
    for plan, precision in RESUMED:
        whole, parts = (
            tiny(
                shared_text,
                folder / f"{plan}-{precision}" / out,
                parallel__plan=plan,
                parallel__precision=precision,
                schedule__steps=4,
                **FEW,
            )
            for out in ("whole", "parts")
        )
        runs += [(whole,), (parts, None, 2), (parts, Path(parts.run.out))]
    return folder, run_ranks(train_in_turn, 2, runs)[0][1::3]


@pytest.mark.parametrize(("plan", "precision"), RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(resumed: tuple[Path, list[Outcome]], plan: str, precision: str) -> None:
    folder, outcomes = resumed
    stopped = outcomes[RESUMED.index((plan, precision))]
    whole, parts = (folder / f"{plan}-{precision}" / out for out in ("whole", "parts"))
    assert (stopped.step, stopped.validation_loss) == (2, None)
    assert losses(parts) == losses(whole)
    assert rows(parts, "validation") == rows(whole, "validation")
    assert equal_states(parts, whole)
    applied = [row for out in (parts, whole) for row in rows(out, "step") if row["applied"]]
    assert {row["engine_bytes"] for row in applied} == {applied[0]["planned_bytes"]}


def skipping(text: Path, out: Path, **overrides: object) -> Config:
    """An fp16 run whose first gradients overflow at the initial loss scale, and later ones after the scale has
    grown."""
    many = {
        **FEW,
        "model__layers": 2,
        "schedule__steps": 8,
        "evaluation__every": 5,
        "optimizer__loss_scale": 2.0**20,
        "optimizer__loss_scale_growth": 3,
    }
    return tiny(text, out, parallel__precision="fp16", **{**many, **overrides})


MIDDLE = 6
"""A step in the middle of a growth interval, in `skipping`: the two before it were applied, the one before them not."""


@pytest.fixture(scope="module")
def skipped(shared_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of `skipping`: under ZERO3, with each step saved, and under DDP."""
    folder = tmp_path_factory.mktemp("skipped")
    saving = skipping(shared_text, folder / "zero3", run__save_every=1, run__keep_every=1)
    run_ranks(train_in_turn, 2, [(saving,), (skipping(shared_text, folder / "ddp", parallel__plan="ddp"),)])
    return folder


def test_a_skipped_step_moves_neither_weights_nor_schedule(skipped: Path, shared_text: Path) -> None:
    config = skipping(shared_text, skipped / "zero3")
    taken = rows(skipped / "zero3", "step")
    applied = [row["applied"] for row in taken]
    assert not all(applied[applied.index(True) :])  # also one after growth
    updates = list(itertools.accumulate(applied, initial=0))
    lrs = [row["lr"] for row in taken]
    assert lrs == [1e-2 * learning_rate_factor(done, config.schedule) for done in updates[:-1]]
    assert lrs != [1e-2 * learning_rate_factor(step, config.schedule) for step in range(8)]
    assert updates_of(skipped / "zero3") == updates[-1]
    for row, following in itertools.pairwise(taken):
        assert row["applied"] or following["loss_scale"] == row["loss_scale"] / 2
        assert row["applied"] == (row["grad_norm"] is not None)
    assert applied[:3] == [False, False, True]
    saved = steps(skipped / "zero3")
    assert equal_steps(saved[1], saved[2])
    assert not equal_steps(saved[2], saved[3])


def test_the_loss_scale_is_that_of_fp16_or_the_one_asked_for(shared_text: Path, tmp_path: Path) -> None:
    """A loss scale that is a power of two changes no bit of bf16 training. An fp16 run that resumes a checkpoint
    without a loss scale starts with the initial scale."""
    options: dict[str, dict[str, Any]] = {"bf16": {}, "scaled": {"optimizer__loss_scale": 1024.0}}
    short = {**FEW, "schedule__steps": 3}
    bf16 = {
        name: tiny(shared_text, tmp_path / name, parallel__precision="bf16", **short, **options[name])
        for name in options
    }
    fp16 = tiny(shared_text, tmp_path / "fp16", parallel__precision="fp16", **short)
    runs = [*((config, None, 2) for config in bf16.values()), (fp16, tmp_path / "bf16")]
    run_ranks(train_in_turn, 2, runs)
    assert [row["loss_scale"] for row in rows(tmp_path / "bf16", "step")] == [1.0] * 2
    assert [row["loss_scale"] for row in rows(tmp_path / "scaled", "step")] == [1024.0] * 2
    assert losses(tmp_path / "scaled") == losses(tmp_path / "bf16")
    assert equal_states(tmp_path / "scaled", tmp_path / "bf16")
    assert [row["loss_scale"] for row in rows(tmp_path / "fp16", "step")] == [65536.0]


def test_plans_skip_the_same_steps(skipped: Path) -> None:
    assert equal_runs(skipped / "ddp", skipped / "zero3")


def equal_runs(a: Path, b: Path) -> bool:
    """Whether losses, norms, rates, scales, skipped steps and the last state are equal."""
    names = ("step", "loss", "lr", "grad_norm", "applied", "loss_scale")
    first, second = ([{name: row[name] for name in names} for row in rows(out, "step")] for out in (a, b))
    validations = rows(a, "validation") == rows(b, "validation")
    scalers = scaler_of(a) == scaler_of(b)
    return first == second and validations and scalers and equal_states(a, b)


def resumed_with(rank: int, config: Config, lost: str | None) -> Outcome:
    """Resume in the run's folder, as if the checkpoint did not contain `lost`."""
    inside = loop.start_run.__globals__
    load_run = inside["load_run"]

    def partly(handle: zeroshard.Handle, optimizer: zeroshard.ShardedOptimizer, found: Found) -> Position:
        fresh = optimizer.scaling.state_dict()
        position: Position = load_run(handle, optimizer, found)
        saved = optimizer.scaling.state_dict()
        match lost:
            case "the scaler's state":
                optimizer.scaling.load_state_dict(fresh)
            case "its growth tracker":
                assert saved["growth_tracker"] > 0
                optimizer.scaling.load_state_dict({**saved, "growth_tracker": 0})
            case "the number of updates":
                position.updates = found.step
        return position

    inside["load_run"] = partly  # this process is a fork: nobody else sees it
    try:
        return train(config, resume=Path(config.run.out))
    finally:
        inside["load_run"] = load_run


def resumed_in_turn(rank: int, runs: Sequence[tuple[Config, str | None]]) -> None:
    for config, lost in runs:
        resumed_with(rank, config, lost)


def test_a_run_resumed_after_skipped_steps_is_the_uninterrupted_one(
    skipped: Path, shared_text: Path, tmp_path: Path
) -> None:
    """Resumed right after the first skipped step, and after some applied steps in the middle of a growth interval;
    under the same plan and under another one. The last three runs show that each part of the saved state is needed."""
    whole = skipped / "zero3"
    assert [row["applied"] for row in rows(whole, "step")][MIDDLE - 3 : MIDDLE] == [False, True, True]
    cases: list[tuple[int, str, str | None]] = [
        (1, "zero3", None),
        (MIDDLE, "zero1", None),
        (MIDDLE, "zero3", "the scaler's state"),
        (MIDDLE, "zero3", "its growth tracker"),
        (MIDDLE, "zero3", "the number of updates"),
    ]
    runs = []
    for number, (step, plan, lost) in enumerate(cases):
        out = copy_until(step, whole, tmp_path / str(number))
        runs.append((skipping(shared_text, out, parallel__plan=plan), lost))
    run_ranks(resumed_in_turn, 2, runs)
    for number, (step, plan, lost) in enumerate(cases):
        assert equal_runs(tmp_path / str(number), whole) == (lost is None), f"{step}, {plan}, without {lost}"


def test_what_is_lost_between_two_saves_is_taken_out_of_the_metrics(
    plain: Path, shared_text: Path, tmp_path: Path
) -> None:
    out = copy_until(3, plain, tmp_path / "run")
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "step": 4, "loss": 99.0}\n{"kind": "st')
    run_ranks(train_rank, 2, tiny(shared_text, out), out)
    assert [row["step"] for row in rows(out, "step")] == list(range(1, 7))
    assert losses(out) == losses(plain)
    walls = [row["wall_seconds"] for row in rows(out, "step")]
    assert walls == sorted(walls), "the time of the first session counts, too"


def test_a_resumed_run_with_another_learning_rate_and_other_batches(
    plain: Path, shared_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another learning rate was ignored in silence: the peak of the saved run held. Tokens of all steps were counted
    as if each had read the batch of the last session. A timeline of a step that is done, or comes after the last one,
    is not written, and a line says so. A byte that is not UTF-8 in a line of the metrics raised."""
    before = tiny(shared_text, plain).tokens_per_step
    no_timelines = {
        2: "NO timeline in this session: step 2 of run.timeline is done already",
        99: "NO timeline: step 99 of run.timeline comes after the last step, 6",
    }
    for number, (lines, timeline) in enumerate(zip((slice(None), slice(0)), no_timelines, strict=True)):
        out = copy_until(3, plain, tmp_path / str(number))
        kept = (out / "metrics.jsonl").read_text().splitlines(True)[lines]
        (out / "metrics.jsonl").write_bytes(b'{"kind": "\xff"\n' + "".join(kept).encode())
        sequences = 2 * tiny(shared_text, out).batch.sequences
        config = tiny(shared_text, out, batch__sequences=sequences, run__timeline=timeline, optimizer__lr=3e-2)
        run_ranks(train_rank, 2, config, out)
        rates = [row["lr"] for row in rows(out, "step") if row["step"] > 3]
        assert rates == [3e-2 * learning_rate_factor(updates, config.schedule) for updates in (3, 4, 5)]
        assert config.tokens_per_step == 2 * before
        recorded = 3 * before if kept else 3 * config.tokens_per_step
        read = [row["tokens"] for row in rows(out, "step") if row["step"] > 3]
        assert read == [recorded + number * config.tokens_per_step for number in (1, 2, 3)]
        assert no_timelines[timeline] in capfd.readouterr().out


def test_what_a_run_leaves(plain: Path, shared_text: Path) -> None:
    out, config = plain, of_plain(shared_text, plain)
    assert {path.name for path in out.iterdir()} >= {"config.toml", "metrics.jsonl", "step-6", "latest", "sample.txt"}
    assert list(steps(out)) == [3, 5, 6]
    assert not [path for path in out.iterdir() if "tmp" in path.name]
    assert resolve([out / "config.toml"], {}) == config
    first = rows(out, "step")[0]
    assert first["bits_per_byte"] == pytest.approx(first["loss"] / math.log(2))
    assert first["engine_bytes"] == first["planned_bytes"] > 0
    assert not list(out.glob("timeline*"))
    assert 0 <= first["communication_share"] <= 1
    assert [row["step"] for row in rows(out, "validation")] == [3, 6]
    tokens = config.batch.sequences * config.model.context
    assert [row["tokens"] for row in rows(out, "step")] == [tokens * step for step in range(1, 7)]
    for row, later in itertools.pairwise(rows(out, "step")):
        assert 0 < row["data_seconds"] < row["seconds"] <= row["wall_seconds"] < later["wall_seconds"]
        assert row["flops_per_second"] > row["tokens_per_second"] > 0 and row["mfu"] is None
    with newest(out) as reader:
        assert {"model/blocks.0.mlp.down.weight", "optimizer/exp_avg/blocks.0.mlp.down.weight"} <= {
            *reader.manifest.tensors
        }


def test_the_engine_holds_what_the_page_of_the_run_says(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The records of a real run: a start, and bytes by kind that equal the plan. The page has them."""
    out = plain
    (start,) = rows(out, "start")
    assert (start["step"], start["ranks"], start["restarts"]) == (0, 2, 0)
    assert [row["step"] for row in rows(out, "memory")] == [1, 2]
    assert run_command(["report", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'report.html'}\n"
    compared = re.findall(r"<td>([^<]*)</td></tr>", (out / "report.html").read_text().partition("at most: planned")[2])
    until = compared.index(next(cell for cell in compared if cell != "equal"))
    assert until >= 5, "planned and measured differ"


@pytest.mark.by_gloo
def test_the_plan_knows_how_the_ranks_exchange(
    shared_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks on several machines send messages. The plan was once that of ranks that read each other's memory, and the
    run warned about a difference."""
    monkeypatch.setattr(Collectives, "_try_to_share", lambda self: None)
    config = tiny(shared_text, tmp_path, parallel__plan="zero2", schedule__steps=2, model__layers=2)
    run_ranks(train_rank, 2, config)
    assert rows(tmp_path, "start")[0]["transport"] == "pairwise"
    held = {row["engine_bytes"] for row in rows(tmp_path, "step")}
    assert held == {row["planned_bytes"] for row in rows(tmp_path, "step")}
    run = saved_run(tmp_path)
    language = language_of(run.config)
    for place in (run.place, replace(run.place, transport="shared")):
        planned = zeroshard.plan(language.model, configuration_of(run.config, language, place)).at_rest.sum
        assert (held == {planned}) == (place.transport == "pairwise"), place
    assert run_command(["plan", "--compare", str(tmp_path)]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("the engine, between steps"))
    assert row.split()[-2:] == ["0", "B"], row


def forwards_of_a_step(rank: int, text: Path, recompute: bool) -> tuple[int, bool]:
    """How often a block runs in a step, and whether it is compiled (unless it is recomputed)."""
    config = tiny(text, Path(), parallel__recompute=recompute, parallel__compile=not recompute)
    language = build_language(config.model, 256)
    shard_model(config, language)
    block, calls = language.model.get_submodule("blocks.0"), []
    compiled, block._compiled_call_impl = block._compiled_call_impl, None  # not run: it takes half a minute
    block.get_submodule("attention").register_forward_hook(lambda *_: calls.append(1))
    tokens = torch.zeros(2, config.model.context, dtype=torch.long)
    language.loss(tokens, tokens).backward()
    return len(calls), compiled is not None


COMPILES = pytest.mark.filterwarnings("ignore")  # the compiler warns of itself


@COMPILES
def test_blocks_are_recomputed_and_compiled_as_asked(plain: Path, shared_text: Path, tmp_path: Path) -> None:
    """No bit of a run changes. The plan has the memory of a run that recomputes."""
    assert run_ranks(forwards_of_a_step, 1, shared_text, True) == [(2, False)]
    assert run_ranks(forwards_of_a_step, 1, shared_text, False) == [(1, True)], "control"
    config = tiny(shared_text, tmp_path / "run", parallel__recompute=True)
    run_ranks(train_rank, 2, config)
    assert losses(tmp_path / "run") == losses(plain)
    language, place = language_of(config), Place(2, "cpu")
    saved = {
        recompute: zeroshard.plan(
            language.model, configuration_of(with_values(config, parallel={"recompute": recompute}), language, place)
        ).trace.saved
        for recompute in (False, True)
    }
    assert saved[True] < 0.5 * saved[False]


@COMPILES
@pytest.mark.skipif(not EVERYTHING, reason="compiles for a minute; ZEROSHARD_TEST_EVERYTHING=1 runs it")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_run_learns_the_same(plain: Path, shared_text: Path, tmp_path: Path, recompute: bool) -> None:
    config = tiny(shared_text, tmp_path / "run", parallel__compile=True, parallel__recompute=recompute)
    run_ranks(train_rank, 2, config)
    assert losses(tmp_path / "run") == pytest.approx(losses(plain), rel=1e-4)  # fused kernels round elsewhere


def test_a_report_that_cannot_be_written_does_not_fail_the_run(plain: Path) -> None:
    class Fake:
        folder = plain / "nowhere"
        config = resolve([plain / "config.toml"], {})
        ranks = type("Ranks", (), {"world_size": 2, "device": torch.device("cpu")})
        collectives = SimpleNamespace(transport=SharedTransport)
        handle = SimpleNamespace(engine=SimpleNamespace(collectives=collectives))

    line = telling.written_report(Fake())  # type: ignore[arg-type]
    assert line.startswith("NO report was written (InvalidValue: ") and str(Fake.folder) in line
    Fake.folder = plain
    assert telling.written_report(Fake()) == f"report {Fake.folder / 'report.html'}"  # type: ignore[arg-type]


def crashing_rank(rank: int, config: Config) -> int:
    take_step = loop.train_step

    def crashing(run: loop.Run, step: int) -> Any:
        if step == 5:
            run.handle.finish_background()  # waits for the save after step 4
            raise ZeroDivisionError
        return take_step(run, step)

    loop.train_step = crashing  # this process is a fork: nobody else sees it
    with pytest.raises(ZeroDivisionError):
        train(config)
    return newest(Path(config.run.out)).manifest.step


def test_a_crashed_run_goes_on_from_its_last_regular_save(plain: Path, shared_text: Path, tmp_path: Path) -> None:
    crashed = tiny(shared_text, tmp_path / "crashed", run__save_every=2)
    assert run_ranks(crashing_rank, 2, crashed) == [4, 4]
    assert len(losses(tmp_path / "crashed")) == 5
    run_ranks(train_rank, 2, crashed, tmp_path / "crashed")
    assert losses(tmp_path / "crashed") == losses(plain)
    assert rows(tmp_path / "crashed", "validation") == rows(plain, "validation")
    assert equal_states(tmp_path / "crashed", plain)


def interrupted_rank(rank: int, config: Config) -> Outcome:
    """Rank 1 alone gets a signal, in the middle of a step."""
    take_step = loop.train_step

    def signalled(run: loop.Run, step: int) -> Any:
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not steps(run.folder)
        if step == 2:
            run.handle.finish_background()
            assert list(steps(run.folder)) == [2]
        return take_step(run, step)

    loop.train_step = signalled  # this process is a fork: nobody else sees it
    outcome, out = train(config), Path(config.run.out)
    assert len(rows(out, "step")) == 3
    loop.train_step = take_step
    train(config, resume=out)
    return outcome


def test_signals_to_one_rank_save_and_stop_all_after_the_step(
    plain: Path, shared_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes = run_ranks(interrupted_rank, 2, tiny(shared_text, tmp_path / "a run"))
    assert [outcome.step for outcome in outcomes] == [3, 3]
    assert losses(tmp_path / "a run") == losses(plain)
    assert f"continue with: zeroshard train --resume '{tmp_path}/a run'\n" in capfd.readouterr().out


def damage(step: Path) -> None:
    file = step / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def refused(rank: int, config: Config, resume: Path | None = None) -> str:
    try:
        train(config, resume=resume)
    except UserError as error:
        return str(error)
    return "not refused"


def test_refusals_are_the_same_on_every_rank(
    plain: Path, shared_text: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they leave no folder: a tracker that was not installed was refused beside the `config.toml` of a run. A run
    in the folder of its text could not be resumed: what it had written there was another text."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    copy_until(3, plain, tmp_path / "run")
    damaged = copy_until(5, plain, tmp_path / "damaged")
    for step in steps(damaged).values():
        damage(step)
    copy_until(3, plain, tmp_path / "a run")
    (tmp_path / "other.txt").write_text("other text " * 5000)
    train_tokenizer([b"a tokenizer that the saved run has not used"], 260).save(str(tmp_path / "tokenizer.json"))
    other_tokens = tiny(shared_text, tmp_path / "x", data__tokenizer=str(tmp_path / "tokenizer.json"))
    cases: list[tuple[Config, Path | None, str]] = [
        (tiny(tmp_path / "absent", tmp_path / "x"), None, "no text at"),
        (tiny(shared_text, tmp_path / "run"), None, "already holds a run: continue it with --resume"),
        (tiny(shared_text, tmp_path / "x"), tmp_path / "absent", "nothing to resume in"),
        (tiny(shared_text, tmp_path / "a run"), None, f"continue it with --resume '{tmp_path}/a run'"),
        (tiny(tmp_path / "other.txt", tmp_path / "x"), tmp_path / "run", "the text, or its tokenizer, is not the one"),
        (other_tokens, tmp_path / "run", "pass the same --data, --data.tokenizer, "),
        (
            tiny(shared_text, tmp_path / "x", model__layers=2),
            tmp_path / "run",
            "does not fit: missing: blocks.1.",
        ),
        (tiny(shared_text, tmp_path / "x", schedule__steps=3), tmp_path / "run", "has done 3 steps: expected --steps"),
        (tiny(shared_text, tmp_path / "x", evaluation__windows=1), None, "expected at least one for each rank"),
        (tiny(shared_text, tmp_path / "x", optimizer__loss_scale=2.0**30), None, "expected floor <= init <= max_scale"),
        (tiny(shared_text, tmp_path / "run" / "config.toml"), None, "config.toml is a file: expected a folder"),
        (tiny(shared_text, tmp_path / "x", run__observers="wnadb"), None, "there is no observer 'wnadb'"),
        (tiny(shared_text, tmp_path / "x", run__observers="wandb"), None, "wandb is not installed: pip install"),
        (tiny(text_folder, text_folder / "runs"), None, "/text/runs lies in the text, --data"),
        (
            tiny(shared_text, tmp_path / "mine"),
            None,
            "/mine/config.toml is of no run, and this one would write its own",
        ),
        (tiny(shared_text, damaged), damaged, "no good step in"),
    ]
    (tmp_path / "mine").mkdir()
    mine = tmp_path / "mine" / "config.toml"
    mine.write_text("# my own\n[optimizer]\nlr = 0.01\n")
    for config, resume, message in cases:
        found = run_ranks(refused, 2, config, resume)
        assert message in found[0]
        assert found[0] == found[1]
    assert "step-3" in found[0] and "step-5" in found[0]
    assert os.listdir(tmp_path / "mine") == ["config.toml"] and mine.read_text().startswith("# my own")
    assert not (tmp_path / "x").exists()


def refused_beside_others(rank: int, configs: Sequence[Config]) -> str:
    return refused(rank, configs[rank])


def test_ranks_with_different_configurations_are_refused(shared_text: Path, text_folder: Path, tmp_path: Path) -> None:
    """A file that one host has in another version: ranks with another seed or batch trained on, and read sequences
    that others had read; a clip or a schedule was found in the first step, an interval of saves in a deadlock."""
    config = tiny(shared_text, tmp_path / "x")
    for key, value in {"run.seed": 1, "batch.sequences": 24, "model.dropout": 0.5, "run.save_every": 2}.items():
        section, _, name = key.partition(".")
        other = with_values(config, **{section: {name: value}})
        found = run_ranks(refused_beside_others, 2, [config, other])
        assert found == [found[0]] * 2
        assert found[0].startswith(f"rank 1: {key} = {value}, and {value_of(config, key)} on rank 0: start all ranks")
    assert not (tmp_path / "x").exists()
    with_paths = with_values(config, run={"out": str(tmp_path / "y"), "log_every": 3}, data={"path": str(text_folder)})
    configs = [with_values(one, schedule={"steps": 1}) for one in (config, with_paths)]
    assert run_ranks(refused_beside_others, 2, configs) == ["not refused"] * 2
    assert steps(tmp_path / "x") and not (tmp_path / "y").exists()


def resumed_twice(rank: int, config: Config) -> list[int]:
    """Each gives the folder free at its end, also in one process. The last has nothing to do (and saved the state as
    that of step 2)."""
    out = Path(config.run.out)
    return [train(config, resume=out, stop_at=step).step for step in (4, 5, 2)]


def test_a_folder_in_which_another_process_trains_is_refused(plain: Path, shared_text: Path, tmp_path: Path) -> None:
    """A job that was started again while it still ran wrote its steps into the same folder, and pruned."""
    out = copy_until(3, plain, tmp_path / "run")
    config, before = tiny(shared_text, out), sorted(os.listdir(out))
    lock = files.lock_folder(out)
    assert lock is not None
    for resume in (out, None):
        for said in run_ranks(refused, 2, config, resume):
            assert "is in use: another process is training there" in said
    assert sorted(os.listdir(out)) == before
    files.unlock(lock)
    assert run_ranks(resumed_twice, 2, config) == [[4, 5, 5], [4, 5, 5]]


def test_a_damaged_step_is_passed_over_aloud(
    plain: Path, shared_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = copy_until(5, plain, tmp_path / "run")
    damage(out / "step-5")
    run_ranks(train_rank, 2, tiny(shared_text, out), out)
    said = capfd.readouterr().out
    assert f"SKIPPED a damaged checkpoint: {out}/step-5/rank-00001.safetensors is damaged" in said
    assert f"resumed after step 3 of {out}" in said
    assert losses(out) == losses(plain)


def refused_twice(rank: int, bad: Sequence[Config], good: Config) -> tuple[list[str], int]:
    return [refused(rank, config) for config in bad], train(good).step


def test_a_refused_run_leaves_the_process_group_as_it_was(shared_text: Path, tmp_path: Path) -> None:
    """The connections of the group were closed: the next run failed with "Application timeout caused pair closure"."""
    bad = [tiny(shared_text, tmp_path / "a", batch__sequences=size) for size in (3, 10**6)]
    good = tiny(shared_text, tmp_path / "run", schedule__steps=1)
    for told, step in run_ranks(refused_twice, 2, [bad[0], bad[1], bad[0]], good):
        assert "batch.sequences" in told[0] and "use more text" in told[1] and told[2] == told[0], told
        assert step == 1


def meets_a_full_disk(rank: int, config: Config) -> str:
    rank_watch.GRACE_SECONDS = AT_ONCE  # so that each rank reports the error itself, even on a busy machine
    with disk_with(free=10_000) if rank == 1 else nullcontext():
        try:
            train(config)
        except UserError as error:
            return str(error)
    return "no error"


def test_a_save_that_fails_on_one_rank_is_known_to_all(shared_text: Path, tmp_path: Path) -> None:
    found = run_ranks(meets_a_full_disk, 2, tiny(shared_text, tmp_path / "run"))
    assert found[0] == found[1]
    assert "No space left on device" in found[0]
    assert not steps(tmp_path / "run")


def with_a_loss_of_nan(rank: int, config: Config, resume: Path | None) -> str:
    """In the fourth step, on rank 1."""
    take_step, loss_of = loop.train_step, Language.loss

    def stepping(run: loop.Run, step: int) -> Any:
        factor = math.nan if step == 3 and rank == 1 else 1.0
        Language.loss = lambda *arguments: factor * loss_of(*arguments)  # type: ignore[method-assign]
        return take_step(run, step)

    loop.train_step = stepping  # this process is a fork: nobody else sees it
    return refused(rank, config, resume)


def test_a_gradient_that_is_not_finite_does_not_cost_the_steps_before_it(
    plain: Path, shared_text: Path, tmp_path: Path
) -> None:
    """The run ended without a save."""
    config = tiny(shared_text, tmp_path / "run")
    found = run_ranks(with_a_loss_of_nan, 2, config, None)
    assert found == [found[0]] * 2 and found[0].startswith("step 4: the gradient was not finite: ")
    assert found[0].endswith(
        " on rank 1. Nothing has been updated. Step 3 is saved: continue it with another --lr, --seed or --precision"
    )
    assert [*steps(tmp_path / "run")] == [3]
    (again,) = set(run_ranks(with_a_loss_of_nan, 2, config, tmp_path / "run"))
    assert again == found[0] and [*steps(tmp_path / "run")] == [3]
    run_ranks(train_rank, 2, config, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(plain)


def cannot_prune(rank: int, config: Config) -> Outcome:
    """Not before step 4."""
    prune = zeroshard.prune

    def refuses(folder: Path, **options: Any) -> None:
        if max(steps(folder), default=0) < 4:
            raise OSError(39, "Directory not empty", str(folder / "step-1"))
        prune(folder, **options)

    zeroshard.prune = refuses  # type: ignore[assignment]  # this process is a fork: nobody else sees it
    return train(config)


def test_a_step_that_cannot_be_removed_does_not_end_the_run(
    plain: Path, shared_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings_on_stderr():
        run_ranks(cannot_prune, 2, tiny(shared_text, tmp_path / "run", run__save_every=1))
    assert "/run/step-1: Directory not empty\n" in capfd.readouterr().err.partition("warning: old steps are not ")[2]
    assert sorted(steps(tmp_path / "run")) == [5, 6] and losses(tmp_path / "run") == losses(plain)


def test_a_timeline_and_a_sample_that_cannot_be_written_do_not_end_the_run(
    shared_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "timeline-1.json.gz").mkdir(), (tmp_path / "sample.txt").mkdir()
    with warnings_on_stderr():
        run_ranks(train_rank, 2, tiny(shared_text, tmp_path, schedule__steps=2, run__timeline=1))
    told = capfd.readouterr().err
    assert f"NO timeline of rank 1 was written: {tmp_path}/timeline-1.json.gz is a folder" in told
    assert told.count("NO sample.txt was written") == 1 and f"{tmp_path}/sample.txt is a folder" in told
    assert (tmp_path / "timeline-0.json.gz").is_file() and [*steps(tmp_path)] == [2]


def meets_a_full_disk_for_a_while(rank: int, config: Config) -> Outcome:
    """The save after step 2 fails, in the background."""
    take_step, disk = loop.train_step, ExitStack()

    def stepping(run: loop.Run, step: int) -> Any:
        if step == 1 and rank == 1:
            disk.enter_context(disk_with(free=10_000))
        if step == 2:
            saving = run.handle.engine.background
            assert saving is not None and saving._thread is not None
            saving._thread.join()
            disk.close()
            assert not steps(run.folder)
        return take_step(run, step)

    loop.train_step = stepping  # this process is a fork: nobody else sees it
    return train(config)


def test_a_run_goes_on_if_its_next_save_succeeds(
    plain: Path, shared_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ended there, without saving the steps that it had done; also at the end, whatever room there was again."""
    config = tiny(shared_text, tmp_path / "run", run__save_every=2)
    with warnings_on_stderr():
        run_ranks(meets_a_full_disk_for_a_while, 2, config)
    assert sorted(steps(tmp_path / "run")) == [4, 6] and losses(tmp_path / "run") == losses(plain)
    said = capfd.readouterr().err
    assert said.count("warning: step 2 was not saved: rank 1: ") == said.count("; step 4 is saved now") == 1


class Lingering:
    """An observer that has much to send at the end."""

    def __init__(self, about: object) -> None:
        pass

    def on_step(self, record: object) -> None:
        pass

    on_validation = on_step

    def close(self) -> None:
        time.sleep(2 * QUICKLY)


QUICKLY = 2.0
"""Seconds after which a collective counts as stuck."""


def ends_slowly(rank: int, config: Config) -> Outcome:
    telling.written_report = lambda run: str(time.sleep(2 * QUICKLY))  # this process is a fork: nobody else sees it
    return train(config)


def test_what_rank_0_does_at_the_end_may_take_longer_than_a_collective_waits(shared_text: Path, tmp_path: Path) -> None:
    """A run that had done and saved everything failed: the others waited for rank 0, which drew its page."""
    options = {"run__observers": f"{__name__}:Lingering", "run__report": True, "model__layers": 3}
    config = tiny(shared_text, tmp_path / "run", schedule__steps=1, **options)
    outcomes = run_ranks(ends_slowly, 2, config, collective_timeout=QUICKLY)
    assert [outcome.step for outcome in outcomes] == [1, 1]


def refused_by_the_system(rank: int, path: Path) -> str:
    with joined(ParallelConfig(device="cpu")) as ranks:
        try:
            ranks.first_does(path.read_bytes)
        except UserError as error:
            return str(error)
    return "no error"


def test_what_the_system_refuses_is_told_in_words(tmp_path: Path) -> None:
    """`--data` without rights gave "[Errno 13] Permission denied: ..."."""
    found = run_ranks(refused_by_the_system, 2, tmp_path)
    assert found == [f"{tmp_path} is a folder: expected a file"] * 2


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    schedule = ScheduleConfig(steps=100, warmup=10, final_share=0.1)
    factors = [learning_rate_factor(step, schedule) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == 1.0
    assert factors[55] == pytest.approx(0.55)
    assert factors[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(factors[9:]))


def test_seeds_differ_by_step_and_rank() -> None:
    seeds = {seed_of(0, step, rank) for step in range(20) for rank in range(4)} | {seed_of(1, 0, 0)}
    assert len(seeds) == 81


def test_without_proc_the_memory_of_a_process_is_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil raises there, and with it the first record of a run."""
    ranks: Any = SimpleNamespace(device=torch.device("cpu"))
    now, peak = process_memory(ranks)
    assert 0 < now <= peak

    def no_such_process(pid: int | None = None) -> Any:
        raise psutil.NoSuchProcess(os.getpid())

    monkeypatch.setattr(psutil, "Process", no_such_process)
    now, peak = process_memory(ranks)
    assert 0 < now == peak
