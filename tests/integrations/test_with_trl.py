"""TRL's SFTTrainer over a sharded model has the bits of a plain zeroshard loop with its loss and its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from tests.integrations.common import HALF, MAX_NORM, MICRO_BATCHES, STEPS, as_launched
from tests.integrations.versions import as_logged, in_order
from tests.kit import State, same_bits
from tests.late import once
from zeroshard.testing import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.by_gloo]

_once = once("trl.trainer.sft_trainer", "zeroshard.integrations.transformers")

WORDS = ("ab", "cde", "f", "ghij", "kl", "m", "nop", "q")
LETTERS = "abcdefghijklmnopqrstuvwxyz :!"


def tokenizer() -> Any:
    """One token for each letter; nothing is downloaded."""
    import tokenizers
    import transformers as hf

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocab = {token: number for number, token in enumerate([*special.values(), *LETTERS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return hf.PreTrainedTokenizerFast(tokenizer_object=model, **special)


def llama() -> Any:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **special, num_attention_heads=4, max_position_embeddings=64))


def trainer(of_class: Any, folder: Path, **options: Any) -> Any:
    """The loss counts the tokens of the completions only; there are different numbers of them on every rank."""
    import datasets
    import trl

    usual = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": STEPS,
        "save_steps": HALF,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": MAX_NORM,
        "max_length": 32,
        "bf16": False,
        **in_order(),
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    words = [f"{first}{second}" for first in WORDS[:4] for second in WORDS]
    data = datasets.Dataset.from_dict(
        {"prompt": [f"say {word}:" for word in words], "completion": [f" {word}!" for word in words]}
    )
    more = {name: options.pop(name) for name in ("sharding",) if name in options}
    args = trl.SFTConfig(str(folder), **{**usual, **options})
    return of_class(llama(), args, train_dataset=data, processing_class=tokenizer(), **more)


def plain_loop(rank: int, folder: Path) -> tuple[list[tuple[float, float]], State]:
    """The data and the loss are those of a plain SFTTrainer, which does not train itself."""
    import transformers as hf
    import trl

    plain = trainer(trl.SFTTrainer, folder)
    model, batches = plain.model, iter(plain.get_train_dataloader())
    decayed = hf.Trainer.get_decay_parameter_names(None, model)
    handle = zeroshard.shard(model, "zero1", units="LlamaDecoderLayer")
    groups = [
        {"params": [p for name, p in model.named_parameters() if name in decayed], "weight_decay": 0.1},
        {"params": [p for name, p in model.named_parameters() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = zeroshard.ShardedOptimizer(groups, torch.optim.AdamW, lr=1e-2, fused=True)
    scheduler = hf.get_scheduler("linear", optimizer, 0, STEPS)
    model.train()
    logged = []
    for _ in range(STEPS):
        of_step, num_items = plain.get_batch_samples(batches, MICRO_BATCHES, torch.device("cpu"))
        total = torch.tensor(0.0)
        for number, batch in enumerate(of_step):
            with handle.no_sync() if number + 1 < MICRO_BATCHES else torch.enable_grad():
                loss = plain.compute_loss(model, batch, num_items_in_batch=num_items)
                optimizer.backward(loss)
            total += loss.detach()
        norm = optimizer.clip_grad_norm_(MAX_NORM).item()
        optimizer.step(), scheduler.step(), optimizer.zero_grad()
        of_ranks = [torch.zeros(()), torch.zeros(())]
        torch.distributed.all_gather(of_ranks, total)
        logged.append((as_logged(torch.stack(of_ranks).mean().item()), norm))
    return logged, handle.full_state_dict(main=True)


def logged(trainer: Any) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]


def test_the_sft_trainer_has_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    """Also when it is resumed under another plan."""
    trl = pytest.importorskip("trl", reason="the extra 'dev' brings trl")
    from zeroshard.integrations import Sharding
    from zeroshard.integrations.transformers import ShardedTrainerMixin

    class ShardedSFTTrainer(ShardedTrainerMixin, trl.SFTTrainer):
        """As docs/integrations.md has it."""

    def check(rank: int) -> None:
        as_launched(rank, 2)
        lines, weights = plain_loop(rank, tmp_path / "plain")
        how = {"sharding": Sharding("zero3", units="LlamaDecoderLayer")}
        run = trainer(ShardedSFTTrainer, tmp_path / "a", **how)
        run.train()
        assert logged(run) == lines
        assert same_bits(run.handle.full_state_dict(), weights)
        other = Sharding("zero1", units="LlamaDecoderLayer")
        resumed = trainer(ShardedSFTTrainer, tmp_path / "a", sharding=other, save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{HALF}"))
        assert logged(resumed)[HALF:] == lines[HALF:]
        assert same_bits(resumed.handle.full_state_dict(), weights)
        control = trainer(ShardedSFTTrainer, tmp_path / "b", **how, save_strategy="no", max_grad_norm=100.0)
        control.train()
        assert not same_bits(control.handle.full_state_dict(), weights)

    run_ranks(check, 2)


def test_the_reference_model_of_dpo_follows_the_trained_one(tmp_path: Path) -> None:
    """With the whole of its weights, so that both are equal after a step."""
    trl = pytest.importorskip("trl", reason="the extra 'dev' brings trl")
    import datasets

    from zeroshard.integrations.sharding import expect_handle_of
    from zeroshard.integrations.transformers import ShardedTrainerMixin

    class ShardedDPOTrainer(ShardedTrainerMixin, trl.DPOTrainer):
        pass

    def are_equal(**options: Any) -> bool:
        usual = {"per_device_train_batch_size": 2, "max_steps": 1, "max_length": 32, "bf16": False, "use_cpu": True}
        usual |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "learning_rate": 1e-2}
        answers = {"chosen": [f" {word}!" for word in WORDS], "rejected": [f" no {word}" for word in WORDS]}
        data = datasets.Dataset.from_dict({"prompt": [f"say {word}:" for word in WORDS], **answers})
        run = ShardedDPOTrainer(
            llama(),
            ref_model=llama(),
            args=trl.DPOConfig(str(tmp_path), **usual, **options),
            train_dataset=data,
            processing_class=tokenizer(),
            sharding={"plan": "zero3", "units": "LlamaDecoderLayer"},
        )
        run.train()
        reference = expect_handle_of(run.ref_model, "prepare_model").full_state_dict()
        return same_bits(reference, run.handle.full_state_dict())

    def check(rank: int) -> None:
        as_launched(rank, 2)
        assert are_equal(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0)
        assert not are_equal()  # a control

    run_ranks(check, 2)
