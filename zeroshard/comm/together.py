"""Work that all ranks do, or none: what one of them fails at, all raise. Collective.

Without the exchange a rank that has failed would leave the others waiting in their next collective. (A checkpoint that
is written in the background does the same without collectives: `checkpoint/meeting.py`.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from zeroshard.comm.collectives import Collectives
from zeroshard.errors import InvalidValue
from zeroshard.io.checked import CheckpointError

T = TypeVar("T")
Errors = tuple[type[Exception], ...]
Words = Callable[[Exception], str]


def in_words(error: BaseException) -> str:
    """For other ranks to hear of, and for users to read."""
    return str(error) if isinstance(error, (ValueError, CheckpointError)) else f"{type(error).__name__}: {error}"


def together(
    collectives: Collectives, what: str, work: Callable[[], T], *, words: Words = in_words, patient: bool = False
) -> T:
    """What `work` returns.

    Args:
        what: the call, for the message.
        words: what is said of an error.
        patient: one rank may have much more to do than the others: they wait as long as it is heard of.

    Raises:
        ValueError: on all ranks, if `work` has raised on any: what the first of them says, and which it is, if not all.
    """
    return tell_together(collectives, what, lambda: (work(), None), words=words, patient=patient, tell=False)[0]


def tell_together(
    collectives: Collectives,
    what: str,
    work: Callable[[], tuple[T, Any]],
    *,
    errors: Errors = (InvalidValue,),
    words: Words = in_words,
    patient: bool = False,
    tell: bool = True,
) -> tuple[T, list[Any]]:
    """`work` gives something to keep, and something JSON-able for all ranks to know. Returns the own, and what all have
    told, in rank order.

    Args:
        tell: False: nobody has to know anything unless something fails, and nothing is told.
        errors: classes that are raised as they are; others become the first of these.
        what, words, patient: as above.

    Raises:
        one of `errors`: as above.
    """
    problem, told, failure = None, None, None
    try:
        kept, told = work()
    except Exception as error:  # whatever it is: the others wait
        # What torch or the user's code raises is raised as the class of ours that is of the same kind. (A checkpoint's
        # is of no kind: any RuntimeError keeps its name in the text.)
        kinds = {base: one.__name__ for one in errors if one is not CheckpointError for base in one.__bases__}
        kind = {**kinds, **{one: one.__name__ for one in errors}}.get(type(error), "")
        text = str(error) if kind else words(error)
        problem, failure = [kind, text.removeprefix(f"{what}: ")], error
    if patient:
        collectives.wait_for_all()
    if not tell and not collectives.count(problem is not None, what):
        return kept, []
    results = collectives.exchange_objects([problem, told], what)
    failed = [(rank, of_rank) for rank, (of_rank, _) in enumerate(results) if of_rank]
    if failed:
        rank, (kind, text) = failed[0]
        where = "" if len(failed) == len(results) and all(of[1] == text for _, of in failed) else f" (on rank {rank})"
        try:
            raise {one.__name__: one for one in errors}.get(kind, errors[0])(f"{what}{where}: {text}") from failure
        finally:
            # Its traceback refers to this frame, which refers to it: a cycle that keeps all that `work` has looked at
            # until the garbage collector runs (Python reference, "The try statement").
            failure = None
    return kept, [of_rank for _, of_rank in results]
