"""The simulated fabric: modelled times against an injected clock, and zeroshard, torch DDP and FSDP over it."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS
from tests.planning.test_dry_run import alone
from zeroshard.planning.fabric import NAME, simulated_fabric
from zeroshard.planning.wire import Fabric, Network, ProcessorClock, WallClock

SLOW = Network(latency=0.25, bandwidth=64.0)
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
INSTANT = Network(latency=0.0, bandwidth=math.inf)


class Computation:
    """Seconds that a program has computed, by its own account."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def clock(self) -> ProcessorClock:
        return ProcessorClock(lambda: self.seconds)


def test_seconds_of_each_collective_by_hand() -> None:
    seconds = SLOW.seconds
    for ring in ("all_gather", "reduce_scatter", "all_to_all"):
        assert seconds(ring, 640, 5) == 4 * 0.25 + 640 * 4 / 5 / 64
        assert seconds(ring, 640, 1) == 0
    assert seconds("all_reduce", 64_000, 4) == 6 * 0.25 + 2 * 64_000 * 3 / 4 / 64, "a ring"
    assert seconds("all_reduce", 8, 64) == 12 * 0.25 + 12 * 8 / 64, "a tree"
    assert seconds("all_reduce", 0, 6) == 6 * 0.25, "a barrier"
    assert seconds("broadcast", 64_000, 8) == (3 + 7) * 0.25 + 2 * 64_000 * 7 / 8 / 64
    assert seconds("reduce", 8, 8) == 3 * 0.25 + 3 * 8 / 64
    assert INSTANT.seconds("all_reduce", 10**12, 1024) == 0


def test_collectives_queue_on_the_wire() -> None:
    computation = Computation()
    fabric = Fabric(SLOW, clock := computation.clock())
    first = fabric.issue("all_gather", 128, 2)  # 0.25 + 64 / 64
    computation.seconds += 0.5
    second = fabric.issue("all_gather", 128, 2)
    assert (first.begin, first.end) == (0.0, 1.25)
    assert (second.issued, second.begin, second.end) == (0.5, 1.25, 2.5)
    assert not fabric.is_over(first)
    fabric.wait(first)
    assert clock.now() == 1.25 and first.waited == 0.75 and fabric.is_over(first)
    computation.seconds += 1.0
    fabric.wait(second)
    fabric.wait(second)
    assert clock.now() == 2.5 and second.waited == 0.25
    computation.seconds += 1.0  # the wire is free
    third = fabric.issue("all_gather", 128, 2)
    assert third.begin == third.issued == 3.5
    fabric.settle()
    assert clock.now() == third.end == 4.75


def collectives(rank: int, size: int) -> None:
    """Each collective once, with the values of equal ranks."""
    own = torch.arange(4.0)
    gathered = torch.zeros(4 * size)
    all_gather(gathered, own)
    assert torch.equal(gathered, own.repeat(size))
    parts = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(parts, own)
    assert all(torch.equal(part, own) for part in parts)
    terms, out = torch.arange(4.0 * size), torch.zeros(4)
    reduce_scatter(out, terms)
    assert torch.equal(out, size * terms[4 * rank : 4 * rank + 4])
    total = own.clone()
    dist.all_reduce(total)
    assert torch.equal(total, size * own)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    assert torch.equal(total, size * own)
    dist.reduce(total, 0)
    assert torch.equal(total, (1 if rank else size) * size * own)
    dist.broadcast(total.copy_(own), 0)
    assert torch.equal(total, own)
    received = torch.zeros(3 * size)
    dist.all_to_all_single(received, torch.arange(4.0), [3] * size, [1] * rank + [3] + [0] * (size - 1 - rank))
    assert torch.equal(received, torch.arange(rank, rank + 3.0).repeat(size))
    dist.barrier()
    found: list[object] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": rank}] * size
    with pytest.raises(ValueError, match="expected a sum, mean, minimum or maximum over ranks"):
        dist.all_reduce(total, dist.ReduceOp.PRODUCT)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))


def data(step: int) -> Tensor:
    return torch.rand(4, 32, generator=torch.Generator().manual_seed(step))


def train(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> Counter[str]:
    """Collective -> how often it was issued in the last step."""
    for step in range(steps):
        optimizer.zero_grad()
        fabric.settle(), fabric.log.clear()
        model(data(step)).square().mean().backward()
        fabric.settle()
        optimizer.step()
    return Counter(transfer.collective for transfer in fabric.log)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def ours(plan: str) -> tuple[nn.Module, zeroshard.Handle, zeroshard.ShardedOptimizer]:
    handle = zeroshard.shard(model := net(), plan, units=nn.Linear)
    return model, handle, zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, non_finite="ignore")


def zero3() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _, optimizer = ours("zero3")
    return model, optimizer


def torch_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.004, broadcast_buffers=False)


def fsdp1() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy([nn.Linear])
    return FullyShardedDataParallel(net(), auto_wrap_policy=policy, device_id=torch.device("cpu"))


def fsdp2() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model, mesh = net(), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [*model.children(), model]:
        fully_shard(module, mesh=mesh)
    return model


def compute_in_each_layer(model: nn.Module, computation: Computation, seconds: float) -> None:
    """Each layer takes `seconds` in forward, and twice as long in backward."""

    def add(times: int) -> None:
        computation.seconds += times * seconds

    for layer in (module for module in model.modules() if isinstance(module, nn.Linear)):
        layer.register_forward_hook(lambda *_: add(1))
        layer.register_full_backward_pre_hook(lambda *_: add(2))


@pytest.mark.filterwarnings("ignore")  # FSDP's, about names of torch and views
def test_values_times_and_training() -> None:
    def check() -> None:
        expect_values_and_times()
        expect_torch_ddp_to_train_as_equal_ranks()
        expect_each_plan_to_send_what_its_log_says()
        expect_exposure()

    alone(check)


def expect_values_and_times() -> None:
    """A known sequence takes the modelled time, on the default group and on a smaller one."""
    computation = Computation()
    with simulated_fabric(4, SLOW, rank=1, clock=(clock := computation.clock())) as fabric:
        assert (
            dist.get_world_size() == 4 and dist.get_rank() == 1 and dist.get_backend_config().startswith("cpu:" + NAME)
        )
        collectives(1, 4)
        assert clock.now() == pytest.approx(sum(transfer.seconds for transfer in fabric.log)), "one after the other"
        computation.seconds, start = computation.seconds + 5, clock.now()
        pair = dist.new_group([1, 3])
        full, own = torch.zeros(512, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
        one = all_gather(full, own, group=pair, async_op=True)
        two = dist.all_reduce(torch.zeros(128, dtype=torch.uint8), async_op=True)
        assert not one.is_completed()
        two.wait()
        of_one, of_two = 0.25 + 512 / 2 / 64, 4 * 0.25 + 4 * 128 / 64
        assert SLOW.seconds("all_reduce", 128, 4) == min(of_two, 6 * 0.25 + 2 * 128 * 3 / 4 / 64)
        assert clock.now() - start == pytest.approx(5 + of_one + SLOW.seconds("all_reduce", 128, 4)), (
            "one wire for both"
        )
        one.wait()
        assert one.is_completed() and clock.now() == fabric.log[-1].end


def expect_torch_ddp_to_train_as_equal_ranks() -> None:
    """Training of equal ranks is training in one process, bit for bit. On the wall clock: another thread completes the
    futures that torch DDP waits for."""
    plain = net()
    optimizer = adamw(plain)
    for step in range(2):
        optimizer.zero_grad()
        plain(data(step)).square().mean().backward()
        optimizer.step()
    with simulated_fabric(4, Network(latency=1e-4, bandwidth=1e9)) as fabric:
        assert isinstance(fabric.clock, WallClock)
        train(fabric, wrapped := torch_ddp(net()), adamw(wrapped))
        assert all(map(torch.equal, weights_of(wrapped), weights_of(plain)))
        train(fabric, wrapped, adamw(wrapped), 1)
        assert not any(map(torch.equal, weights_of(wrapped), weights_of(plain)))


def expect_each_plan_to_send_what_its_log_says() -> None:
    with simulated_fabric(8, INSTANT, rank=3, clock=Computation().clock()) as fabric:
        for plan in PLANS:
            model, handle, optimizer = ours(plan)
            train(fabric, model, optimizer, 1)
            fabric.log.clear(), handle.comm_log.clear()
            train(fabric, model, optimizer, 1)
            sent = Counter[str]()
            for transfer in fabric.log:
                sent[transfer.collective] += transfer.num_bytes * 7 // 8
            logged = Counter[str]()
            for entry in handle.comm_log.entries:
                logged[entry.op] += entry.bytes
            assert {op: sent[op] for op in ("all_gather", "reduce_scatter")} == {
                op: logged[op] for op in ("all_gather", "reduce_scatter")
            }, plan
            handle.close()


def exposure(build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], network: Network) -> tuple[float, float]:
    """(exposed, on the wire): seconds of a step in steady state. Each layer computes for 6 s in forward, 12 in
    backward."""
    computation = Computation()
    with simulated_fabric(2, network, clock=(clock := computation.clock())) as fabric:
        model, optimizer = build()
        compute_in_each_layer(model, computation, 6.0)
        train(fabric, model, optimizer, 2)
        fabric.log.clear()
        start, computed = clock.now(), computation.seconds
        optimizer.zero_grad()
        model(data(0)).square().mean().backward()
        fabric.settle()
        optimizer.step()
        waited = sum(transfer.waited for transfer in fabric.log)
        exposed = clock.now() - start - (computation.seconds - computed)
        assert exposed >= waited - 1e-9
        return exposed, sum(transfer.seconds for transfer in fabric.log)


def expect_exposure() -> None:
    """Nothing is exposed on an instant network, and everything where nothing can overlap; else a part of it."""
    builders: dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]] = {
        "zero3": zero3,
        "DDP": lambda: ((model := torch_ddp(net())), adamw(model)),
        "FSDP1": lambda: ((model := fsdp1()), adamw(model)),
        "FSDP2": lambda: ((model := fsdp2()), adamw(model)),
    }
    network = Network(latency=0.0, bandwidth=1024.0)
    share = {}
    for name, build in builders.items():
        assert exposure(build, INSTANT) == (0.0, 0.0), name
        exposed, wire = exposure(build, Network(latency=0.0, bandwidth=1024.0, overlaps=False))
        assert exposed == pytest.approx(wire) and wire > 4, name
        exposed, wire = exposure(build, network)
        share[name] = exposed / wire
    assert share["FSDP1"] == share["FSDP2"] == pytest.approx(1), "without streams their collectives block"
    assert 0.1 < share["zero3"] < 0.4, "in forward the first gather, in backward the last reduction"
    assert 0.1 < share["DDP"] < 0.4, "the last bucket"


def test_a_future_is_completed_by_the_wall_clock() -> None:
    clock, done = WallClock(), threading.Event()
    clock.call_at(clock.now() + 1e-3, done.set)
    assert done.wait(60)
    clock.wait_until(moment := clock.now() + 1e-3)
    assert clock.now() >= moment


def test_bad_input() -> None:
    for bad in (
        {"latency": -1.0, "bandwidth": 1.0},
        {"latency": 0.0, "bandwidth": 0.0},
        {"latency": math.nan, "bandwidth": 1.0},
    ):
        with pytest.raises(ValueError, match="a latency of at least 0 seconds and a positive bandwidth"):
            Network(**bad)
    with (
        pytest.raises(ValueError, match="rank must be below the number of ranks, 2, found 2"),
        simulated_fabric(2, INSTANT, rank=2),
    ):
        pass

    def check() -> None:
        with simulated_fabric(2, INSTANT), pytest.raises(RuntimeError, match="in a process group already"):
            simulated_fabric(2, INSTANT).__enter__()

    alone(check)
