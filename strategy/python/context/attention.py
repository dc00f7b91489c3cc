"""Rules of attention: by the ring, by Ulysses or by both, or with the keys and values of all tokens."""

from __future__ import annotations

import math
import types
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.strategy.context.layout import Place
from weft.strategy.context.masks import CausalMask, causal_mask_of
from weft.strategy.context.products import drop
from weft.strategy.context.sharded_sequence import GATHER, ShardedSequence, rule, shard, wrap

Attention = Literal["ring", "ulysses", "ring_ulysses"]
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@rule(F.scaled_dot_product_attention)
def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    named: dict[str, Any] = dict(zip(_NAMES, args, strict=False)) | kwargs
    query, key, value = (named[name] for name in _NAMES[:3])
    if not isinstance(query, ShardedSequence) or query.place.dim != query.dim() - 2 or query.place.is_joined:
        return GATHER
    layout = query.place.layout
    alike = all(isinstance(each, ShardedSequence) and each.place == query.place for each in (key, value))
    if (
        alike
        and _is_supported(query.shape, key.shape, value.shape)
        and not named.get("dropout_p", 0.0)
        and layout.order is not None
    ):
        given, scale = named.get("attn_mask"), named.get("scale")
        if given is None:
            mask = CausalMask(None, None) if named.get("is_causal") else None
            return _sharded(query, key, value, mask, scale)
        found = None if isinstance(given, ShardedSequence) else causal_mask_of(given, layout.size)
        if found is not None:
            return _sharded(query, key, value, found, scale)
    return _with_all_keys(query, named)


def _calling_functions_of_sequences(function: Any) -> Any:
    """Return a function of torch that calls others, without its check for tensors that are no plain ones."""
    namespace = {**function.__globals__, "has_torch_function": lambda _: False}
    made = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_multi_head_attention = _calling_functions_of_sequences(F.multi_head_attention_forward)


@rule(F.multi_head_attention_forward)
def _attention_of_module(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute nn.MultiheadAttention's function, in which linear layers and attention have rules."""
    return _multi_head_attention(*args, **kwargs)


def _is_supported(query: torch.Size, key: torch.Size, value: torch.Size) -> bool:
    """Return whether the operators take these shapes: they do not broadcast."""
    return len(query) == 4 and query[0] == key[0] == value[0] and key[1] == value[1] and query[1] % key[1] == 0


def _sharded(query: Any, key: Any, value: Any, mask: CausalMask | None, scale: float | None) -> Any:
    layout = query.place.layout
    options: dict[str, Any] = {
        "group_name": layout.group_name,
        "is_causal": mask is not None,
        "window": None if mask is None else mask.window,
        "document_offsets": None if mask is None else mask.document_offsets,
        "scale": scale,
        "sequence_size": layout.size,
    }
    # The operators support one head size: smaller heads are padded by zeros, which add nothing.
    shards = [query.local, key.local, value.local]
    sizes = [each.shape[-1] for each in shards]
    if len(set(sizes)) > 1:
        options["scale"] = scale if scale is not None else 1 / math.sqrt(sizes[0])
        shards = [F.pad(each, (0, max(sizes) - each.shape[-1])) for each in shards]
    if layout.grids:
        heads, kv_heads = shards[0].shape[1], shards[1].shape[1]
        grid = next(each for each in layout.grids if each.takes(heads, kv_heads))
        options |= {"group_name": grid.ulysses_group_name, "ring_group_name": grid.ring_group_name}
        out = torch.ops.weft.ulysses_attention(*shards, **options, order=layout.order)
    elif layout.order == "contiguous":
        out = torch.ops.weft.ulysses_attention(*shards, **options)
    else:
        out = torch.ops.weft.ring_attention(*shards, **options, order=layout.order)
    return wrap(out[..., : sizes[2]], query.place)


def _with_all_keys(query: ShardedSequence, named: dict[str, Any]) -> Any:
    """Compute this rank's queries with all keys and values, for masks, dropout and slices of sequences."""
    key, value = (each.full() if isinstance(each, ShardedSequence) else each for each in (named["key"], named["value"]))
    mask, place = named.get("attn_mask"), query.place
    if mask is not None and mask.dim() > 1:
        rows = place.at(mask.dim() - 2)
        if isinstance(mask, ShardedSequence):
            mask = mask.local if mask.place == rows else mask.full()
        if not isinstance(named["attn_mask"], ShardedSequence) or mask is not named["attn_mask"].local:
            mask = mask if mask.shape[-2] == 1 else shard(mask, rows)
    if named.get("is_causal"):
        own = place.layout.positions(query.device)
        causal = own[:, None] >= torch.arange(key.shape[-2], device=query.device)
        mask = (
            causal
            if mask is None
            else mask & causal
            if mask.dtype == torch.bool
            else mask.masked_fill(~causal, -math.inf)
        )
    own_query = query.local
    if not named.get("enable_gqa"):  # torch does not broadcast an empty query
        own_query = own_query.expand(*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), *own_query.shape[-2:])
        place = place.at(own_query.dim() - 2)
    p = named.get("dropout_p", 0.0)
    options: dict[str, Any] = {name: named[name] for name in ("scale", "enable_gqa") if name in named}
    if not p:
        out = F.scaled_dot_product_attention(own_query, key, value, attn_mask=mask, **options)
        if mask is not None and mask.requires_grad and own_query.numel() == 0:
            # torch then leaves the mask out of the graph, whose collectives the other ranks wait for.
            out = out + mask.sum() * 0
        return wrap(out, place)
    return wrap(_with_dropout(own_query, key, value, mask, place, p, options), place)


def _with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, place: Place, p: float, options: dict[str, Any]
) -> Tensor:
    """Compute attention with dropout of the scores, whose mask follows from the positions of the queries."""
    num_heads = query.shape[-3]
    if options.get("enable_gqa"):
        key, value = (each.repeat_interleave(num_heads // each.shape[-3], -3) for each in (key, value))
    scale = options.get("scale")
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    seed = int(torch.randint(0, 1 << 62, (), dtype=torch.int64, device=torch.device("cpu")))
    return drop(weights, place.at(weights.dim() - 2), p, seed) @ value
