"""Records the calls of a model's modules in one micro-batch, and where its backward comes to them.

It is what the hooks of the engine would see (`runtime/hooks.py`), whatever the units are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.model.paths import Modules, first_paths
from zeroshard.model.trees import differentiable
from zeroshard.runtime.calls import Entry
from zeroshard.runtime.weight_views import left_beside


class Event(NamedTuple):
    """A call of a module begins or ends, or backward has the gradient of an output of it ("grad").

    Attributes:
        module: its number.
        call: the number of the call.
        task: number of autograd's graph task; -1: not inside of a backward.
        makes_graph: whether grad is enabled.
        checkpoint: for the begin of a call inside of a backward: the number of the node that recomputes.
    """

    kind: Literal["begin", "end", "grad"]
    module: int
    call: int
    task: int
    makes_graph: bool = True
    checkpoint: int = 0


@dataclass(frozen=True, eq=False)
class Calls:
    """What was recorded. `number_of`: every path of every module -> its number; that of the model itself is 0."""

    events: tuple[Event, ...]
    number_of: Mapping[str, int]


class Recorder:
    """Its `begin` and `end` are to be called by hooks around each call of each module."""

    def __init__(self, modules: Modules) -> None:
        numbers = {module: number for number, module in enumerate(first_paths(modules))}
        self._number_of = {path: numbers[module] for path, module in modules.items()}
        self._numbers = numbers
        self._events: list[Event] = []
        self._open: list[tuple[int, int, Entry]] = []  # module, call, and the graph when it began
        self._num_calls = self._num_checkpoints = 0
        self._checkpoint: Any = None

    @property
    def calls(self) -> Calls:
        return Calls(tuple(self._events), self._number_of)

    def begin(self, module: nn.Module, inputs: Any) -> None:
        self._num_calls += 1
        number, task = self._numbers[module], torch._C._current_graph_task_id()
        if task != -1 and (node := torch._C._current_autograd_node()) is not self._checkpoint:
            self._checkpoint = node
            self._num_checkpoints += 1
        makes_graph = torch.is_grad_enabled()
        event = Event("begin", number, self._num_calls, task, makes_graph, self._num_checkpoints if task != -1 else 0)
        self._events.append(event)
        self._open.append((number, self._num_calls, Entry.of(inputs)))

    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Also of a call that raises, as a recomputation does that has all it needs."""
        number = self._numbers[module]
        index = next((n for n in range(len(self._open) - 1, -1, -1) if self._open[n][0] == number), None)
        if index is None:
            return
        _, call, entry = self._open[index]
        del self._open[index:]
        task, makes_graph = torch._C._current_graph_task_id(), torch.is_grad_enabled()
        self._events.append(Event("end", number, call, task, makes_graph))
        if not makes_graph:
            return
        leaves = [*differentiable(output), *left_beside(inputs, [*module.modules()])]
        for leaf in {id(leaf): leaf for leaf in leaves if entry.has_made(leaf)}.values():
            leaf.register_hook(partial(self._on_grad, number, call))  # type: ignore[no-untyped-call]

    def _on_grad(self, number: int, call: int, grad: Tensor) -> None:
        self._events.append(Event("grad", number, call, torch._C._current_graph_task_id()))
