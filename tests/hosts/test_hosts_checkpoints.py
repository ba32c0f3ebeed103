"""Checkpoints on a folder that all hosts share; and on folders of their own, as on machines without a common file
system: every rank raises the same message, which says what to do, and nothing is left behind."""

from __future__ import annotations

import pytest

from tests.hosts.launched import launch
from tests.hosts.namespaces import Hosts
from tests.kit import same_bits

pytestmark = pytest.mark.hosts


@pytest.mark.parametrize("plan", ["zero3", "ddp"])
def test_folders_that_hosts_share_and_folders_of_their_own(plan: str) -> None:
    with Hosts(2) as hosts:
        launched = launch(hosts, "checkpoints", plan=plan)
        assert launched.finish() == [0, 0], launched.said()
        found = launched.results()
    first, second = found
    for name in first.keys() - {"left", "weights", "loss"}:
        print(f"{name}: {first[name]}")
        assert first[name] == second[name], name
    for name in ("save", "save in the background"):
        assert "a file system that all machines share" in first[name], name
        assert "node1" in first[name] and "rank 1" in first[name], name
    assert all(of_rank["left"] == [] for of_rank in found), found
    for name in ("load what nobody has", "load what the first host has", "load what differs"):
        assert first[name].startswith("CheckpointError"), name
    for name in ("load what the first host has", "load what differs"):
        assert "a file system that all machines share" in first[name], name
    assert first["load copies"] == "not refused"
    for of_rank in found:
        before, after = of_rank["weights"]
        assert same_bits(before, after)  # no refused call has changed anything
