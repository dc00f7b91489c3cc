"""Plans with rule options for the small Llama, its training batches and its loss."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from support.models import token_batches

TOKENS = token_batches(4, 37)
ATTENTION, MLP, NORM = "layers.*.attention", "layers.*.feed_forward", "layers.*.ffn_norm"


def rules(**options: Any) -> dict[str, Any]:
    plan = {ATTENTION: "attention", MLP: "column_row_mlp", NORM: "replicate", "tok_embeddings": "vocab_embedding"}
    return {pattern: {"style": style, **options} for pattern, style in plan.items()}


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
