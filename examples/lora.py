"""LoRA adapters (peft) on a small Llama: only the adapters train; then all ranks generate. Needs transformers and peft.

torchrun --nproc-per-node 2 examples/lora.py
"""

import peft
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import zeroshard

device = zeroshard.init()
rank = torch.distributed.get_rank()

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=0,
    eos_token_id=None,
)
base = transformers.LlamaForCausalLM(config)  # in real life: from_pretrained
adapters = peft.LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"])
model = peft.get_peft_model(base, adapters).to(device)
handle = zeroshard.shard(model, "zero3", units=LlamaDecoderLayer)  # after the adapters have been added
optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2)

data = torch.Generator().manual_seed(1 + rank)
for _step in range(40):
    starts = torch.randint(32, (8, 1), generator=data)
    tokens = ((starts + torch.arange(12)) % 32).to(device)  # counting, from any number
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()

# `generate` may stop at another length on each rank: inside `unsharded` a forward is not collective.
with handle.unsharded(), torch.no_grad():
    prompt = torch.tensor([[3, 4, 5, 6]], device=device)
    written = model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)[0].tolist()
print(f"rank {rank}: loss {loss.item():.3f}, counts on: {written}")
