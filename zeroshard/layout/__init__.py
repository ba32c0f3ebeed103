"""Arithmetic on parameters, slots and shards, without any communication."""
