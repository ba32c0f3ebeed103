"""LARS: SGD with momentum whose gradient is, for each parameter, scaled to the norm of the parameter."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroshard.optim.layerwise import LayerwiseOptimizer, expect, learning_rate, norm, trust_ratio


class Lars(LayerwiseOptimizer):
    """You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017), Algorithm 1.

        d = η ‖x‖ / (‖g‖ + λ ‖x‖ + ε) · (g + λ x)  norms of the whole parameter; the ratio is 1 where ‖x‖ is zero
        b = μ b + d                                momentum_buffer
        x = x - lr · b

    The learning rate is applied as in `torch.optim.SGD`, after the momentum; the paper has it before (b = μ b + lr d,
    x = x - b). With a constant learning rate the two are the same; under a schedule the paper's steps lag behind it.

    Args:
        params: parameters, or param groups of them.
        lr: learning rate.
        momentum: μ.
        weight_decay: λ, which is part of the ratio.
        trust_coefficient: η.
        eps: ε, against overflow if the gradient is almost zero; the paper has none.
        adapt: scale by the ratio. A param group with False takes plain SGD steps, as is usual for biases and
            normalization weights.
        maximize: ascend.

    Raises:
        ValueError: a hyper-parameter out of its range, NaN included.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        adapt: bool = True,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "adapt": adapt,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def check(self, group: dict[str, Any]) -> None:
        expect("lr", group["lr"])
        expect("momentum", group["momentum"], below=1.0)
        expect("weight_decay", group["weight_decay"])
        expect("trust_coefficient", group["trust_coefficient"])
        expect("eps", group["eps"])

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        update = grad.add(weight, alpha=decay)
        if group["adapt"]:
            weight_norm = norm(weight)
            scale = norm(grad).add_(weight_norm, alpha=decay).add_(group["eps"])
            update.mul_(trust_ratio(group["trust_coefficient"] * weight_norm, scale))
        if momentum:
            if "momentum_buffer" in state:
                update = state["momentum_buffer"].mul_(momentum).add_(update)
            else:
                state["momentum_buffer"] = update.clone()
        weight.sub_(update * learning_rate(group))
