"""The models of benchmarks/tune.py: LightningModules with random weights, and the batch of one data-parallel rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning as L
import torch
import torch.nn.functional as F
from common import FeedForward
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from model import ModelArgs, Transformer


class _Task(L.LightningModule):
    """Builds its model in `configure_model`, and trains it with AdamW."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self._build = build
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = self._build()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _Text(_Task):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class _HuggingFace(_Task):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


class _Images(_Task):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)


class _Regression(_Task):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).square().mean()


def text_small() -> L.LightningModule:
    return _Text(lambda: Transformer(ModelArgs(dim=256, n_layers=4, n_heads=8, hidden_dim=768)))


def text_wide() -> L.LightningModule:
    return _Text(lambda: Transformer(ModelArgs(dim=1024, n_layers=2, n_heads=16, hidden_dim=3072)))


def llama() -> L.LightningModule:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
    return _HuggingFace(lambda: _language_model("llama", vocab_size=4096, max_position_embeddings=256, **sizes))


def gpt2() -> L.LightningModule:
    sizes = {"n_embd": 512, "n_layer": 4, "n_head": 8, "n_positions": 256}
    return _HuggingFace(lambda: _language_model("gpt2", vocab_size=4096, **sizes))


def _language_model(family: str, **sizes: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, use_cache=False))
    return model


def resnet50() -> L.LightningModule:
    from torchvision.models import resnet50 as build

    return _Images(lambda: build(num_classes=10))


def mlp() -> L.LightningModule:
    return _Regression(lambda: FeedForward(1024, 4096))


def tokens(num_rows: int, num_tokens: int, vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (num_rows, num_tokens), generator=torch.Generator().manual_seed(0))


def text_batch() -> Tensor:
    return tokens(2, 129, 256)


def language_batch() -> Tensor:
    return tokens(2, 128, 4096)


def image_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)), torch.arange(4)


def vector_batch() -> Tensor:
    return torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))


# By name: the function that builds the module, and the function that makes the batch of a rank.
MODELS: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], Any]]] = {
    "text_small": (text_small, text_batch),
    "text_wide": (text_wide, text_batch),
    "llama": (llama, language_batch),
    "gpt2": (gpt2, language_batch),
    "resnet50": (resnet50, image_batch),
    "mlp": (mlp, vector_batch),
}
