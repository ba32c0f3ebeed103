"""The language model that a run trains: the small GPT, or one of transformers; and how it continues a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.errors import InvalidValue
from zeroshard.integrations.causal_lm import build, read_config, units_of
from zeroshard.model.unit_policy import UnitPolicy
from zeroshard.train.config import ModelConfig, UserError
from zeroshard.train.flops import flops_per_token
from zeroshard.train.model import GPT, Block


@dataclass(frozen=True)
class Language:
    """A causal language model.

    Attributes:
        units: how `shard` divides it.
        vocabulary: tokens of the tokenizer; the model may have more, of which none is ever written.
        flops_per_token: operations of forward and backward.
        hf_config: its configuration, if it is a model of transformers.
    """

    model: nn.Module
    units: UnitPolicy
    vocabulary: int
    flops_per_token: float
    hf_config: Any = None

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats per token, fp32 0-d; tokens and targets int64 [B, T]."""
        if self.hf_config is None:
            loss: Tensor = self.model(tokens, targets)
            return loss
        output = self.model(input_ids=tokens, use_cache=False)
        loss = F.cross_entropy(output.logits.float().flatten(0, 1), targets.flatten())
        balance = getattr(output, "aux_loss", None)  # of experts, where the configuration asks for it
        return loss if balance is None or not self.model.training else loss + self._router_weight * balance

    def logits(self, tokens: Tensor) -> Tensor:
        """fp32 [B, T, vocabulary]."""
        output = self.model(tokens) if self.hf_config is None else self.model(input_ids=tokens, use_cache=False).logits
        logits: Tensor = output[..., : self.vocabulary].float()
        return logits

    @property
    def _router_weight(self) -> float:
        return float(getattr(self.hf_config, "router_aux_loss_coef", 0.0))


def build_language(config: ModelConfig, vocabulary: int) -> Language:
    """The model of a configuration, on the current default device, for a tokenizer with that many tokens.

    Raises:
        UserError: the file of the configuration cannot be read, does not fit the tokenizer or the context, or is of a
            model that sees later tokens.
    """
    if not config.config:
        model = GPT(config, vocabulary)
        flops = flops_per_token(
            model, layers=config.layers, width=config.width, context=config.context, tied=config.tied
        )
        return Language(model, Block, vocabulary, flops)
    try:
        found = read_config(Path(config.config))
        _expect_room(found, config, vocabulary)
        other = build(found)
    except (InvalidValue, ModuleNotFoundError) as error:
        raise UserError(f"model.config: {error}") from error
    language = Language(other, units_of(other), vocabulary, _flops_of(other, found, config.context), found)
    if not next(other.parameters()).is_meta:
        _expect_causal(language, config)
    return language


def has_decay(parameter: Tensor) -> bool:
    """Whether the trainer's optimizer decays a parameter: matrices, not vectors."""
    return parameter.dim() >= 2


def _expect_room(found: Any, config: ModelConfig, vocabulary: int) -> None:
    longest = getattr(found, "max_position_embeddings", None)
    if longest is not None and config.context > longest:
        raise UserError(f"model.context = {config.context}: {config.config} has room for {longest} positions")
    if getattr(found, "vocab_size", vocabulary) < vocabulary:
        raise UserError(
            f"model.config: {config.config} has {found.vocab_size} tokens, the tokenizer has {vocabulary}: set "
            "vocab_size there to at least that"
        )


@torch.no_grad()
def _expect_causal(language: Language, config: ModelConfig) -> None:
    """
    Raises:
        UserError: a token changes what the model says before it. It would learn to copy the token that it is to
            predict, and its loss would mean nothing. (transformers builds a BERT as a causal model, with a warning.)
    """
    model, length = language.model, min(config.context, 5)
    tokens = torch.arange(length)[None].repeat(2, 1)
    tokens[1, -1] = length
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            one, other = (language.logits(row[None])[:, :-1] for row in tokens)
    except Exception:  # kernels for a GPU, or for 16 bits; what else is wrong is raised in the first step
        return
    finally:
        model.train()
    if length > 1 and (one - other).abs().max() > 1e-5 * one.abs().max():
        raise UserError(
            f"model.config: a {type(model).__name__} of {config.config} sees the tokens that it is to predict: set "
            '"is_decoder": true there, or choose a model that sees only earlier tokens'
        )


def _flops_of(model: nn.Module, found: Any, context: int) -> float:
    layers, heads = (getattr(found, name, 0) or 0 for name in ("num_hidden_layers", "num_attention_heads"))
    width = heads * (getattr(found, "head_dim", None) or (found.hidden_size // heads if heads else 0))
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((number for name in names if (number := getattr(found, name, None))), None)
    used = getattr(found, "num_experts_per_tok", None)
    active = used / experts if used and experts else 1.0
    return flops_per_token(model, layers=layers, width=width, context=context, active=active)


@torch.no_grad()
def continue_text(
    logits_of: Callable[[Tensor], Tensor],
    tokens: Tensor,
    num_tokens: int,
    *,
    context: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
) -> Tensor:
    """Continue `tokens`, int64 [B, T], by `num_tokens`. Runs one forward per token, because under sharding each
    forward is collective and every rank must run the same number."""
    for _ in range(num_tokens):
        # Without a branch, as each forward is collective: a model that has diverged writes anything.
        logits = logits_of(tokens[:, -context:])[:, -1].nan_to_num(0.0, 1e20, -1e20)
        if temperature == 0:
            following = logits.argmax(dim=-1, keepdim=True)
        else:
            best, indices = logits.topk(min(top_k, logits.shape[-1]))
            choice = torch.multinomial(F.softmax(best / temperature, dim=-1), 1, generator=generator)
            following = indices.gather(-1, choice)
        tokens = torch.cat((tokens, following), dim=1)
    return tokens
