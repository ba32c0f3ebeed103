"""LAMB: AdamW whose step has, for each parameter, the norm of the parameter times the learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroshard.optim.layerwise import LayerwiseOptimizer, expect, learning_rate, norm, trust_ratio


class Lamb(LayerwiseOptimizer):
    """You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (ICLR 2020), Algorithm 2.

        m = β1 m + (1 - β1) g                      exp_avg
        v = β2 v + (1 - β2) g²                     exp_avg_sq
        u = m / (1 - β1^t)  /  (sqrt(v / (1 - β2^t)) + ε)  +  λ x
        x = x - lr · ‖x‖ / ‖u‖ · u                 norms of the whole parameter; the ratio is 1 where either is zero

    The paper's φ(‖x‖) is ‖x‖.

    Args:
        params: parameters, or param groups of them.
        lr: learning rate; with `adapt`, the norm of a step relative to the norm of the parameter.
        betas: (β1, β2).
        eps: ε.
        weight_decay: λ, decoupled from the moments.
        adapt: scale by the ratio. A param group with False takes plain AdamW steps, as the paper's own code does for
            biases and normalization weights.
        maximize: ascend.

    Raises:
        ValueError: a hyper-parameter out of its range, NaN included.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        adapt: bool = True,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adapt": adapt,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def check(self, group: dict[str, Any]) -> None:
        expect("lr", group["lr"])
        expect("betas[0]", group["betas"][0], below=1.0)
        expect("betas[1]", group["betas"][1], below=1.0)
        expect("eps", group["eps"])
        expect("weight_decay", group["weight_decay"])

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        step = state["step"].item()
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1**step)).div_(denominator).add_(weight, alpha=group["weight_decay"])
        if group["adapt"]:
            update.mul_(trust_ratio(norm(weight), norm(update)))
        weight.sub_(update.mul_(learning_rate(group)))
