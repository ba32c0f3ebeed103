"""The `zeroshard plan` command: its tables, its JSON, and a one-line error for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import zeroshard
from tests.cli.test_commands import said
from tests.kit import Block, Net
from zeroshard.cli.models import _loss_of
from zeroshard.planning import Configuration

NET = "tests.kit:Net"


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


def test_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan", NET, "--fit", "60kB", "--ranks", "8", "--device", "cpu")
    assert "why it does not fit" in text and " fit into 60.0 kB on each rank" in text and "too much in " in text
    rows = json.loads(said(capsys, "plan", NET, "--fit", "1GB", "--json"))
    assert all(row["fits"] for row in rows)


def test_the_trainers_model_and_one_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pydantic")
    path = tmp_path / "run.toml"
    path.write_text("[model]\nlayers = 2\nwidth = 64\n[batch]\nmicro_batches = 2\n")
    (found,) = json.loads(said(capsys, "plan", path, "--plan", "zero3", "--json"))
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
    (tmp_path / "a_script.py").write_text("import sys\nsys.exit()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for arguments, message in (
        (["nothing"], "expected the configuration of a run"),
        (["no.such:module"], "cannot be imported"),
        (["a_script:Net"], "a_script:Net: cannot be imported: it called sys.exit(): what only a script does"),
        (["sys:exit"], "cannot be built on the meta device: it called sys.exit()"),
        (["tests.kit:VOCAB"], "expected a function, found a int"),
        (["tests.kit:logs"], "cannot be built on the meta device"),
        (["builtins:dict"], "expected a torch.nn.Module, found a dict"),
        ([tmp_path / "none.json"], "there is no file"),
        ([tmp_path / "bad.toml"], "unknown configuration key 'model.layer'"),
        ([NET, "--ranks", "0"], "ranks must be a whole number"),
        ([NET, "--ranks", "8,x"], "'x' is not a valid integer"),
        ([NET, "--plan", "zero9"], "unknown plan 'zero9'"),
        ([NET, "--units", "Nothing"], "expected a size, or a class of modules: Block"),
        ([NET, "--fit", "much"], "is not a size"),
        ([NET, "--fit", "0GB"], "is not a size"),
        ([NET, "--micro-batches", "-2"], "micro_batches must be a whole number from 1"),
        ([NET, "--micro-batches", "0"], "micro_batches must be a whole number from 1"),
        ([NET, "--replicas", "0"], "'--replicas': 0 is not in the range"),
        ([NET, "--ranks", "6", "--replicas", "4"], "6 ranks do not divide into 4 replicas"),
        ([NET, "--optimizer", "Adamm"], "unknown optimizer 'Adamm'"),
        ([NET, "--rank", "8"], "unknown option --rank; did you mean --ranks?"),
    ):
        assert message in said(capsys, "plan", *arguments, code=2), arguments


def test_a_model_without_anything_to_differentiate_is_named() -> None:
    """It was a bare StopIteration."""
    with pytest.raises(ValueError, match="the output of Identity has no loss and no tensor that requires grad"):
        _loss_of(torch.nn.Identity(), torch.zeros(2))
    assert _loss_of(torch.nn.Identity(), torch.ones(2, requires_grad=True)) == 1.0


def inputs(sequences: int, tokens: int | None) -> torch.Tensor:
    return torch.zeros(sequences, tokens or 7, dtype=torch.long)


INPUTS = ("--inputs", "tests.cli.test_plan_command:inputs")


def test_a_batch_and_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", NET, "--units", "Block", *INPUTS, "--batch", "4", "--plan", "zero1,zero3")
    text = said(capsys, *arguments, "--machine", "node", "--modules", "--tokens", "64")
    assert "with activations and inputs" in text and "by a model; nothing was measured" in text
    assert any(line.split()[0] == "blocks.2.up" for line in text.splitlines() if line)
    usual, recomputed = (json.loads(said(capsys, *arguments, "--json", *more))[0] for more in ((), ("--recompute",)))
    assert usual["activations"]["inputs"] == 4 * 7 * 8
    assert recomputed["whole_peak"] < usual["whole_peak"] and usual["whole_peak"] > usual["phases"]["step"]["together"]
    text = said(capsys, *arguments, "--fit", "1GB", "--device", "cpu")
    assert "recomputed" in text and "4 of 4 fit into 1.00 GB" in text
    rows = json.loads(said(capsys, *arguments, "--fit", "1kB", "--device", "cpu", "--json"))
    assert sorted(row["micro_batches"] for row in rows) == [1] * 4 + [2] * 4 + [4] * 4, "4 sequences, as none fits"
    for wrong, message in (
        ((NET, "--batch", "4"), "add --inputs module:function"),
        ((NET, "--machine", "node"), "are about a batch: add --batch"),
        ((NET, *INPUTS, "--batch", "4", "--machine", "abacus"), "'abacus' is not one of"),
    ):
        assert message in said(capsys, "plan", *wrong, code=2), wrong


def test_planned_beside_what_a_run_has_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pydantic")
    said_of = [said(capsys, "plan", "--compare", tmp_path, code=2)]
    record = {"kind": "step", "step": 3, "engine_bytes": 10_000_000, "peak_memory_bytes": 400_000_000}
    for lines in ("", "{", json.dumps(record | {"engine_bytes": "many"})):
        (tmp_path / "metrics.jsonl").write_text(lines)
        said_of.append(said(capsys, "plan", "--compare", tmp_path, code=2))
    for found, message in zip(
        said_of, ("not the folder of a run", "not come to its first step", "is damaged", "is damaged"), strict=True
    ):
        assert message in found
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record))
    (tmp_path / "config.toml").write_text('[model]\nlayers = 2\nwidth = 64\n[parallel]\nnproc = 2\ndevice = "cpu"\n')
    (tmp_path / "timeline-0.json.gz").write_bytes(b"nothing")  # damaged, and not read for this table
    text = said(capsys, "plan", "--compare", tmp_path)
    assert "step 3: zero3, fp32, 2 ranks" in text
    (row,) = (line for line in text.splitlines() if line.startswith("the engine, between steps"))
    assert "10.0 MB" in row
    assert "leave MODEL out" in said(capsys, "plan", NET, "--compare", tmp_path, code=2)
    assert "Missing argument 'MODEL'" in said(capsys, "plan", code=2)
