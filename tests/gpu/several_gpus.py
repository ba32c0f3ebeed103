"""Pieces of `make test-gpu` for several GPUs over NCCL: values where ranks differ, how ranks end, and what it costs."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.comm.test_nccl_rules import Adapters, is_unit, train_codes
from tests.gpu.around_steps import Training
from tests.gpu.checks import Checks, Setting, Skip, run_python
from tests.gpu.jobs import Matrices
from tests.gpu.worlds import on_own_devices
from tests.kit import DEVICE, PLANS, State, make, same_bits
from zeroshard.placement import Plan

STEPS = 3


def _ranks_of(setting: Setting) -> int:
    if setting.is_small:
        return 2
    if setting.num_gpus < 2:
        raise Skip("it needs two GPUs")
    return setting.num_gpus


# Values ---------------------------------------------------------------------------------------------------------------


def values(checks: Checks, setting: Setting) -> None:
    """What differs between ranks, and must not: compared with one process, to the last bits but a few."""
    num_ranks = _ranks_of(setting)
    ranks = partial(on_own_devices, setting.device)
    kinds: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], float]] = {
        "layers that some ranks leave out, the host waits in backward": (Adapters, _loss_of_adapters, 1e-4),
        "more ranks than matrices, parts of which train": (
            _few_matrices,
            _loss_of_matrices,
            2e-3,
        ),  # Muon has steps in bf16
    }
    for name, (model, loss_of, bound) in kinds.items():
        truth = ranks(_plain, 1, model, loss_of, num_ranks)[0]
        for plan in PLANS[:: 3 if setting.is_small else 1]:
            found = ranks(_sharded, num_ranks, model, loss_of, plan)
            far = max(_distance(one, truth) for one in found)
            checks.expect(f"{name}, {plan}: the weights of one process", far < bound, f"{far:.1e} apart")
            checks.expect(f"{name}, {plan}: the same on all ranks", all(same_bits(one, found[0]) for one in found))
        other = ranks(_plain, 1, model, loss_of, num_ranks - 1)[0]
        checks.expect(f"{name}: with one rank less, others (control)", _distance(other, truth) > bound)
    (alone,) = ranks(train_codes, 1, torch.int16, None)
    codes = [torch.equal(found[1], alone[1]) for found in ranks(train_codes, num_ranks, torch.int16, "zero3")]
    checks.expect("frozen integers of 16 bits, which NCCL does not have, are gathered", all(codes))
    few = max(num_ranks // 2, 1)
    for saved, loaded in ((PLANS[3], PLANS[1]), (PLANS[0], PLANS[3]))[: 1 if setting.is_small else None]:
        folder = setting.folder / f"{saved} to {loaded}"
        before = ranks(_save, num_ranks, saved, folder)[0]
        after = ranks(_load, few, loaded, folder)
        same = all(same_bits(one, before) for one in after)
        checks.expect(f"saved by {num_ranks} ranks under {saved}, loaded by {few} under {loaded}: the same bits", same)
    for plan in PLANS[3 if setting.is_small else 1 :: 2]:
        joined, zeros = (ranks(_uneven, num_ranks, plan, joins) for joins in (True, False))
        same = all(same_bits(one, zeros[0]) for one in joined)
        checks.expect(f"{plan}: the last rank has run out of inputs: the bits of gradients of 0", same)


def _loss_of_adapters(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(3, 8, generator=generator).to(DEVICE)
    out: Tensor = model(x, uses_both=bool((rank + step) % 2))
    # Where the host waits for the device in backward, a rank must not wait for one that has to issue something first.
    out.register_hook(lambda grad: grad * (1.0 if float(grad.abs().sum()) > 0 else 0.0))
    return out.square().mean()


def _few_matrices() -> nn.Module:
    model = Matrices()
    model.layers[0].requires_grad_(False)
    return model


def _loss_of_matrices(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = torch.randint(23, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _optimizer_of(model: nn.Module) -> tuple[type[torch.optim.Optimizer], dict[str, float]]:
    return (torch.optim.Muon, {"lr": 0.02}) if isinstance(model, Matrices) else (torch.optim.SGD, {"lr": 0.05})


def _sharded(rank: int, make_model: Callable[[], nn.Module], loss_of: Callable[..., Tensor], plan: Plan) -> State:
    model = make(make_model)
    kind, options = _optimizer_of(model)
    units = nn.Linear if isinstance(model, Matrices) else is_unit
    handle = zeroshard.shard(model, plan, units=units)
    optimizer = zeroshard.ShardedOptimizer(handle, kind, **options)  # type: ignore[arg-type]
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in handle.full_state_dict().items()}


def _plain(rank: int, make_model: Callable[[], nn.Module], loss_of: Callable[..., Tensor], num_ranks: int) -> State:
    """The weights of one process in plain torch, with the losses of so many ranks."""
    model = make(make_model)
    kind, options = _optimizer_of(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = kind(trained, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        for other in range(num_ranks):
            (loss_of(model, other, step) / num_ranks).backward()
        optimizer.step()
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in other)


def _save(rank: int, plan: Plan, folder: Path) -> State:
    training = Training(plan)
    training.step(0, rank)
    zeroshard.save(folder, training.handle, training.optimizer, step=1)
    return training.weights()


def _load(rank: int, plan: Plan, folder: Path) -> State:
    training = Training(plan, seed=1)
    zeroshard.load(folder, training.handle, training.optimizer)
    return training.weights()


def _uneven(rank: int, plan: Plan, joins: bool) -> State:
    """The last rank has inputs for one step less; without a join, its loss is multiplied by 0 there."""
    training, is_last = Training(plan), rank == dist.get_world_size() - 1
    if not joins:
        for number in range(STEPS):
            training.step(number, rank, factor=float(number < STEPS - is_last))
        return training.weights()
    with training.handle.join():
        for number in range(STEPS - is_last):
            training.step(number, rank)
    return training.weights()


# Ends -----------------------------------------------------------------------------------------------------------------

ENDS = {
    "is right": "",
    "raises": r"rank 0 exits because rank 1 failed: ValueError(.|\n)*rank 1 of 2 failed first"
    r"|rank 1 of 2 failed first(.|\n)*rank 0 exits because rank 1 failed: ValueError",
    "destroys": r"ValueError: out of memory, say",
    "dies": r"because rank 1 died without reporting an error",
    "stops": r"rank 1 .* has stopped",
    "is elsewhere": r"rank 1 .* is at ending_ranks.py:\d+",
    "leaves": r"rank 1 has reached the end of its program",
    "skips": r"different collectives|is at unit|rank \d failed",
}
"""What the last of two ranks does -> what is said."""
_TIMEOUT, _LIMIT = 20.0, 90.0
"""Seconds: of collectives; from the start of Python until all ranks have ended (torchrun waits 30 s for ranks that do
not end by themselves)."""


def ends(checks: Checks, setting: Setting) -> None:
    num_gpus = 2 if setting.is_small else setting.num_gpus // 2 * 2
    if num_gpus < 2:
        raise Skip("it needs two GPUs")
    cases = ["raises"] if setting.is_small else [*ENDS]
    pairs = [f"{first},{first + 1}" for first in range(0, num_gpus, 2)]
    with ThreadPoolExecutor(len(pairs)) as pool:  # each pair of GPUs runs its share, one after the other
        shares = [(pair, cases[number :: len(pairs)]) for number, pair in enumerate(pairs)]
        for found in pool.map(lambda share: [_end_of(setting, share[0], case) for case in share[1]], shares):
            for case, status, output, seconds in found:
                checks.text(case, "\n".join(output.splitlines()[-60:]))
                is_told = re.search(ENDS[case], output) is not None
                checks.expect(f"{case}: said as it is", is_told and (status == 0) == (case == "is right"), status)
                checks.expect(f"{case}: all ranks end in time", seconds < _LIMIT, f"{seconds:.0f} s")
    _starts(checks, setting)


def _end_of(setting: Setting, pair: str, case: str) -> tuple[str, int, str, float]:
    began = time.monotonic()
    if setting.is_small:  # without torchrun, which takes seconds to start
        found = _started(setting, ("", ""), case)
        status, output = max(status for status, _ in found), "\n".join(output for _, output in found)
    else:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        program = ("-m", "tests.gpu.ending_ranks", case, str(_TIMEOUT))
        status, output = run_python(*launcher, *program, variables=_visible(setting, pair))
    return case, status, output, time.monotonic() - began


def _visible(setting: Setting, gpus: str) -> dict[str, str]:
    """Variables of a process that sees these GPUs; on other devices, none."""
    own = {"ZEROSHARD_TEST_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return {"CUDA_VISIBLE_DEVICES": gpus} if setting.device == "cuda" else own


def _starts(checks: Checks, setting: Setting) -> None:
    """Two processes of a launcher that sets RANK, and not LOCAL_RANK."""
    is_gpu = setting.device == "cuda"
    devices = ("cuda:0", "cuda:1") if is_gpu else ("cpu", "cpu")
    for what, gpus, expected in (
        ("both see both GPUs", ("0,1", "0,1"), devices),
        ("each sees its own", ("0", "1"), ("cuda:0", "cuda:0") if is_gpu else devices),
    ):
        found = _started(setting, gpus)
        outputs = [output for _, output in found]
        right = [f"rank {rank} on {expected[rank]}" in output for rank, output in enumerate(outputs)]
        statuses = [status for status, _ in found]
        checks.expect(f"without LOCAL_RANK, {what}: they train", all(right) and statuses == [0, 0], statuses)
    if is_gpu:
        found = _started(setting, ("0", "0"))
        output = "\n".join(output for _, output in found)
        is_told = "ranks 0 and 1 use the same GPU" in output and all(status for status, _ in found)
        checks.expect("two ranks on one GPU are told so", is_told, output[-300:])


def _started(setting: Setting, gpus: Sequence[str], case: str = "is right") -> list[tuple[int, str]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(len(gpus)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "LOCAL_RANK": ""}

    def start(rank: int) -> tuple[int, str]:
        variables = common | {"RANK": str(rank)} | _visible(setting, gpus[rank])
        return run_python("-m", "tests.gpu.ending_ranks", case, str(_TIMEOUT), variables=variables)

    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(start, range(len(gpus))))


# Costs ----------------------------------------------------------------------------------------------------------------


def costs(checks: Checks, setting: Setting) -> None:
    num_ranks = _ranks_of(setting)
    found = on_own_devices(setting.device, _measured, num_ranks, 1 << (14 if setting.is_small else 28))
    names = [*found[0]]
    checks.table("by rank", ["rank", *names], [[rank, *one.values()] for rank, one in enumerate(found)])
    checks.expect("all ranks have measured", len(found) == num_ranks)


def _measured(rank: int, num_bytes: int) -> dict[str, str]:
    is_gpu = DEVICE.type == "cuda"
    found: dict[str, str] = {}

    def used() -> float:
        free, total = torch.cuda.mem_get_info() if is_gpu else (0, 0)
        return (total - free) / 1e6

    before, began = used(), time.perf_counter()
    handle = zeroshard.shard(nn.Linear(8, 8).to(DEVICE), "zero3")
    found["seconds of the first shard"] = f"{time.perf_counter() - began:.2f}"
    found["MB before it, of the process's context and the default group"] = f"{before:.0f}"
    found["MB of the group for reductions and of connections"] = f"{used() - before:.0f}"
    mesh, size = handle.engine.collectives.mesh, dist.get_world_size()
    full = torch.zeros(num_bytes // 2 // size * size, dtype=torch.bfloat16, device=DEVICE)
    own = full.view(size, -1)[rank]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    moves: dict[str, Callable[[], object]] = {
        "GB/s of gathers": lambda: gather(full, own, group=mesh.shard.group),
        "GB/s of reductions": lambda: reduce(own, full, group=mesh.reduce.group),
    }
    for name, move in moves.items():
        move()
        seconds = _seconds(move, is_gpu)
        found[name] = f"{full.nbytes * (size - 1) / size / seconds / 1e9:.1f}"
    numbers = torch.zeros(512, dtype=torch.int64, device=DEVICE)
    found["us of a control exchange"] = f"{1e6 * _seconds(lambda: dist.all_reduce(numbers), is_gpu):.0f}"
    found["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
    return found


def _seconds(move: Callable[[], object], is_gpu: bool, times: int = 10) -> float:
    dist.barrier()
    if is_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        move()
    if is_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times
