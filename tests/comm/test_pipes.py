"""Small messages between the ranks of one host go through pipes, as gloo's do: in order of their receives, each channel
by itself; and whoever waits for a rank that has ended, or for nothing, is told so."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroshard
from tests.kit import (
    NUM_RANKS,
    Block,
    Job,
    Net,
    Outcome,
    State,
    logs,
    loss_of_tokens,
    make,
    same_bits,
    train,
    train_reference,
)
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.messages import Messages
from zeroshard.comm.pending import Pending
from zeroshard.placement import Plan
from zeroshard.ranks.pipes import MOST_BYTES, Pipes, Receive, Reentered, _Peer
from zeroshard.ranks.trial import connected
from zeroshard.testing import expect_same_logs, run_ranks

A, B = 7, 2**64 - 1
"""Channels."""


def number(value: int, numel: int = 1) -> Tensor:
    return torch.full((numel,), value, dtype=torch.int64)


def ends_of(num_ranks: int = 2, timeout: float = 60.0) -> list[Pipes]:
    """All in this process."""
    ranks = range(num_ranks)
    made = [Pipes(rank, ranks, timeout) for rank in ranks]
    cards = [pipes.card(ranks) for pipes in made]
    for rank, pipes in enumerate(made):
        pipes.connect({other: (os.getpid(), cards[other][rank]) for other in ranks if other != rank})
    for pipes in made:
        pipes.start()
    return made


def receive(pipes: Pipes, rank: int, channel: int, numel: int = 1) -> tuple[Receive, Tensor]:
    into = number(-1, numel)
    return pipes.receive(rank, channel, into), into


def test_a_message_is_for_the_receive_that_was_posted_first_whichever_is_waited_for_first() -> None:
    first, second, third = ends_of(3)
    before = [receive(first, 1, A), receive(first, 1, B), receive(first, 1, A)]
    for value, channel in ((1, A), (2, A), (3, A), (4, B)):
        second.send(0, channel, number(value))
    third.send(0, A, number(5))
    after, of_third = receive(first, 1, A), receive(first, 2, A)
    for work, _ in (after, before[2], of_third, before[0], before[1]):
        work.wait()
    assert [into.item() for _, into in (*before, after, of_third)] == [1, 4, 2, 3, 5]


def test_ranks_that_all_write_before_they_read_take_in_what_comes() -> None:
    """Each pipe holds 64 KiB: here 4 MB go both ways, and neither rank has asked for anything."""

    def exchange(rank: int) -> list[int]:
        for message in range(256):
            ends[rank].send(1 - rank, A, number(1000 * rank + message, MOST_BYTES // 8))
        works = [receive(ends[rank], 1 - rank, A, MOST_BYTES // 8) for _ in range(256)]
        for work, _ in works:
            work.wait()
        return [int(into[0]) for _, into in works if int(into.sum()) == int(into[0]) * into.numel()]

    ends = ends_of()
    found = in_threads(exchange)
    assert found == {0: list(range(1000, 1256)), 1: list(range(256))}


def test_a_rank_whose_pipe_is_full_gives_up_when_nobody_reads() -> None:
    """The negative control of the test above: the pipes are full indeed."""
    ends = ends_of(timeout=0.2)

    def send_many() -> None:
        for _ in range(256):
            ends[0].send(1, A, number(0, MOST_BYTES // 8))

    with pytest.raises(RuntimeError, match="timed out waiting for rank 1"):
        send_many()


def test_two_threads_of_a_rank_may_wait_at_once() -> None:
    """What one of them reads may be what the other one waits for, and be needed for its own to come."""
    first, second = ends_of()

    def ask(rank: int) -> list[int]:
        if rank == 0:
            work, into = receive(first, 1, A)
            both_wait.wait()
            work.wait()
            first.send(1, A, into + 1)
            return [into.item()]
        work, into = receive(first, 1, B)
        both_wait.wait()
        work.wait()
        return [into.item()]

    def answer() -> None:
        both_wait.wait()
        second.send(0, A, number(1))
        work, into = receive(second, 0, A)
        work.wait()
        second.send(0, B, into + 1)

    both_wait = threading.Barrier(3)
    other = threading.Thread(target=answer)
    other.start()
    assert in_threads(ask) == {0: [1], 1: [3]}
    other.join()


def test_messages_of_two_threads_do_not_mix_where_a_pipe_is_full() -> None:
    """Of a message that is longer than the room left, a pipe takes a part."""
    first, second = ends_of()
    numel = MOST_BYTES // 8 - 1  # so that 64 KiB are not a whole number of messages

    def send(channel: int) -> list[int]:
        for value in range(50):
            first.send(1, channel, number(value, numel))
        return []

    found: dict[int, list[int]] = {}

    def take(channel: int) -> None:
        works = [receive(second, 0, channel, numel) for _ in range(50)]
        for work, _ in works:
            work.wait()
        found[channel] = [int(into[0]) for _, into in works if int(into.sum()) == int(into[0]) * numel]

    readers = [threading.Thread(target=take, args=(channel,)) for channel in range(2)]
    for reader in readers:
        reader.start()
    in_threads(send)
    for reader in readers:
        reader.join()
    assert found == {0: list(range(50)), 1: list(range(50))}


def test_a_wait_may_begin_just_before_the_same_thread_polls() -> None:
    """As when garbage collection drops a communication there. It must not wait for "the thread that polls"."""
    first, second = ends_of(timeout=5.0)
    inner, outer = receive(first, 1, B), receive(first, 1, A)
    poll = first._poller.poll
    begins = [True]

    class Poller:
        register, unregister = first._poller.register, first._poller.unregister

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            if begins.pop() if begins else False:
                second.send(0, B, number(1))
                inner[0].wait()
                second.send(0, A, number(2))
            return poll(milliseconds)

    first._poller = Poller()  # type: ignore[assignment]
    outer[0].wait()
    assert (inner[1].item(), outer[1].item()) == (1, 2)


def test_a_wait_inside_of_a_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when garbage collection drops a communication there: messages that it reads would overtake the one that has
    just been read, in the same channel."""
    first, second = ends_of(timeout=5.0)
    works = [receive(first, 1, channel) for channel in (A, A, B)]
    match, begins = _Peer._match, [True]

    def interrupted(self: Any, key: int, one: Any, other_type: Any) -> Any:
        if begins.pop() if begins else False:
            second.send(0, A, number(2))
            second.send(0, B, number(3))
            with pytest.raises(Reentered, match="a wait began while the same thread"):
                works[2][0].wait()
        return match(self, key, one, other_type)

    second.send(0, A, number(1))
    monkeypatch.setattr(_Peer, "_match", interrupted)
    for work, _ in works:
        work.wait()
    assert [int(into) for _, into in works] == [1, 2, 3]


def in_threads(work: Callable[[int], list[int]]) -> dict[int, list[int]]:
    found = {}

    def run(rank: int) -> None:
        found[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_what_a_rank_has_sent_arrives_after_its_end_and_then_its_end_is_known() -> None:
    first, second, third = ends_of(3)
    second.send(0, A, number(1))
    second.interrupt("it leaves")
    work, into = receive(first, 1, A)
    work.wait()
    assert into.item() == 1
    with pytest.raises(RuntimeError, match="connection closed by rank 1"):
        receive(first, 1, A)[0].wait()
    third.send(0, A, number(2))  # the other ranks are still there
    work, into = receive(first, 2, A)
    work.wait()
    assert into.item() == 2


def test_a_wait_that_lasts_too_long_ends_for_both() -> None:
    first, second = ends_of(timeout=0.1)
    with pytest.raises(RuntimeError, match="timed out waiting for rank 1"):
        receive(first, 1, A)[0].wait()
    with pytest.raises(RuntimeError, match="connection to rank 1 closed: timed out"):
        first.send(1, A, number(0))
    with pytest.raises(RuntimeError, match="connection closed by rank 0"):
        receive(second, 0, A)[0].wait()


def test_a_wait_ends_when_another_thread_says_so() -> None:
    first, _ = ends_of()
    polls = threading.Event()
    poll = first._poller.poll

    class Poller:
        register, unregister = first._poller.register, first._poller.unregister

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            polls.set()
            return poll(milliseconds)

    first._poller = Poller()  # type: ignore[assignment]
    other = threading.Thread(target=lambda: (polls.wait(), first.interrupt("a rank has failed")))
    other.start()
    with pytest.raises(RuntimeError, match="closed: a rank has failed"):
        receive(first, 1, A)[0].wait()
    other.join()


def test_an_interrupt_does_not_wait_for_a_finalizer_that_waits() -> None:
    """The watch waited for the lock, and did not end the process of a failed job."""
    first, _ = ends_of()
    waits, over = threading.Event(), threading.Event()

    def finalizer() -> None:
        waits.set()
        over.wait()

    def receives() -> None:
        with first._locked:  # a garbage collection may run here
            finalizer()

    threads = [threading.Thread(target=work, daemon=True) for work in (receives, lambda: first.interrupt("it ends"))]
    try:
        threads[0].start()
        waits.wait()
        threads[1].start()
        threads[1].join(60)
        assert not threads[1].is_alive()
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_message_of_another_size_is_refused() -> None:
    first, second = ends_of()
    second.send(0, A, number(1, 3))
    with pytest.raises(RuntimeError, match="rank 1 sent 24 bytes where 8 were expected"):
        receive(first, 1, A)[0].wait()


def test_a_forked_copy_takes_nothing_from_its_parent() -> None:
    first, second = ends_of()
    work, into = receive(first, 1, A)
    second.send(0, A, number(1))

    def use(pipes: Pipes) -> None:
        pipes.interrupt("a copy ends")
        for call in (work.wait, lambda: pipes.receive(0, A, number(0)), lambda: pipes.send(0, A, number(2))):
            with pytest.raises(zeroshard.errors.InvalidState, match="forked from a rank, and cannot exchange data"):
                call()

    assert in_a_copy(lambda: use(second)) == 0
    work.wait()
    assert into.item() == 1
    second.send(0, A, number(3))
    work, into = receive(first, 1, A)
    work.wait()
    assert into.item() == 3


def in_a_copy(use: Callable[[], Any]) -> int:
    """The exit status of a forked copy of this process: 0 if it raises nothing."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            use()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_end_of_a_rank_is_seen_while_a_forked_copy_of_it_still_runs() -> None:
    """A DataLoader's worker is a copy of its rank."""
    first, second = ends_of()
    held, release = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(release)
        os.read(held, 1)
        os._exit(0)
    os.close(held)
    second.interrupt("it ends")
    with pytest.raises(RuntimeError, match="connection closed by rank 1"):
        receive(first, 1, A)[0].wait()
    os.close(release)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("by_python", [True, False])
def test_a_peer_that_has_ended_is_an_error_also_where_the_default_of_sigpipe_is_restored(by_python: bool) -> None:
    """The default ends the process, without a message. Scripts whose output is piped to `head` restore it, and so does
    `subprocess` before `preexec_fn`: then Python does not know."""

    def send() -> None:
        first, second = ends_of()
        if by_python:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        else:
            ctypes.CDLL(None).signal(signal.SIGPIPE, 0)
        known = signal.getsignal(signal.SIGPIPE)
        for file in [*first._files]:
            first._release(file)
        with pytest.raises(RuntimeError, match=r"connection to rank 0 closed: .*Broken pipe"):
            second.send(0, A, number(1))
        assert not signal.sigpending() and signal.getsignal(signal.SIGPIPE) is known
        assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, [])

    assert in_a_copy(send) == 0  # in a process of its own, which the signal would end


def test_a_message_that_came_while_this_process_was_stopped_is_read() -> None:
    first, second = ends_of(timeout=0.0)  # the time is over as soon as the wait begins
    second.send(0, A, number(1))
    work, into = receive(first, 1, A)
    work.wait()
    assert into.item() == 1
    with pytest.raises(RuntimeError, match="timed out waiting for rank 1"):
        receive(first, 1, A)[0].wait()


def test_a_channel_takes_no_memory_once_it_is_empty() -> None:
    """Each handle has channels of its own."""
    first, second = ends_of()
    for channel in range(100):
        work, _ = receive(first, 1, channel)
        second.send(0, channel, number(1))
        second.send(0, channel, number(2))
        work.wait()
        receive(first, 1, channel)[0].wait()
    assert first._peers[1].channels == {}


def test_another_file_is_not_taken_for_a_pipe_of_a_peer() -> None:
    """Numbers of processes and of files are given again."""
    ranks = range(2)
    first, second = (Pipes(rank, ranks, 60.0) for rank in ranks)
    end, inode = first.card(ranks)[1]
    with pytest.raises(OSError, match=rf"expected pipe:\[{inode + 1}\] of a peer"):
        second.connect({0: (os.getpid(), [end, inode + 1])})


def test_all_files_are_closed_with_the_pipes() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    made = ends_of(3)
    assert count() > before
    del made
    assert count() == before


def test_the_end_of_a_program_does_not_close_them_before_its_last_messages() -> None:
    """Rank 1 had ended its program, rank 0 was slower, and its last confirmation failed: connection closed."""
    first, second = ends_of()
    at_exit = [one for one in weakref.finalize._registry if one.atexit]  # type: ignore[attr-defined]
    for finalizer in at_exit:
        found = finalizer.peek()
        if found is not None and found[1].__module__ == Pipes.__module__:
            finalizer()
    second.send(0, A, number(1))
    work, into = receive(first, 1, A)
    work.wait()
    assert into.item() == 1


# In training ----------------------------------------------------------------------------------------------------------


@contextmanager
def counted_by_gloo() -> Iterator[list[int]]:
    """Bytes of each message that an engine hands to gloo."""
    found: list[int] = []
    send = Messages.send

    def counted(self: Messages, axis: Any, tensor: Tensor, rank: int, kind: str) -> Any:
        if self._pipes_for(tensor) is None:
            found.append(tensor.nbytes)
        return send(self, axis, tensor, rank, kind)

    Messages.send = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Messages.send = send  # type: ignore[method-assign]


def no_pipes_on_the_last_rank(rank: int, num_ranks: int) -> None:
    """There are no numbers left for its files."""
    if rank == num_ranks - 1:
        make = Pipes.__init__

        def without_numbers(self: Pipes, *arguments: Any) -> None:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                make(self, *arguments)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)

        Pipes.__init__ = without_numbers  # type: ignore[method-assign]


@pytest.mark.by_gloo
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_training_in_shared_memory_hands_nothing_to_gloo_and_is_the_same_with_and_without_pipes(num_ranks: int) -> None:
    job = Job(steps=2)

    def two(rank: int) -> tuple[list[Outcome], bool, list[int]]:
        """The second shares the pipes of the first, which has made them."""
        first = train(job, zeroshard.ZERO3, rank)
        with counted_by_gloo() as by_gloo:
            second = train(job, zeroshard.ZERO1, rank)
        return [first, second], connected(torch.distributed.group.WORLD) is not None, by_gloo

    def two_without(rank: int) -> tuple[list[Outcome], bool, list[int]]:
        no_pipes_on_the_last_rank(rank, num_ranks)
        return two(rank)

    truth = run_ranks(lambda rank: train_reference(job, num_ranks), 1)[0]
    for run, has_pipes in ((two, True), (two_without, False)):
        by_rank = run_ranks(run, num_ranks)
        for (outcomes, found, by_gloo), expected in zip(by_rank, truth, strict=True):
            for outcome in outcomes:
                assert outcome.losses == expected.losses and same_bits(outcome.weights, expected.weights)
            assert (found, not by_gloo) == (has_pipes, has_pipes)  # without pipes gloo has them all
        for plan in range(2):
            expect_same_logs(logs([outcomes[plan] for outcomes, *_ in by_rank]))


@pytest.mark.by_gloo
@pytest.mark.parametrize("plan", [zeroshard.ZERO1, zeroshard.ZERO2])
def test_a_rank_may_end_right_after_its_last_step_while_a_slower_one_still_reads(plan: Plan) -> None:
    """The slower one failed in its last step: it could not confirm to the other that it had read its weights."""

    def check(rank: int) -> State:
        store = torch.distributed.distributed_c10d._get_default_store()
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
        acknowledge = Collectives.acknowledge

        def late(self: Collectives) -> Pending:
            if rank == 0 and step == 2:
                store.wait(["the other one has ended"])
            return acknowledge(self)

        Collectives.acknowledge = late  # type: ignore[method-assign]
        for step in range(3):
            loss_of_tokens(model, rank, 0, step).backward()
            optimizer.step()
        if rank == 1:
            pipes = connected(torch.distributed.group.WORLD)
            assert pipes is not None
            for file in [*pipes._files]:  # as the system does at the end of a process
                pipes._release(file)
            store.set("the other one has ended", "")
            return {}
        return {name: value.clone() for name, value in model.state_dict().items()}

    truth = run_ranks(lambda rank: train_reference(Job(steps=3), 2), 1)[0]
    assert same_bits(run_ranks(check, 2)[0], truth[0].weights)
