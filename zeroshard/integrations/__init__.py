"""zeroshard in the training loops of other libraries: `accelerate`, `transformers`, `lightning`.

The module of that name imports the library; this package itself imports none of them."""

from zeroshard.integrations.sharding import Sharding as Sharding
