"""The list of what backward has not come to is searched in constant time, and finds what a plain list would."""

from __future__ import annotations

import random
from typing import Any, cast

from zeroshard.runtime.calls import ToCome, Trail, Visit


class Seen(list[Any]):
    """Counts how often an element is asked whether it is another one."""

    number = 0

    def __contains__(self, one: object) -> bool:
        Seen.number += 1
        return super().__contains__(one)


def call(units: list[Any], trail: Trail) -> list[Visit]:
    one = object()
    return [Visit(unit, (), trail, one) for unit in units]


def test_lookups_are_those_of_a_plain_list() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        units: list[Any] = [object() for _ in range(5)]
        trails = [Trail(), Trail()]
        to_come, plain, calls = ToCome(), list[Visit](), list[list[Visit]]()
        for _ in range(40):
            trails[1].is_gone = draw.random() < 0.5
            what = draw.choice(["call", "call", "older", "take", "drop", "none"])
            if what in ("call", "older"):
                visits = call(draw.sample(units, draw.randint(1, 3)), draw.choice(trails))
                calls.append(visits)
                to_come.add(visits, in_front=what == "older")
                plain = [*visits, *plain] if what == "older" else [*plain, *visits]
            elif plain and what == "take":
                first = draw.randrange(len(plain))
                begin = max(first, min(n for n, visit in enumerate(plain) if visit.call is plain[-1].call))
                assert to_come.take(first) == plain[begin:]
                plain = plain[:begin]
            elif plain and what == "drop":
                first = draw.randrange(len(plain))
                assert to_come.drop(first) == plain[first:]
                plain = plain[:first]
            assert to_come.visits == plain
            for unit in units:
                of_unit = [visit for visit in plain if visit.unit is unit]
                assert to_come.is_listed(unit) == bool(of_unit)
                assert to_come.has(unit) == any(visit.may_come for visit in of_unit)
            for visits in calls:
                found = [n for n, visit in enumerate(plain) if visit in visits]
                assert [*to_come.where(visits)] == found


def test_a_backward_looks_at_each_visit_once() -> None:
    def looks(depth: int) -> int:
        to_come, trail = ToCome(), Trail()
        units: list[Any] = [object() for _ in range(depth)]
        calls = [Seen(call([unit], trail)) for unit in units]
        for visits in calls:
            to_come.add(visits)
        Seen.number = 0
        for visits in reversed(calls):
            to_come.drop(to_come.where(visits).start)
            assert not to_come.has(visits[0].unit)
        return Seen.number

    assert looks(100) <= 2 * looks(50) + 2


def test_nothing_of_a_backward_is_kept() -> None:
    to_come = ToCome()
    to_come.add(call([cast(Any, object())], Trail()))
    to_come.drop(0)
    assert not to_come._visits_of, "it would keep the weights of a closed model"
