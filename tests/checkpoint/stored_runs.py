"""Checkpoints that were written once, under `stored/`: the runs that wrote them, and the expected loaded
state.

`stored/<name>.tar.gz` holds `step-2` of one run. `stored/<name>.json` has the digest of every full tensor of its state,
and those of the files that loading the step and saving it again on the same number of ranks gives. Stored files are
never rewritten: a new kind of checkpoint gets a new name. To write those that do not exist yet:

    python -m tests.checkpoint.stored_runs
"""

from __future__ import annotations

import hashlib
import json
import random
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import zeroshard
from zeroshard.checkpoint import Reader, folders
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.io.tensor_file import bytes_of
from zeroshard.testing import run_ranks

FOLDER = Path(__file__).with_name("stored")
STEP = 2
SAVE_ID = "00c0ffee"
"""Replaces the random save id, which is in the header of each file."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Small(nn.Module):
    """A block, a tied head, a parameter of one element, one of none, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(11, 16), Block(), nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.block(self.embed(tokens)) * self.gain) + self.empty.sum()


class Counter:
    """An object for `extra=`, with different values on each rank."""

    def __init__(self, rank: int) -> None:
        self.values: dict[str, Any] = {"seen": torch.arange(3) + rank, "names": ("a", {3: float("inf")}), "rank": rank}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values


def by_name(*chosen: str) -> Callable[[nn.Module], list[dict[str, Any]]]:
    """Two groups: Muon for the parameters named in `chosen`, and the run's own class for the rest."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        return [
            {"params": [named[name] for name in chosen], "optimizer_class": torch.optim.Muon, "lr": 0.01},
            {"params": [p for name, p in named.items() if name not in chosen], "weight_decay": 0.0},
        ]

    return groups


def with_elements(model: nn.Module) -> list[dict[str, Any]]:
    """All parameters that have elements: Adafactor divides by the number of elements."""
    return [{"params": [p for p in model.parameters() if p.numel()]}]


def low_bit() -> Any:
    """torchao's AdamW8bit. Callers replace `torch.compile`, as compiling its kernel takes a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own
        from torchao.optim import AdamW8bit
    return AdamW8bit


@dataclass(frozen=True)
class Kind:
    """A run. `ranks`: the number of ranks that wrote it; `frozen`: the submodule that is frozen after the first
    step."""

    plan: zeroshard.Plan
    ranks: int
    optimizer: Callable[[], Any] = lambda: torch.optim.AdamW
    defaults: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    model: Callable[[], nn.Module] = Small
    precision: Any = None
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    frozen: str = ""
    loss_scale: Any = None


KINDS = {
    "zero3-adamw": Kind(zeroshard.ZERO3, 2),
    "zero2-muon-adamw": Kind(zeroshard.ZERO2, 3, groups=by_name("block.up.weight", "block.down.weight")),
    "zero1-bf16-remainder": Kind(
        zeroshard.ZERO1,
        2,
        lambda: torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "foreach": False},
        precision="bf16-remainder",
    ),
    "zero3-fp16-scaled": Kind(zeroshard.ZERO3, 1, precision="fp16", loss_scale=zeroshard.DynamicScale(init=2.0**8)),
    "ddp-adafactor": Kind(zeroshard.DDP, 2, lambda: torch.optim.Adafactor, groups=with_elements),
    "optimizer-only-adam": Kind(zeroshard.OPTIMIZER_ONLY, 2, lambda: torch.optim.Adam),
    "zero2-frozen": Kind(zeroshard.ZERO2, 2, frozen="block"),
    "zero3-adamw8bit": Kind(
        zeroshard.ZERO3, 1, low_bit, model=lambda: nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
    ),
}


class Run:
    """A run of one `Kind`, on this rank."""

    def __init__(self, kind: Kind, rank: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.kind, self.rank = kind, rank
        self.model, self.counter = kind.model(), Counter(rank)
        params: Any = kind.groups(self.model) if kind.groups else self.model.parameters()
        if not kind.plan.external_gradients:
            units = [Block, nn.Linear] if isinstance(self.model, nn.Sequential) else Block
            handle = zeroshard.shard(self.model, kind.plan, units=units, precision=kind.precision)
            params = params if kind.groups else handle
        self.optimizer = zeroshard.ShardedOptimizer(
            params, kind.optimizer(), loss_scale=kind.loss_scale, **kind.defaults
        )
        self.handle = self.optimizer.handle

    def freeze(self) -> None:
        if self.kind.frozen:
            self.model.get_submodule(self.kind.frozen).requires_grad_(False)

    def train(self) -> None:
        for step in range(STEP):
            generator = torch.Generator().manual_seed(
                10 * step + (0 if self.kind.plan.external_gradients else self.rank)
            )
            if isinstance(self.model, nn.Sequential):
                loss = self.model(torch.randn(4, 64, generator=generator).bfloat16()).float().square().mean()
            else:
                tokens = torch.randint(0, 11, (2, 6), generator=generator)
                loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1).float(), tokens.flatten().roll(-1))
            self.optimizer.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.freeze()

    def save(self, directory: Path) -> None:
        _set_small_random_state(self.rank)
        zeroshard.save(directory, self.handle, self.optimizer, step=STEP, extra={"counter": self.counter})

    def load(self, directory: Path) -> None:
        self.freeze()
        zeroshard.load(directory, self.handle, self.optimizer, extra={"counter": self.counter})

    def digests(self) -> dict[str, str]:
        """Digests of main and of optimizer state; param groups and loss scale as text. Collective."""
        if self.kind.plan.external_gradients:
            tensors = {f"main {name}": value for name, value in self.model.named_parameters()}
        else:
            tensors = {f"main {name}": value for name, value in self.handle.full_state_dict(main=True).items()}
        state = self.optimizer.state_dict()
        for number, of_one in state.pop("state").items():
            tensors |= {f"state {key} {number}": torch.as_tensor(value) for key, value in of_one.items()}
        digests = {name: _digest(value) for name, value in tensors.items()}
        for number, group in enumerate(state["param_groups"]):
            plain = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
            digests[f"group {number}"] = repr(sorted(plain.items()))
        return digests | {"loss scale": repr(state.get("loss_scale"))}


def _digest(value: Tensor) -> str:
    data = hashlib.sha256(bytes_of(value.detach().cpu().contiguous())).hexdigest()[:16]
    return f"{value.dtype} {tuple(value.shape)} {data}"


def _set_small_random_state(rank: int) -> None:
    """Set states of `random` and numpy that take few bytes in a checkpoint."""
    random.setstate((3, (*range(rank, rank + 624), 624), None))
    numpy.random.set_state(("MT19937", numpy.arange(rank, rank + 624, dtype=numpy.uint32), 0))  # noqa: NPY002


def unpack(name: str, directory: Path) -> tuple[Manifest, dict[str, Any]]:
    """Unpack the step into `directory`; returns its manifest and the expected loaded state."""
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
        archive.extractall(directory, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    with Reader(directory / f"step-{STEP}") as reader:
        return reader.manifest, json.loads((FOLDER / f"{name}.json").read_text())


def load_and_save(
    names: Iterable[str], ranks: int, source: Path, target: Path
) -> list[dict[str, tuple[dict[str, str], Any]]]:
    """Load each run from `source/name` and save it to `target/name`. Returns for each rank, by name, the loaded state's
    digests and the counter."""

    def of_rank(rank: int) -> dict[str, tuple[dict[str, str], Any]]:
        found = {}
        for name in names:
            run = Run(KINDS[name], rank, seed=7)
            run.load(source / name)
            run.save(target / name)
            found[name] = run.digests(), run.counter.state_dict()
        return found

    return run_ranks(of_rank, ranks)


def file_digests(directory: Path) -> dict[str, str]:
    """Digests of the files of the step, without the manifest (which contains versions)."""
    files = sorted((directory / f"step-{STEP}").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def write(name: str) -> None:
    kind = KINDS[name]

    def of_rank(rank: int, directory: Path) -> dict[str, str]:
        run = Run(kind, rank)
        run.train()
        run.save(directory)
        return run.digests()

    with tempfile.TemporaryDirectory() as folder:
        first, again = Path(folder) / "first" / name, Path(folder) / "again" / name
        state = run_ranks(of_rank, kind.ranks, first)[0]
        load_and_save([name], kind.ranks, first.parent, again.parent)
        with tarfile.open(FOLDER / f"{name}.tar.gz", "w:gz") as archive:
            archive.add(first / f"step-{STEP}", f"step-{STEP}")
        expected = {"state": state, "files": file_digests(again)}
        (FOLDER / f"{name}.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    folders.new_id = lambda: SAVE_ID
    for missing in KINDS:
        if not (FOLDER / f"{missing}.tar.gz").exists():
            write(missing)
