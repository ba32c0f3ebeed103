"""First contact: `print(handle)`, `print(model)`, the table of units; units chosen by class name; weights loaded as in
plain torch; and refusal of wrappers (DDP) that would reduce gradients a second time."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.kit import Block, Net, loss_of_tokens, make, plans_of, same_bits
from zeroshard.model.units import choose_units
from zeroshard.testing import run_ranks


def test_print_shows_that_a_model_is_sharded_and_what_of_it() -> None:
    def check(rank: int) -> list[str]:
        class Own(Net):
            def extra_repr(self) -> str:
                return "of its own"

        said = []
        for kind in (Net, Own):
            model = make(kind)
            plain = repr(model)
            handle = zeroshard.shard(model, "zero3", units=Block, precision="bf16")
            lines = repr(model).splitlines()
            place = 1 + (kind is Own)
            line = "  sharded by zeroshard: zero3, 4 units, 5,685 parameters on 2 ranks, bf16"
            assert [lines[:place], *lines[place + 1 :]] == [plain.splitlines()[:place], *plain.splitlines()[place:]]
            assert re.sub(r"[\d,]+ parameters", "5,685 parameters", lines[place]) == line
            handle.close()
            assert repr(model) == plain and "extra_repr" not in vars(model)
        model = make(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        model[1].requires_grad_(False)
        handle = zeroshard.shard(model, "zero2", units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        said.append(handle.summary())
        assert repr(said[-1]) == str(said[-1]) and "\n" in said[-1]
        handle.abandon()
        assert "sharded" not in repr(model)
        with pytest.raises(RuntimeError, match=r"^summary: this handle was abandoned"):
            handle.summary()
        compiled = torch.compile(make(lambda: nn.Sequential(nn.Linear(4, 4))), backend="eager")
        handle = zeroshard.shard(compiled, "zero3")  # type: ignore[arg-type]
        assert repr(compiled).count("sharded by zeroshard") == 1
        handle.close()
        assert "sharded" not in repr(compiled)
        return said

    (table,) = run_ranks(check, 2)[0]
    first, _, columns, *rows, all_units, _, kinds = table.splitlines()
    assert first == "zero2, 2 units, 30 parameters on 2 ranks, fp32"
    assert columns.split("  ")[0] == "unit" and [row.split()[0] for row in rows] == ["0", "1"]
    assert re.split(r"  +", rows[0])[1:5] == ["20", "float32 replicated", "float32 sharded", "the weights"]
    assert re.split(r"  +", rows[1])[1:4] == ["10", "float32 replicated", "frozen"]
    held = [int(row.split()[-1].replace(",", "")) for row in (*rows, all_units)]
    assert held[2] == held[0] + held[1] == 2 * 512 * 4  # full weights, each unit padded to two shards of 256
    assert kinds.startswith("bytes on this rank: weights 4,096, ") and "state 2,048" in kinds


def test_units_by_the_names_of_classes() -> None:
    model = make(Net)
    expected = choose_units(model, Block, None)
    for policy in ("Block", "tests.kit.Block", ["Block"], [Block, "Block"], "Block, Block"):
        assert choose_units(model, policy, None) == expected, policy  # type: ignore[arg-type]
    both = choose_units(model, [Block, nn.Embedding, ("norm", "head")], None)
    assert choose_units(model, ["Block", "Embedding", ("norm", "head")], None) == both != expected
    assert choose_units(model, "Block,Embedding", None) == choose_units(model, [Block, nn.Embedding], None)

    class Further(Block):
        pass

    model.blocks[1] = Further()
    assert choose_units(model, "Block", None) == choose_units(model, Block, None) != choose_units(model, Further, None)
    assert choose_units(model, "Further", None) == choose_units(model, Further, None)
    told = r"Net has no module of a class 'Blok'; its modules are of the classes Block, .*; did you mean 'Block'\?"
    with pytest.raises(ValueError, match=told):
        choose_units(model, "Blok", None)
    with pytest.raises(ValueError, match=r"units=\[\('blocks\.0',\)\]"):
        choose_units(model, ["blocks.0"], None)


def test_weights_are_loaded_and_initialised_where_they_may_be_written() -> None:
    def check(rank: int) -> None:
        state = make(lambda: Net(blocks=1), seed=1).state_dict()
        for plan in plans_of(1):
            model, twin = make(lambda: Net(blocks=1)), make(lambda: Net(blocks=1))
            handle, of_twin = zeroshard.shard(model, plan, units=Block), zeroshard.shard(twin, plan, units=Block)
            optimizers = [zeroshard.ShardedOptimizer(h, torch.optim.SGD, lr=0.1) for h in (handle, of_twin)]
            with handle.unsharded(write=True):
                assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
                with torch.no_grad():
                    nn.init.zeros_(model.head.bias)
            of_twin.load_full_state_dict({**state, "head.bias": torch.zeros(23)})
            for one, optimizer in zip((model, twin), optimizers, strict=True):
                loss_of_tokens(one, rank, 0, 0).backward()
                optimizer.step()
            assert same_bits(handle.full_state_dict(), of_twin.full_state_dict()), plan
            refused = r"handle\.load_full_state_dict\(state_dict\).*or model\.load_state_dict\(\) inside `with handle"
            with pytest.raises(RuntimeError, match=refused):
                model.load_state_dict(state)
            with handle.unsharded(), pytest.raises(RuntimeError, match=refused):
                model.load_state_dict(state)
            with handle.unsharded("blocks", write=True), pytest.raises(RuntimeError, match=refused):
                model.load_state_dict(state)  # not all parameters may be written
            with handle.unsharded(write=True), pytest.raises(RuntimeError, match="leave out assign=True"):
                model.load_state_dict(dict(state), assign=True)  # torch notes it in the metadata
            torch.__future__.set_swap_module_params_on_conversion(True)
            with handle.unsharded(write=True), pytest.raises(RuntimeError, match="or set it to False around this call"):
                model.load_state_dict(state)
            handle.load_full_state_dict(state)
            torch.__future__.set_swap_module_params_on_conversion(False)
            with pytest.raises(RuntimeError, match=refused):  # the scopes have ended
                model.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"zero_: the values of parameter head\.bias .*unsharded\(write=True\)"):
            nn.init.zeros_(model.head.bias)

    run_ranks(check, 2)


def test_what_wraps_a_model_is_refused() -> None:
    def check(rank: int) -> None:
        def refused(kind: type[Exception], told: str, model: Any, **options: Any) -> None:
            with pytest.raises(kind, match=told):
                zeroshard.shard(model, "zero1", **options)

        ddp: Any = DistributedDataParallel(nn.Linear(3, 2))
        told = "is wrapped in DistributedDataParallel, and reduces gradients as well: shard a model that has never"
        refused(ValueError, f"^shard: the model {told}", ddp)
        around = nn.Sequential(nn.Linear(3, 3), ddp)
        refused(ValueError, f"^shard: 1 {told}", around)
        zeroshard.shard(around, "zero1", ignored=["1"]).close()  # an ignored part may be wrapped
        refused(ValueError, r"is wrapped in DataParallel", nn.DataParallel(nn.Linear(3, 2)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted = torch.jit.script(nn.Linear(3, 2))
        refused(TypeError, r"^shard: torch.jit.script has made this module", scripted)
        # Sharding the module inside the wrapper, and wrapping a model that is sharded already
        handle = zeroshard.shard(ddp.module, "ddp")
        twice = "DistributedDataParallel is around this model, .* without DistributedDataParallel, shard"
        with pytest.raises(RuntimeError, match=twice):
            ddp(torch.ones(1, 3))
        ddp.module(torch.ones(1, 3))
        model = nn.Linear(3, 2)
        second = zeroshard.shard(model, "zero1")
        wrapped = DistributedDataParallel(model)
        with pytest.raises(RuntimeError, match=twice):
            wrapped(torch.ones(1, 3))
        third = nn.Linear(3, 2)
        zeroshard.shard(third, "zero3")
        with pytest.raises(RuntimeError, match=twice):  # it once told of modules, units and methods
            DistributedDataParallel(third)

        class Student(nn.Module):
            """DDP does not see the sharded teacher: it is in a list, not a submodule."""

            def __init__(self) -> None:
                super().__init__()
                self.layer, self.teacher = nn.Linear(3, 2), [model]

            def forward(self, x: Any) -> Any:
                return self.layer(x) - self.teacher[0](x).detach()

        DistributedDataParallel(Student())(torch.ones(1, 3)).sum().backward()
        # Wrong kinds of arguments
        stays = r"the model stays the object it was"
        refused(
            TypeError, rf"found an object of type Handle: it is sharded already\. shard\(\) returns.*{stays}", second
        )
        refused(TypeError, "found the class Linear: build the model first", nn.Linear)
        refused(TypeError, "found an object of type str: the model comes first", "zero3")
        adam = torch.optim.Adam(nn.Linear(2, 2).parameters())
        refused(TypeError, r"made already .Adam.: .*ShardedOptimizer\.from_optimizer\(handle, optimizer\)", adam)
        dist.barrier()
        del handle

    run_ranks(check, 2)


def test_replicate_and_ddp_around_a_part_are_refused() -> None:
    """Under DDP they reduced gradients twice, in silence."""

    def check(rank: int) -> None:
        def model_of() -> nn.Sequential:
            return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2)))

        for number in (None, 1):
            model = model_of()
            replicate(model if number is None else model[number])
            with pytest.raises(ValueError, match=r"is wrapped in DDP, by replicate\(\), and reduces gradients as well"):
                zeroshard.shard(model, "ddp")

        def put(model: nn.Sequential) -> None:
            model[1] = DistributedDataParallel(model[1])

        told = "DistributedDataParallel is around this model, or a part of it"
        for plan in ("ddp", "zero1"):
            for wrap in (put, replicate, lambda model: replicate(model[1])):
                for has_run in (False, True):
                    model = model_of()
                    handle = zeroshard.shard(model, plan)
                    if has_run:
                        model(torch.ones(1, 3)).sum().backward()
                    wrap(model)
                    with pytest.raises(RuntimeError, match=told):
                        model(torch.ones(1, 3))
                    handle.abandon()
            # A model that is called by its parts alone
            model = model_of()
            zeroshard.shard(model, plan, units=nn.Linear)
            part = DistributedDataParallel(model[1])
            with pytest.raises(RuntimeError, match=told):
                part(model[0](torch.ones(1, 3)))
        dist.barrier()

    run_ranks(check, 2)


def test_dir_is_the_api_and_every_error_is_one_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    assert dir(zeroshard) == sorted(zeroshard.__all__)
    assert all(hasattr(zeroshard, name) for name in zeroshard.__all__)
    assert {"shard", "ShardedOptimizer", "Error", "optim"} <= set(dir(zeroshard)) and "handle" not in dir(zeroshard)
    with pytest.raises(AttributeError, match="module 'zeroshard' has no attribute 'shrad'"):
        zeroshard.shrad  # type: ignore[attr-defined]  # noqa: B018
    kinds = (ValueError, TypeError, RuntimeError, KeyError, FileExistsError, OSError, TimeoutError, ImportError)
    of_module = [one for one in vars(zeroshard.errors).values() if getattr(one, "__module__", "") == "zeroshard.errors"]
    errors = [one for one in of_module if isinstance(one, type) and one is not zeroshard.Error]
    assert len(errors) > 8
    errors += [zeroshard.CheckpointError, zeroshard.LostPeer, zeroshard.testing.RankError]
    assert all(issubclass(one, zeroshard.Error) and issubclass(one, kinds) for one in errors)

    def check(rank: int) -> list[str]:
        zeroshard.init()
        caplog.set_level("DEBUG", "zeroshard")
        model = nn.Linear(3, 2)
        for call, kind in (
            (lambda: zeroshard.shard(model, "zero4"), ValueError),
            (lambda: zeroshard.shard("zero3", "zero3"), TypeError),  # type: ignore[arg-type]
        ):
            with pytest.raises(zeroshard.Error) as error:
                call()
            assert isinstance(error.value, kind)
        handle = zeroshard.shard(model, "zero3")
        with pytest.raises(zeroshard.Error) as error:
            model.weight.norm()
        assert isinstance(error.value, RuntimeError)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1, skip_norm_above=1e-9)
        model(torch.ones(1, 3)).sum().backward()
        assert not optimizer.step().applied
        return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]

    first, other = run_ranks(check, 2)
    assert first[-2].startswith("INFO Linear is sharded: Handle(zero3, 1 unit, 8 parameters on 2 ranks, fp32), ")
    assert first[-1].startswith("INFO a step is skipped: gradient norm 2.8")
    assert [line.replace("INFO", "DEBUG") for line in first] == other
