"""Batches, rules and loss of the Llama that the tests of sequence-parallel plans train."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import weft
from support.models import token_batches
from support.parity import tensor_parallel
from weft.strategy import Plan

TOKENS = token_batches(10, 37)  # 9 tokens: uneven shards, and empty ones on 8 ranks
ROWS = {"layers.*.feed_forward.w1": "column", "layers.*.feed_forward.w3": "column", "layers.*.feed_forward.w2": "row"}
ATTENTION = {
    f"layers.*.attention.w{which}": {"style": "column", "heads": heads}
    for which, heads in (("q", "n_heads"), ("k", "n_kv_heads"))
} | {"layers.*.attention.wv": "column", "layers.*.attention.wo": "row"}


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def sequence_parallel(model: nn.Module, world_size: int, rules: Any = "auto") -> nn.Module:
    return weft.parallelize(model, tensor_parallel(world_size), Plan(rules, sequence_parallel=True))
