"""What all commands share: errors in one line, sizes as arguments, lines and tables as output."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from zeroshard.cli.undisturbed import quiet
from zeroshard.io.checked import CheckpointError, NotWritten
from zeroshard.io.refused import in_words
from zeroshard.starting import begun

READER_GONE = 141
"""The exit code where `head` or a pager reads no further: the one that a shell shows for SIGPIPE."""


class Damaged(click.ClickException):
    """A checkpoint, or a file to be imported as one, is damaged; exit code 1."""


@contextmanager
def _refusals_of_the_system() -> Iterator[None]:
    """Reports a failed read or write in one line; a reader that is gone needs none."""
    try:
        yield
    except BrokenPipeError as error:
        raise click.exceptions.Exit(READER_GONE) from error
    except OSError as error:
        raise click.ClickException(in_words(error)) from error


class Helpful(click.Command):
    """A command whose help, which is printed while its arguments are read, may meet a full disk or lose its reader."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _refusals_of_the_system():
            return super().make_context(*arguments, **options)


class Command(Helpful):
    """A command that reports a damaged checkpoint, a failed read or write and a bad argument in one line."""

    def invoke(self, context: click.Context) -> Any:
        begun()
        try:
            with quiet(), _refusals_of_the_system():
                return super().invoke(context)
        except NotWritten as error:
            raise click.ClickException(str(error)) from error
        except CheckpointError as error:
            raise Damaged(str(error)) from error
        except ValueError as error:
            raise click.ClickException(str(error)) from error


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


if TYPE_CHECKING:
    Type = click.ParamType[Any]
else:
    Type = click.ParamType  # has no parameters before click 8.4


_LEAST = 1000
"""Whoever writes a smaller number without a unit hardly means bytes."""


class Size(Type):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(|[kmgt]|[kmg]i)b?", str(value).lower())
        if not match or int(float(match[1]) * _UNITS[match[2]]) < 1:
            self.fail(f"{value!r} is not a size: expected bytes, or a number with MB, GB, GiB, ...", param, context)
        if str(value).isdecimal() and int(value) < _LEAST:
            self.fail(f"{value} without a unit: expected {value}GB, {value}MB, ... (or {value}B)", param, context)
        return int(float(match[1]) * _UNITS[match[2]])


def say(text: str = "") -> None:
    """Print a line at once. Not `click.echo`: in an ASCII locale it writes "?" for the bytes of a file's name."""
    print(text, flush=True)


def printable(text: object) -> str:
    """`text` with escaped control characters: names in a checkpoint may come from anybody, and could contain escape
    sequences that the terminal would carry out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Print an empty line, the column names and the rows; numbers are aligned right. A terminal that is too narrow
    would break the lines inside of numbers: there the columns come as several tables, each with the first one, and a
    text that is wider than its column goes on in the next line."""
    cells = [columns, *(tuple(f"{v:,}" if isinstance(v, int) else printable(v) for v in row) for row in rows)]
    numbers = [bool(rows) and isinstance(value, (int, float)) for value in (rows[0] if rows else columns)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    screen = shutil.get_terminal_size().columns if sys.stdout.isatty() else sum(widths) + 2 * len(widths)
    first = min(widths[0], max(screen // 3, screen - 2 - max(widths[1:], default=-2)))
    widths = [first, *(max(1, min(width, screen - 2 - first)) for width in widths[1:])]
    for shown in _beside_each_other(widths, screen):
        say()
        for row in cells:
            for line in zip_longest(*(textwrap.wrap(row[i], widths[i]) for i in shown), fillvalue=""):
                aligned = (
                    c.rjust(widths[i]) if numbers[i] else c.ljust(widths[i]) for i, c in zip(shown, line, strict=True)
                )
                say("  ".join(aligned).rstrip())


def _beside_each_other(widths: list[int], screen: int) -> list[list[int]]:
    """The columns of each table on a screen of that width, by number; the first column is in all of them."""
    tables = [[0]]
    for column in range(1, len(widths)):
        if len(tables[-1]) > 1 and sum(widths[other] + 2 for other in tables[-1]) + widths[column] > screen:
            tables.append([0])
        tables[-1].append(column)
    return tables
