"""Cross-entropy with the classes sharded over a group, from logits or fused with the output matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.nn.linear import _init_like_linear
from weft.nn.shard import group_size_and_rank, shard_range


class VocabParallelCrossEntropy(nn.Module):
    """This rank's logits `[..., v]`, targets `[...]` among all classes -> nn.CrossEntropyLoss of the unsharded logits.

    Args:
        vocab_size: the number of classes of all ranks together; this rank's logits are its torch.chunk shard of them.
        group_name: c10d name of the group; "" for a group of one.
        ignore_index, label_smoothing, reduction: those of nn.CrossEntropyLoss.

    The loss is in float32 (float64 for float64 logits).
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        group_name: str,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group_name = group_name
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.vocab_start, self.num_local = shard_range(vocab_size, *group_size_and_rank(group_name))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        if logits.size(-1) != self.num_local:
            raise ValueError(
                f"VocabParallelCrossEntropy: got {logits.size(-1)} logits per token and has {self.num_local} of "
                f"{self.vocab_size} classes on this rank; pass the output of a ColumnLinear with {self.vocab_size} "
                "output features, without padding."
            )
        return torch.ops.weft.vocab_parallel_cross_entropy(
            logits,
            target,
            self.vocab_start,
            group_name=self.group_name,
            vocab_size=self.vocab_size,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, label_smoothing={self.label_smoothing}, reduction={self.reduction!r}"


class VocabParallelLinearCrossEntropy(VocabParallelCrossEntropy):
    """Hidden states `[..., dim]`, targets `[...]` among all classes -> the loss, without storing all logits at once.

    Args:
        dim: size of the last dim of the hidden states.
        vocab_size, group_name, ignore_index, label_smoothing, reduction: as in VocabParallelCrossEntropy.
        device, dtype: of the parameter.

    Parameter `weight [rows_local, dim]`, this rank's torch.chunk shard of the rows of the output matrix.
    """

    def __init__(
        self,
        dim: int,
        vocab_size: int,
        *,
        group_name: str,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            vocab_size,
            group_name=group_name,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
        self.dim = dim
        self.weight = nn.Parameter(torch.empty(self.num_local, dim, device=device, dtype=dtype))
        _init_like_linear(self.weight, None, dim)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return torch.ops.weft.vocab_parallel_linear_cross_entropy(
            x,
            self.weight,
            target,
            self.vocab_start,
            group_name=self.group_name,
            vocab_size=self.vocab_size,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        return f"{self.dim}, {super().extra_repr()}"
