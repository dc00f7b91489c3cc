"""A LightningModule around a small Llama, for pipelines in the Trainer, that logs and returns many kinds of values."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from support.models import Llama, LlamaArgs
from weft.lightning import WeftModelParallelStrategy

ARGS = LlamaArgs(n_layers=4, tie_head=True, dtype=torch.float64)
LENGTH = 5
CUTS = {2: ["layers.2"], 4: ["layers.1", "layers.2", "layers.3"]}


class Text(L.LightningModule):
    """Predicts next tokens with a Llama, all in float64."""

    def __init__(self, optimizer: str = "sgd", has_head: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Llama(ARGS)
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64)) if has_head else None
        self.head = nn.Linear(ARGS.vocab_size, 3, dtype=torch.float64) if has_head else None
        self.accuracy = MulticlassAccuracy(num_classes=ARGS.vocab_size, average="micro")
        self.mean = MeanMetric()
        self.optimizer_name = optimizer
        self.losses: list[float] = []
        self.outputs: list[Any] = []

    def logits(self, x: Tensor) -> Tensor:
        return self.model(x)

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.logits(batch["x"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        if self.head is not None:
            loss = loss * self.temperature + self.head(logits).square().mean()
        return loss, logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss, logits = self.loss(batch)
        self.accuracy(logits.flatten(0, 1), batch["y"].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"most": logits.max(), "highest": logits.exp().max()}, reduce_fx="max")
        self.log("least", logits.min(), reduce_fx=torch.min)
        self.log("tokens", float(batch["y"].numel()), reduce_fx="sum")
        return {"loss": loss, "guess": logits.argmax(-1)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        self.outputs.append(outputs["guess"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, logits = self.loss(batch)
        self.mean.update(logits.mean(), weight=len(logits))
        self.log("val_loss", loss, batch_size=len(batch["x"]))
        return loss

    def on_validation_batch_end(self, outputs: Tensor, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch)[0])

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> tuple[Tensor, list[int]]:
        logits = self.logits(batch["x"])
        return logits, [int(guess) for guess in logits[:, -1].argmax(-1)]

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.02)
        decayed = [p for name, p in self.named_parameters() if "norm" not in name]
        norms = [p for name, p in self.named_parameters() if "layers.3.attention_norm" in name]
        optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": norms, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1
        )
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class FlatText(Text):
    """Text without a Llama submodule: the layers are its own children, and its own forward calls them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        llama = self.model
        del self.model
        for name, child in llama.named_children():
            setattr(self, name, child)
        for name, buffer in llama.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return Llama.forward(self, tokens)  # type: ignore[arg-type]

    def logits(self, x: Tensor) -> Tensor:
        return self(x)


def text_loader(num_samples: int = 18, batch_size: int = 6, rank: int = 0, num_ranks: int = 1) -> DataLoader:
    """Return a loader of token batches, or of data-parallel rank `rank`'s samples of each batch."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(ARGS.vocab_size, (num_samples, LENGTH + 1), generator=generator)
    samples = [{"x": each[:-1], "y": each[1:]} for each in tokens]
    if num_ranks > 1:
        rows = batch_size // num_ranks
        samples = [sample for i, sample in enumerate(samples) if i % batch_size // rows == rank]
        batch_size = rows
    return DataLoader(samples, batch_size=batch_size)


def pipeline_strategy(layout: str = "pp2", **options: Any) -> WeftModelParallelStrategy:
    """Return the strategy with the Llama in stages of equal numbers of layers."""
    stages = int(layout[2])
    settings = {"plan": "auto", "pipeline_cuts": CUTS[stages], "pipeline_module": "model", "num_micro_batches": 2}
    return WeftModelParallelStrategy(layout=layout, **{**settings, **options})
