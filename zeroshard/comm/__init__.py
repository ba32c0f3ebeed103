"""Collectives between ranks, the transports that move their bytes, and checks that the ranks agree."""
