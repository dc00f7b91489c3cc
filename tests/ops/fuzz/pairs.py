"""Random calls of the communication operators, whose backward is their conjugate operator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch

from ops.fuzz import rules
from ops.fuzz.draws import FLOATS, PER_RANK, REPLICATED, Draw, Placement, RankInGroup, Sharded, Value
from ops.fuzz.linears import DIMS, SIZES
from ops.fuzz.operator import EdgeCaseOptions, Operator, Options, Values
from ops.fuzz.rules import ExpectedError, Undetectable, Violations


class Pair(Operator):
    """An operator whose only tensor is x. The reference covers `tested_dtypes`, a subset of the backend's dtypes."""

    fewest_dims = 0
    is_per_rank = False  # whether the ranks' x differ
    tested_dtypes = (*FLOATS, torch.int64, torch.int32)

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        dtype = draw.dtype() if draw.chance(0.9) else draw.random.choice((torch.int64, torch.int32))
        shape = draw.sizes(self.fewest_dims, 4)
        if self.is_per_rank:
            return {"x": [draw.values(shape, dtype) for _ in range(draw.num_ranks)]}, {}
        return {"x": draw.values(shape, dtype)}, {}

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"x": PER_RANK if self.is_per_rank else REPLICATED}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        if given.x.dtype not in self.tested_dtypes:
            yield Undetectable("a dtype that is left to the backend's tests")

    def result_dtype(self, values: Values) -> torch.dtype:
        x = values["x"]
        return x[0].dtype if isinstance(x, list) else x.dtype


class CopyToGroup(Pair):
    name = "copy_to_group"

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (PER_RANK,)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        return ([values.x for _ in ranks_in_group],)


class ReduceFromGroup(Pair):
    name = "reduce_from_group"
    is_per_rank = True

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (REPLICATED,)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        return (torch.stack(values.x).sum(0),)


class AlongDim(Pair):
    """Operators that shard or gather x along a dim."""

    fewest_dims = 1
    edge_case_options: ClassVar[EdgeCaseOptions] = {"dim": DIMS}
    input_is_sharded = output_is_sharded = False

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        values, _ = super().draw(draw)
        x = values["x"]
        first = x[0] if isinstance(x, list) else x
        options: Options = {"dim": draw.dim_of(first.dim())}
        if self.input_is_sharded:
            options["dim_size"] = draw.optional_size(first.size(options["dim"]))
        return values, options

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"x": Sharded(options["dim"])} if self.input_is_sharded else super().placements(values, options)

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        yield from super().violations(given, rank_in_group)
        yield from rules.any_dim(given.x, given.dim)
        if self.input_is_sharded:
            yield from rules.unsharded_size(given.x, given.dim, given.dim_size, rank_in_group)

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (Sharded(options["dim"]),) if self.output_is_sharded else (REPLICATED,)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        return (torch.stack(values.x).sum(0) if self.is_per_rank else values.x,)


class ScatterToGroup(AlongDim):
    name = "scatter_to_group"
    output_is_sharded = True


class GatherFromGroup(AlongDim):
    name = "gather_from_group"
    input_is_sharded = True
    edge_case_options: ClassVar[EdgeCaseOptions] = {"dim": DIMS, "dim_size": SIZES}


class GatherFromSequence(AlongDim):
    """The ranks' results are equal, and each rank's result gets a different gradient."""

    name = "gather_from_sequence"
    input_is_sharded = True
    edge_case_options: ClassVar[EdgeCaseOptions] = {"dim": DIMS, "dim_size": SIZES}

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (PER_RANK,)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        return ([values.x for _ in ranks_in_group],)


class ReduceScatterToSequence(AlongDim):
    name = "reduce_scatter_to_sequence"
    is_per_rank = True
    output_is_sharded = True


class AllToAll(Pair):
    name = "all_to_all"
    fewest_dims = 2
    edge_case_options: ClassVar[EdgeCaseOptions] = {"split_dim": DIMS, "cat_dim": DIMS, "cat_size": SIZES}

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        values, _ = super().draw(draw)
        num_dims = values["x"].dim()
        split, cat = draw.random.sample(range(num_dims), 2)
        size = draw.optional_size(values["x"].size(cat))
        split, cat = (dim if draw.chance(0.5) else dim - num_dims for dim in (split, cat))
        return values, {"split_dim": split, "cat_dim": cat, "cat_size": size}

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"x": Sharded(options["cat_dim"])}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        yield from super().violations(given, rank_in_group)
        x, split, cat = given.x, given.split_dim, given.cat_dim
        yield from rules.any_dim(x, split, "split_dim")
        yield from rules.any_dim(x, cat, "cat_dim")
        if rules.has_dim(x, split) and rules.has_dim(x, cat) and split % x.dim() == cat % x.dim():
            yield ExpectedError(ValueError, f"got {split % x.dim()} as split_dim and as cat_dim")
        yield from rules.unsharded_size(x, cat, given.cat_size, rank_in_group, "cat_size")

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (Sharded(options["split_dim"]),)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        return (values.x,)
