"""What ranks of the trainer import is imported once, before they are forked."""

import importlib

import pytest


@pytest.fixture(autouse=True, scope="session")
def _tensorboard() -> None:
    """(It takes 0.4 s.)"""
    importlib.import_module("torch.utils.tensorboard")
