"""Trainers of other packages, which save and evaluate in ways of their own: as those of sentence-transformers do, which
are written out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.integrations.common import HALF, STEPS, as_launched
from tests.integrations.test_with_transformers import Texts, arguments, logged
from tests.kit import same_bits
from tests.late import once
from zeroshard.testing import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.by_gloo]

_once = once("transformers.trainer", "accelerate", "tests.real_models.real", "zeroshard.integrations.transformers")

PARTS = "parts"


class Wrapped(nn.Module):
    """A model of transformers inside of another one, which saves its parts one by one."""

    def __init__(self) -> None:
        from tests.real_models.real import llama

        super().__init__()
        self.inner = llama()
        self.scale = nn.Linear(1, 1)

    def forward(self, input_ids: Any, labels: Any = None, **more: Any) -> Any:
        out = self.inner(input_ids=input_ids, labels=labels, **more)
        out["loss"] = out["loss"] * self.scale.weight.square().sum()
        return out

    def save(self, folder: str) -> None:
        with torch.no_grad():  # for the model card
            example = self.inner(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits
        self.inner.save_pretrained(folder)
        torch.save({"scale": self.scale.state_dict(), "example": example}, Path(folder, PARTS))


def trainer(folder: Path, plan: str, model: Any = None, optimizers: Any = (None, None), **changes: Any) -> Any:
    import transformers as hf

    from zeroshard.integrations.transformers import ShardedTrainerMixin

    class PlainTrainer(hf.Trainer):
        evaluator: Any = None

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            self.model.save(output_dir)

        def _load_from_checkpoint(self, checkpoint_path: str) -> None:
            inner = hf.LlamaForCausalLM.from_pretrained(checkpoint_path)
            self.model.inner.load_state_dict(inner.state_dict())
            self.model.scale.load_state_dict(torch.load(Path(checkpoint_path, PARTS))["scale"])

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            output = super().evaluation_loop(*args, **kwargs)
            if self.evaluator is not None:
                output.metrics["eval_found"] = self.evaluator(self.model)
            return output

    class OtherTrainer(ShardedTrainerMixin, PlainTrainer):
        pass

    torch.manual_seed(0)
    more = {"train_dataset": Texts(), "eval_dataset": Texts(), "sharding": {"plan": plan, "units": "LlamaDecoderLayer"}}
    return OtherTrainer(model or Wrapped(), arguments(folder, **changes), optimizers=optimizers, **more)


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_a_trainer_that_saves_each_part_by_itself(plan: str, tmp_path: Path) -> None:
    """It has the values of main, where it once wrote 16-bit weights in silence, or could not read them. It loads what a
    plain Trainer of the class has saved."""
    pytest.importorskip("accelerate")
    import transformers as hf

    def check(rank: int) -> None:
        as_launched(rank, 2)
        run = trainer(tmp_path / "a", plan, bf16=True)
        run.train()
        main = run.handle.full_state_dict(main=True)
        saved = tmp_path / "a" / f"checkpoint-{STEPS}"
        torch.distributed.barrier()
        inner = hf.LlamaForCausalLM.from_pretrained(saved)
        parts = torch.load(saved / PARTS)
        found = {f"inner.{name}": value for name, value in inner.state_dict().items()}
        found |= {f"scale.{name}": value for name, value in parts["scale"].items()}
        assert same_bits(found, dict(main))
        assert json.loads((saved / "config.json").read_text())["dtype"] == "float32"
        assert any((value != value.bfloat16()).any() for value in main.values())  # a control
        example = inner(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits
        assert torch.allclose(parts["example"].float(), example, rtol=0.1, atol=0.1)
        assert not any("_save_to_state_dict" in vars(module) for module in run.model.modules())
        torch.distributed.barrier()
        if rank == 0:
            (saved / "zeroshard").rename(tmp_path / "away")  # now it is what a plain Trainer saves
        torch.distributed.barrier()
        again = trainer(tmp_path / "a", plan, save_strategy="no")
        again._load_from_checkpoint(str(saved))
        assert same_bits(dict(again.model.state_dict()), dict(main))

    run_ranks(check, 2)


def test_an_evaluator_that_calls_the_model_more_often_on_one_rank(tmp_path: Path) -> None:
    """It was a deadlock under ZERO3."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        as_launched(rank, 2)
        found = {}
        for plan in ("zero1", "zero3"):
            run = trainer(tmp_path / plan, plan, save_strategy="no", eval_strategy="steps", eval_steps=HALF)
            ids = Texts()[rank]["input_ids"][None]
            run.evaluator = lambda model, ids=ids: sum(
                model.inner(input_ids=ids.roll(number)).logits.sum().item() for number in range(1 + 4 * rank)
            )
            run.train()
            found[plan] = logged(run), [one["eval_found"] for one in run.state.log_history if "eval_found" in one]
        assert found["zero1"] == found["zero3"]
        assert len(found["zero1"][1]) == STEPS // HALF

    run_ranks(check, 2)


def test_weights_of_a_loss(tmp_path: Path) -> None:
    """The error says what to do, and that works."""
    pytest.importorskip("accelerate")

    def check(rank: int) -> None:
        as_launched(rank, 2)
        apart = nn.Linear(3, 3)
        model = Wrapped()
        optimizer = torch.optim.AdamW([*model.parameters(), *apart.parameters()])
        with pytest.raises(ValueError, match=r"2 parameters that belong to no sharded model: .* a part of the model"):
            trainer(tmp_path, "zero3", model, optimizers=(optimizer, None), save_strategy="no").train()
        model = Wrapped()
        model.inner.of_the_loss = apart
        optimizer = torch.optim.AdamW(model.parameters())
        run = trainer(tmp_path, "zero3", model, optimizers=(optimizer, None), save_strategy="no")
        run.train()
        assert "inner.of_the_loss.weight" in run.handle.full_state_dict()

    run_ranks(check, 2)


def test_what_is_shown_is_only_shown_in_the_block() -> None:
    pytest.importorskip("accelerate")
    from zeroshard.integrations.transformers import _showing

    def check(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        handle = zeroshard.shard(model, "zero3")
        state = {name: torch.full_like(value, 7) for name, value in handle.full_state_dict().items()}
        own = handle.full_state_dict()
        with handle.unsharded():
            with _showing(model, state):
                assert same_bits(dict(model.state_dict()), state)
                assert model[1].state_dict()["running_mean"].tolist() == [7, 7]
                state.clear()  # as transformers does while it saves
                assert same_bits(dict(model.state_dict()), own)
            assert same_bits(dict(model.state_dict()), own)
        assert not any("_save_to_state_dict" in vars(module) for module in model.modules())

    run_ranks(check, 2)


def test_a_plain_loop_gets_a_sharded_model(tmp_path: Path) -> None:
    """The error names the integrations. (On CPUs these loops move a model, and raise before they wrap it.)"""
    pytest.importorskip("accelerate")
    import accelerate
    import transformers as hf

    from tests.real_models.real import llama

    def check(rank: int) -> None:
        as_launched(rank, 2)
        model = llama()
        zeroshard.shard(model, "zero3")
        for plain in (accelerate.Accelerator().prepare, lambda model: hf.Trainer(model, arguments(tmp_path))):
            with pytest.raises(RuntimeError, match=r"prepares it as its own: .*zeroshard\.integrations"):
                plain(model)

    run_ranks(check, 2)
