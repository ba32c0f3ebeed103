"""Hosts that are killed or lose their power while torchrun's ranks train on them; and runs that go on after that."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

import pytest

from tests.hosts.launched import Launched, launch
from tests.hosts.namespaces import Hosts
from tests.hosts.programs import train_on
from tests.kit import State, same_bits
from zeroshard.testing import run_ranks

pytestmark = pytest.mark.hosts

NEVER = 3000.0
"""A timeout of collectives that no test waits for: whoever ends before has noticed the failure itself."""
STEPS, SAVED = 10, 6
"""Steps of a whole run, and the step that was saved last when rank 1 stands still."""


def say(launched: Launched, what: str, seconds: list[float]) -> list[str]:
    lines = launched.lines()
    print(f"{what}: ranks ended after {', '.join(f'{one:.1f}' for one in seconds)} s", *lines, sep="\n")
    return lines


def test_a_host_that_is_killed_is_named_and_the_others_leave() -> None:
    with Hosts(3) as hosts:
        launched = launch(hosts, "endless", timeout=NEVER)
        launched.wait_for_step(5)
        killed = time.monotonic()
        hosts.kill(1)
        lines = say(launched, "node1 killed", launched.seconds_until_over([0, 2], killed))
    why = (
        r"and a connection was closed: its processes were killed \(often out of memory\) or crashed, or the host was "
        "shut down"
    )
    named = re.compile(rf"no heartbeat from node1 \(rank 1\) for \d+ s, {why}")
    assert any(named.search(line) for line in lines), lines


@pytest.mark.parametrize("first", [False, True])
def test_a_host_without_power_is_named_and_the_others_leave(first: bool) -> None:
    """`first`: the host of the rendezvous and of the store."""
    gone = 0 if first else 2
    with Hosts(3) as hosts:
        launched = launch(hosts, "endless", timeout=30.0)
        launched.wait_for_step(5)
        off = time.monotonic()
        hosts.power_off(gone)
        others = [rank for rank in range(3) if rank != gone]
        lines = say(launched, f"node{gone} without power", launched.seconds_until_over(others, off))
    assert any(f"node{gone}" in line and "itself, is the likely cause, not a process" in line for line in lines), lines


def test_when_the_host_of_the_rendezvous_is_killed_the_others_leave() -> None:
    """torchrun may notice it first. It then ends its ranks before they can say anything, and says so itself."""
    with Hosts(3) as hosts:
        launched = launch(hosts, "endless", timeout=NEVER)
        launched.wait_for_step(5)
        killed = time.monotonic()
        hosts.kill(0)
        lines = say(launched, "node0 killed", launched.seconds_until_over([1, 2], killed))
        for process in (launched.launchers[1], launched.launchers[2]):
            assert process.wait() != 0
        of_torchrun = launched.said(1, 2).count(
            "RendezvousConnectionError: The connection to the C10d store has failed"
        )
    print(f"by torchrun: {of_torchrun} lines: The connection to the C10d store has failed")
    assert of_torchrun or any("the store of the process group at node0:" in line for line in lines), lines


@pytest.fixture(scope="module")
def uninterrupted() -> State:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(train_on, 2, Path(folder) / "run", STEPS)[0][1]


def expect_resumed(launched: Launched, uninterrupted: State) -> None:
    for first, weights in launched.results():
        assert first == SAVED
        assert same_bits(weights, uninterrupted)


def test_torchrun_starts_the_ranks_again_and_they_go_on(uninterrupted: State) -> None:
    """A rank is killed."""
    with Hosts(2) as hosts:
        launched = launch(hosts, "resumable", restarts=2, num_steps=STEPS, stand_still_at=SAVED)
        launched.wait_until(lambda: launched.number(1, "pid") > 0)
        hosts[1].run("kill", "-9", str(launched.number(1, "pid")))
        assert launched.finish() == [0, 0], launched.said()
        print("restarted:", *launched.lines(), sep="\n")
        expect_resumed(launched, uninterrupted)


def test_a_host_that_comes_back_takes_part_again(uninterrupted: State) -> None:
    """The launcher on the other host waits for it."""
    joins = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see docs/clusters.md, "When a machine fails"
    with Hosts(2) as hosts:
        launched = launch(hosts, "resumable", restarts=2, variables=joins, num_steps=STEPS, stand_still_at=SAVED)
        launched.wait_until(lambda: launched.number(1, "pid") > 0)
        hosts.kill(1)
        hosts.boot(1)
        launched.start(1)
        assert launched.finish() == [0, 0], launched.said()
        print("a host came back:", *launched.lines(), sep="\n")
        expect_resumed(launched, uninterrupted)


def test_without_the_host_of_the_rendezvous_the_run_is_started_anew_and_goes_on(uninterrupted: State) -> None:
    with Hosts(2) as hosts:
        launched = launch(hosts, "resumable", restarts=2, num_steps=STEPS, stand_still_at=SAVED)
        launched.wait_until(lambda: launched.number(1, "pid") > 0)
        hosts.kill(0)
        hosts.kill(1)  # its rank stands still, for good
        for number in range(2):
            hosts.boot(number)
            launched.start(number)
        assert launched.finish() == [0, 0], launched.said()
        expect_resumed(launched, uninterrupted)


def test_a_run_that_does_not_go_on_from_its_checkpoint_is_noticed(uninterrupted: State) -> None:
    """The control: without the saved steps the weights are those of fewer steps."""
    with tempfile.TemporaryDirectory() as folder:
        fewer = run_ranks(train_on, 2, Path(folder) / "run", STEPS - 2)[0][1]
    assert not same_bits(fewer, uninterrupted)
