"""Random calls of the attention operators on sharded sequences."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import ClassVar

import torch

from ops.fuzz import rules
from ops.fuzz.draws import Draw, HeadTail, Placement, RankInGroup, Sharded, Value
from ops.fuzz.linears import SIZES
from ops.fuzz.operator import EdgeCaseOptions, Operator, Options, Values
from ops.fuzz.rules import ExpectedError, MustMatchAcrossRanks, Violations

INPUTS = ("query", "key", "value")
WINDOWS = (None, -1, 0, 1)


class SequenceAttention(Operator):
    """Attention of query, key and value, whose tokens are sharded."""

    optional = ("document_offsets",)
    multiple_of_ranks = False  # whether the number of query heads must be a multiple of the number of ranks
    orders: ClassVar[tuple[str, ...]]  # one of them is drawn
    edge_case_options: ClassVar[EdgeCaseOptions] = {
        "sequence_size": SIZES,
        "order": ("striped", "", "contiguous"),
        "window": WINDOWS,
    }

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        kv_heads = draw.random.randint(1, 3)
        heads = kv_heads * draw.random.randint(1, 3) * (draw.num_ranks if self.multiple_of_ranks else 1)
        batch, tokens, head_dim = draw.size(), draw.size() * draw.random.choice((1, 1, 2, 4)), draw.size()
        dtype = draw.dtype()
        values = {
            name: draw.values((batch, heads if name == "query" else kv_heads, tokens, head_dim), dtype)
            for name in INPUTS
        }
        options: Options = {"is_causal": draw.chance(0.6), "scale": draw.random.choice((None, 0.5))}
        shape = (draw.random.randint(0, 4),) if draw.chance(0.5) else (batch, draw.random.randint(0, 4))
        offsets = torch.randint(0, tokens + 1, shape, generator=draw.generator).sort().values
        values["document_offsets"] = offsets if draw.chance(0.4) else None
        has_window = options["is_causal"] and draw.chance(0.4)
        options["window"] = draw.random.randint(1, 2 + tokens) if has_window else None
        options |= {"sequence_size": draw.optional_size(tokens), "order": draw.random.choice(self.orders)}
        if options["sequence_size"] is None and tokens % (2 * draw.num_ranks):
            options["sequence_size"] = tokens
        return values, options

    def placement(self, options: Options) -> Placement:
        return HeadTail(2) if options["order"] == "head_tail" else Sharded(2)

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {name: self.placement(options) for name in INPUTS}

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (self.placement(options),)

    def result_dtype(self, values: Values) -> torch.dtype:
        return values["query"].dtype

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        query = given.query
        yield from rules.floating(query, "query")
        if given.window is not None and (given.window <= 0 or not given.is_causal):
            yield ExpectedError(ValueError, f"got window {given.window} with is_causal ")
        if given.document_offsets is not None and given.query.dim() == 4:
            yield from self._document_offsets(given, rank_in_group)
        if query.dim() != 4:
            yield ExpectedError(ValueError, "got query of shape ")
        for name in ("key", "value"):
            tensor = getattr(given, name)
            if tensor.dtype != query.dtype:
                yield ExpectedError(TypeError, f"got {name} of dtype ")
            yield from rules.one_device(query, tensor, name)
            if tensor.dim() != 4 or (query.dim() == 4 and self._others(tensor) != self._others(query)):
                yield ExpectedError(ValueError, f"got {name} of shape ")
        if all(getattr(given, name).dim() == 4 for name in INPUTS):
            heads, kv_heads, value_heads = (getattr(given, name).size(1) for name in INPUTS)
            if kv_heads != value_heads or kv_heads == 0 or heads % kv_heads:
                yield ExpectedError(ValueError, f"got {heads} query heads with {kv_heads} heads of key")
            if self.multiple_of_ranks and heads % rank_in_group.num_ranks:
                yield ExpectedError(ValueError, f"got {heads} query heads on {rank_in_group.num_ranks} ranks")
        if given.order not in ("head_tail", "contiguous"):
            yield ExpectedError(ValueError, f"got order '{given.order}'")
        elif given.order == "contiguous" and query.dim() == 4:
            yield from rules.unsharded_size(query, 2, given.sequence_size, rank_in_group, "sequence_size", "query")
        elif query.dim() == 4:
            yield from self._head_tail_size(given, rank_in_group)

    @staticmethod
    def _head_tail_size(given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        own_size, size = given.query.size(2), given.sequence_size
        if size is None:
            yield MustMatchAcrossRanks("query along 2", own_size)
            if own_size % 2 and rank_in_group.num_ranks > 1:
                yield ExpectedError(ValueError, "in head_tail order without sequence_size")
        elif size < 0 or own_size != sum(map(len, rank_in_group.head_tail_chunks(size))):
            where = f"on rank {rank_in_group.rank} of {rank_in_group.num_ranks} with sequence_size {size}"
            yield ExpectedError(ValueError, f"got query of shape {list(given.query.shape)} {where}")

    @staticmethod
    def _document_offsets(given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        offsets, query = given.document_offsets, given.query
        is_integer = offsets.dtype in (torch.int32, torch.int64)
        if not is_integer or offsets.dim() not in (1, 2) or (offsets.dim() == 2 and len(offsets) != len(query)):
            yield ExpectedError(ValueError, "got document_offsets of dtype ")
            return
        if offsets.device.type not in ("cpu", query.device.type):
            yield ExpectedError(ValueError, f"got document_offsets on {offsets.device} with query on ")
        if offsets.is_meta:
            return
        size = query.size(2) * rank_in_group.num_ranks if given.sequence_size is None else given.sequence_size
        positions = offsets.cpu()
        if ((positions < 0) | (positions > size)).any() or (positions.diff() < 0).any():
            yield ExpectedError(ValueError, "got document_offsets [")

    @staticmethod
    def _others(tensor: torch.Tensor) -> tuple[int, ...]:
        return (tensor.size(0), *tensor.shape[2:])

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        query = values.query
        copies = query.size(1) // values.key.size(1)
        key, value = (each.repeat_interleave(copies, 1) for each in (values.key, values.value))
        scale = 1 / math.sqrt(max(query.size(-1), 1)) if options.scale is None else options.scale
        scores = query @ key.transpose(2, 3) * scale
        mask = torch.ones(scores.shape[2:], dtype=torch.bool)
        if options.is_causal:
            mask = mask.tril()
        if options.window is not None:
            mask = mask.triu(1 - options.window)
        offsets = values.document_offsets
        if offsets is not None:
            rows = offsets.cpu().expand(query.size(0), offsets.size(-1)).unsqueeze(-1)
            documents = (rows <= torch.arange(query.size(2))).sum(-2)  # [batch, tokens]
            mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        scores = scores.masked_fill(~mask, -math.inf)
        return (scores.softmax(-1) @ value,)


class RingAttention(SequenceAttention):
    name = "ring_attention"
    orders = ("head_tail", "head_tail", "contiguous")


class UlyssesAttention(SequenceAttention):
    name = "ulysses_attention"
    orders = ("head_tail", "contiguous", "contiguous")
    multiple_of_ranks = True
