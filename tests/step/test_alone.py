"""A single rank compares nothing and sends nothing in a step, and agrees with itself on the same numbers."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import PLANS
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommLog
from zeroshard.gradients.settings import SettingsReport
from zeroshard.placement import Plan
from zeroshard.ranks.mesh import Mesh
from zeroshard.step import control
from zeroshard.testing import run_ranks

BAD = (math.nan, math.inf, 1e308, 5e-324)


def both_controls(rank: int) -> list[tuple[control.Control, control.Control]]:
    """What a single rank agrees on with itself, without and with the exchange of several ranks."""
    collectives, found = Collectives(Mesh.of(None), CommLog()), []
    generator = torch.Generator().manual_seed(0)
    for kind, status, bad in itertools.product((1.0, 2.0, 3.5, math.inf), control.Status, (None, *BAD)):
        norms = torch.rand(70, dtype=torch.float64, generator=generator) * 10.0 ** (len(found) % 30 - 15)
        if bad is not None:
            norms[len(found) % 70] = bad
        groups = [place % 3 for place in range(70)]
        present = [*(place % (2 + len(found) % 3) == 0 for place in range(128)), False, False]
        flags = torch.tensor([False, True]) if len(found) % 2 else None
        weight = bad if bad is not None and len(found) % 5 == 0 else 0.1 * len(found)
        own = control.Contribution(
            status, weight, control.Norms(norms, groups, 4, kind), present, SettingsReport(), flags
        )
        alone = control.ask(collectives, own).read()
        found.append((alone, control._ask_all(collectives, own).read()))
    return found


def test_a_single_rank_agrees_on_what_an_exchange_finds() -> None:
    (found,) = run_ranks(both_controls, 1)
    assert len(found) == 4 * len(control.Status) * (1 + len(BAD))
    for alone, exchanged in found:
        exact = [dataclasses.replace(one, norm_to_clip=None) for one in (alone, exchanged)]
        assert repr(exact[0]) == repr(exact[1]), "repr, as a NaN is equal to no NaN"
        assert (alone.norm_to_clip is None) == (alone.norm_type != 2)
        if alone.finite and alone.norm_to_clip is not None:
            assert alone.norm_to_clip == pytest.approx(alone.norm, rel=1e-15)
            assert exchanged.norm_to_clip == pytest.approx(alone.norm, rel=1e-15)
    assert {alone.finite for alone, _ in found} == {True, False}


def train(rank: int, plan: Plan) -> None:
    def forbidden(*args: object, **options: object) -> None:
        raise AssertionError("a single rank has nobody to exchange anything with")

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.Tanh(), nn.Linear(5, 3))
    plain[2].bias.requires_grad_(False)
    model = copy.deepcopy(plain)
    handle = zeroshard.shard(model, plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1, momentum=0.9)
    plain_optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    with pytest.MonkeyPatch.context() as patched:
        for name in ("reduce_scatter", "begin_sum", "exchange_objects"):
            patched.setattr(Collectives, name, forbidden)
        for step in range(4):
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
            for micro_batch in range(1 + step % 3):
                x = torch.randn(6, 7, generator=torch.Generator().manual_seed(10 * step + micro_batch))
                for one in (model, plain):
                    # In one step, two layers have no gradient: they are not updated.
                    (one[:2] if step == 2 else one)(x).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            assert torch.allclose(optimizer.clip_grad_norm_(0.5), norm.double(), rtol=1e-6)
            optimizer.step()
            plain_optimizer.step()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7), (plan, step)
    assert not handle.comm_log.entries


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_of_a_single_rank_exchanges_nothing(plan: Plan) -> None:
    run_ranks(train, 1, plan)
