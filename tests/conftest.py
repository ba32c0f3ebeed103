"""What all tests share: one torch thread, separate folders, hypothesis settings that give the same examples each time.

With xdist, workers are forked after everything has been imported (`tests/workers.py`).
"""

import gc
import importlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from tests.huge_pages import Again, collapse
from tests.workers import fork_workers

with suppress(ImportError):  # a GPU machine may have only torch and pytest (`make test-gpu`)
    import hypothesis

    # The same examples on every run, so that a failure in continuous integration can be reproduced locally.
    hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
    hypothesis.settings.load_profile("repeatable")


if os.environ.get("ZEROSHARD_TEST_DEVICE", "cpu") == "cpu":
    # Ranks are forked, and could not use CUDA once this process has. What is tested here runs on CPUs anyway.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# torch's store looks up a name for each address it connects to, also for 127.0.0.1. A query that a name server does not
# answer holds it up for five seconds, twice.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:4"

# Programs that tests start have one thread as well: where several wait for the cores, a thread of OpenMP that waits for
# another one uses a core until its time slice ends, which took twice the time of the computation.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_OWN_FOLDER = pytest.StashKey[str]()

gc.disable()  # until all tests are imported: imports leave next to no garbage


@pytest.hookimpl(tryfirst=True)  # pytest's own makes the folder
def pytest_configure(config: pytest.Config) -> None:
    """Each run has its own temporary folder. (pytest numbers its folders, and later runs delete all but three.)"""
    if config.option.basetemp is None:
        config.option.basetemp = config.stash[_OWN_FOLDER] = tempfile.mkdtemp(prefix="zeroshard-tests-")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[object]) -> None:
    fork_workers(config, len(specs))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Delete the folder of the run, unless a test has failed."""
    folder = session.config.stash.get(_OWN_FOLDER, None)
    if folder is not None and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        shutil.rmtree(folder, ignore_errors=True)


LARGE = (
    "tests/exchange/",
    "tests/gpu/test_gpu_libraries.py",
    "tests/integrations/",
    "tests/real_models/",
    "tests/train/test_language.py",
)
"""These tests import large libraries: they come last, as each rank is forked with all that has been imported."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (item.get_closest_marker("long") is None, item.nodeid.startswith(LARGE)))
    left_out = {"by_gloo": os.environ.get("ZEROSHARD_TEST_BACKEND"), "by_cpu": os.environ.get("ZEROSHARD_TEST_DEVICE")}
    for marker in (name for name, other in left_out.items() if other):
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"it is about {marker.removeprefix('by_')}"))


def pytest_collection_finish() -> None:
    """Freeze all objects that exist now: the garbage collector no longer searches them, in this process or in forked
    ones. Ranks live for about a second, and collections at the default rate would take a tenth of that."""
    importlib.import_module("torch._dynamo")  # takes 1.4 s; the first optimizer would import it in every forked rank
    _seed_this_device_alone()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    collapse()


_again = Again()
_seen = {"modules": 0, "tests": 0}
_MODULES, _TESTS = 50, 20


def pytest_runtest_logfinish() -> None:
    """Also freeze once more after imports and after some tests. A plan with activations collects all garbage for each
    trace, and took a third of its time to search what tests had imported."""
    _again.look()
    _seen["tests"] += 1
    if len(sys.modules) > _seen["modules"] + _MODULES or _seen["tests"] == _TESTS:
        _seen.update(modules=len(sys.modules), tests=0)
        gc.collect()
        gc.freeze()


def _seed_this_device_alone() -> None:
    """`torch.manual_seed` formats and keeps a stack trace for each kind of device that this build lacks (three of them;
    see `torch.cuda._lazy_call`). That takes 10 ms a call, a tenth of the tests' time."""
    import torch

    if not torch.accelerator.is_available():
        torch.manual_seed = torch.random.manual_seed = torch.default_generator.manual_seed


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _time_for_everything() -> None:
    """With ZEROSHARD_TEST_EVERYTHING=1 one start of ranks has many times the cases, and rank 0 computes first what one
    process should. On a busy machine that takes longer than the limits of `run_ranks`. `make test-everything` also has
    a longer limit for a test."""
    from tests.grids import EVERYTHING
    from zeroshard.testing import run_ranks

    if EVERYTHING:
        assert run_ranks.__kwdefaults__ is not None
        run_ranks.__kwdefaults__.update(timeout=7000.0, collective_timeout=1800.0)


@pytest.fixture(autouse=True, scope="session")
def _device() -> Iterator[None]:
    """With ZEROSHARD_TEST_DEVICE=cuda ranks make their tensors on their GPU."""
    from tests.kit import DEVICE
    from tests.on_device import tests_on_device

    with tests_on_device() if DEVICE.type != "cpu" else nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def _warm(_one_thread: None, _device: None) -> None:
    """Do once what torch prepares at a first call (wrappers for its compiler, lines of source for a traceback), so that
    ranks that are forked from this process need not do it."""
    import torch

    from tests.kit import DEVICE

    if DEVICE.type != "cpu":
        return  # a backward starts a thread for each device, and a process with such threads cannot be forked
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.weight.register_post_accumulate_grad_hook(lambda _: None)
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def _compiler(_warm: None) -> None:
    """Do once what torch imports and prepares at a first compilation (a second), so that ranks need not do it."""
    import torch

    from tests.kit import DEVICE, Net, loss_of_tokens, make

    if DEVICE.type != "cpu":
        return  # see `_warm`
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer looks at the grad of tensors that are no leaves
        for backend in ("eager", "aot_eager"):
            loss_of_tokens(torch.compile(make(Net), backend=backend), 0, 0, 0).backward()
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def _backward_threads() -> Iterator[None]:
    """With ZEROSHARD_TEST_BACKWARD_THREAD=1 every backward runs on another thread, as it does on CUDA."""
    from tests.backward_threads import backward_on_threads

    with backward_on_threads() if os.environ.get("ZEROSHARD_TEST_BACKWARD_THREAD") == "1" else nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def _backend() -> Iterator[None]:
    """With ZEROSHARD_TEST_BACKEND=late (or another timing) ranks use the backend of `tests/timed_backend.py`."""
    timing = os.environ.get("ZEROSHARD_TEST_BACKEND")
    from tests.timed_backend import timed_ranks

    with timed_ranks(timing) if timing else nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def _ahead() -> Iterator[None]:
    """With ZEROSHARD_TEST_AHEAD=1 steps go ahead of the host (`tests/ahead_of_host.py`)."""
    from tests.ahead_of_host import ahead_of_host

    with ahead_of_host() if os.environ.get("ZEROSHARD_TEST_AHEAD") == "1" else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test reads or writes the user's cache folder, or sees the environment variables of a launcher around the
    tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return


@pytest.fixture(scope="session")
def shared_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty small text files, all different. Read only: tests share them."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(40):
        lines = [f"def function_{index}_{line}(x):\n    return x * {index * line + 1}\n" for line in range(30)]
        (folder / f"module_{index:02}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture
def text_folder(shared_text: Path, tmp_path: Path) -> Path:
    """A copy of `shared_text` that one test may change."""
    return shutil.copytree(shared_text, tmp_path / "text")
