"""Prevents downloads: the hub's client reads this variable when it is imported."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
