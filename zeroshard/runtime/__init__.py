"""When weights and gradients move: the hooks, the schedule of gathers and reductions, and the life cycle."""
