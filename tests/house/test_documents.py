"""What README and the pages say can be run, and what they point to exists."""

import importlib.util
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zeroshard.testing import run_ranks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNABLE = ["README.md", "docs/guide.md", "docs/memory.md"]
"""The pages whose Python examples continue the README's."""


class Block(nn.Linear):
    pass


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def sides_of_the_diff() -> tuple[list[str], list[str]]:
    """The README's diff: the lines before, and those after it."""
    (diff,) = blocks("README.md", "diff")
    lines = diff.splitlines()
    return tuple([line[1:] for line in lines if line[:1] in (mark, " ", "")] for mark in "-+")  # type: ignore[return-value]


def run_examples(rank: int, page: str, folder: str) -> int:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    program = "\n".join(sides_of_the_diff()[1]).replace("range(1, 101)", "range(1, 4)")
    exec(program, names)
    model = names["model"]
    inputs = [(names["x"], names["y"])] * 2
    names |= {
        "nn": nn,
        "nullcontext": nullcontext,
        "Block": Block,
        "build": lambda: nn.Sequential(Block(8, 8), Block(8, 8)),
        "rank": rank,
        "loaded": torch.zeros(512, 32),
        "loss_fn": nn.functional.mse_loss,
        "batches": inputs[: 1 + rank],
        "micro_batches": inputs,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(names["optimizer"], lambda step: 1.0),
    }
    examples = sorted(blocks(page, "python"), key=lambda text: "handle.close()" in text)  # that one last
    for example in examples:
        before_gradient, backward, after = example.partition("handle.gradient")
        exec(before_gradient.replace("runs/a", folder), names)
        if backward:
            nn.functional.mse_loss(names["model"](names["x"]), names["y"]).backward()
            exec(backward + after, names)
        names["model"] = model  # the planner's example builds another one
    return len(examples)


@pytest.mark.parametrize("page", RUNNABLE)
def test_examples_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    assert min(run_ranks(run_examples, 2, page, str(tmp_path / "steps"))) > 0


def test_the_five_lines_are_those_of_the_examples() -> None:
    for side, name in zip(sides_of_the_diff(), ("train_plain", "train_sharded"), strict=True):
        program = [line for line in (ROOT / f"examples/{name}.py").read_text().splitlines() if line]
        assert [line for line in side if line] == program[1:-2]  # without docstring and printing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = re.sub(r"`[^`]*`", "code", prose)
    for path, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", prose):
        if path.startswith("http"):
            continue
        found = page.parent / path if path else page
        assert found.exists(), f"{page.name}: {path}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in anchors, f"{page.name}: {path}{anchor}"


def test_no_line_of_prose_in_the_readme_is_long() -> None:
    prose = [line for line in (ROOT / "README.md").read_text().splitlines() if not line.startswith(("|", "!"))]
    assert max(map(len, prose)) <= 110


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`((?:zeroshard|tests|docs|benchmarks)/[\w/.-]+\.\w+)`", text):
        assert (ROOT / path).exists(), path


def test_the_picture_shows_what_the_planner_says() -> None:
    script = ROOT / "docs/pictures/bytes_per_rank.py"
    spec = importlib.util.spec_from_file_location("bytes_per_rank", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = module.draw(*module.measure())
    assert drawn == script.with_name("bytes-per-rank.svg").read_text(encoding="utf-8"), f"run {script.name} again"
