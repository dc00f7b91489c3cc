"""Recognises masks of causal attention with a window, or of documents, which the attention operators compute faster.

Libraries such as Hugging Face's transformers pass a full mask `[batch, 1, tokens, tokens]` where a sliding window or
the boundaries of documents would do. With these, ring attention moves only keys and values that are attended to.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from weft.strategy.context.sharded_sequence import kept_with


@dataclasses.dataclass(frozen=True)
class CausalMask:
    """A causal mask: a query attends to its own key and those before it, within a window and its document.

    window: the number of keys; None: all.
    document_offsets: the positions at which documents begin, int64 `[documents]` or `[batch, documents]`, on the CPU;
        None: there is one document.
    """

    window: int | None
    document_offsets: Tensor | None


def causal_mask_of(mask: Tensor, num_tokens: int) -> CausalMask | None:
    """Return what a mask `[tokens, tokens]` or `[batch, 1, tokens, tokens]` says, or None.

    The mask is one of bool, or of numbers that are 0 or -inf.

    A mask is compared once in a forward: the result is kept with the tensor that it is a view of.
    """
    has_shape = mask.dim() in (2, 4) and (mask.dim() == 2 or mask.shape[1] == 1)
    is_mask = mask.dtype == torch.bool or (mask.is_floating_point() and not mask.requires_grad)
    if not is_mask or not has_shape or tuple(mask.shape[-2:]) != (num_tokens, num_tokens):
        return None
    found: CausalMask | None = kept_with(mask, ("causal mask",), lambda: _compare(mask))
    return found


def _compare(mask: Tensor) -> CausalMask | None:
    rows = (mask[None] if mask.dim() == 2 else mask[:, 0]).detach()
    if rows.is_floating_point():
        is_zero = rows == 0
        if not bool((is_zero | (rows == -torch.inf)).all()):
            return None
        rows = is_zero
    positions = torch.arange(rows.shape[-1], device=rows.device)
    first = rows.byte().argmax(-1)  # of the keys that a query attends to, `[batch, tokens]`
    is_band = (positions >= first[..., None]) & (positions <= positions[:, None])
    if not torch.equal(is_band, rows):
        return None
    begins = first == positions  # a window of one key has no documents
    window = int((positions - first).max()) + 1
    starts = torch.where(begins, positions, 0).cummax(-1).values if window > 1 else torch.zeros_like(first)
    if torch.equal(first, starts):
        window_or_none = None
    elif torch.equal(first, torch.maximum(starts, positions - window + 1)):
        window_or_none = window
    else:
        return None
    return CausalMask(window_or_none, _offsets(begins.cpu()) if bool(starts.any()) else None)


def _offsets(begins: Tensor) -> Tensor:
    """Return the positions of each row's documents; rows with fewer documents repeat the number of tokens."""
    num_tokens = begins.shape[-1]
    positions = torch.arange(num_tokens).expand_as(begins)
    offsets = torch.where(begins, positions, num_tokens).sort(-1).values[:, : int(begins.sum(-1).max())]
    return offsets[0] if len(offsets) == 1 else offsets
