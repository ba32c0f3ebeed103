import warnings

import pytest


@pytest.fixture
def low_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """For torchao's optimizers: their kernel is not compiled (compiling takes a minute)."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own
        pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
