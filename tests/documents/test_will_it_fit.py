"""docs/will-it-fit.md: fourteen questions, each with a command that runs, and two large models. (`make test-everything`
also compares the answers, with the models of the page, which takes a minute.)"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from benchmarks.plan_time import large_models, measure
from tests.cli.test_commands import said
from tests.grids import EVERYTHING
from tests.house.pages import DOCS

PAGE = (DOCS / "will-it-fit.md").read_text(encoding="utf-8")
QUESTIONS = re.findall(r"^## (\d+)\. .*?\?\n\n    zeroshard (.*?)\n\n(.*?)(?=\n## |\Z)", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore")  # warnings of transformers
def test_the_tables_of_large_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    assert [model["name"] for model in large_models()] == ["llama-70b.json", "moe-400b.json"]
    for model in large_models():
        Path(model["name"]).write_text(model["config"])
        found = said(capsys, *model["command"].split())
        assert [line.strip() for line in found.splitlines()] == [line.strip() for line in model["said"].splitlines()]


@pytest.mark.skipif(not EVERYTHING, reason="takes half a minute: make test-everything")
def test_large_models_need_little_time_and_memory(tmp_path: Path) -> None:
    """Of processor time six times what is promised as time, because other programs slow down processors, too."""
    pytest.importorskip("transformers")
    for model in large_models():
        Path(tmp_path, model["name"]).write_text(model["config"])
        cost = measure(model["command"].split(), tmp_path)
        assert model["said"].splitlines()[0].strip() in cost.said
        assert cost.processor_seconds < 60 and cost.peak < 1e9, cost


def configuration() -> str:
    """The `config.json` of the page; in `make test` a small model instead."""
    config = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])
    if not EVERYTHING:
        config |= {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        config |= {"num_key_value_heads": 4, "vocab_size": 99}
    return json.dumps(config)


@pytest.mark.filterwarnings("ignore")  # warnings of transformers
def test_each_question_has_a_command_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert [int(number) for number, *_ in QUESTIONS] == list(range(1, 15))
    parameters = "6,738,415,616" if EVERYTHING else "47,680"
    (tmp_path / "config.json").write_text(configuration())
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        for number, command, answer in QUESTIONS:
            found = said(capsys, *command.split())
            values = re.findall(r"`(\d[\d.]* (?:[kMGT]?B|ms|s))`", answer)
            assert f"{parameters} parameters" in found or "fit into" in found, found
            assert len(values) >= 1, f"question {number} has no answer in numbers"
            for value in values if EVERYTHING else ():
                assert value in found, f"question {number}: {value} is not what the command says"
    finally:
        os.chdir(before)
