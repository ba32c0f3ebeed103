"""The ranks: their process groups and mesh, and the memory and the pipes that those of one host share."""
