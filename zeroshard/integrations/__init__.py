"""zeroshard in the training loops of other libraries: `accelerate`, `transformers`, `lightning`,
`pytorch_lightning`.

The module of that name imports the library; this package itself imports none of them."""

import importlib
from typing import TYPE_CHECKING, Any

from zeroshard.integrations.sharding import Sharding as Sharding

_IMPORTED_WHEN_ASKED_FOR = ("accelerate", "dcp", "lightning", "pytorch_lightning", "transformers")

if not TYPE_CHECKING:  # so that type checkers still find misspelt names

    def __getattr__(name: str) -> Any:
        if name in _IMPORTED_WHEN_ASKED_FOR:
            return importlib.import_module(f"zeroshard.integrations.{name}")
        raise AttributeError(f"module 'zeroshard.integrations' has no attribute {name!r}")
