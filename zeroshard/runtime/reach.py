"""What the current backward reaches: asked inside of it, as peers may have gradients where this rank has none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from zeroshard.model.absent import as_tensors
from zeroshard.storage.unit import Unit


def is_reduced(units: Sequence[Unit], *, is_own: bool) -> bool:
    """Whether the current backward adds to gradients of these units. Where the graph of this rank has none of their
    parameters, peers may have some, and wait for this rank in their reductions.

    `is_own`: see `Schedule.begin_backward`."""
    if any(is_accumulated(p) for unit in units for p in unit.parameters):
        return True
    return is_own and any(unit.requiring_grad() for unit in units) and accumulates_all()


def is_accumulated(parameter: Tensor) -> bool:
    """Whether the current backward reaches the parameter and adds to its `grad`."""
    with as_tensors():
        return parameter.requires_grad and will_run(get_gradient_edge(parameter).node)


def accumulates_all() -> bool:
    """Whether the current backward adds to the `grad` of all that its current node leads to: `loss.backward()`, or with
    `inputs=` that are all of these."""
    nodes: list[Node | None] = [torch._C._current_autograd_node()]
    seen = set[Node]()
    while nodes:
        if (node := nodes.pop()) is None or node in seen:
            continue
        seen.add(node)
        if not node.next_functions and not will_run(node):  # a leaf's
            return False
        nodes += [following for following, _ in node.next_functions]
    return bool(seen)


def will_run(node: Node) -> bool:
    """Whether the current backward runs this node, or has run it."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch raises for the inputs of `torch.autograd.grad`
        return False
