"""Nothing is downloaded: the hub's client reads this when it is imported."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
