"""The memory of a unit: flat buffers, weights, gradients, main."""
