"""The workers of pytest-xdist, forked from the process that distributes the tests after it has imported them all.

A worker that starts as an interpreter needs ten seconds of a core until its first test: it imports torch and the tests,
whose asserts pytest rewrites. Forked workers share these imports and only collect. They are forked before execnet,
through which xdist talks to them, starts its first thread. A worker that replaces one that has crashed starts as xdist
starts it.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.huge_pages import collapse


def fork_workers(config: pytest.Config, count: int) -> None:
    """Import what these workers will collect, and fork `count` processes, which execnet uses as its interpreters."""
    from execnet import gateway_io

    _import(config)
    collapse()
    waiting = [_fork() for _ in range(count)]
    create_io = gateway_io.create_io

    class Forked(gateway_io.Popen2IOMaster):
        def __init__(self, execmodel: Any) -> None:
            self.popen = waiting.pop(0)
            gateway_io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

    gateway_io.create_io = lambda spec, execmodel: (
        Forked(execmodel) if waiting and spec.popen else create_io(spec, execmodel)
    )


def _import(config: pytest.Config) -> None:
    """A module that raises or warns is left out: the workers import it again, and report that."""
    paths = [config.invocation_params.dir / argument.split("::")[0] for argument in config.args]
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    names = [_name(file, config.rootpath) for file in sorted(files)]
    folders = {name.rpartition(".")[0] for name in names if name}
    with _stderr_dropped():
        for name in (*sorted(f"{folder}.conftest" for folder in folders), *filter(None, names)):
            with warnings.catch_warnings(), suppress(Exception, pytest.skip.Exception):
                warnings.simplefilter("error")
                importlib.import_module(name)


@contextmanager
def _stderr_dropped() -> Iterator[None]:
    """As pytest does while it collects, but by the descriptor alone: loggers that are made here keep `sys.stderr`."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _name(file: Path, root: Path) -> str:
    """The name under which pytest imports a file; "" outside of the root."""
    return ".".join(file.relative_to(root).with_suffix("").parts) if file.is_relative_to(root) else ""


def _fork() -> subprocess.Popen[bytes]:
    from tests.forked import become
    from zeroshard.model.room import with_room  # imports torch, whose loggers keep the stderr of that moment

    # preexec_fn runs between fork and exec. `become` never returns, so there is no exec. Whatever still holds the
    # stdout of this process writes to stderr: the worker's stdout is its connection.
    worker = partial(become, with_room(_serve), dict(os.environ), old_stdout=2)
    pipe = subprocess.PIPE
    # By default Popen restores what SIGPIPE and SIGXFSZ do without Python, which ignores them: they would end a test.
    return subprocess.Popen([sys.executable], stdin=pipe, stdout=pipe, preexec_fn=worker, restore_signals=False)


def _serve() -> int:
    """Do what `python -c LINE` does, with the line that execnet sends."""
    logging.getLogger().handlers.clear()  # pytest's, which collect what the other process logs
    sys.argv = ["-c"]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(eval(sys.stdin.readline()), vars(main))
    return 0
