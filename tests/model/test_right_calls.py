"""Wrong calls of new users: the error says what to write instead. (Each of them once raised an internal error ("'str'
object has no attribute '__name__'"), or torch's own in the first forward.)"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import zeroshard
from tests.together import on_ranks
from zeroshard.testing import run_ranks


def build(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), *more, nn.Linear(8, 1))


def refused(kind: type[Exception], told: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(kind, match=told) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value, (zeroshard.Error, AttributeError)), told


@on_ranks(2)
def test_the_handle_is_not_the_model(rank: int) -> None:
    handle: Any = zeroshard.shard(build(), "zero2", precision="bf16", units=nn.Linear)
    stays = "the model stays the object it was"
    refused(TypeError, f"a Handle cannot be called.*{stays}.*model", handle, torch.ones(2, 5))
    for name in ("parameters", "train", "eval", "to"):
        refused(AttributeError, rf"no attribute '{name}'.*{stays}.*model\.{name}", getattr, handle, name)
    refused(AttributeError, r"handle\.full_state_dict\(", getattr, handle, "state_dict")
    refused(AttributeError, r"handle\.load_full_state_dict\(", getattr, handle, "load_state_dict")
    for name in ("backward", "step", "clip_grad_norm_"):  # of DeepSpeed's engine, and of FSDP
        refused(AttributeError, rf"no attribute '{name}': write .*optimizer\.{name}\(", getattr, handle, name)
    refused(AttributeError, r"write zeroshard\.save\(directory, handle", getattr, handle, "save_checkpoint")
    refused(AttributeError, "no attribute 'unit'$", getattr, handle, "unit")
    assert repr(handle) == "Handle(zero2, 2 units, 57 parameters on 2 ranks, bf16)"
    handle.close()
    assert repr(handle) == "Handle(closed)"
    mixed = zeroshard.MixedPrecision(grad=torch.bfloat16, main=torch.bfloat16)
    found = repr(zeroshard.shard(build(), "ddp", units=nn.Linear, precision={"0": "fp32", "*": mixed}))
    bf16 = "bfloat16 weights, bfloat16 gradients, bfloat16 main"
    assert found == f"Handle(ddp, 2 units, 57 parameters on 2 ranks, {bf16}, fp32)"


def test_optimizers_are_named_by_their_class(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        model = build()
        adam = torch.optim.AdamW(model.parameters())
        handle: Any = zeroshard.shard(model, "zero3")
        sharded: Any = zeroshard.ShardedOptimizer
        write = r"write ShardedOptimizer\(handle, torch\.optim\.AdamW, lr="
        told = r"made already .AdamW.: write ShardedOptimizer\.from_optimizer\(handle, optimizer\)"
        refused(TypeError, told, sharded, handle, adam)
        refused(TypeError, f"found the text 'adamw': {write}", sharded, handle, "adamw", lr=1e-3)
        refused(TypeError, r"'rmsprop'.*torch\.optim\.RMSprop", sharded, handle, "rmsprop")
        refused(
            TypeError, rf"found a module \(Sequential\): {write}.*the model stays", sharded, model, torch.optim.AdamW
        )
        refused(TypeError, "the handle comes first", sharded, torch.optim.AdamW, handle)
        told = r"AdamW are passed by name: write ShardedOptimizer\(handle, AdamW, lr=0\.01, betas=\(0\.9, 0\.99\)\)"
        refused(TypeError, told, sharded, handle, torch.optim.AdamW, 1e-2, (0.9, 0.99))
        told = r"AdamW takes its parameters from the first argument.* ShardedOptimizer\(handle, AdamW, lr=\.\.\.\)"
        for params in (model.parameters(), list(model.parameters()), [{"params": []}], model[0].weight):
            refused(TypeError, told, sharded, handle, torch.optim.AdamW, params, lr=1e-3)
        refused(TypeError, told, sharded, handle, torch.optim.AdamW, params=model.parameters(), lr=1e-3)
        refused(TypeError, "found an object of type int", sharded, 3, torch.optim.AdamW)
        refused(TypeError, f"found the class Linear: {write}", sharded, handle, nn.Linear, lr=1e-3)
        optimizer, second = sharded(handle, torch.optim.AdamW, lr=1e-3), zeroshard.shard(build(), "zero1")
        refused(TypeError, "a tensor, found an object of type float", optimizer.backward, 3.0)
        added = {"params": [nn.Parameter(torch.ones(3))]}
        refused(ValueError, r"add it to the model before shard\(\)", optimizer.add_param_group, added)
        # Checkpoints
        for call, kwargs in ((zeroshard.save, {"step": 1}), (zeroshard.load, {})):
            name = call.__name__
            told = rf"found a module \(Sequential\): write zeroshard\.{name}\(directory, handle, .*the model stays"
            refused(TypeError, told, call, tmp_path, model, optimizer, **kwargs)
            told = r"expected a ShardedOptimizer, found an object of type AdamW: .*ShardedOptimizer\(handle, "
            refused(TypeError, told, call, tmp_path, handle, adam, **kwargs)
            refused(TypeError, "or a list of them, found an object of type int", call, tmp_path, handle, 3, **kwargs)
            told = rf"{name}: the optimizer belongs to another handle, Handle\(zero3.*: pass these two together"
            refused(ValueError, told, call, tmp_path, second, optimizer, **kwargs)
            told = f"{name}: extra 'epoch' is of type int: extra takes objects with state_dict"
            refused(ValueError, told, call, tmp_path, handle, optimizer, extra={"epoch": 3}, **kwargs)
            told = rf'{name}: extra is a dict .* found list: extra=\{{"scheduler": scheduler\}}'
            refused(ValueError, told, call, tmp_path, handle, optimizer, extra=[1], **kwargs)
            model(torch.ones(2, 5)).sum().backward()
            refused(RuntimeError, f"^{name}: gradients are waiting", call, tmp_path, handle, optimizer, **kwargs)
            optimizer.zero_grad()
            first = next(model.parameters())
            first.grad = torch.ones(first.shape)  # one that was set by hand was not seen
            refused(RuntimeError, f"^{name}: gradients are waiting", call, tmp_path, handle, optimizer, **kwargs)
            optimizer.zero_grad()
            if rank == 0:
                model(torch.ones(2, 5))

    run_ranks(check, 1)


@on_ranks(1)
def test_an_optimizer_that_came_before_shard_is_named(rank: int) -> None:
    model = build()
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    told = r"0\.weight belongs to a ShardedOptimizer that was built before shard\(\): call shard\(\) first"
    refused(ValueError, told, zeroshard.shard, model, "zero3")
    del optimizer
    handle = zeroshard.shard(model, "zero3")
    told = r"sharded already, as Handle\(zero3, 1 unit, 57 parameters on 1 rank, fp32\): close\(\) that handle first"
    refused(ValueError, told, zeroshard.shard, model, "ddp")
    del handle


@on_ranks(2)
def test_arguments_of_another_kind_are_told(rank: int) -> None:
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, r"mesh must be .* found 'x': .*init_device_mesh\(", {"mesh": "x"}),
        (ValueError, r"materialize must be a function .* found True", {"materialize": True}),
        (ValueError, r"units: found a module \(Linear\), expected its class: units=Linear", {"units": nn.Linear(1, 1)}),
        (ValueError, r"units: found a module \(Linear\).*a group", {"units": [nn.Linear(1, 1), nn.Linear]}),
        (ValueError, r"units='64MB'.*is an int: units=64 \* 2\*\*20", {"units": "64MB"}),
        (ValueError, r"units: a function is called with each module.*FSDP", {"units": transformer_auto_wrap_policy}),
        (ValueError, r'precision: a dict without a pattern. Write \{"\*": "bf16"\}', {"precision": {}}),
    ]
    for kind, told, options in wrong:
        refused(kind, told, zeroshard.shard, build(), "zero3", **options)
    zeroshard.shard(build(), "zero3", mesh=torch.distributed.group.WORLD, units=[nn.Linear], precision={"*": "bf16"})


class Own(nn.BatchNorm1d):
    """Like timm's batch norms, which add an activation."""


@on_ranks(1)
def test_batch_norms_in_16_bits_are_to_be_kept(rank: int) -> None:
    """`shard` refuses where plain torch's forward would raise, and accepts what works in plain torch."""
    instance_norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    norms: list[nn.Module] = [
        nn.BatchNorm1d(8),
        Own(8),
        nn.BatchNorm1d(8, affine=False),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.LayerNorm(8),
        nn.Sequential(nn.Unflatten(1, (2, 4)), instance_norm, nn.Flatten()),
    ]
    for index, norm in enumerate(norms):
        for dtype, precision in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            model, x = build(norm), torch.ones(4, 5)
            plain = build(type(norm)(*norm) if isinstance(norm, nn.Sequential) else norm)
            for parameter in plain.parameters():
                parameter.data = parameter.data.to(dtype)
            with nullcontext() if index > 1 else pytest.raises(RuntimeError, match="expected scalar type"):
                plain(x.to(dtype))
            plain.float()
            if index > 1:
                handle = zeroshard.shard(model, "zero3", precision=precision)
                model(x)
                handle.close()
                continue
            told = rf"keep 1 in fp32, with precision=MixedPrecision\(param={dtype}, keep=\(nn\.BatchNorm1d,\)\)"
            refused(ValueError, told, zeroshard.shard, model, "zero3", precision=precision)
            patterns = {"2": "fp32", "*": precision}
            told = r'precision=\{nn\.BatchNorm1d: "fp32", \.\.\.\}, in front'
            refused(ValueError, told, zeroshard.shard, model, "zero3", precision=patterns)
            handle = zeroshard.shard(model, "zero3", precision=precision, ignored=["1"])
            handle.close()
            kept = zeroshard.MixedPrecision(param=dtype, keep=(nn.BatchNorm1d,))
            handle = zeroshard.shard(model, "zero3", precision=kept)
            model(x)
            handle.close()
            handle = zeroshard.shard(model, "zero3", precision={nn.BatchNorm1d: "fp32", "*": precision})
            model(x)
            handle.close()


@on_ranks(2)
def test_what_would_shard_or_compile_a_sharded_model(rank: int) -> None:
    model: Any = build()
    handle = zeroshard.shard(model, "zero3")
    wraps: list[Any] = [fully_shard, partial(FullyShardedDataParallel, device_id=torch.device("cpu"))]
    for wrap in wraps:
        refused(RuntimeError, "sharded by zeroshard, and FSDP would shard it again", wrap, model)
        handle.close()
        model = build()
        handle = zeroshard.shard(model, "zero3")
    for wrap in wraps:  # weights that rest in full can be read: the next forward finds what has come in their place
        replicated: Any = build()
        handle_of_it = zeroshard.shard(replicated, "zero1")
        wrapped = wrap(replicated)
        refused(RuntimeError, "sharded by zeroshard, and FSDP would shard it again", wrapped, torch.ones(2, 4))
        handle_of_it.abandon()
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        with pytest.raises(AttributeError, match=r"torch\.jit\.script cannot compile a sharded model"):
            torch.jit.script(model)


@on_ranks(2)
def test_a_module_with_the_hooks_of_another_one_is_told(rank: int) -> None:
    """As `torch.ao.quantization.prepare_qat` replaces modules."""
    for plan in ("ddp", "zero3"):
        model = build()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        old, new = model[0], nn.Linear(5, 8)
        for name, parameter in [*old.named_parameters()]:
            setattr(new, name, parameter)
        for hook in old._forward_pre_hooks.values():
            new.register_forward_pre_hook(hook)  # without `with_kwargs=True`
        model[0] = new
        refused(RuntimeError, r"^a Linear has taken the place of .* before shard\(\)", model, torch.ones(2, 5))
        handle.abandon()
