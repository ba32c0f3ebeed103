"""The costs of the control paths at 1,024 and 16,384 ranks: calls of the store, bytes, and seconds by the model below.

    python benchmarks/control_plane.py                    # a minute; no process group, no GPU
    python benchmarks/control_plane.py --clients 256      # and the same calls against a real TCPStore

This process runs zeroshard's own code (`come`, `find_neighbours`, a beat, a failure, the meeting of a save) for every
rank in turn, on a store that counts its calls. The column "before" is what each of these did until 2026-11-22, counted
in the same way, or by formula where the number is quadratic. The model:

- the store answers `CALLS_PER_SECOND` (measured with --clients) and sends `STORE_BYTES_PER_SECOND`;
- a message between two hosts takes `HOP` seconds, inside of one host `NEAR`; a ring has as many hops as ranks; a tree
  has twice the depth of the tree of hosts, and the hops inside of each host; a network interface moves
  `BYTES_PER_SECOND`;
- the time that a rank needs to process the received data is measured here, not modelled.
"""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from zeroshard.checkpoint import meeting
from zeroshard.comm.alike import as_terms
from zeroshard.comm.packets import ROOM_BYTES, packet_sizes
from zeroshard.failures import heartbeat
from zeroshard.failures.heartbeat import BEAT_SECONDS, Heartbeats
from zeroshard.failures.notices import Beat, Cause, Notices
from zeroshard.failures.peers import Peers
from zeroshard.failures.positions import Position, Wait, in_short, knot
from zeroshard.failures.processes import Who
from zeroshard.layout import exact
from zeroshard.ranks.names import Answers, ask_for_name
from zeroshard.step import control

CALLS_PER_SECOND = 30_000
STORE_BYTES_PER_SECOND = 1e9
HOP, NEAR = 5e-6, 2e-6
BYTES_PER_SECOND = 50e9
RANKS_PER_HOST = 8
TIMEOUT = 120.0
"""Seconds: zeroshard's default timeout of collectives."""
GROUPS, FLAGS = 2, 291
"""The numbers of param groups and of parameters of Llama-3.1-8B."""
MODULES, PARTS_OF_MODEL = 32 * 13 + 7, 32 + 2
"""Modules of Llama-3.1-8B; and the parts in which it is materialized: its blocks, and what comes before and after."""
PARTS = 8
"""Number of digests in each rank's report of a save."""


class Counting:
    """A store in a dictionary that counts calls and bytes. A wait for a missing key raises an error."""

    def __init__(self) -> None:
        self.calls, self.num_bytes = 0, 0
        self.by_name: Counter[str] = Counter()
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def _count(self, name: str, *texts: str | bytes) -> None:
        self.calls += 1
        self.num_bytes += sum(map(len, texts))
        self.by_name[name] += 1

    def set(self, key: str, value: str | bytes) -> None:
        self._count("set", key, value)
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        self._count("get", key, self._values[key])
        return self._values[key]

    def add(self, key: str, by: int) -> int:
        with self._lock:
            self._count("add", key)
            total = int(self._values.get(key, b"0")) + by
            self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        self._count("check", *keys)
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count("compare_set", key)
        found = self._values.get(key, b"")
        if found == expected.encode():
            found = self._values[key] = desired.encode()
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count("multi_get", *keys, *(self._values[key] for key in keys))
        return [self._values[key] for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._count("multi_set", *keys, *values)
        self._values |= {key: value.encode() for key, value in zip(keys, values, strict=True)}

    def delete_key(self, key: str) -> bool:
        self._count("delete", key)
        return self._values.pop(key, None) is not None


class Cost:
    """What one path costs at one number of ranks: a row of the tables."""

    def __init__(self, calls: float = 0, num_bytes: float = 0, seconds: float | None = None) -> None:
        self.calls, self.num_bytes = calls, num_bytes
        served = calls / CALLS_PER_SECOND + num_bytes / STORE_BYTES_PER_SECOND
        self.seconds = served if seconds is None else seconds

    @classmethod
    def of(cls, store: Counting) -> Cost:
        return cls(store.calls, store.num_bytes)

    def __str__(self) -> str:
        return f"{_short(self.calls):>8} calls {_short(self.num_bytes):>8}B {_seconds(self.seconds):>9}"


def _short(number: float) -> str:
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.3g} "


def _seconds(value: float) -> str:
    if value >= 3600:
        return f"{value / 3600:.1f} h"
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def _timed(work: Callable[[], object], times: int = 5) -> float:
    """The minimum of `times` runs, to exclude what else the machine does."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


# Start ----------------------------------------------------------------------------------------------------------------


def who(rank: int) -> Who:
    host = rank // RANKS_PER_HOST
    return Who(f"boot {host}", 1000 + rank % RANKS_PER_HOST, 1, f"node{host}")


def start(ranks: int) -> tuple[Cost, Cost]:
    """Start of the watch: each rank finds the ranks on its own host."""
    store: Any = Counting()
    notices = [Notices(rank, ranks) for rank in range(ranks)]
    for rank in range(ranks):
        notices[rank].come(store, who(rank))
    for rank in range(ranks):
        peers = Peers(rank, ranks, notices[rank])
        peers.me = who(rank)
        peers.find_neighbours(store)
    one = len(json.dumps(who(0))) + 20
    return Cost(2 * ranks + 2 * ranks * (ranks - 1), 2 * ranks * ranks * one), Cost.of(store)


def devices(ranks: int) -> tuple[Cost, Cost]:
    """`backends.expect_usable`, which runs where the backend is not gloo: which device does each rank use? Before: each
    rank read what all others had written. Now rank 0 reads it, in one call, and all read rank 0's result. By
    formula."""
    text = 60
    before = 2 * ranks + ranks * ranks
    return Cost(before, before * text), Cost(3 * ranks + 2, (3 * ranks + ranks) * text)


# In a run -------------------------------------------------------------------------------------------------------------


def in_a_run(ranks: int) -> tuple[Cost, Cost]:
    """Cost per second. Before: each rank wrote a beat and looked for a failure twice a second. The ranks of one host
    run here, on a clock of their own; a speaker needs nothing from other hosts."""
    store: Any = Counting()
    Notices(0, ranks).beat(store, beat := Beat(7, "at train.py:31 in main", None))
    before = 2 * ranks / BEAT_SECONDS
    beat_bytes = store.num_bytes
    hearts = [Heartbeats(rank, Notices(rank, ranks), TIMEOUT) for rank in range(RANKS_PER_HOST)]
    host = {rank: Who.this(heart.card) for rank, heart in enumerate(hearts)}
    warm_up, rounds = 100, 1200
    clock, own_clock = heartbeat.time, SimpleNamespace(monotonic=lambda: number * BEAT_SECONDS)
    heartbeat.time = own_clock  # type: ignore[assignment]
    for number in range(warm_up + rounds):
        if number == warm_up:
            store.calls = store.num_bytes = 0
        for rank, heart in enumerate(hearts):
            others = {other: who for other, who in host.items() if other != rank}
            heart.round(store, beat._replace(number=number), others)
    heartbeat.time = clock
    share = ranks / RANKS_PER_HOST / (rounds * BEAT_SECONDS)
    return Cost(before, before * beat_bytes), Cost(store.calls * share, store.num_bytes * share)


def failure(ranks: int) -> tuple[Cost, Cost]:
    """One rank fails, and all others learn of it. (Before: within half a second, as all ranks polled.)"""
    store: Any = Counting()
    first = Notices(0, ranks)
    cause = Cause(0, "failed: ValueError: no such file: data/7")
    first.claim(store, cause)
    first.announce(store, cause)
    for rank in range(ranks):
        notices = Notices(rank, ranks)
        store.delete_key(notices.bell)
        notices.failure(store)
    before = 2 + 2 * ranks
    return Cost(before, before * 60), Cost.of(store)


def blame(ranks: int) -> tuple[Cost, Cost]:
    """A collective times out on all ranks but one: which one is missing? Before: each rank looked at all others, five
    times."""
    store: Any = Counting()
    for rank in range(ranks):
        Notices(rank, ranks).come(store, who(rank))
    store.calls = store.num_bytes = 0
    wait = Wait(f"all_gather 1 of {in_short(tuple(range(ranks)))}", 41, tuple(range(ranks)), "all_gather of unit a")
    for rank in range(ranks):
        notices = Notices(rank, ranks)
        if notices.may_look(store):
            notices.call(store, range(1, ranks))
            looker = Peers(rank, ranks, notices)
        else:
            store.delete_key(notices.bell)
        for number in range(4):
            notices.beat(store, Beat(number, "at train.py:31 in main", Position(wait, {wait.key: 42})))
    for _ in range(4):
        looker.look(store)
    before = ranks * 5 * 2 * ranks
    return Cost(before, before / 2 * 150), Cost.of(store)


def deadlock(ranks: int) -> tuple[Cost, Cost]:
    """Half of the ranks wait in one collective, half in another one: the cost of each look for the deadlock. Before:
    every rank looked twice a second at positions that listed all ranks by number."""
    everyone = tuple(range(ranks))
    waits = [Wait(f"{kind} 1 of {in_short(everyone)}", 3, everyone, kind) for kind in ("gather", "reduce")]
    store: Any = Counting()
    positions = {}
    for rank in range(ranks):
        notices = Notices(rank, ranks)
        notices.come(store, who(rank))
        own, other = waits[rank % 2], waits[1 - rank % 2]
        positions[rank] = Position(own, {own.key: 4, other.key: 3})
        notices.beat(store, Beat(9, "at train.py:31 in main", positions[rank]))
    peers = Peers(0, ranks, Notices(0, ranks))
    peers.look(store)  # the first look also reads who the ranks are
    store.calls = store.num_bytes = 0
    peers.look(store)
    look = Cost.of(store)
    look.seconds += _timed(lambda: knot(positions, {}), 1)
    listed = 3 * len("-".join(map(str, everyone))) + len(str(list(everyone)))
    calls = ranks * 2 * ranks
    return Cost(calls, calls / 2 * listed), look


# A step ---------------------------------------------------------------------------------------------------------------


def ring(ranks: int) -> float:
    hosts = max(1, ranks // RANKS_PER_HOST)
    return hosts * HOP + (ranks - hosts) * NEAR


def tree(ranks: int) -> float:
    hosts = max(1, ranks // RANKS_PER_HOST)
    return 2 * (math.ceil(math.log2(hosts)) * HOP + (RANKS_PER_HOST - 1) * NEAR) if ranks > 1 else 0.0


def control_exchange(ranks: int) -> tuple[Cost, Cost]:
    """Bytes that a rank receives; seconds of transfer and of unpacking. Before: each rank received the rows of all
    ranks."""
    numbers = 6 + GROUPS + -(-FLAGS // 48)
    row = 320 if 8 * numbers <= 208 else 320 + 8 * numbers - 208
    rows = torch.zeros(ranks, numbers, dtype=torch.float64)

    def unpack_before() -> None:
        [int(status) for [status] in rows[:, :1].tolist()]
        for field in rows[:, :5].unbind(1):
            bool((field == field[0]).all())
        set(rows[:, 3].tolist())
        for column in rows[:, 6 : 6 + GROUPS].t().tolist():
            sum(column) if all(map(math.isfinite, column)) else math.nan
        set(map(tuple, rows[:, 6 + GROUPS :].tolist()))

    count = control.row_numbers(GROUPS, FLAGS, ranks)
    sums = torch.zeros(count, dtype=torch.int64)
    sums[control.Status.READY] = ranks

    def unpack_now() -> None:
        row = control.Row.read(sums.tolist(), GROUPS)
        width = control.alike.WIDTH
        [control.alike.are_alike(row.digests[at : at + width]) for at in range(0, len(row.digests), width)]
        [exact.rounded(one) for one in [row.norm_terms[i * exact.WIDTH :][: exact.WIDTH] for i in range(GROUPS)]]
        exact.rounded(row.weight)
        control._of_any(row.present, FLAGS, ranks)

    sent = sum(packet_sizes(count))
    before = ring(ranks) + row * ranks / BYTES_PER_SECOND + _timed(unpack_before)
    now = tree(ranks) * len(packet_sizes(count)) + 2 * sent / BYTES_PER_SECOND + _timed(unpack_now)
    return Cost(0, row * ranks, before), Cost(0, 2 * sent, now)


def rows_of_shards(ranks: int) -> tuple[Cost, Cost]:
    """Finding the rows of the own shard axis. Before: `ranks.index` for each row, at each step. Now there are no
    rows."""
    everyone = tuple(range(ranks))
    return Cost(seconds=_timed(lambda: [everyone.index(rank) for rank in everyone], 1)), Cost(seconds=0.0)


def same_values(ranks: int) -> tuple[Cost, Cost]:
    """`values="check"`, and every other check that a value is the same on all ranks. Before: a digest of each rank in
    two exchanges."""
    before_bytes = 2 * ranks * 320 + ranks * 8
    texts = [json.dumps("f" * 64).encode() for _ in range(ranks)]
    unpack = _timed(lambda: len({json.loads(bytes(list(text))) for text in texts}))
    before = 2 * (ring(ranks) + ranks * 320 / BYTES_PER_SECOND) + unpack
    sent = sum(packet_sizes(len(as_terms(torch.tensor([1]))[0])))
    return Cost(0, before_bytes, before), Cost(0, 2 * sent, tree(ranks) + 2 * sent / BYTES_PER_SECOND)


def objects(ranks: int, text: str = json.dumps("f" * 198)) -> tuple[Cost, Cost]:
    """`exchange_objects`: all ranks get the rows of all, here of 200 bytes. It grows with the number of ranks, so it is
    used where they differ, or once in a run. Before: the sizes, then the rows, each behind a head. Now a sum shows that
    all ranks are in this exchange, and sizes and rows come together."""
    rows = torch.frombuffer(bytearray(text.encode() * ranks), dtype=torch.uint8).view(ranks, -1)
    unpack = _timed(lambda: [json.loads(bytes(row.tolist())) for row in rows])
    packets, first = ranks * 320, ranks * (8 + ROOM_BYTES)
    rest = ranks * max(0, len(text) - ROOM_BYTES)
    before = 2 * (ring(ranks) + packets / BYTES_PER_SECOND) + unpack
    [sent] = packet_sizes(0)
    num_bytes = 2 * sent + first + rest
    now = tree(ranks) + ring(ranks) * (2 if rest else 1) + num_bytes / BYTES_PER_SECOND + unpack
    return Cost(0, 2 * packets, before), Cost(0, num_bytes, now)


def materialized(ranks: int) -> tuple[Cost, Cost]:
    """`shard(materialize=function)`, without the values, which are broadcast in both cases. Before: a row of each rank
    and a broadcast for each module. Now a sum and a broadcast for each unit."""
    before = objects(ranks, json.dumps([None, None]))[0]
    [sent] = packet_sizes(1)
    down = tree(ranks) / 2  # of a broadcast
    now = tree(ranks) + 2 * sent / BYTES_PER_SECOND + down
    return (
        Cost(0, MODULES * before.num_bytes, MODULES * (before.seconds + down)),
        Cost(0, PARTS_OF_MODEL * 2 * sent, PARTS_OF_MODEL * now),
    )


# A save ---------------------------------------------------------------------------------------------------------------


def watch_of(rank: int, ranks: int, store: Any) -> Any:
    """A stand-in for the watch with what a meeting uses. The calls of a rank whose bell rings are counted in `ring`."""

    def ring(others: Sequence[int]) -> None:
        Notices(rank, ranks).ring(store, others)
        for other in others:
            store.delete_key(Notices(other, ranks).bell)
            Notices(other, ranks).failure(store)
            Notices(other, ranks).calls(store)

    bell = SimpleNamespace(blocks=True, count=0, wait=lambda count, seconds: time.sleep(0.001))
    return SimpleNamespace(bell=bell, ring=ring)


def meetings(ranks: int, store: Any) -> Iterator[meeting.Meeting]:
    for rank in range(ranks):
        one = meeting.Meeting(None, "save")
        one.rank, one.size, one._timeout, one._store = rank, ranks, TIMEOUT, store
        one._mine, one._ranks, one._watch = [f"beat-{rank}"], tuple(range(ranks)), watch_of(rank, ranks, store)
        one._pace = math.inf  # of heartbeats below
        yield one


def save(ranks: int) -> tuple[Cost, Cost]:
    """Reports, verdict, and the removal of keys. Before: rank 0 read each report and asked for all d keys one by
    one."""
    store: Any = Counting()
    everyone = list(meetings(ranks, store))
    part = [{"name": "rank-00000.safetensors"}, ["f" * 32] * PARTS]
    leaders = [one for one in everyone if one.rank % meeting._FOLLOWERS == 0]
    for one in everyone:
        if one not in leaders:
            one.report(part)
    for one in reversed(leaders):
        one.report(part)
    everyone[0].gather()
    announcing = threading.Thread(target=everyone[0].announce, args=("",))
    announcing.start()
    while not store.check(["verdict"]):
        time.sleep(0.001)
    waited = store.by_name["add"]
    for one in everyone[1:]:
        one.verdict()
    announcing.join()
    store.calls -= store.by_name["add"] - waited - ranks  # rank 0 polls here, as it has no real bell
    before = ranks * 2 + ranks * (1 + 2 * 2) + ranks * (1 + 2 + 1) + 3 * ranks * 3  # put, gather, verdict, forget
    text = len(json.dumps({"part": part, "error": ""}))
    return Cost(before, 3 * ranks * text), Cost.of(store)


def waiting_to_save(ranks: int) -> tuple[Cost, Cost]:
    """Cost per second while ranks wait for a slow one. Before: each rank asked 50 times a second whether the key is
    there and whether rank 0 is alive, and wrote its own count twice a second. `seconds` is the store's time per
    second."""
    one = next(meetings(ranks, Counting()))
    slower = max(1.0, ranks / meeting._RANKS_AT_FULL_PACE)
    one._pace = max(BEAT_SECONDS, min(BEAT_SECONDS * slower, TIMEOUT / 4))
    before = ranks * (2 * 50 + 2 / BEAT_SECONDS)
    now = ranks * 3 / one._pace
    return Cost(before, before * 40), Cost(now, now * 40)


PATHS = {
    "start of the watch": start,
    "start: devices of a native backend": devices,
    "the watch in a run, each second": in_a_run,
    "a failure, until all know": failure,
    "a timeout on all ranks: who is it": blame,
    "a deadlock: each look": deadlock,
    "control exchange, each step": control_exchange,
    "ranks.index in it": rows_of_shards,
    "the same on all ranks (values='check', shard)": same_values,
    "exchange_objects, 200 bytes of each rank": objects,
    "materialize, a function": materialized,
    "a save: reports and verdict": save,
    "a save: each second of waiting": waiting_to_save,
}


# A real store ---------------------------------------------------------------------------------------------------------


def against_a_real_store(clients: int) -> None:
    """The same code on a TCPStore; each rank is a thread with its own connection."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    connections = [TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(clients)]
    notices = [Notices(rank, clients) for rank in range(clients)]
    hosts = [Peers(rank, clients, notices[rank]) for rank in range(clients)]

    def store_of(rank: int, name: str) -> Store:
        return PrefixStore(name, connections[rank])

    def come(rank: int) -> None:
        notices[rank].come(store_of(rank, "watch"), who(rank))
        hosts[rank].me = who(rank)

    def hear(rank: int) -> None:
        store = store_of(rank, "watch")
        if rank == 0:
            notices[0].announce(store, Cause(0, "failed: ValueError: no such file: data/7"))
        store.wait([notices[rank].bell], timedelta(seconds=300))
        store.delete_key(notices[rank].bell)
        assert notices[rank].failure(store) is not None

    def meet(rank: int) -> None:
        own = meeting.Meeting(None, "save")
        own.rank, own.size, own._timeout, own._store = rank, clients, TIMEOUT, store_of(rank, "save")
        own._mine, own._ranks, own._watch = [f"beat-{rank}"], tuple(range(clients)), None
        own.report([{"name": "rank"}, ["f" * 32] * PARTS])
        if rank == 0:
            assert len(own.gather()) == clients
            own.announce("")
        else:
            assert own.verdict() == ""

    def old_start(rank: int) -> None:
        store = store_of(rank, "watch")
        for other in range(clients):
            store.check([f"who-{other}"])
            store.get(f"who-{other}")

    print(f"\n{clients} clients of one TCPStore, each a thread of this process:")

    def named(rank: int) -> None:
        if rank == 0:
            assert Answers(connections[0], clients, "a name").wait(300.0)
        else:
            assert ask_for_name(connections[rank], rank, "") == "a name"

    works: dict[str, Callable[[int], None]] = {
        "init: one name for all": named,
        "start of the watch: come": come,
        "start of the watch: who is here": lambda rank: hosts[rank].find_neighbours(store_of(rank, "watch")),
        "before: who is each": old_start,
        "a failure, until all know": hear,
        "a save: reports and verdict": meet,
    }
    with ThreadPoolExecutor(clients) as threads:
        for name, work in works.items():
            start = time.perf_counter()
            list(threads.map(work, range(clients)))
            seconds = time.perf_counter() - start
            calls = f", {2 * clients**2 / seconds:,.0f} calls/s" if work is old_start else ""
            print(f"  {name:<34}{_seconds(seconds):>10}{calls}")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--clients", type=int, default=0)
    arguments = parser.parse_args()
    meeting.GRACE_SECONDS = 600.0
    for ranks in arguments.ranks:
        print(f"\n{ranks:,} ranks on {ranks // RANKS_PER_HOST:,} hosts{'before':>43}{'now':>34}")
        for name, path in PATHS.items():
            before, now = path(ranks)
            print(f"  {name:<46}{before}  {now}")
    if arguments.clients:
        against_a_real_store(arguments.clients)


if __name__ == "__main__":
    main()
