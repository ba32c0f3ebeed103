"""zeroshard inside the training loops of other libraries: `accelerate`, `transformers`, `lightning`.

Each has a module of its name here, which imports it. This package imports none of them."""

from zeroshard.integrations.sharding import Sharding as Sharding
