"""Slow networks, networks that lose packets, and networks that break, under torchrun on several hosts."""

from __future__ import annotations

import re
import time

import pytest

from tests.hosts.launched import GENEROUS, launch
from tests.hosts.namespaces import Hosts
from tests.hosts.programs import train_all
from tests.hosts.test_hosts_plans import expect_same
from zeroshard.testing import run_ranks

pytestmark = pytest.mark.hosts

NETWORKS = {
    "100 Mbit/s": (100, 0.0, 0.0),
    "500 Mbit/s": (500, 0.0, 0.0),
    "20 ms": (0, 0.02, 0.0),
    "2 % lost": (0, 0.0, 0.02),
    "all of it": (100, 0.02, 0.02),
}
"""Mbit/s (0: no limit), seconds of delay, share of the packets that are lost; each way."""


def test_slow_networks_that_lose_packets_give_the_same_bits() -> None:
    """One start of the ranks, which train again under each network."""
    names = [name.replace("/", " per ") for name in NETWORKS]
    lost, carried = [], []
    with Hosts(2, long_wires=True) as hosts:
        launched = launch(hosts, "networks", names=names)
        launched.wait_until(lambda: all(launched.files(rank, "alive") for rank in range(2)))
        for number, (name, (mbit, delay, loss)) in enumerate(zip(names, NETWORKS.values(), strict=True)):
            before = hosts.wires.lost, hosts.wires.carried
            hosts.limit(mbit)
            hosts.wires.set(delay=delay, loss=loss)
            began = time.monotonic()
            for host in hosts:
                host.path(f"/tmp/go-{name}").touch()
            launched.wait_for_step(number + 1)
            lost.append(hosts.wires.lost - before[0]), carried.append(hosts.wires.carried - before[1])
            print(f"{name}: {time.monotonic() - began:.1f} s, {carried[-1]} packets carried, {lost[-1]} lost")
        assert launched.finish() == [0, 0], launched.said()
        results = launched.results()
    [*expected] = run_ranks(train_all, 2, 2)
    for name in names:
        expect_same([of_rank[name] for of_rank in results], expected)
    for (_, _, loss), of_network in zip(NETWORKS.values(), lost, strict=True):
        assert (of_network > 0) == (loss > 0)  # the networks were what they are called
    assert min(carried) > 100


def test_a_host_that_is_cut_off_and_the_others_leave_and_name_the_network() -> None:
    timeout = 30.0
    with Hosts(3) as hosts:
        launched = launch(hosts, "endless", timeout=timeout)
        launched.wait_for_step(5)
        cut = time.monotonic()
        hosts.cut(2)
        seconds = launched.seconds_until_over(range(3), cut)
        print(f"cut off: ranks ended after {', '.join(f'{one:.1f}' for one in seconds)} s; timeout {timeout:.0f} s")
        here, there = launched.lines(0, 1), launched.lines(2)
        print("\n".join([*here, "--", *there]))
        hosts.mend(2)  # so that torchrun's agents find each other, and end soon
        assert all(launched.finish()), launched.said()
    assert max(seconds) < timeout + GENEROUS
    likely = "is the likely cause, not a process"
    heard = r"no heartbeat from node2 \(rank 2\) for \d+ s: the network between node[01] and node2, or node2 itself, "
    assert any(re.search(heard + likely, line) for line in here), here
    assert any("the store of the process group at node0:" in line and likely in line for line in there), there
    assert not any("stands still" in line or "has stopped" in line for line in [*here, *there])
