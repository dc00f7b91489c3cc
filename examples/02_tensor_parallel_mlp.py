"""Lightning's documented feed-forward, tensor-parallel by one argument of the Trainer.

    python examples/02_tensor_parallel_mlp.py [--devices 2] [--epochs 10]

The LightningModule has no code for weft: no configure_model, no mesh, no plan. strategy="weft" finds the
w1/w2/w3 block by itself, shards it over the devices and runs it as one operator. Lightning starts the other
processes (on CPU a "device" is a process). The last lines show how the parameters are sharded.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import weft.lightning  # registers the strategy "weft"
import weft.strategy

DIM = 256


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class RandomVectors(Dataset[Tensor]):
    """`length` vectors `[dim]`, the same in every process."""

    def __init__(self, dim: int, length: int) -> None:
        self.data = torch.randn(length, dim, generator=torch.Generator().manual_seed(42))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, idx: int) -> Tensor:
        return self.data[idx]


class LitFeedForward(L.LightningModule):
    """Trains the feed-forward to reproduce its input."""

    def __init__(self) -> None:
        super().__init__()
        self.model = FeedForward(DIM, DIM)

    def training_step(self, batch: Tensor) -> Tensor:
        loss = F.mse_loss(self.model(batch), batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def train_dataloader(self) -> DataLoader[Tensor]:
        # The ranks of a tensor-parallel group compute one batch together, so each rank loads the same batches.
        return DataLoader(RandomVectors(DIM, 64), batch_size=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="weft",
        max_epochs=args.epochs,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = LitFeedForward()
    trainer.fit(module)

    num_elements = sum(parameter.numel() for parameter in module.parameters())
    if trainer.is_global_zero:
        print(weft.strategy.report(module))
        local = sum(parameter.to_local().numel() for parameter in module.parameters())
        print(
            f"devices {args.devices}: {local} of {num_elements} parameters per rank, "
            f"loss {trainer.callback_metrics['loss']:.6f}"
        )


if __name__ == "__main__":
    main()
