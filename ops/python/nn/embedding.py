"""VocabParallelEmbedding: nn.Embedding with its rows sharded over a group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.nn.shard import group_size_and_rank, shard_range


class VocabParallelEmbedding(nn.Module):
    """Token ids `[...]` (int64 or int32, in the full vocabulary) -> `[..., embedding_dim]`.

    Args:
        num_embeddings: rows of the unsharded table; this rank holds its torch.chunk shard of them.
        embedding_dim: size of a row.
        group_name: c10d name of the group; "" for a group of one.
        device, dtype: of the parameter.

    Parameter `weight [rows_local, embedding_dim]`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group_name: str,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_ranks, rank = group_size_and_rank(group_name)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.group_name = group_name
        self.vocab_start, rows = shard_range(num_embeddings, num_ranks, rank)
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim, device=device, dtype=dtype))
        with torch.no_grad():
            self.weight.normal_()

    def forward(self, input: Tensor) -> Tensor:
        return torch.ops.weft.vocab_parallel_embedding(
            input,
            self.weight,
            self.vocab_start,
            group_name=self.group_name,
            vocab_size=self.num_embeddings,
        )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
