"""What every test shares: one thread per rank, a cache of its own, properties that give the same answer each time."""

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import torch._dynamo  # the first optimizer imports it, which takes 1.4 s: once here, not once in every forked rank

# The same examples on every run; a failure in continuous integration is then a failure on the desk.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test reads or writes the user's cache folder, or sees the launcher that may run the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Forty small files of text, no two alike."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(40):
        lines = [f"def function_{index}_{line}(x):\n    return x * {index * line + 1}\n" for line in range(30)]
        (folder / f"module_{index:02}.py").write_text("\n".join(lines))
    return folder
