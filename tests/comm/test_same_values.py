"""`handle.load_full_state_dict(torch.load(f"weights-{rank}.pt"))`: each rank passes other values.

Every rank keeps its shard of what it is passed, so the model and the optimizer's state became a mixture, without an
error. Now the ranks compare a digest of each tensor before anything is written.
"""

from __future__ import annotations

import re
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS, plans_of, same_bits
from zeroshard.comm import same
from zeroshard.comm.same import differing, fingerprint
from zeroshard.io.tensor_file import bytes_of
from zeroshard.testing import run_ranks


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def trained(plan: Any, rank: int) -> tuple[Any, Any, Any]:
    model = build()
    if plan is zeroshard.OPTIMIZER_ONLY:
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return model, optimizer.handle, optimizer
    handle = zeroshard.shard(model, plan)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2)
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))).sum().backward()
    optimizer.step()
    return model, handle, optimizer


def test_weights_that_differ_between_ranks_are_refused_and_nothing_changes() -> None:
    def check(rank: int) -> None:
        for plan in plans_of(0):
            _, handle, optimizer = trained(plan, rank)
            before = handle.full_state_dict()
            other = {**before, "0.bias": before["0.bias"] + (rank == 2), "2.weight": before["2.weight"] + rank}
            told = (
                r"load_full_state_dict: other values than on rank 0 in 0\.bias \(rank 2\), 2\.weight \(rank 1, 2\)\. "
                ".*broadcast_from_rank0=True"
            )
            for strict in (True, False):
                with pytest.raises(ValueError, match=told):
                    handle.load_full_state_dict(other, strict=strict)
            with pytest.raises(ValueError, match=r"on rank 1.*an empty state dict.*broadcast_from_rank0=True"):
                handle.load_full_state_dict(handle.full_state_dict(rank0_only=True))
            assert same_bits(handle.full_state_dict(), before), plan
            # Buffers are not sharded, and may differ between ranks.
            handle.load_full_state_dict({**before, "1.running_mean": torch.full((8,), float(rank))})
            after = handle.full_state_dict()
            assert (after["1.running_mean"] == rank).all() and torch.equal(after["0.weight"], before["0.weight"])
            handle.load_full_state_dict(other, broadcast_from_rank0=True)
            after = handle.full_state_dict()
            assert all(torch.equal(after[name], before[name]) for name in ("0.weight", "0.bias", "2.weight"))
            # But rank 0's can only be taken by ranks that have the same ones: they were copied in part, in silence.
            handle.model[1].register_buffer("seen", torch.zeros(3 + rank // 2))
            with pytest.raises(ValueError, match=r"different models: .*1\.seen \(3,\).* where rank 2 .*1\.seen \(4,\)"):
                handle.load_full_state_dict({**other, "1.seen": torch.ones(3)}, broadcast_from_rank0=True)
            assert same_bits(handle.full_state_dict(), {**after, "1.seen": torch.zeros(3 + rank // 2)})
            del optimizer

    run_ranks(check, 3)


def test_an_optimizers_state_that_differs_is_refused_and_nothing_changes() -> None:
    def check(rank: int) -> None:
        for plan in [*PLANS, zeroshard.OPTIMIZER_ONLY]:
            _, _, optimizer = trained(plan, rank)
            state = optimizer.state_dict()
            first, *others = state["state"]

            def refused(told: str, wrong: dict[str, Any], optimizer: Any = optimizer, state: Any = state) -> None:
                with pytest.raises(ValueError, match=told):
                    optimizer.load_state_dict(wrong)
                now = optimizer.state_dict()
                assert all(same_bits(now["state"][i], state["state"][i]) for i in state["state"]) and (
                    now["param_groups"] == state["param_groups"]
                ), told

            moments = {i: {**s, "exp_avg": s["exp_avg"] + rank} for i, s in state["state"].items()}
            refused(r"state 'exp_avg' of .* \(rank 1\), .*broadcast_from_rank0=True", {**state, "state": moments})
            late = {**state["state"], first: {**state["state"][first], "step": torch.tensor(1.0 + rank)}}
            refused(r"state 'step' of .* \(rank 1\)\. ", {**state, "state": late})
            part = {i: state["state"][i] for i in (others if rank else [first, *others])}
            refused(r"state 'step' of .* \(rank 1\), state 'exp_avg' of", {**state, "state": part})
            groups = [{**state["param_groups"][0], "lr": 0.1 * (rank + 1)}]
            refused(r"'lr' of param group 0 \(rank 1\)", {**state, "param_groups": groups})
            refused(r"load_state_dict \(on rank 1\): a state_dict with 'state'", state if rank == 0 else {})
            optimizer.load_state_dict(state)
            optimizer.load_state_dict({**state, "state": moments}, broadcast_from_rank0=True)

    run_ranks(check, 2)


@pytest.mark.by_cpu
def test_gradients_and_files_that_differ_are_refused(tmp_path: Path) -> None:
    from zeroshard.checkpoint.files import write_new

    def check(rank: int) -> None:
        model = build()
        handle = zeroshard.shard(model, "zero3")
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW)
        model(torch.ones(4, 5)).sum().backward()
        with pytest.raises(ValueError, match=r"set_gradient: other values than on rank 0 in 0\.bias \(rank 1\)"):
            handle.set_gradient("0.bias", torch.full((8,), float(rank)))
        optimizer.step()
        write_new(tmp_path / f"{rank}.safetensors", safetensors(build(rank).state_dict()))
        torch.distributed.barrier()
        for own, told in [
            (f"{rank}.safetensors", r"materialize: other values than on rank 0 in .*0\.weight \(rank 1\)"),
            (f"{2 * rank}.safetensors", r"materialize \(on rank 1\): there is no file"),
        ]:
            with torch.device("meta"):
                empty = build()
            with pytest.raises(ValueError, match=told):
                zeroshard.shard(empty, "zero3", materialize=tmp_path / own)

    run_ranks(check, 2)


def safetensors(state: dict[str, Tensor]) -> bytes:
    import json
    import struct

    kinds, header, data = {torch.float32: "F32", torch.int64: "I64"}, dict[str, Any](), b""
    for name, value in state.items():
        part = bytes(bytes_of(value.contiguous()))
        header[name] = {
            "dtype": kinds[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(part)],
        }
        data += part
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_fingerprint_tells_values_shapes_and_dtypes_apart() -> None:
    values: list[Any] = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.int32),
        torch.tensor([0.0, 0.0, 0.0, 1e-45]),
        torch.zeros(4, dtype=torch.complex64),
        torch.zeros(0),
        torch.zeros(()),
        1,
        1.0,
        True,
        [1, (2, torch.ones(1))],
        [1, (2, torch.zeros(1))],
        {"a": None},
    ]
    assert len({fingerprint(value) for value in values}) == len(values)
    assert fingerprint(object()) == fingerprint(object())  # an object without values to compare
    assert differing(dict(enumerate([{"a": "1", "b": "2"}, {"a": "1"}, {"a": "3", "b": "2"}]))) == {"a": [2], "b": [1]}
    assert re.fullmatch(r"torch\.float32 \[4\] \d+", fingerprint(torch.zeros(4)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_a_digest_sees_a_change_of_any_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same, "_CHUNK", 3)
    before = torch.arange(40, dtype=torch.uint8)
    for at, bit in product(range(40), range(8)):
        after = before.clone()
        after[at] ^= 1 << bit
        assert same.digest(after.view(dtype)) != same.digest(before.view(dtype)), (at, bit)


def test_a_digest_sees_changes_of_several_words() -> None:
    """Some cancelled: two signs of float64 always, and of masks and permutations those that differ by chance."""
    wide, signs = torch.randn(8, 8, dtype=torch.float64), torch.tensor([1.0, -1.0, -1.0, 1.0])
    changed = wide.clone()
    changed[1, 3], changed[7, 5] = -wide[1, 3], -wide[7, 5]
    for one, other in ((wide, -wide), (wide, changed), (wide.cdouble(), -wide.cdouble()), (signs, -signs)):
        assert same.digest(one) != same.digest(other)
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(16, generator=generator) < 0.5 for _ in range(300)]
    for values in ([torch.tensor(order) for order in permutations(range(6))], masks):
        different = {tuple(value.tolist()) for value in values}
        assert len({same.digest(value) for value in values}) == len(different)
