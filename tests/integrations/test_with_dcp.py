"""Sharded models in torch.distributed.checkpoint: `stateful`, folders of FSDP2, and torch's own state_dict helpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import zeroshard
from tests.exchange.test_exchange_dcp import full_of_fsdp, groups, loss, new_model, with_fsdp
from tests.kit import same_bits
from zeroshard.exchange import import_dcp
from zeroshard.integrations.dcp import stateful
from zeroshard.testing import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.by_gloo]

BF16 = zeroshard.MixedPrecision(torch.bfloat16, keep=(nn.BatchNorm1d,))


def sharded(plan: str, precision: Any = None, of_class: Any = torch.optim.AdamW, seed: int = 0) -> Any:
    model = new_model(seed)
    handle = zeroshard.shard(model, plan, units=nn.Linear, precision=precision)
    return model, handle, zeroshard.ShardedOptimizer(groups(model), of_class, lr=1e-2)


def train(model: nn.Module, optimizer: Any, rank: int, *steps: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()


def everything(handle: Any, optimizer: Any) -> dict[str, Tensor]:
    """Parameters and state of the optimizer. (Buffers differ between ranks, and a folder has those of one rank.)"""
    names = [name for name, _ in handle.model.named_parameters()]
    found = {name: handle.full_state_dict(main=True)[name].clone() for name in names}
    parameters = optimizer.groups.parameters()
    for number, of_parameter in optimizer.state_dict()["state"].items():
        name = handle.engine.name_of(parameters[number])
        found |= {f"{key} of {name}": torch.as_tensor(value).clone() for key, value in of_parameter.items()}
    return found


def continues(rank: int, folder: Path, plan: str, other: str, precision: Any, of_class: Any) -> None:
    """A folder is loaded into a new model under another plan, whose optimizer has no state yet."""
    model, handle, optimizer = sharded(plan, precision, of_class)
    train(model, optimizer, rank, 0, 1)
    dcp.save({**stateful(handle, optimizer), "epoch": 3}, checkpoint_id=folder)
    saved = everything(handle, optimizer)
    train(model, optimizer, rank, 2, 3)
    trained = everything(handle, optimizer)
    for with_optimizer in (True, False):  # without its state the optimizer goes another way
        model, handle, new = sharded(other, precision, of_class, seed=1)
        dcp.load(stateful(handle, new if with_optimizer else None), checkpoint_id=folder)
        assert same_bits(everything(handle, new), saved) is with_optimizer
        train(model, new, rank, 2, 3)
        assert same_bits(everything(handle, new), trained) is with_optimizer


def exchanged_with_fsdp(rank: int, folder: Path) -> None:
    """Folders of FSDP2 are loaded, and FSDP2 loads those of `stateful`."""
    theirs, their_optimizer = with_fsdp()
    train(theirs, their_optimizer, rank, 0)
    weights, state = get_state_dict(theirs, their_optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder / "theirs")
    full = full_of_fsdp(theirs, their_optimizer)
    model, handle, optimizer = sharded("zero3", seed=1)
    dcp.load(stateful(handle, optimizer), checkpoint_id=folder / "theirs")
    ours = everything(handle, optimizer)
    assert same_bits(ours, {name: full[name] for name in ours})
    assert len(ours) == 5 * 4  # parameters, each with three items of state
    train(model, optimizer, rank, 1)
    dcp.save(stateful(handle, optimizer), checkpoint_id=folder / "ours")
    weights, state = get_state_dict(theirs, their_optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=folder / "ours")
    set_state_dict(theirs, their_optimizer, model_state_dict=weights, optim_state_dict=state)
    after, ours = full_of_fsdp(theirs, their_optimizer), everything(handle, optimizer)
    assert same_bits(ours, {name: after[name] for name in ours}) and not same_bits(full, after)


def flattened_by_fsdp(rank: int, folder: Path) -> None:
    """`stateful` asks for the nested form. The helpers of torch take the flattened one, in this order."""
    theirs, their_optimizer = with_fsdp()
    train(theirs, their_optimizer, rank, 0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(theirs, their_optimizer, options=options)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder / "flat")
    full = full_of_fsdp(theirs, their_optimizer)
    for plan in ("zero1", "zero3"):
        model, handle, optimizer = sharded(plan, seed=1)
        with pytest.raises(CheckpointException, match=r"Missing key in .*optim\.param_groups"):
            dcp.load(stateful(handle, optimizer), checkpoint_id=folder / "flat")
        if plan == "zero3":
            with pytest.raises(RuntimeError, match="call get_optimizer_state_dict before the block"):
                with handle.unsharded(write=True):
                    get_state_dict(model, optimizer)
            model, handle, optimizer = sharded(plan, seed=1)  # torch has left the learning rate at 0
        found = {"optim": get_optimizer_state_dict(model, optimizer, options=options)}
        with handle.unsharded(write=True):
            found["model"] = get_model_state_dict(model)
            dcp.load(found, checkpoint_id=folder / "flat")
            set_state_dict(
                model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"], options=options
            )
        ours = everything(handle, optimizer)
        assert len(ours) == 5 * 4 and same_bits(ours, {name: full[name] for name in ours})


def test_folders_go_from_plan_to_plan_and_to_fsdp_and_back(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        continues(rank, tmp_path / "a", "zero3", "zero1", None, torch.optim.AdamW)
        continues(rank, tmp_path / "b", "ddp", "zero3", BF16, torch.optim.RMSprop)
        exchanged_with_fsdp(rank, tmp_path)
        flattened_by_fsdp(rank, tmp_path)

    run_ranks(check, 2)


def helpers_of_torch(rank: int, plan: str) -> None:
    model, handle, optimizer = sharded(plan)
    train(model, optimizer, rank, 0)
    before = everything(handle, optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    ours = stateful(handle, optimizer)["optim"].state_dict()
    assert same_bits(_flat(state), _flat(ours))
    if plan == "zero3":
        with pytest.raises(RuntimeError, match=r"call handle.full_state_dict\(\), or .*inside `with handle.unsharded"):
            get_state_dict(model, optimizer)
    with handle.unsharded():
        weights = get_model_state_dict(model)
    weights = {name: value.clone() for name, value in weights.items()}
    assert same_bits(weights, handle.full_state_dict())
    other, other_handle, new = sharded(plan, seed=1)
    fresh = other_handle.full_state_dict()
    with pytest.raises(RuntimeError, match=r"handle.load_full_state_dict\(.*inside `with handle.unsharded\(write=True"):
        set_state_dict(other, new, model_state_dict=dict(weights), optim_state_dict=state)
    assert same_bits(other_handle.full_state_dict(), fresh) and not same_bits(everything(other_handle, new), before)
    with other_handle.unsharded(write=True):
        set_state_dict(other, new, model_state_dict=dict(weights), optim_state_dict=state)
    assert same_bits(everything(other_handle, new), before)
    other, other_handle, new = sharded(plan, seed=2)
    with other_handle.unsharded(write=True):
        set_model_state_dict(other, dict(weights))
    set_optimizer_state_dict(other, new, state)
    assert same_bits(everything(other_handle, new), before)


def begins_anew(rank: int, folder: Path, of_class: Any, **options: Any) -> None:
    """A folder from before the first step, loaded into an optimizer that has stepped, begins as the class does; also
    by `zeroshard import` and `load`."""
    found, from_dcp = [], folder / f"{of_class.__name__}-saved"
    for kind in ("saved", "loaded", "imported"):
        model = new_model(0)
        handle = zeroshard.shard(model, "zero3", units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, of_class, lr=1e-2, **options)
        if kind == "saved":
            dcp.save(stateful(handle, optimizer), checkpoint_id=from_dcp)
            steps = folder / f"{of_class.__name__}-imported"
            if rank == 0:
                import_dcp(from_dcp, steps, step=0, optimizer_class=of_class.__name__)
            torch.distributed.barrier()
        else:
            train(model, optimizer, rank, 0, 1)
            if kind == "loaded":
                dcp.load(stateful(handle, optimizer), checkpoint_id=from_dcp)
            else:
                zeroshard.load(steps, handle, optimizer)
        train(model, optimizer, rank, 2, 3)
        names = [name for name, _ in model.named_parameters()]
        full = handle.full_state_dict(main=True)
        found.append({name: full[name] for name in names})
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2]), of_class


def test_a_folder_from_before_the_first_step_leaves_the_first_step_to_the_class(tmp_path: Path) -> None:
    """The product of momenta of NAdam begins at one, the rate of ASGD at lr, and SGD does not dampen its first step."""

    def check(rank: int) -> None:
        begins_anew(rank, tmp_path, torch.optim.NAdam)
        begins_anew(rank, tmp_path, torch.optim.ASGD)
        begins_anew(rank, tmp_path, torch.optim.SGD, momentum=0.9, dampening=0.5)
        begins_anew(rank, tmp_path, torch.optim.AdamW)

    run_ranks(check, 2)


def _flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{name} {key}": torch.as_tensor(v) for name, of_name in state["state"].items() for key, v in of_name.items()
    }


def test_options_for_a_gpu_leave_the_blank_state_to_the_cpu() -> None:
    """torch raised that capturable=True needs another device, before the first step: wherever a run was resumed."""

    def check(rank: int) -> None:
        handle = zeroshard.shard(new_model(0), "zero3")
        options = {"lr": torch.tensor(1e-2), "capturable": True, "foreach": True}
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, **options)
        found = stateful(handle, optimizer)["optim"].state_dict()
        assert len(found["state"]) == len(handle.trainable_parameters())
        assert all(of.keys() == {"step", "exp_avg", "exp_avg_sq"} for of in found["state"].values())
        assert found["param_groups"][0]["capturable"] is True

    run_ranks(check, 2)


def test_the_helpers_of_torch_work_or_name_the_block_that_they_need() -> None:
    def check(rank: int) -> None:
        helpers_of_torch(rank, "zero1")
        helpers_of_torch(rank, "zero3")
        # Torch gives an optimizer without state gradients in the dtype of the weights, which sums in fp32 refuse.
        model, handle, optimizer = sharded("zero3", BF16)
        with pytest.raises(RuntimeError, match="grad_dtype"):
            set_optimizer_state_dict(model, optimizer, stateful(handle, optimizer)["optim"].state_dict())

    run_ranks(check, 2)


def test_a_folder_without_a_loss_scale_is_loaded_into_a_run_that_has_one(tmp_path: Path) -> None:
    """torch asks for all that is asked for, and its error had no remedy that keeps the optimizer's state."""

    def check(rank: int) -> None:
        half = zeroshard.MixedPrecision(torch.float16, keep=(nn.BatchNorm1d,))
        model, handle, optimizer = sharded("zero1", BF16)
        train(model, optimizer, rank, 0, 1)
        dcp.save(stateful(handle, optimizer), checkpoint_id=tmp_path / "bf16")
        _, of_half, scaled = sharded("zero3", half, seed=1)
        with pytest.raises(CheckpointException, match=r"Missing key in .*optim\.loss_scale"):
            dcp.load(stateful(of_half, scaled), checkpoint_id=tmp_path / "bf16")
        before = scaled.state_dict()["loss_scale"]
        dcp.load(stateful(of_half, scaled, loss_scale=False), checkpoint_id=tmp_path / "bf16")
        assert same_bits(everything(of_half, scaled), everything(handle, optimizer))
        assert scaled.state_dict()["loss_scale"] == before

    run_ranks(check, 2)


def test_gradients_that_wait_for_a_step_are_refused(tmp_path: Path) -> None:
    """`dcp.save` went on, and the gradients were in no folder. One rank alone has them here."""

    def check(rank: int) -> None:
        model, handle, optimizer = sharded("zero1")
        with handle.no_sync():
            if rank == 1:
                loss(model, rank, 0).backward()
        parts = stateful(handle, optimizer)
        with pytest.raises(RuntimeError, match=r"checkpoint \(on rank 1\): gradients are waiting for a step"):
            dcp.save(parts, checkpoint_id=tmp_path / "a")
        optimizer.zero_grad()
        dcp.save(parts, checkpoint_id=tmp_path / "a")

    run_ranks(check, 2)


def test_what_cannot_be_stateful_is_refused() -> None:
    def check(rank: int) -> None:
        model, handle, optimizer = sharded("zero1")
        _, _, other = sharded("zero1")
        with pytest.raises(TypeError, match=r"write zeroshard.integrations.dcp.stateful\(handle, optimizer\)"):
            stateful(model)
        with pytest.raises(TypeError, match="expected a ShardedOptimizer, found SGD"):
            stateful(handle, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
        with pytest.raises(TypeError, match="found list: one optimizer"):
            stateful(handle, [other])
        with pytest.raises(ValueError, match="belongs to another model than the handle"):
            stateful(handle, other)
        with pytest.raises(ValueError, match=r"load: the folder has the optimizer's state of mine, .* of no parameter"):
            stateful(handle, optimizer)["optim"].load_state_dict({"state": {}, "param_groups": [{"params": ["mine"]}]})

    run_ranks(check, 1)
