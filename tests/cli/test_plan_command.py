"""The `zeroshard plan` command: its tables, its JSON, and a one-line error for each mistake."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch

import zeroshard
from tests.cli.test_commands import said
from tests.integrations.versions import is_older
from tests.kit import Block, Net
from tests.report.common import START
from zeroshard.__main__ import _make_streams_usable
from zeroshard.cli.main import run
from zeroshard.cli.models import _loss_of
from zeroshard.planning import Configuration
from zeroshard.planning.in_words import in_units
from zeroshard.testing import run_ranks

NET = "tests.kit:Net"
INPUTS = ("--inputs", "tests.cli.test_plan_command:inputs")


def inputs(sequences: int, tokens: int | None) -> torch.Tensor:
    return torch.zeros(sequences, tokens or 7, dtype=torch.long)


class Disturbing(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)


class Prints(Disturbing):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        print("hello")
        return super().forward(inputs)


class Reads(Disturbing):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        input("which? ")
        return inputs


class Exits(Disturbing):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)


class Buffered(Disturbing):
    """With a buffer that is changed in place. `small`: of 4 bytes; else of 4 MB."""

    def __init__(self, small: bool = False) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1 if small else 1_000_000), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(0.5)  # type: ignore[operator]
        return super().forward(inputs)


def little_buffered() -> torch.nn.Module:
    return Buffered(small=True)


def columns(sequences: int, tokens: int | None) -> torch.Tensor:
    return torch.zeros(sequences, 8)


class Masks(Disturbing):
    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return inputs * mask


class Fails(Disturbing):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs[:, :3])


def asks() -> torch.nn.Module:
    input("who? ")
    return Disturbing()


def fails() -> torch.nn.Module:
    raise RuntimeError("no")


def needs(width: int) -> torch.nn.Module:
    return torch.nn.Linear(width, width)


def rows(sequences: int, tokens: int | None) -> torch.Tensor:
    return torch.zeros(sequences, 8)


def deep() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(30)))


def with_batch_norm() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))


def test_a_table_of_all_plans(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan", NET, "--units", "Block", "--ranks", "2,64", "--optimizer", "SGD:momentum=0.9")
    rows = [line.split() for line in text.splitlines() if line.startswith(("ddp", "zero"))]
    assert [(row[0], row[2]) for row in rows] == [
        (p, r) for r in ("2", "64") for p in ("ddp", "zero1", "zero2", "zero3")
    ]
    assert "between steps" in said(capsys, "plan", NET, "--plan", "zero3", "--phases")


def test_for_programs_it_says_what_python_says(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = json.loads(said(capsys, "plan", NET, "--plan", "zero3", "--units", "Block", "--json"))
    with torch.device("meta"):
        planned = zeroshard.plan(Net(), Configuration(ranks=8, precision="bf16", units=Block))
    assert (found["sent"], found["checkpoint_bytes"] // 100) == (planned.sent, planned.checkpoint_bytes // 100)
    assert found["phases"]["backward"]["together"] == planned.peak and found["state"] == planned.state


def test_buffers_that_are_large_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """They are in no column, and `--fit` does not count them: a plan of 2 kB would seem to fit into 1 MB. Nor are they
    activations, where an operator returns them."""
    here = "tests.cli.test_plan_command"
    batch = ("--batch", 2, "--inputs", f"{here}:columns", "--json")
    for options in ((), ("--fit", "1MB")):
        text = said(capsys, "plan", f"{here}:Buffered", *options)
        assert "without activations, and without the 4.00 MB of the model's buffers\n" in text
        assert "the model's buffers" not in said(capsys, "plan", f"{here}:little_buffered", *options)
    found = json.loads(said(capsys, "plan", f"{here}:Buffered", "--plan", "ddp", *batch))[0]
    assert found["buffers"] == 4_000_000 and found["activations"]["forward"] < 2000


def test_the_rank_that_holds_most_and_another_one(capsys: pytest.CaptureFixture[str]) -> None:
    of_owners = ("plan", NET, "--units", "Block", "--optimizer", "Muon+AdamW", "--plan", "zero3", "--ranks", "7")
    (found,) = json.loads(said(capsys, *of_owners, "--json"))
    most = found["fullest_rank"]
    assert found["rank"] == 0 != most and found["fullest_peak"] > found["whole_peak"]
    assert f"zero3, bf16, 7 ranks, Muon+AdamW, 4 units: rank {most} holds most, at most " in said(capsys, *of_owners)
    (other,) = json.loads(said(capsys, *of_owners, "--json", "--rank", str(most)))
    assert (other["rank"], other["whole_peak"]) == (most, found["fullest_peak"])
    assert "holds most" not in said(capsys, *of_owners, "--ranks", "8"), "4 bytes more"
    text = said(capsys, *of_owners, "--rank", str(most))
    assert f"bytes on rank {most}, " in text and "holds most" not in text
    (row,) = json.loads(said(capsys, *of_owners, "--fit", "1GB", "--precision", "bf16", "--json"))
    assert (row["rank"], row["whole_peak"]) == (most, found["fullest_peak"])


def test_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan", NET, "--fit", "45kB", "--ranks", "8", "--device", "cpu")
    assert "why it does not fit" in text and " fit into 45.0 kB on each rank" in text and "too much in " in text
    assert "the nearest" not in text
    rows = json.loads(said(capsys, "plan", NET, "--fit", "1GB", "--json"))
    assert all(row["fits"] for row in rows)
    assert {row["precision"] for row in rows} == {"bf16", "bf16-remainder", "fp32"}
    rows = json.loads(said(capsys, "plan", NET, "--fit", "1GB", "--json", "--precision", "bf16", "--ranks", "64"))
    assert {(row["plan"], row["precision"], row["replicas"]) for row in rows} == {
        *((plan, "bf16", 1) for plan in ("ddp", "zero1", "zero2", "zero3")),
        ("zero3", "bf16", 8),
    }
    rows = json.loads(said(capsys, "plan", NET, "--fit", "1GB", "--json", "--ranks", "64", "--replicas", "2"))
    assert {row["replicas"] for row in rows} == {2}


def test_what_holds_more_outside_of_a_step_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """It was in --phases and --json alone: what fitted did not start, or ended in a state dict."""
    deep_one, ranks = "tests.cli.test_plan_command:deep", ("--ranks", "16", "--device", "cpu")
    of_one = ("plan", deep_one, "--units", "Linear", "--plan", "zero3", *ranks, "--precision", "bf16")
    (found,) = json.loads(said(capsys, *of_one, "--json"))
    assert found["phases"]["init"]["together"] > found["whole_peak"]
    sizes = {name: phase["together"] for name, phase in found["phases"].items()}
    (line,) = (line for line in said(capsys, *of_one).splitlines() if line.startswith("at most: in a step; more outs"))
    for name, words in (
        ("init", "shard() of a model that is not on the meta device"),
        ("full_state_dict", "full_state_dict()"),
        ("state_dict", " optimizer.state_dict()"),
        ("close", "close()"),
    ):
        assert (f"{words} {in_units(sizes[name])}" in line) == (sizes[name] > found["whole_peak"]), (name, line)
    assert sizes["state_dict"] > max(found["whole_peak"], sizes["full_state_dict"], sizes["init"], sizes["close"])
    assert "to another device no more than that" in line
    fits = ("--fit", str(sizes["state_dict"] - 1), "--replicas", "1")
    line = next(line for line in said(capsys, *of_one, *fits).splitlines() if line.startswith("they fit in a step; "))
    assert f"it: optimizer.state_dict() {in_units(sizes['state_dict'])} (to another device no more than" in line
    assert "outside of it" not in said(capsys, *of_one, "--fit", "1GB")
    assert "outside of it" not in said(capsys, "plan", NET, *INPUTS, "--batch", "640")


def test_phases_say_what_is_in_no_column(capsys: pytest.CaptureFixture[str]) -> None:
    of_one = ("plan", NET, "--units", "Block", "--plan", "zero3", "--ranks", "3", "--rank", "2")
    (found,) = json.loads(said(capsys, *of_one, "--json"))
    text = said(capsys, *of_one, "--phases")
    assert "init: of a model that is on the device in full; built on the meta device, it has no copies" in text
    for key, num_bytes in found["state"].items():
        assert f"{key} {in_units(num_bytes)}" in text
    assert f"padding: {in_units(found['padding'])}, of all ranks {in_units(found['padding_of_all'])}; " in text
    assert f"largest message: {in_units(found['largest_message'])}\n" in text
    of_ranks = (json.loads(said(capsys, *of_one, "--json", "--rank", str(rank)))[0]["padding"] for rank in range(3))
    assert sum(of_ranks) == found["padding_of_all"] > 0


def test_if_nothing_fits_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    """It was 0."""
    arguments = ["plan", NET, "--fit", "1kB", "--ranks", "2,8", "--units", "Block"]
    assert run(arguments) == 1
    out, err = capsys.readouterr()
    first, nearest, *rows = out.splitlines()
    assert err == "" and first.startswith("0 of ")
    assert nearest.startswith("the nearest is zero3, bf16, 8 ranks, AdamW, 4 units, micro-batches: 1: ")
    assert " too much in " in nearest and nearest.split(": ", 2)[-1] in rows[2]
    assert run([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not any(row["fits"] for row in found)
    assert found[0]["spare"] == max(row["spare"] for row in found) and found[0]["reason"] in nearest
    assert run([*arguments, "--fit", "60kB"]) == 0  # on 8 ranks


def test_a_precision_that_the_model_does_not_take_is_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Batch norms are refused in 16 bits, and `--fit` tries those by itself: it was an error."""
    assert run(["plan", "tests.cli.test_plan_command:with_batch_norm", "--fit", "1GB", "--json"]) == 0
    out, err = capsys.readouterr()
    assert {row["precision"] for row in json.loads(out)} == {"fp32"}
    assert err.startswith("zeroshard: warning: fit: bf16, bf16-remainder not tried: ") and err.count("\n") == 1
    named = ("--fit", "1GB", "--precision", "bf16")
    message = said(capsys, "plan", "tests.cli.test_plan_command:with_batch_norm", *named, code=2)
    assert "torch's batch norm takes no weights" in message
    message = said(capsys, "plan", "tests.cli.test_plan_command:with_batch_norm", code=2)  # bf16 is the default
    assert message.endswith("This command takes names of precisions: --precision fp32\n")


def test_each_option_has_an_effect_or_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were ignored."""
    pytest.importorskip("pydantic")
    toml = tmp_path / "run.toml"
    toml.write_text("[model]\nlayers = 2\nwidth = 64\n")
    for arguments, message in (
        ((NET, "--fit", "1GB", "--phases"), "--phases: not with --fit"),
        ((NET, "--fit", "1GB", "--rank", "1"), "--rank: not with --fit"),
        ((NET, "--fit", "1GB", "--each-unit", "--save", tmp_path / "a"), "--each-unit, --save: not with --fit"),
        ((NET, "--fit", "1GB", *INPUTS, "--batch", "1", "--modules"), "--modules: not with --fit"),
        ((NET, "--tokens", "3", "--recompute"), "--tokens, --recompute: only with a batch. Add --batch"),
        ((NET, "--machine", "node"), "--machine: only with a batch. Add --batch"),
        ((NET, "--modules"), "--modules: only with a batch"),
        ((NET, *INPUTS), "--inputs: only with a batch"),
        ((NET, *INPUTS, "--batch", "1", "--machine", "node"), "which only --inputs knows: add --tokens (1 where"),
        ((NET, "--reduce-every-micro-batch"), "only with several passes in a step. Add --micro-batches"),
        ((toml, *INPUTS, "--batch", "1"), "--inputs is for a model of module:factory"),
        (("--compare", tmp_path, "--ranks", "8", "--plan", "zero3"), "leave out --plan, --ranks"),
        (("--compare", tmp_path, "--save", tmp_path / "a"), "from the run: leave out --save"),
        (("--compare", tmp_path, NET), "from the run: leave out MODEL"),
    ):
        assert message in said(capsys, "plan", *arguments, code=2), arguments
    batch = (NET, "--units", "Block", *INPUTS, "--batch", "2", "--tokens", "7", "--machine", "node", "--json")
    first, *_ = json.loads(said(capsys, "plan", *batch, "--each-unit"))
    assert set(first["seconds"]) == {"compute", "update", "communication", "exposed"}
    assert [unit["unit"] for unit in first["each_unit"]] == ["root", "blocks.0", "blocks.1", "blocks.2"]
    rows = json.loads(said(capsys, "plan", *batch, "--fit", "1GB"))
    assert [row["seconds"]["exposed"] for row in rows] == sorted(row["seconds"]["exposed"] for row in rows)
    assert "exposed" in said(capsys, "plan", *batch[:-1], "--fit", "1GB")


def test_the_trainers_model_and_one_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pydantic")
    path = tmp_path / "run.toml"
    path.write_text("[model]\nlayers = 2\nwidth = 64\n[batch]\nmicro_batches = 2\n")
    (tmp_path / "config.toml").write_text(path.read_text())
    for named in (path, tmp_path):  # a file of any name, and the folder of a run
        (found,) = json.loads(said(capsys, "plan", named, "--plan", "zero3", "--json"))
        assert (found["units"], found["micro_batches"]) == (3, 2)


@pytest.mark.filterwarnings("ignore")
def test_a_config_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 48,
        "n_head": 4,
        "vocab_size": 101,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (found,) = json.loads(said(capsys, "plan", tmp_path, "--plan", "zero3", "--json"))
    assert found["units"] == 3


def test_a_config_that_is_not_there_needs_no_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It told to install transformers; then, that there is no such file."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(["plan", str(tmp_path / "no.json")]) == 2
    assert f"there is no file {tmp_path}/no.json\n" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_a_batch_of_models_that_are_no_language_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens alone: a T5 asked for those of its decoder, and a ViT had no pixels ("'NoneType' has no attribute")."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    t5 = {"model_type": "t5", "d_model": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 9, "d_ff": 16, "d_kv": 8}
    path.write_text(json.dumps(t5))
    (found,) = json.loads(said(capsys, "plan", path, "--plan", "zero3", "--batch", "1", "--tokens", "8", "--json"))
    assert found["activations"]["inputs"] == 8 * 8
    path.write_text(
        json.dumps({"model_type": "vit", "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1})
    )
    message = said(capsys, "plan", path, "--batch", "1", code=2)
    assert "--batch: a ViTModel takes no tokens: name a module:factory that builds it, and its inputs by" in message


def test_the_first_rank_of_a_report_is_one_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    said(capsys, "plan", NET, "--plan", "zero3", "--ranks", "8", "--save", path)
    message = said(capsys, "report", path, "--first-rank", "99", code=2)
    assert "--first-rank must be from 0 to 7, found 99" in message
    assert not (tmp_path / "plan.html").exists()
    said(capsys, "report", path, "--first-rank", "7")


def test_one_line_for_each_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.toml").write_text("[model]\nlayer = 2\n")
    (tmp_path / "bad.json").write_text("{}")
    for name in ("a run", "a bad run"):
        (tmp_path / name).mkdir()
    (tmp_path / "a bad run" / "config.toml").write_text("[model]\nlayers = 'x'")
    (tmp_path / "a_script.py").write_text("import sys\nsys.exit()\n")
    (tmp_path / "exits.py").write_text("def inputs(*_):\n    raise SystemExit(2)\n")
    (tmp_path / "fails.py").write_text("raise OSError('no\\nnetwork')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for arguments, message in (
        (["nothing"], "expected the configuration of a run"),
        ([tmp_path / "a run"], "a run: expected config.toml, of a run, or config.json, of transformers, found neither"),
        ([tmp_path / "a bad run"], "a bad run/config.toml: model.layers = 'x': expected a valid integer"),
        (["no.such:module"], "cannot be imported"),
        (["models/mine.py:Net"], "found a file in front of the colon: write models.mine:Net"),
        (["a_script:Net"], "a_script:Net: cannot be imported: it called sys.exit(): what only a script does"),
        (
            [NET, "--optimizer", "a_script.Lion"],
            "optimizer 'a_script.Lion' cannot be imported: it called sys.exit(): what",
        ),
        ([NET, "--optimizer", "fails.Lion"], "optimizer 'fails.Lion' cannot be imported: OSError: no\n"),
        ([NET, "--batch", "2", "--inputs", "exits:inputs"], "inputs of one micro-batch: it called sys.exit(2): what"),
        (["sys:exit"], "cannot be built on the meta device: it called sys.exit()"),
        (["tests.kit:VOCAB"], "expected a function, found a int"),
        (["tests.kit:logs"], "tests.kit:logs(outcomes) is called with 0 arguments"),
        (["tests.cli.test_plan_command:fails"], "cannot be built on the meta device: RuntimeError: no"),
        (["builtins:dict"], "expected a torch.nn.Module, found a dict"),
        ([tmp_path / "none.json"], "there is no file"),
        ([tmp_path / "bad.toml"], "unknown configuration key 'model.layer'"),
        ([NET, "--ranks", "0"], "ranks must be a whole number"),
        ([NET, "--ranks", "8,x"], "'x' is not a valid integer"),
        ([NET, "--plan", "zero9"], "unknown plan 'zero9'"),
        ([NET, "--units", "Nothing"], "--units Nothing: expected a size (64MB), or a class of modules: Block"),
        ([NET, "--units", "0"], "--units 0: expected a size (64MB), or a class of modules: Block"),
        ([NET, "--fit", "much"], "is not a size"),
        ([NET, "--fit", "0GB"], "is not a size"),
        ([NET, "--fit", "80"], "80 without a unit: expected 80GB, 80MB, ... (or 80B)"),
        ([NET, "--micro-batches", "-2"], "micro_batches must be a whole number from 1"),
        ([NET, "--micro-batches", "0"], "micro_batches must be a whole number from 1"),
        ([NET, "--replicas", "0"], "'--replicas': 0 is not in the range"),
        ([NET, "--ranks", "6", "--replicas", "4"], "6 ranks do not divide into 4 replicas"),
        ([NET, "--optimizer", "Adamm"], "unknown optimizer 'Adamm'"),
        ([NET, "--rnks", "8"], "unknown option --rnks; did you mean --ranks?"),
        ([NET, "--rank", "8"], "rank must be below the number of ranks, 8, found 8"),
        ([NET, "--rank", "-1"], "'--rank': -1 is not in the range"),
    ):
        assert message in said(capsys, "plan", *arguments, code=2), arguments


def test_a_model_does_not_disturb_the_command(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prints were in the JSON, questions waited for an answer, torch logged a traceback, and exit ended the command."""
    here, logged = "tests.cli.test_plan_command", list[logging.LogRecord]()
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "callHandlers", logged.append)
    of_rows = ("--inputs", f"{here}:rows", "--batch", "2", "--plan", "zero3", "--json")
    assert run(["plan", f"{here}:Prints", *of_rows]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)[0]["parameters"] == 72
    assert err.startswith(f"zeroshard: warning: {here}:Prints prints while it is planned, and this is left out: ")
    assert err.count("\n") == 1
    for model, arguments, message in (
        ("Reads", of_rows, "InvalidState: it reads from standard input"),
        ("asks", (), "cannot be built on the meta device: InvalidState: it reads from standard input"),
        ("Exits", of_rows, "its loss, run without values on a tensor [2, 8] torch.float32: it called sys.exit(3)"),
        ("Fails", of_rows, "its loss, run without values on a tensor [2, 8] torch.float32: RuntimeError"),
        ("Masks", of_rows, "Masks.forward(inputs, mask) is called with 1 arguments"),
        ("needs", (), f"{here}:needs(width) is called with"),
        ("Prints", (*of_rows, "--inputs", f"{here}:needs"), f"--inputs {here}:needs(width) is called with"),
    ):
        found = said(capfd, "plan", f"{here}:{model}", *arguments, code=2)
        assert message in found and not logged, (model, found)


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_value_in_a_config_of_transformers_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    of_text = "cannot be built" if is_older() else "Field 'n_layer' expected int, got str"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": "x"}))
    run(["plan", str(path)])
    capfd.readouterr()  # what other libraries say when they are imported, in a process with many tests
    for value, message in (("x", of_text), (-1, "")):
        path.write_text(json.dumps({"model_type": "gpt2", "n_layer": value, "vocab_size": -1}))
        assert message in said(capfd, "plan", path, code=2)


class Broken(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str, /) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(errno.EPIPE, 141, ""), (errno.ENOSPC, 2, "zeroshard: error: No space left on device\n")],
)
def test_output_that_nobody_takes_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, code: int, message: str
) -> None:
    """`zeroshard plan ... | head -1` printed "error: Broken pipe", and `zeroshard --help > /dev/full` a traceback."""
    for arguments in (["plan", NET], ["--help"], [], ["--version"], ["plan", "--help"], ["train", "--help"]):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", Broken(number))
            assert run(arguments) == code, arguments
        assert capsys.readouterr().err == message, arguments


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_that_are_no_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """`zeroshard report` of such a run wrote no page, and a path came out with "?" in an ASCII locale."""
    pytest.importorskip("pydantic")
    folder = tmp_path / os.fsdecode(b"\xfc")
    folder.mkdir()
    (folder / "run.toml").write_text("[model]\nlayers = 2\nwidth = 64\n")
    taken = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", taken)
        _make_streams_usable()
        assert run(["plan", str(folder / "run.toml"), "--save", str(folder / "plan.json")]) == 0
        before = taken.tell()
        assert run(["report", str(folder / "plan.json")]) == 0
        print("\u2713 \ud800", file=taken, flush=True)
    taken.seek(before)
    lines = taken.buffer.read().splitlines()  # type: ignore[attr-defined]
    check = "\u2713".encode() if encoding == "utf-8" else b"\\u2713"
    assert lines == [os.fsencode(folder / "plan.html"), check + b" \\ud800"]
    assert "\ufffd/run.toml: zeroshard report</title>" in (folder / "plan.html").read_text(encoding="utf-8")


def test_a_model_without_anything_to_differentiate_is_named() -> None:
    """It was a bare StopIteration."""
    with pytest.raises(ValueError, match="the output of Identity has no loss and no tensor that requires grad"):
        _loss_of(torch.nn.Identity(), torch.zeros(2))
    assert _loss_of(torch.nn.Identity(), torch.ones(2, requires_grad=True)) == 1.0


def test_a_batch_and_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", NET, "--units", "Block", *INPUTS, "--batch", "4", "--plan", "zero1,zero3")
    text = said(capsys, *arguments, "--machine", "node", "--modules", "--tokens", "64")
    assert "with activations and inputs" in text and "by a model; nothing was measured" in text
    assert any(line.split()[0] == "blocks.2.up" for line in text.splitlines() if line)
    times = text.partition("by a model")[2].splitlines()
    assert all("µs" in line and "0.0000" not in line for line in times if line.startswith("zero")), times
    usual, recomputed = (json.loads(said(capsys, *arguments, "--json", *more))[0] for more in ((), ("--recompute",)))
    assert usual["activations"]["inputs"] == 4 * 7 * 8
    assert recomputed["whole_peak"] < usual["whole_peak"] and usual["whole_peak"] > usual["phases"]["step"]["together"]
    text = said(capsys, *arguments, "--fit", "1GB", "--device", "cpu")
    assert "recomputed" in text and "12 of 12 fit into 1.00 GB" in text
    one_precision = ("--precision", "bf16", "--fit", "1kB", "--device", "cpu", "--json")
    assert run([*arguments, *one_precision]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert sorted(row["micro_batches"] for row in rows) == [1] * 4 + [2] * 6 + [4] * 6, "4 sequences, as none fits"
    assert {(row["plan"], row["micro_batches"]) for row in rows if row["reduce_every_micro_batch"]} == {
        ("zero3", 2),
        ("zero3", 4),
    }
    assert run([*arguments[:-1], "zero3", *one_precision[:-1]]) == 1
    found = capsys.readouterr().out
    assert "  reduced  why it does not fit" in found and "  4  in each  " in found and "  4  once     " in found
    of_six = ("--plan", "zero3", *INPUTS, "--batch", "6", "--recompute", "--units", "Block")
    assert run(["plan", NET, *of_six, *one_precision]) == 1
    assert {row["micro_batches"] for row in json.loads(capsys.readouterr().out)} == {1, 2, 6}, "as far as they divide"
    for wrong, message in (
        ((NET, "--batch", "4"), "add --inputs module:function"),
        ((NET, *INPUTS, "--batch", "4", "--machine", "abacus"), "'abacus' is not one of"),
    ):
        assert message in said(capsys, "plan", *wrong, code=2), wrong


def test_planned_beside_what_a_run_has_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pydantic")
    said_of = [said(capsys, "plan", "--compare", tmp_path, code=2)]
    assert "is not the folder of a run" in said(capsys, "plan", "--compare", __file__, code=2)
    record = {"kind": "step", "step": 3, "engine_bytes": 10_000_000, "peak_memory_bytes": 400_000_000}
    for lines in ("", "{", json.dumps(record | {"engine_bytes": "many"})):
        (tmp_path / "metrics.jsonl").write_text(lines)
        said_of.append(said(capsys, "plan", "--compare", tmp_path, code=2))
    for found, message in zip(
        said_of, ("not the folder of a run", "not come to its first step", "is damaged", "is damaged"), strict=True
    ):
        assert message in found
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(START)}\n{json.dumps(record)}")
    (tmp_path / "config.toml").write_text('[model]\nlayers = 2\nwidth = 64\n[parallel]\nnproc = 2\ndevice = "cpu"\n')
    (tmp_path / "timeline-0.json.gz").write_bytes(b"nothing")  # damaged, and not read for this table
    text = said(capsys, "plan", "--compare", tmp_path)
    assert "step 3: zero3, fp32, 2 ranks" in text
    (row,) = (line for line in text.splitlines() if line.startswith("the engine, between steps"))
    assert "10.0 MB" in row
    # Resumed with other settings, and killed before its first step.
    batch = {"sequences": 64, "micro_batches": 4, "reduce_every_micro_batch": True}
    resumed = START | {"step": 3, "plan": "ddp", "precision": "fp16", "ranks": 4, "batch": batch, "recompute": True}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(START)}\n{json.dumps(record)}\n{json.dumps(resumed)}\n")
    with (tmp_path / "config.toml").open("a") as file:
        file.write('plan = "ddp"\nprecision = "fp16"\nrecompute = true\n[optimizer]\nloss_scale_growth = 100\n')
        file.write("[batch]\nsequences = 64\nmicro_batches = 4\nreduce_every_micro_batch = true\n")
    assert said(capsys, "plan", "--compare", tmp_path) == text
    as_json = json.loads(said(capsys, "plan", "--compare", tmp_path, "--json"))
    assert as_json["step"] == 3 and as_json["of_rank_0"][0]["measured"] == 10_000_000
    assert "Missing argument 'MODEL'" in said(capsys, "plan", code=2)


def saves(rank: int, folder: Path) -> None:
    handle = zeroshard.shard(torch.nn.Linear(4, 4), "ddp")
    zeroshard.save(folder, handle, zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1), step=1)


def test_a_checkpoint_without_one_of_its_files_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its bytes were summed without the file, and the difference was given as that of the plan."""
    pytest.importorskip("pydantic")
    start = START | {"ranks": 1}
    record = {"kind": "step", "step": 1, "engine_bytes": 10_000_000, "peak_memory_bytes": 400_000_000}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(record)}\n")
    (tmp_path / "config.toml").write_text('[model]\nlayers = 2\nwidth = 64\n[parallel]\ndevice = "cpu"\n')
    run_ranks(saves, 1, tmp_path)
    of_rank = tmp_path / "step-1" / "rank-00000.safetensors"
    on_disk, of_index = of_rank.stat().st_size, Path(f"{of_rank}.index.json").stat().st_size
    found = json.loads(said(capsys, "plan", "--compare", tmp_path, "--json"))["of_rank_0"][-1]
    assert (found["what"], found["measured"]) == ("files of a checkpoint, all ranks", on_disk + of_index)
    more = {**start, "step": 1, "ranks": 3}  # resumed by three ranks, which have not saved yet
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, (start, record, more, {**record, "step": 2}))))
    assert json.loads(said(capsys, "plan", "--compare", tmp_path, "--json"))["of_rank_0"][-1] == found
    of_rank.write_bytes(of_rank.read_bytes()[:-1])
    cut = said(capsys, "plan", "--compare", tmp_path, code=2)
    assert f"{of_rank} is damaged: expected {on_disk} bytes, found {on_disk - 1} bytes" in cut
    of_rank.unlink()
    lost = said(capsys, "plan", "--compare", tmp_path, code=2)
    assert f"{of_rank} is damaged: expected {on_disk} bytes, found no file" in lost
    (tmp_path / "step-1" / "manifest.json").write_text("junk")
    assert "manifest.json is not a manifest that zeroshard wrote" in said(capsys, "plan", "--compare", tmp_path, code=2)
