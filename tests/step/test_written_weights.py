"""Values that a user writes to the weights become main. WGAN clips its weights after each step: `p.data.clamp_(-c, c)`.
With bf16 weights and fp32 main the next step started from main and undid the clipping without an error. So did steppers
of whole parameters, which keep their own copies. With a remainder `p.zero_()` became NaN.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, Block, Net, loss_of_tokens, make, same_bits
from tests.together import in_turn, on_ranks
from zeroshard.optim import Lamb
from zeroshard.storage.main_weights import follow_weights, have_same_bits, join_remainder
from zeroshard.testing import run_ranks

BOUND = 0.07
IN_FULL = {"fp32": PLANS[:3:2], "bf16": PLANS[:2], "bf16-remainder": PLANS[1:3]}
"""The plans under which weights rest in full, by precision: two of three, and all with `make test-everything`."""
if EVERYTHING:
    IN_FULL = dict.fromkeys(IN_FULL, PLANS[:3])
SGD = {"lr": 2.0**-6}


def clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-BOUND, BOUND)


class Plain(nn.Module):
    """bf16 weights with fp32 main in one process, in plain torch: a written weight becomes main."""

    def __init__(self, steps: int, num_ranks: int) -> None:
        super().__init__()
        self.model = make(Net)
        masters = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.model.bfloat16()
        for step in range(steps):
            total = [torch.zeros_like(master) for master in masters]
            for rank in range(num_ranks):
                grads = torch.autograd.grad(loss_of_tokens(self.model, rank, 0, step), list(self.model.parameters()))
                for of_all, grad in zip(total, grads, strict=True):
                    of_all.add_(grad)
            clip(self.model)
            for parameter, master, grad in zip(self.model.parameters(), masters, total, strict=True):
                written = parameter.detach() != master.bfloat16()
                master.copy_(torch.where(written, parameter.detach().float(), master))
                master.sub_(SGD["lr"] * (grad / num_ranks))
                parameter.data.copy_(master)
        self.masters = dict(zip(dict(self.model.named_parameters()), masters, strict=True))


def stepped_from(rank: int, precision: str) -> None:
    expected, found = Plain(4, 2).masters, []
    for plan in IN_FULL[precision]:
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, foreach=False, **SGD)
        for step in range(4):
            loss_of_tokens(model, rank, 0, step).backward()
            clip(model)
            main = handle.full_state_dict(main=True)
            seen = handle.full_state_dict()
            for name, value in seen.items():
                assert value.abs().max() <= BOUND, name
                apart = (main[name] - value.float()).abs() - value.float().abs() * 2**-8
                assert apart.max() <= 0, name  # the weight is main, rounded (ties differ with a remainder)
            optimizer.step()
        found.append(handle.full_state_dict(main=True))
    assert all(same_bits(one, found[0]) for one in found)
    for name, value in expected.items():
        error = (found[0][name] - value).abs().max()
        assert error <= 1e-6 if precision == "bf16" else error <= BOUND * 2**-7, (name, error)


@pytest.mark.parametrize("precision", ["bf16", "bf16-remainder"])
@on_ranks(2)
def test_what_is_written_is_stepped_from(rank: int, precision: str) -> None:
    stepped_from(rank, precision)


def test_without_looking_the_write_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.storage.main_weights.follow_weights", lambda *arguments: None)
    with pytest.raises(zeroshard.testing.RankError, match="assert"):
        run_ranks(stepped_from, 2, "bf16")


@on_ranks(3)
def test_owners_of_whole_parameters_see_it(rank: int) -> None:
    """Also in fp32, as owners keep copies of the parameters that they step."""

    def check(rank: int, precision: str) -> None:
        found = []
        for plan in IN_FULL[precision]:
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block, precision=precision)
            optimizer = zeroshard.ShardedOptimizer(handle, Lamb, lr=1e-4)
            for step in range(2):
                optimizer.zero_grad()
                loss_of_tokens(model, rank, 0, step).backward()
                clip(model)
                optimizer.step()
                main = handle.full_state_dict(main=True)
                assert max(value.abs().max() for value in main.values()) <= BOUND + 1e-3
            found.append(main)
        assert all(same_bits(one, found[0]) for one in found)

    in_turn(check, ["fp32", "bf16", "bf16-remainder"])(rank)


def test_under_torchs_ddp_and_into_a_checkpoint(tmp_path: Path) -> None:
    def check(rank: int, folder: str) -> None:
        model = make(Net).bfloat16()
        ddp = DistributedDataParallel(model)
        optimizer = zeroshard.ShardedOptimizer(ddp.parameters(), torch.optim.SGD, **SGD)
        for step in range(3):
            optimizer.zero_grad()
            loss_of_tokens(ddp, rank, 0, step).backward()
            optimizer.step()
            clip(model)
        clipped = {name: value.clone() for name, value in model.state_dict().items()}
        zeroshard.save(folder, optimizer.handle, optimizer, step=1)
        clip_all = [parameter.data.zero_() for parameter in model.parameters()]
        assert clip_all
        zeroshard.load(folder, optimizer.handle, optimizer)
        assert same_bits(dict(model.state_dict()), clipped)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert same_bits(dict(model.state_dict()), clipped)

    run_ranks(check, 2, str(tmp_path))


def test_every_written_weight_is_itself_beside_every_remainder() -> None:
    """65,536 weights with 70 remainders each: no NaN that was not written, and an error of half a bit at most."""
    weights = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for low in (*range(-(1 << 15), 1 << 15, 997), -1, 0, 1, (1 << 15) - 1):
        master = torch.empty(weights.numel())
        join_remainder(weights, torch.full((weights.numel(),), low, dtype=torch.int16), master)
        assert torch.equal(master.isnan(), weights.isnan())
        there = ~weights.isnan()
        apart = (master[there].view(torch.int32) - weights[there].float().view(torch.int32)).abs()
        assert apart.max() <= 1 << 15


def test_elements_that_nobody_wrote_keep_their_low_half() -> None:
    main = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        weights, before = main.to(dtype), main.clone()
        weights[::7] = 0.25
        weights[3] = torch.nan
        follow_weights(main, weights, lambda value: value)
        assert main[3].isnan() and main[::7].eq(0.25).all()
        kept = torch.ones(1000, dtype=torch.bool)
        kept[::7] = kept[3] = False
        assert torch.equal(main[kept], before[kept])
        main = before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_changed_element_is_seen_wherever_it_is(dtype: torch.dtype) -> None:
    store, other = torch.randn(40).to(dtype), torch.randn(40).to(dtype)
    store[5] = torch.nan
    for numel in range(1, 14):
        for at, at_other in ((0, 0), (4, 8), (2, 4), (1, 3)):
            a, b = store[at : at + numel], other[at_other : at_other + numel]
            b.copy_(a)
            assert have_same_bits(a, b)  # NaN included
            for changed in range(numel):
                kept, b[changed] = b[changed].clone(), 9.5  # no random number here is that large
                assert not have_same_bits(a, b)
                b[changed] = kept


@on_ranks(2)
def test_what_it_costs(rank: int) -> None:
    """Written weights are looked for only where a user can write to them: not under ZERO3, where parameters are
    hidden."""
    for plan, precision, exposed in (("zero3", "bf16", False), ("zero2", "bf16", True)):
        handle = zeroshard.shard(make(Net), plan, units=Block, precision=precision)
        assert all(unit.main._exposed is exposed for unit in handle.engine.units)
