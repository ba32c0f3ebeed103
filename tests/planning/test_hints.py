"""Advice of `plan`: a 2-D mesh where messages are so small that latency dominates, and nothing elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import zeroshard
from tests.cli.test_commands import said
from zeroshard.planning import MACHINES, Configuration, Machine, forecast


def model() -> nn.Module:
    """Units of 33.6 MB in bf16: on n ranks a message has 33.6 MB / n."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))


GIVEN = Configuration(plan="zero3", precision="bf16", units=nn.Linear)


def test_a_mesh_is_advised_where_latency_dominates() -> None:
    planned = zeroshard.plan(model(), replace(GIVEN, ranks=1024))
    (hint,) = planned.hints()
    # 630 kB are the break-even between nodes with 400 Gb/s: 33.6 MB / 32 = 1.05 MB, 33.6 MB / 64 = 524 kB
    assert (hint.replicas, hint.shards) == (32, 32) and hint.message == pytest.approx(33.6e6 / 1024, rel=0.03)
    latency = 1.5e-5 / (1.5e-5 + hint.message / 4.2e10)
    assert hint.latency_share == pytest.approx(latency, rel=1e-6)
    there = zeroshard.plan(model(), replace(GIVEN, ranks=1024, replicas=32))
    assert (hint.peak, hint.peak_there) == (planned.peak, there.peak)
    seconds = [one.time("nodes-400", tokens=1).communication for one in (planned, there)]
    assert [hint.seconds, hint.seconds_there] == seconds and seconds[1] < seconds[0] / 2
    assert "2-D mesh of 32 replicas x 32 shards" in str(hint) and "33.3 kB" in str(hint)
    assert not there.hints(), "one of a good mesh"


def test_nothing_is_advised_where_it_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for changed in (
        {"ranks": 8},  # one node: a mesh does not help
        {"ranks": 32},  # messages are large enough
        {"ranks": 1024, "plan": "zero2"},  # no gathers in forward
        {"ranks": 1024, "plan": "ddp"},
        {"ranks": 1024, "replicas": 32},
        {"ranks": 1024, "transport": "shared"},  # of one host: nothing is sent
        {"ranks": 1021},  # no divisor
    ):
        assert zeroshard.plan(model(), replace(GIVEN, **changed)).hints() == (), changed  # type: ignore[arg-type]
    planned = zeroshard.plan(model(), replace(GIVEN, ranks=64))
    (hint,) = planned.hints()
    assert hint.latency_share > 0.5 and hint.seconds_there < 0.8 * hint.seconds
    monkeypatch.setattr(forecast, "WORTH_IT", 0.99 * hint.seconds_there / hint.seconds)
    assert planned.hints() == ()


def test_it_depends_on_the_machine() -> None:
    planned = zeroshard.plan(model(), replace(GIVEN, ranks=1024))
    without_latency = replace(MACHINES["nodes-400"], latency=0.0, far_latency=0.0)
    assert planned.hints(without_latency) == ()
    slow = Machine(flops=1e14, memory=1e12, latency=3e-6, bandwidth=3e11, far_latency=1e-3, far_bandwidth=4e10)
    assert planned.hints(slow)[0].shards == 8, "at least the ranks of a node"
    with pytest.raises(ValueError, match="machine must be one of"):
        planned.hints("abacus")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "tests.planning.test_hints:model", "--units", "Linear", "--plan", "zero1,zero3")
    text = said(capsys, *arguments, "--ranks", "8,1024")
    (line,) = (line for line in text.splitlines() if line.startswith("hint: "))
    assert line.startswith("hint: zero3, bf16, 1,024 ranks, AdamW, 8 units: ") and line.endswith(": --replicas 32")
    rows = json.loads(said(capsys, *arguments, "--ranks", "8,1024", "--json"))
    assert [len(row["hints"]) for row in rows] == [0, 0, 0, 1]
    assert rows[-1]["hints"][0]["replicas"] == 32 and "2-D mesh" in rows[-1]["hints"][0]["text"]
    assert "hint: " not in said(capsys, *arguments, "--ranks", "8")
    # what is advised is among what `--fit` tries
    rows = json.loads(said(capsys, *arguments, "--ranks", "1024", "--precision", "bf16", "--fit", "1GB", "--json"))
    assert {row["replicas"] for row in rows if row["plan"] == "zero3"} >= {1, 128}
