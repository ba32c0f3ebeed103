"""Small `transformers` models with random weights, each with a loss on data that differ on every rank and in every
step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersBlock
from transformers.models.t5.modeling_t5 import T5Block
from transformers.models.vit.modeling_vit import ViTLayer

from tests.grids import EVERYTHING
from tests.kit import Job

hf.logging.set_verbosity_error()

VOCAB, WIDTH, HIDDEN = 37, 24, 40
LAYERS = 3 if EVERYTHING else 2
"""Of BERT and ViT. Two gathered blocks stay; other models have more, so that ZERO3 gathers again."""
PAD, START, END = 0, 1, 2

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
    "bos_token_id": START,
    "eos_token_id": END,
}
GROUPED: dict[str, Any] = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2}
T5_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": HIDDEN,
    "num_heads": 3,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "decoder_start_token_id": PAD,
}


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, num_hidden_layers=3))


def gpt2(dropout: float = 0.0) -> nn.Module:
    """The head is tied to the embedding."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 3, "n_head": 3, "n_positions": 32}
    special = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **rates, **special, loss_type="ForCausalLM"))


def bert(dropout: float = 0.0) -> nn.Module:
    """The head's matrix is tied to the embedding, and its bias has two names."""
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return hf.BertForMaskedLM(hf.BertConfig(**TEXT, **rates, num_hidden_layers=LAYERS, num_attention_heads=3))


def t5(dropout: float = 0.0) -> nn.Module:
    """Encoder, decoder and head share one embedding; all layers use the attention bias of the first."""
    return hf.T5ForConditionalGeneration(hf.T5Config(**T5_SIZES, dropout_rate=dropout))


def mixtral() -> nn.Module:
    """Eight experts in one tensor; each token uses one."""
    routing = {"num_local_experts": 8, "num_experts_per_tok": 1, "output_router_logits": True}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, **routing, num_hidden_layers=2))


def switch() -> nn.Module:
    """Six experts that are modules; an expert without tokens is not called."""
    sizes: dict[str, Any] = {"num_experts": 6, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    rates = {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "expert_capacity": 64}
    return hf.SwitchTransformersForConditionalGeneration(hf.SwitchTransformersConfig(**T5_SIZES, **sizes, **rates))


def vit(dropout: float = 0.0) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "image_size": 12, "patch_size": 4}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    layers = {"num_hidden_layers": LAYERS, "num_attention_heads": 3}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, **layers, **rates, num_labels=5))


def generator(rank: int, micro_batch: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1 + rank + 10 * micro_batch + 100 * step)


def tokens(random: torch.Generator, length: int = 7) -> Tensor:
    return torch.randint(3, VOCAB, (2, length), generator=random)


def text(rank: int, micro_batch: int, step: int) -> dict[str, Tensor]:
    ids = tokens(generator(rank, micro_batch, step))
    return {"input_ids": ids, "labels": ids}


def padded_text(rank: int, micro_batch: int, step: int) -> dict[str, Tensor]:
    """Some labels are ignored; one sequence ends with padding, whose length differs between ranks."""
    random = generator(rank, micro_batch, step)
    ids, mask = tokens(random), torch.ones(2, 7, dtype=torch.long)
    mask[1, 6 - (rank + step) % 3 :] = 0
    counts = (torch.rand(2, 7, generator=random) < 0.6).index_fill_(1, torch.tensor(0), True) & mask.bool()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~counts, -100)}


def text_to_text(rank: int, micro_batch: int, step: int) -> dict[str, Tensor]:
    random = generator(rank, micro_batch, step)
    return {"input_ids": tokens(random), "labels": tokens(random, 5)}


def images(rank: int, micro_batch: int, step: int) -> dict[str, Tensor]:
    random = generator(rank, micro_batch, step)
    return {
        "pixel_values": torch.randn(2, 3, 12, 12, generator=random),
        "labels": torch.randint(5, (2,), generator=random),
    }


@dataclass(frozen=True)
class Row:
    """A model, its inputs, and the class of its units."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], dict[str, Tensor]]
    block: type[nn.Module]

    def loss(self, model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int = 1) -> Tensor:
        return model(**self.batch(rank, micro_batch, step)).loss / micro_batches

    def job(self, **changes: Any) -> Job:
        return Job(**{"model": self.build, "loss_of": self.loss, "units": self.block, "steps": 5, **changes})


ROWS = {
    "Llama": Row(llama, text, LlamaDecoderLayer),
    "GPT-2": Row(gpt2, text, GPT2Block),
    "BERT": Row(bert, padded_text, BertLayer),
    "T5": Row(t5, text_to_text, T5Block),
    "Mixtral": Row(mixtral, text, MixtralDecoderLayer),
    "Switch": Row(switch, text_to_text, SwitchTransformersBlock),
    "ViT": Row(vit, images, ViTLayer),
}


# More architectures, each with something unusual ----------------------------------------------------------------------

DECODER: dict[str, Any] = {**TEXT, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
ENCODER: dict[str, Any] = {**TEXT, "num_attention_heads": 3, "num_hidden_layers": 3}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ: dict[str, Any] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 3),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), HIDDEN),
    **{name: TEXT[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    "d_model": WIDTH,
    "dropout": 0.0,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
WAVES: dict[str, Any] = {
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
    **dict.fromkeys(("final_dropout", "layerdrop", "mask_time_prob"), 0.0),
    "vocab_size": 12,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_feat_extract_layers": 2,
    "conv_dim": (8, 8),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
}
CLIP_TEXT = {**{name: TEXT[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}, "eos_token_id": END}
CLIP_IMAGE = {"hidden_size": 16, "intermediate_size": 24, "image_size": 12, "patch_size": 4}
TWO_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}


def pairs(rank: int, micro_batch: int, step: int) -> dict[str, Any]:
    random = generator(rank, micro_batch, step)
    image = torch.randn(2, 3, 12, 12, generator=random)
    return {"input_ids": tokens(random), "pixel_values": image, "return_loss": True}


def waves(rank: int, micro_batch: int, step: int) -> dict[str, Tensor]:
    random = generator(rank, micro_batch, step)
    labels = torch.randint(1, 9, (2, 3), generator=random)
    return {"input_values": torch.randn(2, 800, generator=random), "labels": labels}


def spectra(rank: int, micro_batch: int, step: int) -> dict[str, Tensor]:
    random = generator(rank, micro_batch, step)
    return {"input_features": torch.randn(2, 8, 24, generator=random), "labels": tokens(random, 5)}


def of_class(name: str, config: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, name)(getattr(hf, config)(**options))


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int, int], dict[str, Any]]]] = {
    "ALBERT: one layer, run three times": (
        of_class("AlbertForMaskedLM", "AlbertConfig", {**ENCODER, **NO_DROPOUT, "embedding_size": 12}),
        padded_text,
    ),
    "BART: learned positions, scaled shared embedding": (
        of_class("BartForConditionalGeneration", "BartConfig", {**SEQ2SEQ, "max_position_embeddings": 32}),
        text_to_text,
    ),
    "CLIP: two towers, a 0-d parameter, a loss over pairs": (
        of_class(
            "CLIPModel",
            "CLIPConfig",
            {"text_config": CLIP_TEXT | TWO_LAYERS, "vision_config": CLIP_IMAGE | TWO_LAYERS, "projection_dim": 12},
        ),
        pairs,
    ),
    "DeBERTa: the head takes the embedding's weights": (
        of_class(
            "DebertaV2ForMaskedLM",
            "DebertaV2Config",
            {**ENCODER, **NO_DROPOUT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        ),
        padded_text,
    ),
    "DeepSeek-V3: latent attention, shared experts": (
        of_class(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            {**DECODER, **EXPERTS, **LATENT, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
            | {"num_key_value_heads": 2, "first_k_dense_replace": 1},
        ),
        text,
    ),
    "GPT-OSS: sinks, experts with biases": (
        of_class(
            "GptOssForCausalLM",
            "GptOssConfig",
            {**DECODER, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1},
        ),
        text,
    ),
    "Mamba: a mixer takes its convolution's weights": (
        of_class(
            "MambaForCausalLM",
            "MambaConfig",
            {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": PAD},
        ),
        text,
    ),
    "Qwen2-MoE: routed and shared experts": (
        of_class(
            "Qwen2MoeForCausalLM",
            "Qwen2MoeConfig",
            {**DECODER, **EXPERTS, "num_key_value_heads": 1, "num_experts": 6, "shared_expert_intermediate_size": 24},
        ),
        text,
    ),
    "wav2vec2: a weight made of two (weight norm)": (of_class("Wav2Vec2ForCTC", "Wav2Vec2Config", WAVES), waves),
    "Whisper: frozen positions, convolutions": (
        of_class(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16}
            | {"decoder_start_token_id": START, "suppress_tokens": None, "begin_suppress_tokens": None},
        ),
        spectra,
    ),
}


RESNET = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic", "num_labels": 5}
resnet = of_class("ResNetForImageClassification", "ResNetConfig", RESNET)
"""Batch norm: buffers that training changes."""

SPARSE = {"num_experts": 4, "expert_capacity": 64, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
NLLB_RATES = {
    **dict.fromkeys(("attention_dropout", "activation_dropout", "moe_token_dropout"), 0.0),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0),
}
NLLB = {**SEQ2SEQ, **SPARSE, **NLLB_RATES, "decoder_start_token_id": END}
nllb = of_class("NllbMoeForConditionalGeneration", "NllbMoeConfig", NLLB)
"""Positions are a buffer, added to the embeddings."""
