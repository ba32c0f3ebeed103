"""The Trainer of transformers with a sharded model: one argument. Needs transformers and accelerate.

torchrun --nproc-per-node 2 examples/with_trainer.py
"""

import tempfile

import torch
import transformers

import zeroshard
from zeroshard.integrations import Sharding
from zeroshard.integrations.transformers import ShardedTrainer

zeroshard.init()


class Counting(torch.utils.data.Dataset):
    """Texts that count, from any number."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(12)) % 32
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
with tempfile.TemporaryDirectory() as folder:
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=30,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    sharding = Sharding("zero3", units="LlamaDecoderLayer")
    trainer = ShardedTrainer(model, arguments, train_dataset=Counting(), sharding=sharding)
    result = trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
