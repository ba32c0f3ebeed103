"""The code on the pages runs: every example, and the old and the new side of every diff in docs/moving."""

from __future__ import annotations

import os
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.grids import EVERYTHING
from tests.house.pages import CONTINUES, OWN, blocks, commands, sides, sides_of_the_readmes_diff
from tests.kit import same_bits
from zeroshard.cli.main import run
from zeroshard.testing import run_ranks


class Block(nn.Linear):
    """Stands for the reader's transformer block."""


class Loader:
    def state_dict(self) -> dict[str, int]:
        return {"position": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"position": 3}


def run_continued(rank: int, page: str, folder: str) -> int:
    """Run a page whose examples use the README's model, handle and optimizer."""
    os.chdir(folder)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    program = "\n".join(sides_of_the_readmes_diff()[1]).replace("range(1, 101)", "range(1, 4)")
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
        "loader": Loader(),
        "loss_fn": nn.functional.mse_loss,
        "batches": inputs[: 1 + rank],
        "micro_batches": inputs,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(names["optimizer"], lambda step: 1.0),
    }
    examples = [block.text for block in blocks(page, "python") if block.is_run]
    for example in examples:
        exec(example, names)
        names["model"] = model  # the planner's example builds another model
    return len(examples)


@pytest.mark.parametrize("page", CONTINUES)
def test_examples_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    assert min(run_ranks(run_continued, CONTINUES[page], page, str(tmp_path))) > 0


def tutorial(rank: int, folder: str, changes: tuple[str, str], last: str) -> dict[str, torch.Tensor]:
    """The weights after the tutorial's examples, up to the one with `last` in it."""
    os.chdir(folder)
    names: dict[str, Any] = {}
    for block in blocks("docs/tutorial.md", "python"):
        if block.is_run:
            exec(block.text.replace(*changes), names)
        if last in block.text:
            break
    return dict(names["handle"].full_state_dict())


def test_the_tutorials_resumed_run_has_the_bits_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    resumed = run_ranks(tutorial, 2, str(tmp_path), ("", ""), "train(loaded.step, 4)")
    whole = run_ranks(tutorial, 2, str(tmp_path), ("train(0, 2)", "train(0, 4)"), "train(0, 2)")
    assert all(map(same_bits, resumed, whole))


SHORTER = {} if EVERYTHING else {"torch.randn(512, 16": "torch.randn(64, 16"}
"""The tutorial's data: two steps an epoch on two ranks, instead of sixteen."""


def run_page(rank: int, page: str, folder: str) -> dict[str, list[float]]:
    """Run a page in an empty namespace: its examples in their order, then both sides of each diff, on data of this
    rank."""
    os.chdir(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page, "python"):
        if block.is_run:
            text = block.text
            for long, short in SHORTER.items():
                text = text.replace(long, short)
            exec(text, names)
    losses = {}
    for number, block in enumerate(blocks(page, "diff")):
        for side, lines in zip(("before", "after"), sides(block.text), strict=True):
            program = "\n".join(lines).replace("dist.init_process_group()", "pass  # there is a group already")
            if block.mark.startswith("run: after") and side == "before":
                compile(program, page, "exec")
                continue
            exec(program, names := {"__name__": "page"})
            losses[f"{number} {side}"] = names["losses"]
            run_commands(rank, page, after=f"{number} {side}")
    run_commands(rank, page, after="")
    return losses


AFTER = {"import": "0 before", "export": "0 after"}
"""On pages with diffs: the command that reads what a side of a diff has written."""


def run_commands(rank: int, page: str, after: str) -> None:
    """Rank 0 runs the page's commands for checkpoints: those that come after a side of a diff, or (""), where there
    is no diff, all of them."""
    dist.barrier()
    for line in commands(page) if rank == 0 else ():
        program, *words = shlex.split(line)
        if program == "zeroshard" and (AFTER[words[0]] if blocks(page, "diff") else "") == after:
            assert run(words) == 0, line
    dist.barrier()


@pytest.mark.filterwarnings("ignore")  # warnings of the other libraries
@pytest.mark.parametrize("page", OWN)
def test_pages_run_from_nothing(page: str, tmp_path: Path) -> None:
    if page.endswith("accelerate.md"):
        pytest.importorskip("accelerate")
    first, second = run_ranks(run_page, 2, page, str(tmp_path))
    assert (len(first) > 0) == bool(blocks(page, "diff"))
    for name, losses in first.items():
        assert len(losses) >= 6 and all(0 < loss < 100 for loss in losses)
        if "accelerate" not in page:
            assert losses != second[name], "each rank has data of its own"
        if name.endswith("after") and name.replace("after", "before") in first:
            assert losses == pytest.approx(first[name.replace("after", "before")], rel=1e-4)


def test_the_example_of_contributing_is_a_test_that_passes() -> None:
    example = next(block for block in blocks("CONTRIBUTING.md", "python") if "run_ranks" in block.text)
    names = {"torch": torch, "nn": nn, "zeroshard": zeroshard, "run_ranks": run_ranks}
    exec(example.text, names)
    names["test_plans_agree"]()  # type: ignore[operator]
