"""The pieces of `make test-gpu` for other libraries, in their CPU forms. The libraries are imported once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_gpu_runner import OF_LIBRARIES, expect_passed
from tests.late import once

_once = once(*OF_LIBRARIES)


@pytest.mark.by_gloo
@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_each_piece_passes_in_its_cpu_form(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_passed(name, tmp_path, monkeypatch)
