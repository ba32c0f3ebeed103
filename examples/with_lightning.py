"""The Trainer of Lightning with a sharded module: `strategy="zeroshard_zero3"`. Needs lightning.

python examples/with_lightning.py            Lightning starts the processes itself: devices=2
"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zeroshard.integrations.lightning  # noqa: F401  registers the strategies

DEVICES = 2


class Sines(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(960, 16)
    loader = DataLoader(TensorDataset(x, x.sin().sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
    module = Sines()
    trainer = lightning.Trainer(
        strategy="zeroshard_zero3",
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=DEVICES,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, loader)
    print(f"rank {trainer.global_rank}: loss {module.losses[0]:.3f} at first, {module.losses[-1]:.3f} at last")
