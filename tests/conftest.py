"""What every test shares: one thread, folders of its own, properties that give the same answer each time.

torch is imported by the tests alone: the process that hands them out to others runs none, and they wait for it.
"""

import gc
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import hypothesis
import pytest

from tests.huge_pages import collapse

# The same examples on every run; a failure in continuous integration is then a failure on the desk.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("repeatable")


_OWN_FOLDER = pytest.StashKey[str]()

gc.disable()  # until all tests are imported: of what comes with an import nothing becomes garbage


@pytest.hookimpl(tryfirst=True)  # pytest's own makes the folder
def pytest_configure(config: pytest.Config) -> None:
    """The folder of a run is its own: pytest's are numbered, of which runs that come later keep three."""
    if config.option.basetemp is None:
        config.option.basetemp = config.stash[_OWN_FOLDER] = tempfile.mkdtemp(prefix="zeroshard-tests-")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """It stays where something has failed."""
    folder = session.config.stash.get(_OWN_FOLDER, None)
    if folder is not None and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if os.environ.get("ZEROSHARD_TEST_BACKEND"):
        for item in items:
            if item.get_closest_marker("by_gloo"):
                item.add_marker(pytest.mark.skip(reason="it is about gloo"))


def pytest_collection_finish() -> None:
    """What is here now stays: no collection searches it any more, in this process or in one that is forked from it.
    Ranks live for a second; collections that come as often as in a program that runs for days are a tenth of it."""
    importlib.import_module("torch._dynamo")  # by the first optimizer, in 1.4 s: once here, not in every forked rank
    _seed_this_device_alone()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    collapse()


def _seed_this_device_alone() -> None:
    """`torch.manual_seed` keeps a formatted stack for each kind of device that this build lacks (three of them; see
    `torch.cuda._lazy_call`): 10 ms a call, a tenth of the tests' time."""
    import torch

    if not torch.accelerator.is_available():
        torch.manual_seed = torch.random.manual_seed = torch.default_generator.manual_seed


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _warm(_one_thread: None) -> None:
    """What torch prepares at a first call (wrappers for its compiler, lines of source for a traceback) is prepared
    once, here, and not by every rank that is forked from this process."""
    import torch

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.weight.register_post_accumulate_grad_hook(lambda _: None)
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _backward_threads() -> Iterator[None]:
    """With ZEROSHARD_TEST_BACKWARD_THREAD=1 every backward runs on another thread, as it does on CUDA."""
    from tests.backward_threads import backward_on_threads

    with backward_on_threads() if os.environ.get("ZEROSHARD_TEST_BACKWARD_THREAD") == "1" else nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def _backend() -> Iterator[None]:
    """With ZEROSHARD_TEST_BACKEND=late (or another timing) ranks exchange by a backend that is not gloo."""
    timing = os.environ.get("ZEROSHARD_TEST_BACKEND")
    from tests.timed_backend import timed_ranks

    with timed_ranks(timing) if timing else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test reads or writes the user's cache folder, or sees the launcher that may run the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return


@pytest.fixture(scope="session")
def shared_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty small files of text, no two alike; for reading alone."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(40):
        lines = [f"def function_{index}_{line}(x):\n    return x * {index * line + 1}\n" for line in range(30)]
        (folder / f"module_{index:02}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture
def text_folder(shared_text: Path, tmp_path: Path) -> Path:
    """The same for one test, which may change it."""
    return shutil.copytree(shared_text, tmp_path / "text")
