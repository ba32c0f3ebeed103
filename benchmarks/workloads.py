"""Models for `step_time.py --model`, other than the trainer's GPT: what costs time differs between them.

    resnet        convolutions and batch norm: many small parameters
    bert, t5      post-norm blocks; an encoder and a decoder, whose blocks share a table of positions
    mixtral       a mixture of experts
    lstm          a language model of two recurrent layers
    recommender   large embeddings, of which a batch uses a few rows, and a small perceptron
    perceptron    200 small layers: nothing but the host's time

Those of transformers have random weights in small sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Generator, Tensor, nn
from torch.nn import functional as F

VOCABULARY, CONTEXT, CLASSES = 2048, 128, 10


@dataclass(frozen=True)
class Workload:
    """`build` makes a module whose forward takes a batch and returns the loss. `blocks`: names of the classes that
    ZERO3 and FSDP2 gather one by one. `batch` draws one; the rows of each tensor are the samples. `tolerance`: of
    losses, if not that of the dtype."""

    build: Callable[[], nn.Module]
    blocks: tuple[str, ...]
    batch: Callable[[Generator], tuple[Tensor, Tensor]]
    tolerance: float | None = None


class OfTransformers(nn.Module):
    """A model of transformers, which computes its loss itself."""

    def __init__(self, architecture: str, config: str, **sizes: Any) -> None:
        super().__init__()
        self.model = getattr(transformers, architecture)(getattr(transformers, config)(**sizes))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.model(inputs, labels=labels).loss


class Recurrent(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.first, self.second = (nn.LSTM(width, width, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.second(self.first(self.embedding(tokens))[0])[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Recommender(nn.Module):
    """Embeddings of 16 categories, as in DLRM (arXiv:1906.00091), without the products between them."""

    def __init__(self, rows: int = 20_000, width: int = 32, categories: int = 16, hidden: int = 512) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(categories))
        sizes = [categories * width, hidden, hidden, 1]
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        self.top = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def forward(self, indices: Tensor, clicked: Tensor) -> Tensor:
        x = torch.cat([table(indices[:, number]) for number, table in enumerate(self.tables)], 1)
        return F.binary_cross_entropy_with_logits(self.top(x).squeeze(1), clicked)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Ten layers, one block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width) for _ in range(10)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Perceptron(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stacks, self.head = nn.Sequential(*(Stack(width) for _ in range(20))), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stacks(x)), targets)


def _tokens(batch: int) -> Callable[[Generator], tuple[Tensor, Tensor]]:
    def draw(generator: Generator) -> tuple[Tensor, Tensor]:
        tokens = (torch.rand(batch, CONTEXT + 1, generator=generator) ** 3 * VOCABULARY).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return draw


def _classes(batch: int, *shape: int) -> Callable[[Generator], tuple[Tensor, Tensor]]:
    def draw(generator: Generator) -> tuple[Tensor, Tensor]:
        targets = torch.randint(CLASSES, (batch,), generator=generator)
        return torch.randn(batch, *shape, generator=generator), targets

    return draw


def _clicks(generator: Generator) -> tuple[Tensor, Tensor]:
    indices = (torch.rand(256, 16, generator=generator) ** 3 * 20_000).long()
    return indices, (indices[:, 0] % 2).float()


def _of_transformers(*names: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: OfTransformers(*names, **sizes)


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

WORKLOADS = {
    "resnet": Workload(
        _of_transformers(
            "ResNetForImageClassification", "ResNetConfig", hidden_sizes=[128, 256, 512, 1024], num_labels=CLASSES
        ),
        ("ResNetStage",),
        _classes(8, 3, 64, 64),
        tolerance=0.2,  # a bias before batch norm has a gradient of rounding errors, and Adam takes it as others
    ),
    "bert": Workload(
        _of_transformers(
            "BertForMaskedLM", "BertConfig", vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=6,
            num_attention_heads=6, intermediate_size=1536, **_NO_DROPOUT,
        ),
        ("BertLayer",),
        _tokens(2),
    ),
    "t5": Workload(
        _of_transformers(
            "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=384, d_kv=64, d_ff=1024,
            num_layers=4, num_heads=6, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
        ),
        ("T5Block",),
        _tokens(2),
    ),
    "mixtral": Workload(
        _of_transformers(
            "MixtralForCausalLM", "MixtralConfig", vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512,
            num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, num_local_experts=8,
        ),
        ("MixtralDecoderLayer",),
        _tokens(2),
    ),
    "lstm": Workload(Recurrent, ("LSTM",), _tokens(4)),
    "recommender": Workload(Recommender, ("Embedding", "Sequential"), _clicks),
    "perceptron": Workload(Perceptron, ("Stack",), _classes(64, 64)),
}  # fmt: skip
