"""Where the bytes of a unit lie: flat buffers, weights, gradients, main."""
