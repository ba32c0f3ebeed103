"""Padding, and the manifest of a checkpoint, of models of 8 to 405 B parameters on 1,024 and 16,384 ranks, by the
planner.

    python benchmarks/large_runs.py                       # minutes; no process group, no GPU, no weights
    python benchmarks/large_runs.py --models 8B --ranks 1024

The models have the shapes of Llama 3.1: bf16 matrices, fp32 norms, a block as the unit; AdamW with fp32 master weights.
What stands before an arrow is what it would be with each small unit by itself.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from zeroshard.model import small_units
from zeroshard.planning import Configuration, Forecast, plan

SHAPES = {"8B": (32, 4096, 14336), "70B": (80, 8192, 28672), "405B": (126, 16384, 53248)}
"""Layers, width, and width inside of the feed-forward part."""
KEYS, VOCABULARY = 1024, 128256


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.before, self.after = (nn.RMSNorm(width, dtype=torch.float32) for _ in range(2))
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, KEYS, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("only shapes are used")


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width, dtype=torch.float32)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError("only shapes are used")


def model_of(name: str) -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Llama(*SHAPES[name])
    torch.set_default_dtype(torch.float32)
    return model


def padding_before(model: nn.Module, configuration: Configuration) -> Forecast:
    """The plan without merged units."""
    kept, small_units.NEGLIGIBLE = small_units.NEGLIGIBLE, 1 << 62
    try:
        return plan(model, configuration)
    finally:
        small_units.NEGLIGIBLE = kept


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384])
    arguments = parser.parse_args()
    print(f"{'':22}{'units':>12}{'padding':>20}{'sent a step, GB':>20}{'manifest, MB':>14}{'index, kB':>11}")
    for name in arguments.models:
        model = model_of(name)
        for ranks in arguments.ranks:
            configuration = Configuration(plan="zero3", ranks=ranks, units=Block)
            before, now = padding_before(model, configuration), plan(model, configuration)
            cells = (
                f"{before.num_units} -> {now.num_units}",
                f"{before.padding_share:.2%} -> {now.padding_share:.2%}",
                f"{before.sent / 1e9:.1f} -> {now.sent / 1e9:.1f}",
                f"{now.manifest_bytes / 1e6:.1f}",
                f"{now.index_bytes / 1e3:.1f}",
            )
            widths = 12, 20, 20, 14, 11
            print(f"{name:>5} {ranks:>9,} ranks " + "".join(map(str.rjust, cells, widths)), flush=True)


if __name__ == "__main__":
    main()
