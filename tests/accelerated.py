"""Accelerate's training loop, as in its documentation, for all tests of it."""

from __future__ import annotations

from typing import Any

from tests.kit import loss_of

MICRO_BATCHES, MAX_NORM = 2, 0.5


class AcceleratedLoop:
    """The loop of what `accelerator.prepare` has returned: a model of tokens, and batches of them."""

    accelerator: Any
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any

    def train(self, steps: int, skip: int = 0) -> list[float]:
        """The loss of each micro-batch. `skip`: so many steps have been made already."""
        losses, count = [], 0
        for (tokens,) in self.accelerator.skip_first_batches(self.loader, skip * MICRO_BATCHES):
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, tokens)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
            count += self.accelerator.sync_gradients
            if count == steps:
                break
        return losses
