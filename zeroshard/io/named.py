"""Imports what a user names in a module of their own. Whatever their code raises, also SystemExit, becomes one line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zeroshard.errors import Error, InvalidValue


def named(module: str, path: str) -> Any:
    """What is at a dotted path in a module. The current directory is searched first, as `python -m` does. To be called
    inside `in_one_line`."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@contextmanager
def in_one_line(what: str, passes: type[Error] | tuple[()] = ()) -> Iterator[None]:
    """Code of the user runs inside. Errors of the type `passes` are not changed.

    Raises:
        ValueError: with `what` and the first line of what the code has raised.
    """
    try:
        yield
    except passes:
        raise
    except SystemExit as error:
        # Without this the process would end here, without a message, or with a status that means something else.
        raise InvalidValue(
            f"{what}: it called sys.exit({error}): what only a script does belongs under `if __name__ == '__main__':`"
        ) from error
    except Exception as error:
        lines = str(error).splitlines()
        raise InvalidValue(f"{what}: {type(error).__name__}: {lines[0] if lines else ''}") from error
