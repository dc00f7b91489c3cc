"""Small float64 models and a Trainer for the plugin's tests, which use them on warm ranks and in scripts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

DIM, HIDDEN, BATCH, NUM_BATCHES = 8, 12, 4, 6


class FeedForward(nn.Module):
    """A SwiGLU MLP that plan="auto" fuses."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False, dtype=dtype)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False, dtype=dtype)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Model(L.LightningModule):
    """norm -> MLP -> dropout -> + buffer; the loss multiplies by the parameter `scale`. Records losses and batches."""

    def __init__(self, dropout: float = 0.0, optimizer: str = "adamw", seed: int | None = 0) -> None:
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.norm = nn.LayerNorm(DIM, dtype=torch.float64)
        self.feed_forward = FeedForward()
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.full((DIM,), 1.5, dtype=torch.float64))
        self.register_buffer("offset", torch.randn(DIM, dtype=torch.float64))
        self.optimizer_name = optimizer
        self.losses: list[float] = []
        self.batches: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.feed_forward(self.norm(x))) + self.offset

    def loss(self, batch: Tensor) -> Tensor:
        return ((self(batch) * self.scale - batch) ** 2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.batches.append(batch.clone())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05)
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)


def fixed_data() -> Tensor:
    """Return the same samples in every process, `[BATCH * NUM_BATCHES, DIM]` float64."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(BATCH * NUM_BATCHES, DIM, dtype=torch.float64, generator=generator)


def loader(data: Any = None, **options: Any) -> DataLoader:
    """Return batches of `data`, or of `fixed_data()`, in order unless `options` say otherwise."""
    return DataLoader(fixed_data() if data is None else data, batch_size=BATCH, **options)


class ResumableLoader:
    """Batches of `fixed_data`, from the one at which an earlier run stopped."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        for idx in range(self.position, NUM_BATCHES):
            self.position = (idx + 1) % NUM_BATCHES  # at the end of an epoch: the start of the next
            yield fixed_data()[BATCH * idx : BATCH * (idx + 1)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def trainer(devices: int, strategy: Any, folder: Path | str, **options: Any) -> L.Trainer:
    """Return a quiet Trainer, on the CPU unless `options` say otherwise."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return L.Trainer(devices=devices, strategy=strategy, **{**settings, **options})


def set_torchrun_environment(rank: int, world_size: int) -> None:
    """Set the variables by which Lightning recognizes a process that torchrun has started."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter as a full plain tensor; collective."""
    full = {}
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        full[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return full


def assert_same_weights(left: dict[str, Tensor], right: dict[str, Tensor], rtol: float = 1e-10) -> None:
    """Compare weights, which must be equal up to the order of sums in float64."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")
