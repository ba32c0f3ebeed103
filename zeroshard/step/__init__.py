"""The optimizer step: the agreement between ranks, and the steppers that update main."""
