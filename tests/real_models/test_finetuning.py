"""Adapters of `peft`, and `transformers.Trainer`. Where those packages are not installed the tests are skipped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import zeroshard
from tests.kit import CANCELLED, PLANS, Job, State, largest_difference, make, same_bits, train, train_reference
from tests.real_models.real import ROWS, generator, llama, text, tokens
from zeroshard.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


# Adapters -------------------------------------------------------------------------------------------------------------


def adapted() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)


def loss_of_text(model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int = 1) -> Tensor:
    return model(**text(rank, micro_batch, step)).loss / micro_batches


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_adapters_train_and_the_model_under_them_stays(precision: str | None, tmp_path: Path) -> None:
    """As in one process, bit for bit; what is saved loads into a plain model and gives its loss; they merge."""
    peft = pytest.importorskip("peft")
    jobs = [
        Job(model=adapted, loss_of=loss_of_text, precision=precision, units=units, micro_batches=2)
        for units in (LlamaDecoderLayer, None)
    ]
    expected = run_ranks(lambda rank: train_reference(jobs[0], 2), 1)[0]

    def check(rank: int) -> None:
        before = {name: value.clone() for name, value in make(adapted).state_dict().items()}
        for plan in PLANS:
            for job in jobs:
                found = train(job, plan, rank)
                assert found.losses == expected[rank].losses, plan
                assert same_bits(found.weights, expected[rank].weights), plan
            cast = {name: value.to(found.weights[name].dtype) for name, value in before.items()}
            changed = {name for name in cast if not torch.equal(cast[name], found.weights[name])}
            assert changed == {name for name in cast if "lora" in name}
            model = make(adapted)
            handle = zeroshard.shard(model, plan, units=LlamaDecoderLayer, precision=precision)
            handle.load_full_state_dict(found.weights)
            folder = tmp_path / f"{plan}-{rank}"
            with handle.unsharded(), torch.no_grad():
                model.save_pretrained(folder)
                loss = loss_of_text(model, rank, 0, 9)
                plain = peft.PeftModel.from_pretrained(make(llama).to(loss.dtype), folder)
                assert torch.equal(loss_of_text(plain.to(next(model.parameters()).dtype), rank, 0, 9), loss)
            handle.close()
            merged = model.merge_and_unload()
            assert isinstance(merged, hf.LlamaForCausalLM)
            assert abs(float(loss_of_text(merged, rank, 0, 9) - loss)) < 1e-2

    run_ranks(check, 2)
    other = run_ranks(lambda rank: train_reference(ROWS["Llama"].job(precision=precision), 2), 1)[0]
    assert other[0].losses[-1] != expected[0].losses[-1]  # all parameters trained: another result


# The trainer ----------------------------------------------------------------------------------------------------------


def sharded_trainer() -> type[Any]:
    """The recipe of docs/models.md. The class is made where `accelerate` is known to be there."""

    class ShardedTrainer(hf.Trainer):
        def __init__(self, *args: Any, sharding: dict[str, Any], **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.sharding, self.handle = sharding, None

        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            if self.handle is None:
                decayed = self.get_decay_parameter_names(self.model)
                optimizer_class, defaults = self.get_optimizer_cls_and_kwargs(self.args, self.model)
                self.handle = zeroshard.shard(self.model, **self.sharding)
                named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
                groups = [
                    {"params": [p for name, p in named if name in decayed], "weight_decay": self.args.weight_decay},
                    {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
                ]
                groups = [group for group in groups if group["params"]]
                self.optimizer = self.sharded = zeroshard.ShardedOptimizer(groups, optimizer_class, **defaults)
                self.model._is_accelerate_prepared = True  # accelerate: no DistributedDataParallel around it
                self.model.no_sync = self.handle.no_sync  # accelerate calls it between micro-batches
            return self.optimizer

        def _clip_grad_norm(self, model: nn.Module) -> Tensor:
            return self.sharded.clip_grad_norm_(self.args.max_grad_norm)

        def save_model(self, *args: Any, **kwargs: Any) -> None:
            with self.handle.unsharded():
                super().save_model(*args, **kwargs)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            extra = {"scheduler": self.lr_scheduler}
            zeroshard.save(f"{output_dir}/sharded", self.handle, self.sharded, step=self.state.global_step, extra=extra)

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            if checkpoint is not None:
                extra = {"scheduler": self.lr_scheduler}
                zeroshard.load(f"{checkpoint}/sharded", self.handle, self.sharded, extra=extra)

    return ShardedTrainer


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = tokens(generator(0, 0, index))[0]
        return {"input_ids": ids, "labels": ids}


def run_trainer(rank: int, trainer_class: Any, folder: Path, resume: str | None = None, **sharding: Any) -> Any:
    """What was logged, the weights, the trainer: six steps of two micro-batches; evaluated and saved every third."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    args = hf.TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=6,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=1.0,
        report_to=[],
        disable_tqdm=True,
    )
    kwargs = {"sharding": sharding} if sharding else {}
    trainer = trainer_class(make(llama), args, train_dataset=Texts(), eval_dataset=Texts(), **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss")
    logged = [{key: float(line[key]) for key in kept if key in line} for line in trainer.state.log_history]
    weights: State = {name: value.clone() for name, value in trainer.model.state_dict().items()} if not sharding else {}
    return logged, weights or trainer.handle.full_state_dict(), trainer


def test_the_trainer_of_transformers_over_a_sharded_model(tmp_path: Path) -> None:
    """Log and weights are those of the trainer by itself (torch DDP, whose sums have another order), and the same bits
    under every plan; a run that is resumed from step 3 ends as one that was not stopped."""
    pytest.importorskip("accelerate")
    trainer_class = sharded_trainer()

    def check(rank: int) -> None:
        logged, weights, trainer = run_trainer(rank, hf.Trainer, tmp_path / "plain")
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
        first = None
        for plan in PLANS:
            folder, sharding = tmp_path / str(plan), {"plan": plan, "units": LlamaDecoderLayer}
            found = run_trainer(rank, trainer_class, folder, **sharding)
            assert found[2].model_wrapped is found[2].model
            assert largest_difference(found[1], weights) < CANCELLED
            for line, expected in zip(found[0], logged, strict=True):
                assert line == pytest.approx(expected, abs=CANCELLED)
            first = first or found
            assert found[0] == first[0] and same_bits(found[1], first[1])
            resumed = run_trainer(rank, trainer_class, folder, str(folder / "checkpoint-3"), **sharding)
            assert same_bits(resumed[1], first[1])
            saved = hf.LlamaForCausalLM.from_pretrained(folder / "checkpoint-6").state_dict()
            assert same_bits(dict(saved), first[1])
            early = hf.LlamaForCausalLM.from_pretrained(folder / "checkpoint-3").state_dict()
            assert not same_bits(dict(early), first[1])

    run_ranks(check, 2)
