"""Checkpoints to and from torch.distributed.checkpoint, compared to FSDP2: weights and optimizer state, bit for bit.
Malicious folders are refused, and no code in them is run."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import zeroshard
from tests.checkpoint.common import FULL, read_all, same_bits
from tests.checkpoint.test_faults import SEED
from tests.opened import in_its_own_process, opened_by
from tests.together import in_turn
from zeroshard.checkpoint import Reader
from zeroshard.checkpoint.saved_state import plain_value, saved_entries, saved_groups
from zeroshard.exchange import export, export_dcp, import_dcp
from zeroshard.exchange.dcp_folder import DcpFolder
from zeroshard.io import tensor_file
from zeroshard.io.values import decode
from zeroshard.layout.interval import Interval
from zeroshard.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Small(nn.Module):
    """A tied weight whose rows do not divide evenly over the ranks, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        logits: Tensor = self.head(self.mix(self.norm(self.embed(tokens))))
        return logits


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]


def new_model(seed: int) -> Small:
    torch.manual_seed(seed)
    return Small()


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = torch.randint(7, (5,), generator=torch.Generator().manual_seed(rank + 10 * step))
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1))


def with_fsdp(seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    model = new_model(seed)
    fully_shard(model.mix)
    fully_shard(model)
    return model, torch.optim.AdamW(groups(model), lr=1e-2)


def with_zeroshard(plan: str, seed: int = 0) -> tuple[nn.Module, Any, Any]:
    model = new_model(seed)
    handle = zeroshard.shard(model, getattr(zeroshard, plan.upper()), units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(groups(model), torch.optim.AdamW, lr=1e-2, foreach=False)
    return model, handle, optimizer


def full_of_fsdp(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    weights, state = get_state_dict(model, optimizer, options=options)
    found = {name: value.clone() for name, value in weights.items()}
    for name, of_parameter in state["state"].items():
        found |= {f"{key} of {name}": value.clone() for key, value in of_parameter.items()}
    return found


def full_of_zeroshard(handle: Any, optimizer: Any) -> dict[str, Tensor]:
    found = dict(handle.full_state_dict(main=True))
    state = optimizer.state_dict()["state"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, of_parameter in state.items():
        name = handle.engine.name_of(parameters[number])
        found |= {f"{key} of {name}": torch.as_tensor(value).clone() for key, value in of_parameter.items()}
    return found


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that FSDP2 saved after two steps: nested, flattened, weights only; and `full`, the unsharded values."""
    directory = tmp_path_factory.mktemp("fsdp")

    def check(rank: int) -> None:
        model, optimizer = with_fsdp()
        for step in range(2):
            loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, flat in (("nested", False), ("flat", True)):
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            weights, state = get_state_dict(model, optimizer, options=options)
            dcp.save({"model": weights, "optim": state, "epoch": 3}, checkpoint_id=directory / name)
        dcp.save(weights, checkpoint_id=directory / "bare")
        full = full_of_fsdp(model, optimizer)
        if rank == 0:
            torch.save(full, directory / "full")

    run_ranks(check, 2)
    return directory


def test_zeroshard_goes_on_from_what_fsdp_has_saved(fsdp: Path, tmp_path: Path) -> None:
    done = [import_dcp(fsdp / name, tmp_path, step=step) for step, name in enumerate(("nested", "flat"))]
    done.append(import_dcp(fsdp / "bare", tmp_path, step=2, model_key=""))
    assert [one.left_out for one in done] == [("epoch",), ("epoch",), ()]
    for one in done:
        zeroshard.verify(one.path)
    first, second = (read_all(one.path) for one in done[:2])
    assert same_bits(first, second) and {name.split("/")[0] for name in first} == {"model", "optimizer", "scalar"}
    expected = torch.load(fsdp / "full")

    def check(rank: int) -> None:
        for step in (0, 1):
            for plan in ("zero3", "ddp"):
                _, handle, optimizer = with_zeroshard(plan, seed=1)
                zeroshard.load(tmp_path, handle, optimizer, step=step)
                found = full_of_zeroshard(handle, optimizer)
                own = {name: value for name, value in expected.items() if "norm.running" not in name}
                assert same_bits({name: found[name] for name in own}, own) and len(found) == len(expected)
                assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
        _, handle, _ = with_zeroshard("zero1", seed=1)
        zeroshard.load(tmp_path, handle, step=2)
        assert torch.equal(handle.full_state_dict()["mix.weight"], expected["mix.weight"])
        _, handle, other = with_zeroshard("zero2", seed=1)
        other.param_groups[0]["lr"] = 0.5
        zeroshard.load(tmp_path, handle, other, step=0)
        assert other.param_groups[0]["lr"] == 1e-2

    run_ranks(check, 2)


@pytest.mark.parametrize("box_bytes", [1 << 20, 30])
def test_fsdp_goes_on_from_what_zeroshard_has_saved(
    box_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroshard.exchange.exported_dcp.BOX_BYTES", box_bytes)

    def train(rank: int) -> dict[str, Tensor]:
        model, handle, optimizer = with_zeroshard("zero3")
        for step in range(3):
            optimizer.backward(loss(model, rank, step))
            optimizer.step()
            if step == 0:
                zeroshard.save(tmp_path, handle, optimizer, step=1)
        zeroshard.save(tmp_path, handle, optimizer, step=3)
        return full_of_zeroshard(handle, optimizer)

    expected = run_ranks(train, 2)[0]
    for step in (1, 3):
        export_dcp(tmp_path / f"step-{step}", tmp_path / f"dcp-{step}")
    assert sorted(os.listdir(tmp_path / "dcp-3")) == [".metadata", "__0_0.distcp"]

    def check(rank: int) -> list[dict[str, Tensor]]:
        found = []
        for step, flat in ((3, False), (3, True), (1, False)):
            model, optimizer = with_fsdp(seed=1)
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            weights, state = get_state_dict(model, optimizer, options=options)
            state_dict = {"model": weights, "optim": state}
            dcp.load(state_dict, checkpoint_id=tmp_path / f"dcp-{step}")
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state_dict["model"],
                optim_state_dict=state_dict["optim"],
                options=options,
            )
            assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
            found.append(full_of_fsdp(model, optimizer))
        return found

    nested, flat, other = run_ranks(check, 2)[0]
    assert same_bits(nested, expected) and same_bits(flat, expected)
    assert not same_bits(other, expected)  # negative control
    # And imported again: the same bits.
    again = import_dcp(tmp_path / "dcp-3", tmp_path / "again", step=3).path
    assert same_bits(read_all(again), read_all(tmp_path / "step-3"))
    with pytest.raises(FileExistsError, match=r"holds .metadata already"):
        export_dcp(tmp_path / "step-3", tmp_path / "dcp-3")


def test_the_state_of_another_class_needs_its_name(tmp_path: Path) -> None:
    """It was imported as AdamW's, and `load` said so of a class that nobody had named."""
    for of_class, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {}), (torch.optim.AdamW, {})):
        model = nn.Linear(3, 3)
        optimizer = of_class(model.parameters(), lr=0.1, **options)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        for flat in (False, True):
            folder, run = tmp_path / f"{of_class.__name__}-{flat}", tmp_path / f"run-{of_class.__name__}-{flat}"
            weights, state = get_state_dict(
                model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
            )
            dcp.save({"model": weights, "optim": state}, checkpoint_id=folder, no_dist=True)
            if of_class is not torch.optim.AdamW:
                with pytest.raises(ValueError, match=r"has .*, as another optimizer than AdamW has it: name its class"):
                    import_dcp(folder, run, step=0)
                assert not run.exists()
            name = None if of_class is torch.optim.AdamW else of_class.__name__
            assert import_dcp(folder, run, step=0, optimizer_class=name).left_out == ()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_state_of_a_parameter_of_one_number_is_what_its_class_makes_of_it(tmp_path: Path) -> None:
    """Moments and the count of steps look alike in the folder."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            (model(torch.tensor(1.0 + step)) ** 2).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = Scaled()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    train(plain, optimizer, range(2))
    weights, state = get_state_dict(plain, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "steps", step=2)
    train(plain, optimizer, range(2, 4))

    def check(rank: int, plan: str) -> None:
        handle = zeroshard.shard(model := Scaled(), plan)
        sharded = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
        zeroshard.load(tmp_path / "steps", handle, sharded)
        train(model, sharded, range(2, 4))
        assert torch.equal(handle.full_state_dict()["scale"], plain.scale)

    for plan in ("ddp", "zero3"):
        run_ranks(check, 2, plan)


def test_what_torch_keeps_in_param_groups_is_imported(tmp_path: Path) -> None:
    """A set refused the whole import, and a dtype was left out, though a checkpoint can hold both. So is state that is
    no tensor."""
    options = {
        "names": {"up", "down"},
        "frozen": frozenset([(1, 2), (3,)]),
        "dtype": torch.bfloat16,
        "nested": ([{1, 2}, torch.int8], (Counter({7: 2}), set(), None)),
    }
    with_dict = {**options, "of": {"x": 1}, "decay": torch.tensor(0.25)}  # DCP takes the dict apart
    options["decay"] = 0.25
    state = {"moment": torch.ones(2), "step": 2, "kind": "x", "none": None, "pair": [1, 2.5]}
    nested = {"param_groups": [{"params": ["a"], **with_dict}], "state": {"a": state}}
    flat = {f"param_groups.a.{key}": value for key, value in with_dict.items()}
    flat |= {f"state.a.{key}": value for key, value in state.items()}
    for owner, saved in (("0", nested), ("a", flat)):
        dcp.save({"model": {"a": torch.ones(2)}, "optim": saved}, checkpoint_id=tmp_path / owner, no_dist=True)
        done = import_dcp(tmp_path / owner, tmp_path / f"run-{owner}", step=0, optimizer_class="Own")
        assert done.left_out == (f"optim.param_groups.{owner}.of.x",)
        export_dcp(done.path, tmp_path / f"again-{owner}")
        again = import_dcp(tmp_path / f"again-{owner}", tmp_path / f"run-{owner}", step=1, optimizer_class="Own")
        assert again.left_out == ()
        for one in (done, again):
            with Reader(one.path) as reader:
                (group,) = saved_groups(reader.manifest.values["optimizers"][0])
                assert group["params"] == ["a"] and decode(group["options"], reader.tensor) == options
                found = saved_entries(reader.manifest)["a"]
                kinds = {"moment": "optimizer", "step": "number", "kind": "value", "none": "value", "pair": "value"}
                assert {one.key: one.kind for one in found} == kinds
                assert all(plain_value(reader, one) == state[one.key] for one in found if one.kind != "optimizer")


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number in range(2):
            self.register_parameter(str(number), nn.Parameter(torch.ones(3)))


def test_parameters_named_by_numbers_are_not_taken_for_param_groups(tmp_path: Path) -> None:
    """torch read the learning rate of the other group for each of them, in silence."""

    def save(rank: int, step: int) -> None:
        model = Numbered()
        handle = zeroshard.shard(model, "zero1")
        first, second = list(model.parameters())[:: -1 if step else 1]
        groups = [{"params": [first], "table": torch.arange(3.0)}, {"params": [second], "lr": 0.2}]
        zeroshard.save(tmp_path, handle, zeroshard.ShardedOptimizer(groups, torch.optim.AdamW, lr=0.1), step=step)

    run_ranks(in_turn(save, range(2)), 1)
    export_dcp(tmp_path / "step-0", tmp_path / "as they are")
    found: dict[str, Any] = {"optim": {"param_groups": [{"table": torch.zeros(3)}, {"lr": 0.0}]}}
    dcp.load(found, checkpoint_id=tmp_path / "as they are", no_dist=True)
    (first, second) = found["optim"]["param_groups"]
    assert first["table"].tolist() == [0.0, 1.0, 2.0] and second["lr"] == 0.2
    with DcpFolder(tmp_path / "as they are") as folder:
        assert "optim.param_groups.0.table" in folder.tensors and "optim.param_groups.1.lr" in folder.values
    with pytest.raises(ValueError, match=r"parameter '1' is of param group 0, and DCP has no names for its options"):
        export_dcp(tmp_path / "step-1", tmp_path / "swapped")
    assert not (tmp_path / "swapped").exists()
    export_dcp(tmp_path / "step-1", tmp_path / "swapped", optimizer=False)


def test_boxes_of_every_kind_are_read(tmp_path: Path) -> None:
    """Columns, blocks of a matrix, transposed storages and every dtype are read as by dcp.load."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        values = torch.arange(5 * 7 * 3, dtype=torch.float64).view(5, 7, 3)
        places = {"rows": (Shard(0), Replicate()), "columns": (Replicate(), Shard(1)), "both": (Shard(0), Shard(1))}
        state: dict[str, Any] = {k: distribute_tensor(values, mesh, place) for k, place in places.items()}
        state["twice"] = distribute_tensor(values, mesh, (Shard(0), Shard(0)))
        dcp.save({"model": state}, checkpoint_id=tmp_path / "sharded")

    run_ranks(save, 4)
    plain: dict[str, Tensor] = {
        str(dtype): torch.randn(3, 5).mul(9).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.int16)
    }
    plain |= {"f8": torch.randn(3, 5).to(torch.float8_e4m3fn), "u16": torch.arange(5).to(torch.uint16)}
    plain |= {"turned": torch.randn(4, 6).t(), "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)}
    plain |= {"empty": torch.empty(0, 4), "number": torch.tensor(2.5), "view": torch.randn(9)[2:5]}
    number = torch.randn(4, 6, dtype=torch.complex64)
    plain |= {"conjugate": number.conj(), "adjoint": number.mH, "negative": torch._neg_view(torch.randn(5))}
    plain |= {"many": torch.randn(2, 2, 64, 64, 32)}  # the product of its strides is larger than any size
    dcp.save({"model": plain}, checkpoint_id=tmp_path / "plain", no_dist=True)
    for folder in ("sharded", "plain"):
        with DcpFolder(tmp_path / folder) as foreign:
            for name, tensor in foreign.tensors.items():
                expected = {name: torch.zeros(tensor.shape, dtype=tensor.dtype)}
                dcp.load(expected, checkpoint_id=tmp_path / folder, no_dist=True)
                whole = Interval(0, tensor.numel)
                if whole:
                    assert same_bits({name: foreign.read(name, whole).view(tensor.shape)}, expected), name
                    part = Interval(tensor.numel // 3, tensor.numel // 3 + 1)
                    assert same_bits({name: foreign.read(name, part)}, {name: expected[name].reshape(-1)[part.slice]})
        step = import_dcp(tmp_path / folder, tmp_path / "run", step=len(folder)).path
        zeroshard.verify(step)
    found = read_all(tmp_path / "run" / "step-5")
    assert same_bits(
        {n: found[f"model/{n}"] for n in plain},
        {n: v.resolve_conj().resolve_neg().contiguous() for n, v in plain.items()},
    )


# Enemies --------------------------------------------------------------------------------------------------------------


class Attack:
    """Calls `function(*args)` when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def attacks(trace: Path) -> Iterator[tuple[str, Any]]:
    """Objects that create the file `trace` when they are unpickled."""
    code = f"open({str(trace)!r}, 'w').close()"
    yield "os.system", Attack(os.system, f"touch {trace}")
    yield "eval", Attack(eval, code)
    yield "exec", Attack(exec, code)
    yield "getattr", Attack(getattr(pickle, "loads"), pickle.dumps(Attack(exec, code)))  # noqa: B009
    yield "touch", Attack(Path.touch, trace)


def refused(folder: Path, tmp_path: Path) -> str:
    """The message of the CheckpointError that `import_dcp` must raise."""
    with pytest.raises(zeroshard.CheckpointError) as raised:
        import_dcp(folder, tmp_path / "run", step=0)
    assert not (tmp_path / "run" / "step-0").exists()
    return str(raised.value)


def test_code_in_pickles_is_not_run(fsdp: Path, tmp_path: Path) -> None:
    folder, trace = tmp_path / "dcp", tmp_path / "trace"
    shutil.copytree(fsdp / "nested", folder)
    metadata = (folder / ".metadata").read_bytes()
    for what, attack in attacks(trace):
        hidden = pickle.loads(metadata)
        hidden.planner_data = {"a": [attack]}
        for data in (pickle.dumps(attack), pickle.dumps(attack, 0), pickle.dumps(hidden, 2), pickle.dumps(hidden, 4)):
            (folder / ".metadata").write_bytes(data)
            message = refused(folder, tmp_path)
            assert not trace.exists() and ".metadata" in message, what
            pickle.loads(data)  # negative control
            assert trace.exists(), what
            trace.unlink()
    # The same in the data of a hyper-parameter, and of a tensor.
    for name in ("optim.param_groups.0.lr", "optim.state.mix.weight.step"):
        for what, attack in attacks(trace):
            changed = pickle.loads(metadata)
            memory = io.BytesIO()
            torch.save(attack, memory)
            (folder / "evil").write_bytes(memory.getvalue())
            for index, info in changed.storage_data.items():
                if index.fqn == name:
                    info.relative_path, info.offset, info.length = "evil", 0, len(memory.getvalue())
            (folder / ".metadata").write_bytes(pickle.dumps(changed))
            assert "nothing of it was run" in refused(folder, tmp_path) and not trace.exists(), what
            torch.load(folder / "evil", weights_only=False)  # negative control
            assert trace.exists()
            trace.unlink()


def moved_rows(metadata: Any, first: int) -> None:
    """Rows 3 to 6 of a matrix are said to begin elsewhere, so that others are left out."""
    box, name = metadata.state_dict_metadata["model.mix.weight"].chunks[1], "model.mix.weight"
    assert tuple(box.offsets) == (3, 0)
    slice_ = metadata.storage_data.pop(MetadataIndex(name, box.offsets, 1))
    box.offsets = torch.Size([first, 0])
    metadata.storage_data[MetadataIndex(name, box.offsets, 1)] = slice_


def changes(tmp_path: Path) -> Iterator[tuple[str, Callable[[Metadata], Any]]]:
    """Changes of the metadata, made by hand, that need no code: (description, function)."""

    def info(metadata: Any) -> Any:
        return next(v for k, v in metadata.storage_data.items() if k.fqn == "model.mix.weight")

    def entry(metadata: Any) -> Any:
        return metadata.state_dict_metadata["model.mix.weight"]

    for name in ("../secret", str(tmp_path / "secret"), "a/b", "..", "", ".hidden", "link", "pipe", "gone", "folder",
                 "a\0b", 7, None):  # fmt: skip
        yield f"file {name!r:.20}", lambda m, name=name: setattr(info(m), "relative_path", name)
    for key in ("offset", "length"):
        for number in (-1, 0, 1, 1 << 40, 1 << 62, 1 << 70, 0.5, None, "0", True):
            yield f"{key} {number!r}", lambda m, key=key, number=number: setattr(info(m), key, number)
    yield "compressed", lambda m: setattr(info(m), "transform_descriptors", ["zstd"])
    for size in ([7, 6], [6], [1 << 40, 6], [1 << 40] * 9, [2] * 100, []):
        yield f"size {size!r:.20}", lambda m, size=size: setattr(entry(m), "size", torch.Size(size))
    for size in ((6, 6), [6, 6], "66", None, torch.float32):
        yield f"size {size!r:.20}", lambda m, size=size: setattr(entry(m), "size", size)
    yield "no boxes", lambda m: entry(m).chunks.clear()
    yield "a box twice", lambda m: entry(m).chunks.append(entry(m).chunks[0])
    yield "a box elsewhere", lambda m: setattr(entry(m).chunks[0], "offsets", torch.Size([1, 0]))
    yield "rows that overlap", lambda m: moved_rows(m, 2)
    yield "a box that is larger", lambda m: setattr(entry(m).chunks[0], "sizes", torch.Size([6, 6]))
    yield "dtype", lambda m: setattr(entry(m).properties, "dtype", torch.float64)
    yield "dtype none", lambda m: setattr(entry(m).properties, "dtype", torch.quint8)
    yield "no storage", lambda m: m.storage_data.clear()
    yield "no tensors", lambda m: m.state_dict_metadata.clear()
    yield (
        "slices twice",
        lambda m: m.storage_data.update({k: info(m) for k in m.storage_data if k.fqn == "model.embed.weight"}),
    )
    yield (
        "one slice for two tensors",
        lambda m: (
            m.state_dict_metadata.update(other=m.state_dict_metadata["model.norm.weight"]),
            m.storage_data.update({MetadataIndex("other", [0], 0): info(m), MetadataIndex("other", [3], 1): info(m)}),
        ),
    )
    yield "another name", lambda m: m.storage_data.pop(next(k for k in m.storage_data if k.fqn == "model.mix.weight"))
    yield "no dict", lambda m: setattr(m, "state_dict_metadata", [1])
    yield "a name that is none", lambda m: m.state_dict_metadata.update({7: entry(m)})
    yield "an index that is none", lambda m: m.storage_data.update({"a": info(m)})
    yield "an entry that is none", lambda m: m.state_dict_metadata.update(a=MetadataIndex("a"))


@in_its_own_process
def test_hostile_metadata_made_by_hand(fsdp: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    shutil.copytree(fsdp / "nested", folder)
    shutil.copy(fsdp / "nested" / "__0_0.distcp", tmp_path / "secret")
    os.symlink("../secret", folder / "link")
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    metadata = (folder / ".metadata").read_bytes()
    bad, count = [], 0
    fine = (str(folder), str(tmp_path / "run"), sys.prefix, sys.base_prefix)
    for what, change in changes(tmp_path):
        changed = pickle.loads(metadata)
        change(changed)
        (folder / ".metadata").write_bytes(pickle.dumps(changed))
        try:
            paths = opened_by(lambda: refused(folder, tmp_path))
            outside = [path for path in paths if not path.startswith(fine) and path != str(tmp_path)]
            bad += [f"{what}: opened {outside}"] if outside else []
        except BaseException as error:
            bad.append(f"{what}: {error!r:.200}")
        count += 1
    print(f"{count} hostile folders: {len(bad)} bad")
    assert bad == []
    deep = b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b"."
    loop = b"\x80\x04]\x94h\x00a."
    short = (b"", b".", b"\x80\x04", b"\x80\x04K\x01.", b"(((", b"\x80\x04r\xff\xff\xff\x7f.", b"\x00" * 99,
             b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", b"cos\nsystem\n.", b"\x80\x04)}\x94(h\x00h\x00u.",
             b"t.", b"\x80\x040.", b"\x80\x02(K\x01q\x000.")  # fmt: skip
    for data in (*short, deep, loop):
        (folder / ".metadata").write_bytes(data)
        refused(folder, tmp_path)


def test_a_small_file_is_no_large_tensor(tmp_path: Path) -> None:
    """By a stride of 0, one stored number could be the elements of a tensor of any size."""
    folder, size = tmp_path / "dcp", torch.Size([1 << 24])
    dcp.save({"model": {"a": torch.zeros(1)}}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["model.a"]
    entry.size = entry.chunks[0].sizes = size
    for info in metadata.storage_data.values():
        torch.save(torch.zeros(1).expand(size), folder / info.relative_path)
        info.offset, info.length = 0, (folder / info.relative_path).stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert f"has a box of {1 << 24} elements in a slice of" in refused(folder, tmp_path)


def test_columns_that_overlap_are_refused(tmp_path: Path) -> None:
    """They leave a gap, whose values would be what has been in memory before."""
    folder, name = tmp_path / "dcp", "model.a"
    dcp.save({"model": {"a": torch.zeros(4, 2)}}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entry, (info,) = metadata.state_dict_metadata[name], metadata.storage_data.values()
    shutil.copy(folder / info.relative_path, folder / "other")
    second = type(info)("other", info.offset, info.length)

    def write(at: int) -> None:
        entry.size, first = torch.Size([4, 4]), entry.chunks[0]
        entry.chunks = [first, type(first)(torch.Size([0, at]), torch.Size([4, 2]))]
        metadata.storage_data = {MetadataIndex(name, [0, 0], 0): info, MetadataIndex(name, [0, at], 1): second}
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    write(2)
    import_dcp(folder, tmp_path / "valid", step=0)
    write(1)
    assert "the boxes of a tensor overlap, or leave a gap" in refused(folder, tmp_path)


class AsPython3110(pickle.Pickler):
    """Writes members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_members_of_enums_as_early_python_3_11_writes_them(fsdp: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    shutil.copytree(fsdp / "nested", folder)
    with DcpFolder(folder) as before:
        expected = before.tensors
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    written = io.BytesIO()
    AsPython3110(written, 4).dump(metadata)
    assert b"getattr" in written.getvalue()
    (folder / ".metadata").write_bytes(written.getvalue())
    with DcpFolder(folder) as after:
        assert after.tensors == expected
    # The name getattr opens nothing: not other classes, and not attributes of values.
    for call in ((getattr, os, "system"), (getattr, "text", "format"), (getattr, dict, "get"), (getattr, torch.Size)):
        metadata.planner_data = Attack(call[0], *call[1:])
        with suppress(TypeError):  # modules cannot be pickled
            (folder / ".metadata").write_bytes(pickle.dumps(metadata))
            refused(folder, tmp_path)


def changed_archive(data: bytes, **entries: bytes | None) -> bytes:
    """An archive of torch.save with some entries replaced; None leaves an entry out."""
    old, new = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    with zipfile.ZipFile(new, "w") as archive:
        for name in old.namelist():
            content = entries.get(name.partition("/")[2].replace("/", "_").replace(".", "_"), old.read(name))
            if content is not None:
                archive.writestr(name, content)
    return new.getvalue()


def test_hostile_slices(tmp_path: Path) -> None:
    """Changed archives of a tensor, read as a tensor and as a hyper-parameter."""
    folder, memory = tmp_path / "dcp", io.BytesIO()
    values = {"model": {"a": torch.arange(6.0).view(2, 3)}, "optim": {"param_groups": [{"params": ["a"], "lr": 0.5}]}}
    dcp.save(values, checkpoint_id=folder, no_dist=True)
    assert import_dcp(folder, tmp_path / "valid", step=0).left_out == ()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    negative = io.BytesIO()
    torch.save(torch._neg_view(values["model"]["a"]), negative)
    with_marks = zipfile.ZipFile(negative).read("archive/data.pkl")
    torch.save(values["model"]["a"], memory)
    whole = memory.getvalue()
    pickled = zipfile.ZipFile(memory).read("archive/data.pkl")

    def with_pickle(old: bytes, new: bytes) -> bytes:
        assert pickled.count(old) == 1
        return changed_archive(whole, data_pkl=pickled.replace(old, new))

    cases = {
        "nothing": b"",
        "no archive": b"PK" * 50,
        "no data": changed_archive(whole, data_0=None),
        "no pickle": changed_archive(whole, data_pkl=None),
        "fewer bytes": changed_archive(whole, data_0=bytes(20)),
        "odd bytes": changed_archive(whole, data_0=bytes(25)),
        "big-endian": changed_archive(whole, byteorder=b"big"),
        "another dtype": with_pickle(b"FloatStorage", b"DoubleStorage"),
        "another size": with_pickle(b"K\x02K\x03\x86", b"K\x03K\x02\x86"),
        "strides that reach out": with_pickle(b"K\x03K\x01\x86", b"K\x04K\x02\x86"),
        "negative strides": with_pickle(b"K\x03K\x01\x86", b"K\x03J\xff\xff\xff\xff\x86"),
        "huge strides": with_pickle(b"K\x03K\x01\x86", b"K\x03\x8a\x09" + b"\xff" * 8 + b"\x00\x86"),
        "another key": with_pickle(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x007"),
        "a path as key": with_pickle(b"X\x01\x00\x00\x000", b"X\x05\x00\x00\x00../.."),
        "another mark": changed_archive(whole, data_pkl=with_marks.replace(b"neg", b"new")),
        "marks that are no dict": changed_archive(whole, data_pkl=with_marks[: with_marks.index(b"}")] + b"K\x07tR."),
        "marks of no name": changed_archive(whole, data_pkl=with_marks.replace(b"X\x03\0\0\0neg", b"K\x07")),
        "another function": with_pickle(b"ctorch._utils\n_rebuild_tensor_v2", b"cposix\nsystem"),
    }
    repeated = b"".join(b"](" + b"h%c" % i * 10 + b"eq%c" % (i + 1) for i in range(30))
    for what, made in {
        "a set of lists": b"c__builtin__\nset\n]]a\x85R.",
        "a set of what is deep": b"c__builtin__\nset\n]N" + b"\x85" * 100_000 + b"a\x85R.",
        "a set of a number": b"c__builtin__\nset\nK\x01\x85R.",
        "a counter of a text": b"ccollections\nCounter\nX\x01\x00\x00\x00a\x85R.",
        "the same list again and again": b"(]q\0" + repeated + b"t.",
    }.items():
        cases[what] = changed_archive(whole, data_pkl=b"\x80\x02" + made)
    squeezed = io.BytesIO()
    with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in zipfile.ZipFile(memory).namelist():
            archive.writestr(name, zipfile.ZipFile(memory).read(name))
    cases["compressed"] = squeezed.getvalue()
    bad = []
    for name in ("model.a", "optim.param_groups.0.lr"):
        for what, data in cases.items():
            for index, info in metadata.storage_data.items():
                if index.fqn == name:
                    info.relative_path, info.offset, info.length = "evil", 0, len(data)
            (folder / "evil").write_bytes(data)
            (folder / ".metadata").write_bytes(pickle.dumps(metadata))
            with suppress(zeroshard.CheckpointError), DcpFolder(folder) as foreign:
                if name in foreign.values:
                    foreign.value(name)  # may succeed: the result is plain data
                else:
                    read_everything(foreign)
                    bad.append(what)
    assert bad == []


def read_everything(foreign: DcpFolder) -> None:
    """Read all values without an import, which would turn other errors into a CheckpointError."""
    for name in foreign.values:
        foreign.value(name)
    for name, tensor in foreign.tensors.items():
        if tensor.numel:
            foreign.read(name, Interval(0, 1))
            foreign.read(name, Interval(0, tensor.numel))


def test_more_files_than_a_process_may_open_are_read(fsdp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "MAX_OPEN_FILES", 1)
    assert len(list((fsdp / "nested").glob("*.distcp"))) > 1
    with DcpFolder(fsdp / "nested") as foreign:
        read_everything(foreign)
        assert len(foreign._open) == 1


def test_fuzzed_folders(fsdp: Path, tmp_path: Path) -> None:
    """Random changes anywhere: a CheckpointError, or a step with other values (DCP has no digests)."""
    rng = random.Random(SEED)
    folder = tmp_path / "dcp"
    shutil.copytree(fsdp / "nested", folder)
    outcomes = {"refused": 0, "step": 0}
    originals = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    for trial in range(3000 if FULL else 40):
        path = rng.choice(list(originals))
        data = bytearray(originals[path])
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if trial % 10 == 0 else data)
        try:
            with DcpFolder(folder) as foreign:
                read_everything(foreign)
            import_dcp(folder, tmp_path / "run", step=0, force=True, optimizer_class="AdamW")
            outcomes["step"] += 1
        except zeroshard.CheckpointError:
            outcomes["refused"] += 1
        path.write_bytes(originals[path])
    print(outcomes)
    assert outcomes["refused"] > (20 if FULL else 5)


def test_weights_of_a_step_without_an_optimizer(fsdp: Path, tmp_path: Path) -> None:
    step = import_dcp(fsdp / "bare", tmp_path / "run", step=0, model_key="").path
    export_dcp(step, tmp_path / "out", model_key="", dtype=torch.bfloat16)
    expected = {n: v.to(torch.bfloat16) if v.is_floating_point() else v for n, v in torch.load(fsdp / "full").items()}
    found = {n: torch.zeros_like(v) for n, v in expected.items() if " of " not in n and "running" not in n}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same_bits(found, {n: expected[n] for n in found})
    export(step, tmp_path / "out")  # both formats may share a folder
