"""The batch of a dry run: the one that was given or that the model offers, with as many rows as a layout gives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.strategy.comparison import subject
from weft.strategy.pipeline.micro_batches import map_tensors


def batch_of(model: nn.Module, given: Any) -> tuple[Any, bool]:
    """Return (the batch, whether it is for the forward); without a batch, the first of `train_dataloader`, if any.

    Raises:
        ValueError: there is no batch, or `train_dataloader` has several loaders.
    """
    if given is None and subject.is_lightning_module(model):
        definer = next((cls for cls in type(model).__mro__ if "train_dataloader" in vars(cls)), object)
        if definer.__name__ not in ("object", "DataHooks"):  # the hook of Lightning's base class raises an error
            module: Any = model
            loader = module.train_dataloader()
            if isinstance(loader, (dict, list, tuple)):
                raise ValueError(
                    f"estimate: {type(model).__name__}.train_dataloader returns a {type(loader).__name__} of loaders; "
                    "pass the batch (--batch)."
                )
            return next(iter(loader)), False
    return subject.batch_of(model, given, 1)


def num_rows_of(batch: Any) -> int:
    """Return the size of the first dim of the batch's first tensor; 1 if it has no tensor with dims."""
    sizes: list[int] = []

    def add(tensor: Tensor) -> Tensor:
        sizes.extend(tensor.shape[:1])
        return tensor

    map_tensors(add, batch)
    return sizes[0] if sizes else 1


def num_bytes_of(batch: Any) -> int:
    """Return the bytes of all tensors of a batch."""
    sizes: list[int] = []

    def add(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(add, batch)
    return sum(sizes)


def with_rows(batch: Any, num_rows: int) -> Any:
    """Return a batch with `num_rows` rows in all tensors that have as many rows as the first: repeated, or the first.

    Tensors of other sizes stay as they are.
    """
    before = num_rows_of(batch)
    if num_rows == before:
        return batch

    def resized(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != before:
            return tensor
        return tensor.index_select(0, torch.arange(num_rows).remainder(before))

    return map_tensors(resized, batch)
