"""`run_ranks`, which starts the ranks of a test, and `init`, which joins the ranks of a training run."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.kit import Job, same_bits, train, train_reference
from tests.patience import wait_until
from zeroshard import testing
from zeroshard.checkpoint import files
from zeroshard.comm import joining
from zeroshard.testing import RankError, run_ranks


def test_results_come_back_in_rank_order_and_ranks_can_talk() -> None:
    def run(rank: int, offset: int) -> tuple[int, int, float]:
        total = torch.tensor(float(rank + offset))
        dist.all_reduce(total)
        time.sleep(0.02 * (2 - rank))
        return rank, dist.get_world_size(), total.item()

    assert run_ranks(run, 3, 10) == [(0, 3, 33.0), (1, 3, 33.0), (2, 3, 33.0)]


@pytest.mark.by_cpu
def test_tensors_come_back_as_they_were() -> None:
    def make() -> list[torch.Tensor]:
        x = torch.arange(6.0).reshape(2, 3) / 7
        others = [x.to(dtype) for dtype in (torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.complex64)]
        others += [torch.tensor([1 + 2j]).conj().imag, torch._neg_view(x)]  # their memory has the other sign
        return [x, *others, x.t(), x[:, 1], x[0, 0], x[:0], x.clone().requires_grad_(), torch.nn.Parameter(x)]

    (found,) = run_ranks(lambda rank: [*make(), *[torch.ones(2)] * 2], 1)
    assert found[-1] is found[-2]
    for tensor, expected in zip(found[:-2], make(), strict=True):
        assert type(tensor) is type(expected) and tensor.dtype == expected.dtype
        assert tensor.requires_grad == expected.requires_grad and tensor.stride() == expected.stride()
        assert torch.equal(tensor, expected)
    found[0].mul_(2)  # the receiver's own memory


def test_arguments_in_another_order_are_refused() -> None:
    wrong: Any
    for wrong, message in (
        ((2, len), r"as in run_ranks\(fn, 2, 'zero3'\); found a int and a builtin_function_or_method"),
        ((len, "zero3", 2), "found a builtin_function_or_method and a str"),
        ((len, 0), "expected at least one rank, found 0"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            run_ranks(*wrong)


def test_the_first_rank_that_raises_is_reported_with_its_traceback() -> None:
    def run(rank: int) -> None:
        if rank == 1:
            raise KeyError("the reason")
        dist.barrier()

    with pytest.raises(RankError, match=r"(?s)rank 1 raised:.*in run.*KeyError: 'the reason'") as caught:
        run_ranks(run, 3, timeout=1e6, collective_timeout=1e6)  # nobody waits for that
    assert caught.value.rank == 1


def test_other_errors_of_other_ranks_are_in_the_message() -> None:
    """Of several, only the first was shown: often one that another rank has caused."""

    def fails_otherwise(what: str) -> None:
        raise KeyError(what)

    def run(rank: int) -> None:
        dist.barrier()
        if rank == 0:
            raise ValueError("one")
        fails_otherwise("another")

    with pytest.raises(RankError) as caught:
        run_ranks(run, 3)
    _, *parts = re.split(r"rank ([0-9, ]+) raised:\n", str(caught.value))
    found = {text.strip().splitlines()[-1]: ranks for ranks, text in zip(parts[::2], parts[1::2], strict=True)}
    assert sorted(found) == ["KeyError: 'another'", "ValueError: one"]
    assert found["ValueError: one"] == "0"
    assert found["KeyError: 'another'"] in (("1", "2") if caught.value.rank else ("1, 2", "2, 1"))
    assert str(caught.value).count("in fails_otherwise") == 1


def test_an_error_may_name_any_file() -> None:
    """The name of a file may be no Unicode. The rank was said to have ended without an error."""

    def run(rank: int) -> None:
        raise ValueError(os.fsdecode(b"no file \xff"))

    with pytest.raises(RankError, match=r"ValueError: no file \\udcff"):
        run_ranks(run, 1)


def test_a_rank_that_is_killed_is_reported() -> None:
    def run(rank: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        if rank == 2:
            store.wait(["0", "1"])  # which then wait for nothing, so that no other rank has an error to report
            os.kill(os.getpid(), signal.SIGKILL)
        store.set(str(rank), "")

    with pytest.raises(RankError, match=r"rank 2 raised:\nkilled by signal 9") as caught:
        run_ranks(run, 3)
    assert caught.value.rank == 2


def test_ranks_that_hang_are_named_and_ended() -> None:
    def run(rank: int) -> int:
        if rank == 1:
            signal.pause()
        return rank

    with pytest.raises((TimeoutError, RankError), match="1"):
        run_ranks(run, 2, timeout=1.0)


def test_ranks_that_do_not_end_after_a_failure_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = tmp_path / "sleeps"

    def run(rank: int) -> None:
        if rank == 0:
            wait_until(sleeps.exists)
        assert rank == 1, "first"
        sleeps.touch()
        signal.pause()

    monkeypatch.setattr(testing, "_OTHERS_SECONDS", 0.1)
    with pytest.raises(RankError, match=r"(?s)rank 0 raised.*first.*rank 1 has been killed here"):
        run_ranks(run, 2)


def test_no_rank_outlives_a_call_that_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time limit of a test, say: the ranks went on for ever."""

    def run(rank: int) -> None:
        (tmp_path / str(os.getpid())).touch()
        signal.pause()

    def interrupted(*arguments: object) -> None:
        wait_until(lambda: len(os.listdir(tmp_path)) == 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(testing, "_wait_for_one", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(run, 2)
    for pid in map(int, os.listdir(tmp_path)):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_ends_when_its_save_in_the_background_is_done(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        sync = files.sync
        files.sync = lambda file: (time.sleep(0.05), sync(file))[1]
        zeroshard.save(tmp_path, zeroshard.shard(torch.nn.Linear(3, 3), "ddp"), step=1, background=True)

    run_ranks(run, 2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-1"]


@pytest.mark.by_cpu
def test_init_without_a_launcher_is_a_world_of_one() -> None:
    def run(rank: int) -> bool:
        dist.destroy_process_group()
        assert zeroshard.init(timeout=10) == torch.device("cpu")
        assert zeroshard.init() == torch.device("cpu")  # a second time does nothing else
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        alone = train(Job(), zeroshard.ZERO3, 0)
        return same_bits(alone.weights, train_reference(Job(), 1)[0].weights)

    assert run_ranks(run, 1) == [True]


@pytest.mark.by_cpu
def test_init_returns_the_device_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's five lines are the same with GPUs: `model.to(zeroshard.init())`. (The GPUs here are simulated.)"""

    def run(rank: int) -> list[Any]:
        chosen: list[int] = []
        join = dist.init_process_group
        monkeypatch.setenv("LOCAL_RANK", "3")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(joining, "accelerator", lambda: ("cuda", "nccl"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])

        def join_fake(name: str, **options: Any) -> None:
            for of_nccl in ("device_id", "pg_options"):
                options.pop(of_nccl, None)
            join(name.replace("nccl", "fake"), **options)

        monkeypatch.setattr(dist, "init_process_group", join_fake)
        found: list[Any] = []
        for backend in ("gloo", None):
            dist.destroy_process_group()
            found += [zeroshard.init(backend), zeroshard.init()]
        model = torch.nn.Linear(3, 2)  # stays on the CPU, and trains there all the same
        handle = zeroshard.shard(model, "zero3")
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        assert optimizer.step().applied
        return [*map(str, found), chosen]

    assert run_ranks(run, 1) == [["cpu", "cpu", "cuda:3", "cuda:3", [3]]]


def test_ranks_that_have_to_be_killed_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else tells what they wait for."""
    (come, here), wait_for = os.pipe(), testing._wait_for

    def waits_here(rank: int) -> None:
        os.write(here, b".")
        signal.pause()

    def wait_until_they_are_there(pids: dict[int, int], folder: Path, deadline: float) -> None:
        found = b""
        while len(found) < 2:
            found += os.read(come, 2)
        wait_for(pids, folder, time.monotonic())

    monkeypatch.setattr(testing, "_wait_for", wait_until_they_are_there)
    with pytest.raises(TimeoutError, match=r"(?s)rank 0 has been killed here:.*in waits_here.*rank 1 .*in waits_here"):
        run_ranks(waits_here, 2)
    os.close(come), os.close(here)


def test_a_rank_that_ends_without_a_result_is_named() -> None:
    """It was told by the name of a missing file."""

    def ends(rank: int) -> None:
        if rank == 1:
            os._exit(0)

    with pytest.raises(RankError, match="ended with status 0, without a result or an error") as found:
        run_ranks(ends, 2)
    assert found.value.rank == 1
