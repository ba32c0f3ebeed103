"""Work after which all ranks raise if it failed on any rank. Collective.

Without the exchange, a rank that has failed would leave the others waiting in their next collective. (A checkpoint that
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
    """The text of an error for the other ranks and for users."""
    if isinstance(error, (ValueError, CheckpointError)):
        return str(error)
    return ": ".join(filter(None, [type(error).__name__, str(error)]))  # KeyboardInterrupt has no text


def together(
    collectives: Collectives,
    what: str,
    work: Callable[[], T],
    *,
    errors: Errors = (InvalidValue,),
    words: Words = in_words,
    patient: bool = False,
) -> T:
    """Run `work` on every rank, and return its result. Collective.

    Args:
        what: the call, for the message.
        errors: classes that are raised unchanged; other errors become the first of these.
        words: turns an error into text.
        patient: True if one rank may work much longer than the others: they wait as long as it sends heartbeats.

    Raises:
        one of `errors`: on all ranks, if `work` has raised on any: the text of the first failed rank, and its number
            unless all ranks failed with the same text.
    """
    result, _ = tell_together(
        collectives, what, lambda: (work(), None), errors=errors, words=words, patient=patient, tell=False
    )
    return result


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
    """Like `together`, and ranks also exchange a value. `work` returns (a result for this rank, a JSON-able value for
    all ranks). Returns this rank's result, and the values of all ranks in rank order.

    Args:
        tell: False: values are not exchanged, and the returned list is empty.

    Other arguments and errors: as of `together`.
    """
    problem, told, failure = None, None, None
    try:
        kept, told = work()
    except Exception as error:  # of any class: the other ranks are on their way to the exchange below
        # An error of torch or of the user's code is raised as our class with the same built-in base. (CheckpointError
        # is left out: a RuntimeError keeps its class name in the text instead.)
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
        is_of_all = len(failed) == len(results) and all(of[1] == text for _, of in failed)
        where = "" if is_of_all else f" (on rank {collectives.mesh.world.ranks[rank]})"
        try:
            raise {one.__name__: one for one in errors}.get(kind, errors[0])(f"{what}{where}: {text}") from failure
        finally:
            # The traceback of `failure` refers to this frame, and this frame to `failure`: a cycle that keeps all
            # tensors that `work` has touched until the garbage collector runs (Python reference, "The try statement").
            failure = None
    return kept, [of_rank for _, of_rank in results]
