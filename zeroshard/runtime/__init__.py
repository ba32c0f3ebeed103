"""When they move: the hooks, the schedule of gathers and reductions, and the life of it all."""
