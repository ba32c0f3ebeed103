"""Finds parameters that a backward uses once: their 16-bit gradients go into an fp32 bucket without a temporary.

[Note: sums within one backward]
Each edge of the graph that ends at a parameter delivers one term of its gradient. autograd casts every term to
`parameter.grad_dtype` (`validate_outputs` in torch/csrc/autograd/engine.cpp), and then adds (`InputBuffer::add`). So
`grad_dtype = torch.float32` makes several uses of a bf16 parameter add up in fp32, and costs a temporary in fp32 for
each term. One term alone can be cast by the copy into the bucket. So while a backward runs, parameters with one edge
have no `grad_dtype`: terms arrive as they were computed.

No hook runs before terms are added, and nothing shows afterwards how many there were. So edges are counted before the
backward, in the whole graph. This needs the loss: in `optimizer.backward(loss)` it is known. In `loss.backward()` it is
not, as hooks start somewhere inside the graph, and everything is cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from zeroshard.errors import InvalidState
from zeroshard.model.absent import as_tensors
from zeroshard.storage.unit import Unit


class SingleUses:
    """See [Note: sums within one backward].

    Attributes:
        uncast: id -> a parameter that this backward uses once, and its `grad_dtype` outside of it. (By ids, as the
            hash of a tensor is a function in Python.)
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        """`units`: those with gradients."""
        self._widening = [unit for unit in units if unit.spec.widens_gradients]
        self.uncast: dict[int, tuple[Tensor, torch.dtype]] = {}
        self._task: int | None = None  # id of autograd's graph task of this backward

    @contextmanager
    def within(self, loss: Tensor) -> Iterator[None]:
        """A scope for one `loss.backward()` that goes through the whole graph of the loss."""
        self._task = None
        try:
            if self._widening:
                with as_tensors():
                    self._begin(loss)
            yield
        finally:
            self.end()

    def began(self) -> None:
        """Called by the backward's first hook."""
        self._task = torch._C._current_graph_task_id()

    def expect_one_graph(self, parameter: Tensor) -> None:
        """Called for each gradient of a parameter.

        Raises:
            RuntimeError: it comes from a backward that runs inside of this one, whose edges nobody has counted.
        """
        if self.uncast and id(parameter) in self.uncast and torch._C._current_graph_task_id() != self._task:
            raise InvalidState(
                "a hook has run another backward, or torch.autograd.grad, through the model's parameters inside of "
                "optimizer.backward(loss): call loss.backward() in place of optimizer.backward(loss)"
            )

    def end(self) -> None:
        """The backward is over, or has raised."""
        if self.uncast:
            with as_tensors():
                for parameter, dtype in self.uncast.values():
                    if parameter.grad is not None and parameter.grad.dtype != dtype:  # the backward has raised
                        parameter.grad = parameter.grad.to(dtype)
                    parameter.grad_dtype = dtype
            self.uncast.clear()

    def _begin(self, loss: Tensor) -> None:
        cast = {
            id(p): unit.spec.precision.grad for unit in self._widening for p in unit.parameters if _is_hooked_once(p)
        }
        if not cast or loss.grad_fn is None:
            return
        for parameter in _used_once(loss.grad_fn):
            if (dtype := cast.get(id(parameter))) is not None:
                self.uncast[id(parameter)] = parameter, dtype
                parameter.grad_dtype = None


def _is_hooked_once(parameter: nn.Parameter) -> bool:
    """Whether nobody but the engine, which has one hook of each kind, sees its gradients."""
    return (
        parameter.requires_grad
        and len(parameter._backward_hooks or ()) == 1
        and len(parameter._post_accumulate_grad_hooks or ()) == 1
    )


def _used_once(root: Node) -> list[Tensor]:
    """The tensors at which exactly one edge of the graph ends. None of them if the graph contains a function written in
    Python: its backward may run a backward of another graph (that of a reentrant checkpoint does). A compiled graph's
    does not: it was traced through, and adds up the uses in the graph in the dtype of the weights, whatever
    `grad_dtype` is."""
    visited: list[Any] = [root]
    edges: dict[Any, int] = {None: 0}  # None: an edge that leads nowhere
    leaves = []
    for node in visited:  # which grows
        following = node.next_functions
        for other, _ in following:
            if other in edges:
                edges[other] += 1
            else:
                edges[other] = 1
                visited.append(other)
        if not following:
            leaves.append(node)
    of_python = {kind for kind in {*map(type, visited)} if issubclass(kind, BackwardCFunction)}
    if of_python and any(type(node) in of_python and not _is_compiled(node) for node in visited):
        return []
    return [leaf.variable for leaf in leaves if edges[leaf] == 1 and hasattr(leaf, "variable")]


def _is_compiled(node: Any) -> bool:
    """Whether AOTAutograd has made the function, for a graph of `torch.compile`."""
    return bool(node._forward_cls.__module__.startswith("torch._functorch._aot_autograd."))
