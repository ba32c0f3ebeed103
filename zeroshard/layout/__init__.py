"""Arithmetic on parameters, slots and shards. Nothing here knows of ranks that talk to each other."""
