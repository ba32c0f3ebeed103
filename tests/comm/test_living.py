"""A set of living objects may change in the middle of a look at it."""

from __future__ import annotations

import gc
import weakref

from tests.garbage import collected_at
from zeroshard.ranks.living import Living


class One:
    pass


def test_a_look_over_a_set_to_which_a_finalizer_adds() -> None:
    """A step of any optimizer raised "Set changed size during iteration" while another thread sharded a model."""
    kept = [One() for _ in range(5)]
    living, weak, refused = Living[One](), weakref.WeakSet[One](), 0
    for one in kept:
        living.add(one)
        weak.add(one)

    def add() -> None:
        kept.append(One())
        living.add(kept[-1])
        weak.add(kept[-1])

    for made in range(1, 12):
        before = set(kept)
        with collected_at(made, add):
            found = {one for [one] in [[one] for one in living.all()]}
        assert before <= found <= set(kept), made
        with collected_at(made, add):
            try:
                [[one] for one in weak]
            except RuntimeError:
                refused += 1
    assert refused  # the control
    assert len(kept) > 20, "finalizers have run"


def test_what_is_freed_leaves_the_set() -> None:
    kept, living = [One() for _ in range(3)], Living[One]()
    for one in [*kept, *kept]:  # twice is once
        living.add(one)
    assert sorted(map(id, living.all())) == sorted(map(id, kept))
    found = living.all()
    del one, found, kept[1:]
    gc.collect()
    assert living.all() == kept and len(living._known) == 1
