"""Comes before all imports: whether this system will do, and Control-C while the command starts. (Its imports take
seconds, and would print the interrupt or swallow it.)"""

import os
import signal
import sys
import threading
from itertools import pairwise
from types import FrameType

from zeroshard.errors import NotInstalled

if os.name != "posix":  # modules of Python that only POSIX has are imported
    raise NotInstalled(
        "zeroshard runs on Linux and macOS. On Windows, install it in WSL, the Windows Subsystem for Linux"
    )

BAD_INPUT, INTERRUPTED = 2, 130
"""Exit codes of the command."""

told = False
"""Whether a rank of `zeroshard train` was interrupted before it could act on that: `train.loop.Requests` does."""


def begun() -> None:
    """From here on an interrupt is an exception, so that files which are being written are removed."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    # No exception: a library that is being imported would turn it into one of its own.
    try:
        os.write(2, b"\ninterrupted\n")  # the terminal has printed ^C
    finally:  # nobody may read it any longer
        os._exit(INTERRUPTED)


def _note(number: int, frame: FrameType | None) -> None:
    global told
    told = True


def _is_command() -> bool:
    """Whether this process is the `zeroshard` command or `python -m zeroshard`, not a program that imports the library.
    While a package is being imported for -m, the name of the program is "-m"."""
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", []) else ""
    return program == "zeroshard" or (program == "-m" and ("-m", "zeroshard") in pairwise(sys.orig_argv))


if (
    _is_command()
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not of a job that ignores it
):
    # Ranks do not leave one by one: the others would wait for them, and the launcher would report a failure.
    signal.signal(signal.SIGINT, _note if "RANK" in os.environ else _leave)
