"""Runs a command on a terminal of a given width, and says what a person then sees.

    python -m tests.cli.screen 80 zeroshard train --steps 50 --nproc 2

prints all lines that the command has left on the screen, with those that have scrolled out of it. The terminal knows
what `zeroshard` writes: text, line ends, colours, and the sequences by which rich draws a line anew. Anything else
raises.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import unicodedata
from collections.abc import Callable, Sequence

_SEQUENCE = re.compile(r"\x1b\[(\??[0-9;]*)([a-zA-Z])")


class Screen:
    """The lines of a terminal that is endlessly high. A text that reaches the last column goes on in the next line, as
    on every terminal.

    Attributes:
        wrapped: how often that has happened.
        drawn: how many lines have been erased to be drawn anew.
    """

    def __init__(self, columns: int) -> None:
        self.columns, self.lines, self.wrapped, self.drawn = columns, [""], 0, 0
        self._row = self._column = 0
        self._waiting = ""

    def feed(self, text: str) -> None:
        text, self._waiting = self._waiting + text, ""
        position = 0
        while position < len(text):
            if text[position] == "\x1b":
                found = _SEQUENCE.match(text, position)
                if found is None:  # the rest of the sequence comes later
                    self._waiting = text[position:]
                    return
                self._obey(found[1], found[2])
                position = found.end()
            else:
                self._put(text[position])
                position += 1

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down()
        else:
            width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
            if self._column + width > self.columns:
                self.wrapped += 1
                self._column = 0
                self._down()
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += width

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self.lines):
            self.lines.append("")

    def _obey(self, argument: str, letter: str) -> None:
        if letter == "A":
            self._row -= int(argument or 1)
        elif letter == "K" and argument == "2":
            self.lines[self._row] = ""
            self.drawn += 1
        elif letter not in "m" and (argument, letter) not in (("?25", "l"), ("?25", "h")):
            raise ValueError(f"this terminal does not know ESC [ {argument} {letter}")


def run_on_terminal(
    columns: int, command: Sequence[str], start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
) -> tuple[Screen, int]:
    """Run a command with its three standard streams on a terminal of so many columns and 50 lines. Returns what is left
    on it, and the exit status."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = start(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm-256color"})
    os.close(theirs)
    screen, decoder = Screen(columns), codecs.getincrementaldecoder("utf-8")()
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # EIO: nobody has the other end open any more
            data = b""
        screen.feed(decoder.decode(data))
        if not data:
            break
    os.close(ours)
    return screen, process.wait()


if __name__ == "__main__":
    shown, status = run_on_terminal(int(sys.argv[1]), sys.argv[2:])
    print("\n".join(shown.lines))
    sys.exit(status)
