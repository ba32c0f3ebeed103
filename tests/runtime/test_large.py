"""Models too large for one rank: built on the meta device, and filled part by part from functions or files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from tests.grids import EVERYTHING, grid
from tests.kit import PLANS, WIDTH, Block, Net, loss_of_tokens, make, plans_of, same_bits
from tests.together import in_turn
from zeroshard.comm.collectives import Collectives
from zeroshard.precision import MixedPrecision
from zeroshard.testing import run_ranks

KEEP = (nn.BatchNorm1d,)  # its statistics are fp32
PRECISIONS = ("fp32", MixedPrecision(keep=KEEP), MixedPrecision(main="remainder", keep=KEEP))


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__(tied=True)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def init(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def on_meta(build: Any = Buffered) -> nn.Module:
    with torch.device("meta"):
        return build()


def plain(build: Any = Buffered) -> nn.Module:
    model = on_meta(build).to_empty(device="cpu")
    if build is Buffered:
        model.head.weight = model.embed.weight  # to_empty unties them
    torch.manual_seed(0)
    return model.apply(init)


@pytest.mark.by_cpu
def test_values_come_as_from_apply_module_by_module() -> None:
    """Values are those of `apply`, module by module. Where ranks draw different numbers, rank 0's are used. Parameters
    stay the same objects."""

    def check(rank: int) -> None:
        expected = dict(plain().state_dict())
        for plan, precision, same_seeds in grid(PLANS, PRECISIONS, (True, False), apart=(0, 1)):
            model = on_meta()
            model.embed.weight.mark = "kept"
            before = list(model.parameters())
            torch.manual_seed(0 if same_seeds else rank)
            handle = zeroshard.shard(model, plan, units=Block, precision=precision, materialize=init)
            assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
            assert model.embed.weight.mark == "kept" and model.head.weight is model.embed.weight
            assert same_bits(handle.full_state_dict(main=True), expected), (plan, precision)
            twin = plain()
            of_twin = zeroshard.shard(twin, plan, units=Block, precision=precision)
            optimizers = []
            for one, its in ((model, handle), (twin, of_twin)):
                optimizer = zeroshard.ShardedOptimizer(its, torch.optim.AdamW, lr=1e-2, foreach=False)
                optimizers.append(optimizer)  # its state counts below
                optimizer.backward(loss_of_tokens(one, rank, 0, 0))
                optimizer.step()
            assert same_bits(handle.full_state_dict(main=True), of_twin.full_state_dict(main=True)), (plan, precision)
            assert handle.memory() == of_twin.memory()

    run_ranks(check, 2)


def test_ranks_agree_once_per_unit_and_not_once_per_module() -> None:
    """Each block has several modules. The root unit's are before the blocks and behind them."""

    class Blocks(nn.Module):
        def __init__(self, modules: int) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.blocks = nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(modules))) for _ in range(5)))
            self.last = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def check(rank: int) -> list[dict[str, int]]:
        found = []
        for modules in (1, 8):
            counts = dict.fromkeys(("count", "broadcast"), 0)

            def counting(name: str, counts: dict[str, int] = counts) -> Any:
                original = getattr(Collectives, name)

                def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                    counts[name] += 1
                    return original(self, *args, **kwargs)

                return call

            model = on_meta(lambda modules=modules: Blocks(modules))
            groups = [tuple(f"blocks.{index}.{number}" for number in range(modules)) for index in range(5)]
            with pytest.MonkeyPatch.context() as patch:
                for name in counts:
                    patch.setattr(Collectives, name, counting(name))
                zeroshard.shard(model, "zero3", units=groups, materialize=init)
            found.append(counts)
        return found

    few, many = run_ranks(check, 2)[0]
    assert few == many
    assert many["broadcast"] >= 7  # the counter counts


class Peak(TorchDispatchMode):
    """The maximum of the bytes of storages that were allocated inside the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._live = {key: item for key, item in self._live.items() if not item[0].expired()}
        self.most = max(self.most, sum(num_bytes for _, num_bytes in self._live.values()))
        return result


LAYERS = 24 if EVERYTHING else 12


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.by_gloo  # the other backend's copies of inputs would be counted
def test_no_rank_ever_holds_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal layers on 3 ranks under ZERO3: a rank holds its own third, two pool buffers, and two layers while they
    are filled. The negative control: without the meta device it holds the whole model."""
    save_file(plain(Deep).state_dict(), tmp_path / "model.safetensors")
    monkeypatch.setattr(Collectives, "_try_to_share", lambda self: None)  # memory mapped from peers is not counted
    layer = (256 * 256 + 256) * 4

    def check(rank: int, source: str) -> None:
        with Peak() as peak:
            if source == "not on meta":
                handle = zeroshard.shard(plain(Deep), "zero3", units=nn.Linear)
            else:
                values: Any = init if source == "init" else tmp_path
                handle = zeroshard.shard(on_meta(Deep), "zero3", units=nn.Linear, materialize=values)
        memory = handle.memory()
        assert memory["weights"] < (LAYERS / 3 + 0.2) * layer
        if source == "not on meta":
            assert peak.most > LAYERS * layer
        else:
            assert peak.most < sum(memory.values()) + 3 * layer < LAYERS * layer

    run_ranks(in_turn(check, ["init", "file", "not on meta"]), 3)


def test_values_come_from_safetensors_files(tmp_path: Path) -> None:
    state = {name: torch.randn_like(v) if v.is_floating_point() else v + 5 for name, v in plain().state_dict().items()}
    tied = {name: value for name, value in state.items() if name != "head.weight"}  # such files leave out tied names
    state["head.weight"] = state["embed.weight"]
    for num_files in (1, 3):
        folder = tmp_path / str(num_files)
        folder.mkdir()
        parts = [dict(list(tied.items())[index::num_files]) for index in range(num_files)]
        names = [f"model-{index}.safetensors" if num_files > 1 else "model.safetensors" for index in range(num_files)]
        for name, part in zip(names, parts, strict=True):
            save_file(part, folder / name)
        if num_files > 1:
            index = {"weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def check(rank: int) -> None:
        for plan, precision, num_files in grid(PLANS, PRECISIONS, (1, 3)):
            folder = str(tmp_path / str(num_files))
            handle = zeroshard.shard(on_meta(), plan, units=Block, precision=precision, materialize=folder)
            assert same_bits(handle.full_state_dict(main=True), state), (plan, precision, num_files)

    run_ranks(check, 3)


def test_a_file_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    state = dict(plain(Net).state_dict())
    cases: dict[str, tuple[dict[str, Tensor], str]] = {
        "missing": ({n: v for n, v in state.items() if n != "head.bias"}, r"missing \['head.bias'\]"),
        "unexpected": ({**state, "more": torch.zeros(1)}, r"unexpected \['more'\]"),
        "shape": ({**state, "head.bias": torch.zeros(7)}, r"head.bias: expected shape \(23,\), found \(7,\)"),
    }
    for name, (values, _) in cases.items():
        (tmp_path / name).mkdir()
        save_file(values, tmp_path / name / "model.safetensors")

    def check(rank: int) -> None:
        for name, (_, message) in cases.items():
            with pytest.raises(ValueError, match=message):
                zeroshard.shard(on_meta(Net), "zero3", units=Block, materialize=tmp_path / name)
        with pytest.raises(ValueError, match="there is no file"):
            zeroshard.shard(on_meta(Net), "zero3", units=Block, materialize=tmp_path / "nothing")
        with pytest.raises(ValueError, match="pass materialize="):
            zeroshard.shard(on_meta(Net), "zero3", units=Block)
        with pytest.raises(ValueError, match="has values already"):
            zeroshard.shard(make(Net), "zero3", units=Block, materialize=init)

        def broken(module: nn.Module) -> None:
            if isinstance(module, nn.LayerNorm) and rank == 1:
                raise KeyError("in the user's function")

        model = on_meta(Net)
        with pytest.raises(ValueError, match=r"rank 1.*at a LayerNorm.*in the user's function"):
            zeroshard.shard(model, "zero3", units=Block, materialize=broken)
        assert all(tensor.is_meta for tensor in model.state_dict().values())  # unchanged
        zeroshard.shard(model, "zero3", units=Block, materialize=init)

    run_ranks(check, 2)


class Positions(nn.Module):
    """Its own parameter, and two buffers that `__init__` computes; one of them is not part of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.position = nn.Parameter(torch.ones(4))
        self.register_buffer("angles", torch.ones(4), persistent=False)
        self.register_buffer("order", torch.arange(4), persistent=True)


@pytest.mark.by_cpu
def test_what_the_source_leaves_without_values_is_an_error(tmp_path: Path) -> None:
    """A parameter or buffer that `init` forgot, or a buffer that a file does not have, would keep arbitrary values."""

    def forgetful(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):  # and not the head, which has the same parameter
            nn.init.ones_(module.weight)

    def with_position(module: nn.Module) -> None:
        forgetful(module)
        if isinstance(module, Positions):
            nn.init.ones_(module.position)

    def complete(module: nn.Module) -> None:
        with_position(module)
        if isinstance(module, Positions):
            module.angles.fill_(1.0), module.order.copy_(torch.arange(4))

    def fills_others(module: nn.Module) -> None:
        complete(module)
        if isinstance(module, Positions):
            nn.init.zeros_(module.head.weight)

    def draws_others(module: nn.Module) -> None:
        complete(module)
        if isinstance(module, Positions):
            nn.init.normal_(module.head.weight)

    state = {name: value for name, value in Positions().state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")

    def check(rank: int) -> None:
        for source, names in (
            (forgetful, r"\['position', 'angles', 'order'\] \(3 in all\)"),
            (with_position, r"\['angles', 'order'\] \(2 in all\)"),
            (fills_others, "writes parameters of modules inside the Positions, which were filled before"),
            (draws_others, "writes parameters of modules inside the Positions, which were filled before"),
            (tmp_path, r"no values for the buffers \['angles'\] \(1 in all\)"),
        ):
            model = on_meta(Positions)
            with pytest.raises(ValueError, match=names):
                zeroshard.shard(model, "zero3", materialize=source)
            assert all(tensor.is_meta for tensor in model.state_dict().values())  # unchanged
        full = zeroshard.shard(model, "zero3", materialize=complete).full_state_dict()
        assert all(torch.equal(full[name], torch.ones_like(full[name])) for name in ("embed.weight", "position"))
        model = on_meta(Positions)
        model.angles = torch.ones(4)
        full = zeroshard.shard(model, "zero3", materialize=tmp_path).full_state_dict()
        assert torch.equal(full["embed.weight"], state["embed.weight"]) and full["order"].tolist() == [0, 1, 2, 3]

    run_ranks(check, 2)


def test_values_are_checked_instead_of_sent_if_asked() -> None:
    def check(rank: int) -> None:
        for plan in plans_of(0):
            handle = zeroshard.shard(make(Net), plan, units=Block, values="check")
            assert same_bits(handle.full_state_dict(), dict(make(Net).state_dict()))
            other = make(Net)
            if rank == 2:
                with torch.no_grad():
                    other.blocks[1].up.bias[3] += 1e-6
            with pytest.raises(ValueError, match=r"other values than on rank 0 in blocks\.1\.up\.bias \(rank 2\)"):
                zeroshard.shard(other, plan, units=Block, values="check")
            with pytest.raises(ValueError, match="values must be 'broadcast' or 'check', found 'maybe'"):
                zeroshard.shard(other, plan, units=Block, values="maybe")

    run_ranks(check, 3)
