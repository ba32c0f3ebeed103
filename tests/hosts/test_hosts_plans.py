"""Every plan, and 2-D meshes, over several hosts: losses and weights are those of one host, bit for bit."""

from __future__ import annotations

import pytest

from tests.hosts.launched import launch
from tests.hosts.namespaces import Hosts
from tests.hosts.programs import Result, train_all
from tests.kit import same_bits
from zeroshard.testing import run_ranks

pytestmark = pytest.mark.hosts


def expect_same(found: list[dict[str, Result]], expected: list[dict[str, Result]]) -> None:
    for rank, (here, there) in enumerate(zip(found, expected, strict=True)):
        assert here.keys() == there.keys()
        for name, (losses, weights) in here.items():
            assert losses == there[name][0], (rank, name)
            assert same_bits(weights, there[name][1]), (rank, name)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (2, 2), (4, 1)])
def test_losses_and_weights_are_those_of_one_host(hosts: int, per_host: int) -> None:
    """One rank each on two hosts: with an interpreter of its own for each process, as everywhere but in these tests."""
    with Hosts(hosts) as cluster:
        launched = launch(cluster, "plans", per_host=per_host, forked=hosts * per_host > 2)
        assert launched.finish() == [0] * hosts, launched.said()
        found = launched.results()
    expect_same(found, run_ranks(train_all, hosts * per_host))
    assert len(found[0]) == (9 if hosts * per_host == 4 else 5)


def test_the_comparison_finds_one_bit() -> None:
    [expected] = run_ranks(train_all, 1)
    [changed] = run_ranks(train_all, 1)
    changed["optimizer_only"][1]["head.bias"].view(-1).numpy().view("int32")[-1] ^= 1
    expect_same([expected], [expected])
    with pytest.raises(AssertionError):
        expect_same([changed], [expected])
