"""A look at another thread is one piece: no finalizer lets that thread go on in the middle of it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import garbage
from zeroshard.failures import frames
from zeroshard.failures.frames import calls_of

IN_ONE_PIECE = "[code.co_name for code, _ in frames.calls_of(thread)]"
AS_PYTHON_DOES = "plain(thread)"

LOOKS = '''
import os, runpy, sys, threading, types

frames, garbage = (types.SimpleNamespace(**runpy.run_path(path)) for path in sys.argv[1:])  # without torch

inside, go, over, looked = (threading.Event() for _ in range(4))
main = threading.main_thread().ident


def finalizer():
    """Lets the main thread return from all its calls, and make others."""
    if inside.is_set() and threading.get_ident() != main:
        go.set()
        over.wait()


def before(n, *rest):
    local, other = n, [n]
    if n:
        return before(n - 1, *rest, n)
    inside.set()
    go.wait()


def after(n):
    a = b = c = d = e = None
    if n:
        return after(n - 1)
    over.set()
    looked.wait()


def plain(thread):
    found, frame = [], sys._current_frames()[thread]
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def look(made):
    inside.wait()
    thread = main
    try:
        with garbage.collected_at(made, finalizer):
            seen = [name for name in LOOK if name in ("before", "after")]
    except AttributeError as error:  # what has been found is no frame
        seen = [repr(error)]
    if seen not in (["before"] * 31, ["after"] * 31):
        os.write(1, b"torn")
        os._exit(3)
    over.set(), go.set(), looked.set()


for made in range(1, 60):
    [event.clear() for event in (inside, go, over, looked)]
    looker = threading.Thread(target=look, args=(made,))
    looker.start()
    before(30)
    after(30)
    looker.join()
print("whole")
'''


def looked(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "looks.py"
    program.write_text(LOOKS.replace("LOOK", how))
    command = [sys.executable, program, str(frames.__file__), str(garbage.__file__)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_finalizer_cannot_end_the_call_that_is_looked_at(tmp_path: Path) -> None:
    """A rank crashed (signal 11) when the watch looked where it was."""
    whole = looked(tmp_path, IN_ONE_PIECE)
    assert whole.returncode == 0 and whole.stdout.split() == ["whole"], whole.stderr
    if sys.version_info < (3, 12):  # later, nothing is collected where an object is made
        torn = looked(tmp_path, AS_PYTHON_DOES)
        assert torn.returncode != 0 and "whole" not in torn.stdout


def wrongly_switched(look: Callable[[], object], is_over: Callable[[int], bool]) -> int:
    """How often this thread finds the collector on after it has switched it off, while another thread looks."""
    ends, before, interval = threading.Event(), gc.isenabled(), sys.getswitchinterval()

    def looks() -> None:
        while not ends.is_set():
            look()

    thread, wrong, rounds = threading.Thread(target=looks), 0, 0
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while not is_over(wrong) and rounds < 3_000:
            gc.disable()
            time.sleep(0)
            wrong += gc.isenabled()
            gc.enable()
            time.sleep(0)
            wrong += not gc.isenabled()
            rounds += 1
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(interval)
        (gc.enable if before else gc.disable)()
    return wrong


def test_a_look_leaves_the_garbage_collector_as_the_program_wants_it() -> None:
    main = threading.get_ident()

    def in_python() -> None:
        was = gc.isenabled()
        gc.disable()
        sys._current_frames()
        (gc.enable if was else gc.disable)()

    assert wrongly_switched(in_python, lambda wrong: wrong > 0) > 0
    assert wrongly_switched(lambda: calls_of(main), lambda wrong: False) == 0


@pytest.mark.parametrize("is_on", [True, False])
def test_a_look_that_fails_leaves_the_garbage_collector_as_it_was(is_on: bool) -> None:
    def fails() -> None:
        assert not gc.isenabled()
        raise MemoryError

    before = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        with pytest.raises(MemoryError):
            frames._in_one_piece(fails)
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if before else gc.disable)()


def test_calls_of_a_thread_with_their_lines() -> None:
    inside, go = threading.Event(), threading.Event()

    def inner() -> None:
        inside.set()
        go.wait(60)

    def outer() -> None:
        inner()

    thread = threading.Thread(target=outer)
    thread.start()
    try:
        assert inside.wait(60)
        found = {code.co_name: line for code, line in calls_of(thread.ident)}
        names = [frame.f_code.co_name for frame in frames.frames_of(thread.ident)]
        first = inner.__code__.co_firstlineno
        assert found["inner"] in (first + 1, first + 2) and found["outer"] == outer.__code__.co_firstlineno + 1
        assert names[-5:] == [code.co_name for code, _ in calls_of(thread.ident)][-5:] and "inner" in names
    finally:
        go.set()
        thread.join()
    assert calls_of(thread.ident) == [] and calls_of(None) == []
