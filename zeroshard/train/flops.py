"""Floating-point operations of the model per token, and what a device can do at most: for FLOP/s and MFU of a run.

Counted are the matrix products, as in the appendix B of PaLM (Chowdhery et al., 2022): 6 operations for each element of
a matrix that multiplies activations (2 in forward, 4 in backward), and 12 x layers x width x context for the products
of queries, keys and values, without leaving out what a causal mask hides. What is recomputed in backward is not
counted, so recomputing lowers the MFU.
"""

import torch
from torch import nn

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "V100": 125e12,
}
"""Dense 16-bit operations per second by a part of the device's name, from the makers' data sheets. The first entry that
fits counts."""


def flops_per_token(
    model: nn.Module, *, layers: int, width: int, context: int, active: float = 1.0, tied: bool = False
) -> float:
    """Operations of forward and backward for one token.

    Args:
        model: before it is sharded, or on the meta device.
        layers, width: of the attention; width is that of all heads together.
        active: the share of its experts that a token uses. Experts are parameters with "experts" in their path.
        tied: the embedding is also the matrix of the head, without a `nn.Linear` that shows it.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = tables if tied else {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    looked_up = tables - multiplied
    products = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and id(parameter) not in looked_up:
            products += parameter.numel() * (active if "experts" in name.split(".") else 1.0)
    return 6 * products + 12 * layers * width * context


def peak_flops(device: torch.device, precision: str, given_tflops: float | None) -> float | None:
    """What one device can do at most, in operations per second; None if that is not known.

    `PEAKS` are those of 16-bit products, so nothing is known for fp32 without `given_tflops`.
    """
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
