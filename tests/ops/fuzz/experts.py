"""Random calls of the operators of a mixture of experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from ops.experts import linear_of_experts
from ops.fuzz import rules
from ops.fuzz.draws import PER_RANK, REPLICATED, Draw, Placement, RankInGroup, Value
from ops.fuzz.operator import EdgeCaseOptions, Operator, Options, Values
from ops.fuzz.rules import ExpectedError, MustMatchAcrossRanks, Undetectable, Violations

INTEGERS = (torch.int64, torch.int32)


def _int64(tensor: Tensor, name: str) -> Violations:
    if tensor.dtype != torch.int64:
        yield ExpectedError(TypeError, f"got {name} of dtype ")


def _has_sum(counts: Tensor, total: int) -> bool:
    return bool((counts >= 0).all()) and int(counts.sum()) == total


class GroupedLinear(Operator):
    """An operator without a group: all ranks compute the same."""

    name = "grouped_linear"
    optional = ("bias",)
    has_group = False

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        dtype, experts, width, out = draw.dtype(), draw.size(), draw.size(), draw.size()
        counts = [draw.size() if draw.chance(0.7) else 0 for _ in range(experts)]
        return {
            "x": draw.values((sum(counts), width), dtype),
            "weight": draw.values((experts, out, width), dtype, 0.5),
            "counts": torch.tensor(counts, dtype=torch.int64),
            "bias": draw.maybe((experts, out), dtype),
        }, {}

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        x, weight, counts, bias = given.x, given.weight, given.counts, given.bias
        yield from rules.floating(x, "x")
        if x.dim() != 2:
            yield ExpectedError(ValueError, "got x of shape ")
        yield from rules.like(x, weight, "weight")
        yield from rules.like(x, bias, "bias")
        if weight.dim() != 3 or (x.dim() == 2 and weight.size(2) != x.size(1)):
            yield ExpectedError(ValueError, "got weight of shape ")
        yield from _int64(counts, "counts")
        yield from rules.one_device(x, counts, "counts")
        if counts.dim() != 1 or (weight.dim() > 0 and counts.size(0) != weight.size(0)):
            yield ExpectedError(ValueError, "got counts of shape ")
        elif counts.dtype == torch.int64 and not counts.is_meta and x.dim() > 0 and not _has_sum(counts, x.size(0)):
            yield ExpectedError(ValueError, "got counts [")
        if bias is not None and bias.shape != weight.shape[:2]:
            yield ExpectedError(ValueError, "got bias of shape ")

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (REPLICATED,)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        return (linear_of_experts(values.x, values.weight, values.counts, values.bias),)

    def run(self, arguments: dict[str, object]) -> tuple[Tensor, ...]:
        return super().run({name: value for name, value in arguments.items() if name != "group_name"})


def _draw_ids(draw: Draw) -> tuple[list[Tensor], int]:
    """Return the experts of each rank's tokens, and the number of experts; ranks may have different numbers of both."""
    num_experts = max(1, draw.size())
    shapes = [(draw.size(), draw.random.randint(0, 3)) for _ in range(draw.num_ranks)]
    highest = draw.random.randint(1, num_experts)  # the other experts get no rows
    ids = [torch.randint(highest, shape, generator=draw.generator) for shape in shapes]
    return ids, num_experts


class MoeDispatch(Operator):
    name = "moe_dispatch"
    edge_case_options: ClassVar[EdgeCaseOptions] = {"num_experts": (-1, 0, 1, 2, 5, 9)}

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        ids, num_experts = _draw_ids(draw)
        dtype, width = draw.dtype(), draw.size()
        integers = draw.random.choice(INTEGERS)
        x = [draw.values((len(each), width), dtype) for each in ids]
        return {"x": x, "expert_ids": [each.to(integers) for each in ids]}, {"num_experts": num_experts}

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"x": PER_RANK, "expert_ids": PER_RANK}

    def options_of(self, values: Values, options: Options, rank_in_group: RankInGroup) -> Options:
        """Return the ids of all ranks; none if a rank raises without reading them."""
        pairs = zip(values["x"], values["expert_ids"], strict=True)
        are_valid = all(
            x.dim() == ids.dim() == 2 and len(x) == len(ids) and ids.dtype in INTEGERS and x.device == ids.device
            for x, ids in pairs
        )
        return options | {
            "all_ids": [each for ids in values["expert_ids"] for each in ids.flatten().tolist()] if are_valid else []
        }

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        x, ids = given.x, given.expert_ids
        yield from rules.floating(x, "x")
        if x.dim() != 2:
            yield ExpectedError(ValueError, "got x of shape ")
        else:
            yield MustMatchAcrossRanks("features", x.size(1))
        yield from rules.integers(ids, "expert_ids")
        yield from rules.one_device(x, ids, "expert_ids")
        if ids.dim() != 2 or (x.dim() > 0 and ids.size(0) != x.size(0)):
            yield ExpectedError(ValueError, "got expert_ids of shape ")
        if given.num_experts < 1:
            yield ExpectedError(ValueError, f"got num_experts {given.num_experts}")
        elif any(not 0 <= each < given.num_experts for each in given.all_ids):
            yield ExpectedError(IndexError, "got expert_ids from ")

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (PER_RANK,)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        results: list[Tensor] = []
        for each in ranks_in_group:
            start, length = each.shard_range(options.num_experts)
            rows = [
                x[token]
                for expert in range(start, start + length)
                for x, ids in zip(values.x, values.expert_ids, strict=True)
                for token, choices in enumerate(ids.tolist())
                for choice in choices
                if choice == expert
            ]
            results.append(torch.stack(rows) if rows else values.x[0].new_zeros(0, values.x[0].size(1)))
        return (results,)

    def result_dtype(self, values: Values) -> torch.dtype:
        return values["x"][0].dtype

    def run(self, arguments: dict[str, object]) -> tuple[Tensor, ...]:
        import weft

        given = {name: value for name, value in arguments.items() if name != "all_ids"}
        return (weft.ops.moe_dispatch(**given).rows,)


class MoeCombine(Operator):
    name = "moe_combine"
    on_cpu = ("sent", "received")

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        ids, num_experts = _draw_ids(draw)
        dtype, width = draw.dtype(), draw.size()
        weight_dtype = torch.float32 if dtype in (torch.bfloat16, torch.float16) and draw.chance(0.5) else dtype
        ranges = [RankInGroup(draw.num_ranks, rank).shard_range(num_experts) for rank in range(draw.num_ranks)]
        counts = torch.stack([each.flatten().bincount(minlength=num_experts) for each in ids])
        received = [counts[:, start : start + length] for start, length in ranges]
        values: Values = {
            "rows": [draw.values((int(each.sum()), width), dtype) for each in received],
            "weights": [draw.values(each.shape, weight_dtype) for each in ids],
            "order": [each.flatten().argsort(stable=True) for each in ids],
            "sent": [torch.stack([each[start : start + length].sum() for start, length in ranges]) for each in counts],
            "received": received,
        }
        return values, {}

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return dict.fromkeys(values, PER_RANK)

    def options_of(self, values: Values, options: Options, rank_in_group: RankInGroup) -> Options:
        """Say whether each rank receives what the others send."""
        sent, received = values["sent"], values["received"]
        ranks = range(rank_in_group.num_ranks)
        is_known = all(
            not each.is_meta and each.dtype == torch.int64 and each.dim() == dims and len(each) == len(ranks)
            for tensors, dims in ((sent, 1), (received, 2))
            for each in tensors
        )
        fits = is_known and all(int(sent[i][j]) == int(received[j][i].sum()) for i in ranks for j in ranks)
        return options | {"is_consistent": fits}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        rows, weights, order = given.rows, given.weights, given.order
        yield from rules.floating(rows, "rows")
        if rows.dim() != 2:
            yield ExpectedError(ValueError, "got rows of shape ")
        else:
            yield MustMatchAcrossRanks("features", rows.size(1))
        is_half = rows.dtype in (torch.bfloat16, torch.float16)
        if weights.dtype != rows.dtype and not (is_half and weights.dtype == torch.float32):
            yield ExpectedError(TypeError, "got weights of dtype ")
        yield from rules.one_device(rows, weights, "weights")
        if weights.dim() != 2:
            yield ExpectedError(ValueError, "got weights of shape ")
        yield from _int64(order, "order")
        yield from rules.one_device(rows, order, "order")
        if order.dim() != 1 or order.numel() != weights.numel():
            yield ExpectedError(ValueError, "got order of shape ")
        elif order.dtype == torch.int64 and not order.is_meta and order.sort().values.tolist() != [*range(len(order))]:
            yield ExpectedError(ValueError, "got order that does not have each number", reads_values=True)
        for name, dims, total in (("sent", 1, order.numel()), ("received", 2, rows.size(0) if rows.dim() else 0)):
            counts = getattr(given, name)
            yield from _int64(counts, name)
            if counts.device.type not in ("cpu", rows.device.type):
                yield ExpectedError(ValueError, f"got {name} on ")
            if counts.dim() != dims or len(counts) != rank_in_group.num_ranks:
                yield ExpectedError(ValueError, f"got {name} of shape ")
            elif counts.dtype == torch.int64 and not counts.is_meta and not _has_sum(counts, total):
                yield ExpectedError(ValueError, f"got {name} [")
        if not given.is_consistent:
            yield Undetectable("counts that differ from those of other ranks")

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (PER_RANK,)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        # By destination, expert and source.
        blocks = [
            rows.split(received.t().flatten().tolist())
            for rows, received in zip(values.rows, values.received, strict=True)
        ]
        results: list[Tensor] = []
        for source, weights in enumerate(values.weights):
            own = [each for of_rank in blocks for each in of_rank[source :: len(ranks_in_group)]]
            returned = torch.cat(own) if own else values.rows[source][:0]
            products = weights.flatten()[:, None] * returned[values.order[source].argsort()]
            results.append(products.view(*weights.shape, returned.size(1)).sum(1))
        return (results,)

    def result_dtype(self, values: Values) -> torch.dtype:
        return values["rows"][0].dtype

    def run(self, arguments: dict[str, object]) -> tuple[Tensor, ...]:
        return super().run({name: value for name, value in arguments.items() if name != "is_consistent"})
