"""The `zeroshard train` command: refusals in one line, its own launcher, torchrun, SIGTERM."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil
import pytest

from tests.forked import FirstAnInterpreter, Forked
from tests.grids import EVERYTHING
from tests.patience import wait_until
from zeroshard import starting
from zeroshard.checkpoint import files, verify
from zeroshard.cli.main import ELSEWHERE, _continued, _other_names, _saved_run, main, run
from zeroshard.train import data
from zeroshard.train.config import ScheduleConfig, UserError
from zeroshard.train.loop import Requests
from zeroshard.train.ranks import cores
from zeroshard.train.resume import find

SMALL = [
    "--model.layers=1",
    "--model.width=32",
    "--model.heads=2",
    "--model.context=32",
    "--batch.sequences=4",
    "--schedule.warmup=2",
    "--evaluation.windows=4",
    "--evaluation.sample_tokens=3",
    "--parallel.device=cpu",
]


def start(
    *arguments: str,
    launcher: tuple[str, ...] = (),
    ranks: type[subprocess.Popen[str]] | None = None,
    before: Callable[[], None] | None = None,
) -> subprocess.Popen[str]:
    return Forked(
        [sys.executable, *launcher, "-m", "zeroshard", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        ranks=ranks,
        before=before,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


def steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row["step"] for row in rows if row["kind"] == "step"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --plan zero4", "'zero4' is not one of 'ddp', 'zero1', 'zero2', 'zero3'"),
        ("train --model.layer 4", "unknown option --model.layer; did you mean --model.layers?"),
        ("train --lrr 4", "unknown option --lrr; did you mean --lr?"),
        ("train --learning-rate 4", "unknown option --learning-rate; did you mean --optimizer.lr?"),
        ("train --batch_size 4", "unknown option --batch_size; did you mean --batch.sequences?"),
        ("train --batch 4", "unknown option --batch; did you mean --batch.sequences?"),
        ("train --units Block", "unknown option --units; zeroshard train --help lists them"),
        ("--units Block", "unknown option --units; zeroshard --help lists them"),
        ("train --model.layers four", "'four' is not a valid integer"),
        ("train --model.layers 0", "model.layers = 0: expected greater than or equal to 1"),
        ("train --nproc 0", "parallel.nproc = 0: expected greater than or equal to 1"),
        ("train --parallel.timeout 0.001", "parallel.timeout = 0.001: expected greater than or equal to 1"),
        ("train --nproc 999", f"--nproc 999: expected at most {4 * cores()}, 4 ranks for each of {cores()} CPU cores"),
        ("train --nproc 2 --batch.sequences 3", "does not divide over 2 ranks x 1 micro-batches"),
        ("train --nproc 2 --data /nowhere", "no text at /nowhere: expected a UTF-8 file or a folder"),
        ("train --resume /nowhere", "--resume /nowhere: expected the folder of a run, with config.toml in it"),
        ("train --config /nowhere.toml", "cannot read the configuration /nowhere.toml: No such file or directory"),
        ("train extra", "Got unexpected extra argument (extra)"),
        ("trian", "No such command 'trian'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert run([*arguments.split(), "--parallel.device=cpu"] if "train" in arguments else arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("zeroshard: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_torchrun_and_nproc_must_not_contradict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run(["train", "--parallel.device=cpu"]) == 2
    assert "found RANK=0, WORLD_SIZE=4, MASTER_ADDR=, MASTER_PORT=. Start with torchrun" in capsys.readouterr().err
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert run(["train", "--nproc", "2", "--parallel.device=cpu"]) == 2
    assert "--nproc 2: the launcher has started 4 ranks; leave --nproc out" in capsys.readouterr().err
    assert run(["train", "--max-restarts", "2", "--parallel.device=cpu"]) == 2  # it was ignored
    assert "--max-restarts: the launcher starts these ranks: give it the option" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--lr 0.25", "optimizer__lr", 0.25),
        ("--weight-decay=0.5", "optimizer__weight_decay", 0.5),
        ("--weight_decay 0.5", "optimizer__weight_decay", 0.5),
        ("--batch.micro-batches 2", "batch__micro_batches", 2),
        ("--max-restarts 2", "parallel__max_restarts", 2),
        ("--evaluation.prompt --lr", "evaluation__prompt", "--lr"),
    ],
)
def test_last_segments_and_dashes_are_names_too(arguments: str, key: str, value: object) -> None:
    context = main.commands["train"].make_context("train", arguments.split(), parent=click.Context(main))
    assert {name: given for name, given in context.params.items() if given not in (None, ())} == {
        key: value, "resume": "never"
    }  # fmt: skip


def test_a_last_segment_that_is_not_unique_is_no_name() -> None:
    options = [click.Option(["--a.x", "a__x"]), click.Option(["--b.x", "b__x"]), click.Option(["--b.y_z", "b__y_z"])]
    names = _other_names([*options, click.Option(["--y-z"])])
    assert {name: option.name for name, option in names.items()} == {"--y_z": "b__y_z", "--b.y-z": "b__y_z"}


SLOW_LIBRARY = """
import os, signal, sys
try:
    for name in os.environ.get("SIGNALS", "SIGINT").split():
        os.kill(os.getpid(), getattr(signal, name))
    for _ in range(1000):
        pass  # here the handler runs
except KeyboardInterrupt:
    print("raised", flush=True)
starting = sys.modules["zeroshard.starting"]
print(*sorted(map(int, starting.told)), flush=True)
os._exit(7)
"""


@pytest.mark.parametrize(
    ("program", "environment", "expected"),
    [
        (("-m", "zeroshard", "plan"), {}, (130, "", "\ninterrupted\n")),
        (("bin/zeroshard", "plan"), {}, (130, "", "\ninterrupted\n")),
        (("-m", "zeroshard", "train"), {"RANK": "0"}, (7, "2\n", "")),  # noted, for the first step
        (("-m", "zeroshard", "train"), {"RANK": "0", "SIGNALS": "SIGTERM SIGUSR1"}, (7, "10 15\n", "")),
        (("bin/zeroshard", "train"), {"SIGNALS": "SIGUSR1"}, (7, "10\n", "")),
        (("bin/zeroshard", "train"), {"SIGNALS": "SIGTERM"}, (-15, "", "")),  # there is nothing to save yet
        (("bin/zeroshard", "plan"), {"SIGNALS": "SIGUSR1"}, (-10, "", "")),
        (("mine.py",), {}, (7, "raised\n\n", "")),  # a program that uses the library has its own way
    ],
)
def test_signals_during_imports(
    tmp_path: Path, program: tuple[str, ...], environment: dict[str, str], expected: tuple[int, str, str]
) -> None:
    """The interrupt comes while torch is being imported, which swallows it. Other signals ended the run."""
    (tmp_path / "torch.py").write_text(SLOW_LIBRARY)
    (tmp_path / "bin").mkdir()
    for name in ("mine.py", "bin/zeroshard"):
        (tmp_path / name).write_text("import zeroshard\n")
    path = f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, *program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_control_c_ends_a_command_whose_output_nobody_reads() -> None:
    """As behind `2>&1 | head`. It raised, in whatever was being imported."""
    if (child := os.fork()) == 0:
        try:
            os.close(2)
            starting._leave(signal.SIGINT, None)
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == starting.INTERRUPTED


def test_a_system_that_is_not_posix_is_told_what_to_do() -> None:
    """As on Windows, whose Python has no module `resource`."""
    command = [sys.executable, "-c", "import os; os.name = 'nt'; import zeroshard"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    said = "zeroshard.errors.NotInstalled: zeroshard runs on Linux and macOS. On Windows,"
    assert done.stderr.splitlines()[-1].startswith(said)


def test_a_rank_that_was_interrupted_while_it_started_stops_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for told in (set(), {signal.SIGINT}, {signal.SIGTERM}, {signal.SIGUSR1}):
        monkeypatch.setattr(starting, "told", told)
        with Requests() as requests:
            assert requests.stop is bool(told - {signal.SIGUSR1})
            assert requests.save is (signal.SIGUSR1 in told)


def test_an_interrupted_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Command, "invoke", interrupted)
    assert run(["inspect", "steps"]) == 130
    assert capsys.readouterr() == ("", "\ninterrupted\n")


def test_a_command_that_is_terminated_removes_what_it_was_writing(tmp_path: Path) -> None:
    """SIGTERM left the tokens of the text, which may be large, behind."""
    (tmp_path / "text").write_text("word " * 5000)

    def slow() -> None:
        write_tokens = data._write_tokens

        def write_and_wait(folder: Path, *arguments: Any) -> None:
            write_tokens(folder, *arguments)
            (tmp_path / "written").touch()
            wait_until((tmp_path / "never").exists)

        data._write_tokens = write_and_wait
        starting._is_ours = True  # as in an interpreter of the command

    arguments = (f"--data={tmp_path}/text", f"--data.cache={tmp_path}/cache", "--nproc=2", *SMALL)
    process = start("train", *arguments, before=slow)
    wait_until((tmp_path / "written").exists)
    assert len(os.listdir(tmp_path / "cache")) == 1
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (128 + signal.SIGTERM, "", "\ninterrupted\n")
    assert os.listdir(tmp_path / "cache") == []


def test_help_names_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("--plan", "--nproc", "--resume", "--model.layers", "--batch.micro_batches", "--optimizer.clip"):
        assert option in out


def test_a_continued_run_takes_its_own_copy_of_the_models_configuration(tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    (run_folder / "model").mkdir(parents=True)
    (run_folder / "model" / "config.json").write_text("{}")
    (run_folder / "config.toml").write_text('[model]\nconfig = "/gone/config.json"\n[optimizer]\nlr = 0.5\n')
    config = _continued(run_folder, (), {"schedule.steps": 7})
    assert config.model.config == str(run_folder / "model" / "config.json")
    assert (config.run.out, config.schedule.steps, config.optimizer.lr) == (str(run_folder), 7, 0.5)
    given = _continued(run_folder, (), {"model.config": "/other", "run.out": "/elsewhere"})
    assert (given.model.config, given.run.out) == ("/other", "/elsewhere")


def test_options_of_a_continued_run_are_checked_beside_its_own_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were checked beside the defaults, too: `--run.keep_every` was refused for a run that saves."""
    kept = "[run]\nsave_every = 2\n[parallel]\nprecision = 'fp16'\n"
    (tmp_path / "config.toml").write_text(kept)
    configs: list[Any] = []
    monkeypatch.setattr("zeroshard.train.loop.train", lambda config, **how: configs.append((config, how["resume"])))
    options = ["--run.keep_every", "4", "--optimizer.loss_scale_growth", "7", "--nproc", "1"]
    assert run(["train", "--resume", str(tmp_path), *options]) == 0
    ((config, resume),) = configs
    assert (config.run.keep_every, config.run.out, resume) == (4, str(tmp_path), tmp_path)
    assert run(["train", "--out", str(tmp_path / "new"), *options]) == 2


def test_steps_that_lack_their_manifest_are_no_reason_to_begin_anew(tmp_path: Path) -> None:
    """`--resume auto` began a new run in that folder, without a word."""
    assert _saved_run("auto", str(tmp_path)) == (None, True)
    (tmp_path / "step-3").mkdir()
    assert _saved_run("auto", str(tmp_path)) == (tmp_path, True)
    with pytest.raises(UserError, match=r"no good step in .*step-3/manifest\.json does not exist"):
        find(tmp_path, "", ScheduleConfig())


def test_a_tokenizer_is_made_and_nothing_is_replaced_unasked(
    text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "books.json"
    make = ["tokenizer", str(out), "--data", str(text_folder), "--vocabulary", "300"]
    assert run(make) == 0
    assert capsys.readouterr().out == f"{out}: 300 tokens; zeroshard train --data.tokenizer {out}\n"
    before = out.read_bytes()
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "empty.txt").touch()
    for arguments, message in (
        ([*make, "--force", "--data", str(empty)], f"no UTF-8 text in {empty}: expected a text file or a folder"),
        ([*make, "--force", "--data", str(empty / "empty.txt")], "no UTF-8 text in"),
        (make, "exists already (--force replaces it)"),
        ([*make, "--force", "--data", "/nowhere"], "no text at /nowhere"),
        (["tokenizer", str(out), "--vocabulary", "256"], "256 is not in the range x>=257"),
    ):
        assert run(arguments) == 2
        assert message in capsys.readouterr().err
        assert out.read_bytes() == before
    assert run([*make, "--force", "--vocabulary", "310"]) == 0
    assert out.read_bytes() != before


@pytest.mark.long
def test_own_launcher_is_told_to_stop_and_torchrun_goes_on(text_folder: Path, tmp_path: Path) -> None:
    """One run: started with --nproc, stopped by SIGTERM, finished under torchrun. (SIGINT is handled by the same
    code.)"""
    common = ["--data", str(text_folder), *SMALL]
    parts = tmp_path / "parts"
    process = start("train", "--nproc=2", "--steps=5000", f"--out={parts}", *common)
    wait_until(lambda: len(steps(parts)) >= 3 or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    done = steps(parts)[-1]
    assert f"stopped after step {done} and saved; continue with: zeroshard train --resume {parts}" in out
    assert len(verify(parts / f"step-{done}").tensors) > 10

    more = f"--steps={done + 3}"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node=2")
    code, out, err = finish(start("train", f"--resume={parts}", more, launcher=torchrun))
    assert code == 0, err
    assert steps(parts) == list(range(1, done + 4))
    assert "validation loss" in out
    assert "def " in (parts / "sample.txt").read_text()
    assert out.endswith(f"report {parts / 'report.html'}\n")
    assert f"resumed after step {done}" in (parts / "report.html").read_text()


def test_refusal_of_the_ranks_is_reported_once(text_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    arguments = ["train", "--nproc=2", "--data", str(text_folder), f"--out={tmp_path / 'run'}", *SMALL]
    code, out, err = finish(start(*arguments))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "already holds a run" in err


@pytest.mark.long
def test_a_rank_that_dies_ends_the_run(text_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", "--nproc=2", "--steps=5000", "--data", str(text_folder), f"--out={out}", *SMALL]
    # The other rank is an interpreter: a forked one would end at the same time, and the launcher might name either.
    process = start(*arguments, ranks=FirstAnInterpreter)
    wait_until(lambda: len(steps(out)) >= 3 or process.poll() is not None)
    psutil.Process(process.pid).children()[-1].kill()
    code, _, err = finish(process)
    assert code == 1
    assert "died of SIGKILL; the other ranks were stopped" in err


@pytest.mark.parametrize("nohup", [True, False])
def test_the_terminal_is_closed(text_folder: Path, tmp_path: Path, nohup: bool) -> None:
    """torch's launcher took SIGHUP also under nohup, which ended the run."""
    out = tmp_path / "run"
    arguments = ["train", "--nproc=2", "--steps=5000", "--data", str(text_folder), f"--out={out}", *SMALL]
    # nohup starts an interpreter that ignores the signal from the beginning.
    process = start(*arguments, before=partial(signal.signal, signal.SIGHUP, signal.SIG_IGN) if nohup else None)
    wait_until(lambda: bool(steps(out)) or process.poll() is not None)
    process.send_signal(signal.SIGHUP)
    if nohup:
        done = steps(out)[-1]
        wait_until(lambda: steps(out)[-1] > done or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
    code, said, err = finish(process)
    if nohup:
        assert code == 0 and "stopped after step" in said, err
    else:
        assert code == 129 and err == "zeroshard: error: SIGHUP: the ranks were stopped, without a save\n", err


def test_what_other_programs_call_an_option_has_a_name_here() -> None:
    train = main.commands["train"]
    train.make_context("train", [])  # the fields of the configuration are added here
    known = {name.lstrip("-") for option in train.params for name in option.opts}
    assert {*ELSEWHERE.values()} <= known and not {*ELSEWHERE} & known


def _on_a_full_disk() -> None:
    files.free_bytes = lambda path: 1000  # this process is a fork: nobody else sees it


def test_a_full_disk_is_one_line(text_folder: Path, tmp_path: Path) -> None:
    for ranks in ("1", "2"):
        out = tmp_path / f"of-{ranks}"
        arguments = ["train", "--nproc", ranks, "--steps=2", "--data", str(text_folder), "--out", str(out), *SMALL]
        code, _, err = finish(start(*arguments, before=_on_a_full_disk))
        where = f"{out} has 1000 bytes free, step 2 needs "
        assert (code, err.count("\n"), where in err, err[:18]) == (2, 1, True, "zeroshard: error: "), err


class Forgets:
    """A tracker that raises."""

    def __init__(self, about: object) -> None:
        pass

    def on_step(self, record: object) -> None:
        raise ConnectionError("the tracker\nis away")

    def on_validation(self, record: object) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


def test_a_tracker_that_fails_is_told_on_stderr(text_folder: Path, tmp_path: Path) -> None:
    name = "tests.cli.test_cli:Forgets"
    options = ["--steps=2", "--nproc=1", f"--out={tmp_path / 'run'}", f"--run.observers={name}"]
    code, _, err = finish(start("train", "--data", str(text_folder), *options, *SMALL))
    said = f"zeroshard: warning: run.observers: {name} gets no more records: ConnectionError: the tracker is away\n"
    assert (code, err) == (0, said)


def test_output_that_is_lost_or_has_another_encoding_ends_no_run(text_folder: Path, tmp_path: Path) -> None:
    """`zeroshard train | head -1` ended with a traceback and nothing saved; a sample in letters that a terminal does
    not have, with a traceback in place of sample.txt and the page."""
    common = [
        "train",
        "--steps=2",
        "--data",
        str(text_folder),
        *SMALL,
        "--run.report=false",
        "--evaluation.temperature=9",
    ]
    for ranks in ("1", "2"):
        out = tmp_path / f"of-{ranks}"
        # Rank 0 is an interpreter: a forked one also has the handler of warnings of the launcher, and says it twice.
        with start(*common, "--nproc", ranks, "--out", str(out), ranks=FirstAnInterpreter) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            err = process.stderr.read()
        said = "zeroshard: warning: the output is lost: Broken pipe; training goes on, and Control-C stops and saves\n"
        assert (process.returncode, err, (out / "sample.txt").exists()) == (0, said, True)
        verify(out / "step-2")

    def in_ascii() -> None:
        sys.stdout.reconfigure(encoding="ascii", errors="strict")  # type: ignore[union-attr]

    code, _, err = finish(start(*common, "--out", str(tmp_path / "ascii"), before=in_ascii))
    assert (code, err, (tmp_path / "ascii" / "sample.txt").exists()) == (0, "", True)


@pytest.mark.parametrize("streams", [">&-", *[">&- 2>&-"] * EVERYTHING])
def test_closed_streams_are_no_error(streams: str) -> None:
    command = f"{sys.executable} -m zeroshard --version {streams}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
