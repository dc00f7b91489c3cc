"""The conjugate pairs of communication operators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch

from ops.fuzz import rules
from ops.fuzz.draws import FLOATS, OWN, WHOLE, Cut, Draw, Place, Placement, Value
from ops.fuzz.linears import DIMS, SIZES
from ops.fuzz.operator import Operator, Options, Values, Wild
from ops.fuzz.rules import Findings, Refusal, Unseen


class Pair(Operator):
    """x is the only tensor. Of the dtypes that the backend supports, the reference covers `known`."""

    fewest_dims = 0
    is_own = False  # whether each rank has an x of its own
    known = (*FLOATS, torch.int64, torch.int32)

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        dtype = draw.dtype() if draw.chance(0.9) else draw.random.choice((torch.int64, torch.int32))
        shape = draw.sizes(self.fewest_dims, 4)
        if self.is_own:
            return {"x": [draw.values(shape, dtype) for _ in range(draw.num_ranks)]}, {}
        return {"x": draw.values(shape, dtype)}, {}

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"x": OWN if self.is_own else WHOLE}

    def findings(self, given: SimpleNamespace, place: Place) -> Findings:
        if given.x.dtype not in self.known:
            yield Unseen("a dtype that is left to the backend's tests")

    def result_dtype(self, values: Values) -> torch.dtype:
        x = values["x"]
        return x[0].dtype if isinstance(x, list) else x.dtype


class CopyToGroup(Pair):
    name = "copy_to_group"

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (OWN,)

    def reference(self, values: SimpleNamespace, options: SimpleNamespace, places: list[Place]) -> tuple[Value, ...]:
        return ([values.x for _ in places],)


class ReduceFromGroup(Pair):
    name = "reduce_from_group"
    is_own = True

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (WHOLE,)

    def reference(self, values: SimpleNamespace, options: SimpleNamespace, places: list[Place]) -> tuple[Value, ...]:
        return (torch.stack(values.x).sum(0),)


class AlongDim(Pair):
    """Operators that shard or gather x along a dim."""

    fewest_dims = 1
    wild: ClassVar[Wild] = {"dim": DIMS}
    takes_part = gives_part = False

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        values, _ = super().draw(draw)
        x = values["x"]
        first = x[0] if isinstance(x, list) else x
        options: Options = {"dim": draw.dim_of(first.dim())}
        if self.takes_part:
            options["dim_size"] = draw.told(first.size(options["dim"]))
        return values, options

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"x": Cut(options["dim"])} if self.takes_part else super().placements(values, options)

    def findings(self, given: SimpleNamespace, place: Place) -> Findings:
        yield from super().findings(given, place)
        yield from rules.any_dim(given.x, given.dim)
        if self.takes_part:
            yield from rules.told(given.x, given.dim, given.dim_size, place)

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (Cut(options["dim"]),) if self.gives_part else (WHOLE,)

    def reference(self, values: SimpleNamespace, options: SimpleNamespace, places: list[Place]) -> tuple[Value, ...]:
        return (torch.stack(values.x).sum(0) if self.is_own else values.x,)


class ScatterToGroup(AlongDim):
    name = "scatter_to_group"
    gives_part = True


class GatherFromGroup(AlongDim):
    name = "gather_from_group"
    takes_part = True
    wild: ClassVar[Wild] = {"dim": DIMS, "dim_size": SIZES}


class GatherFromSequence(AlongDim):
    """Each rank uses the result differently."""

    name = "gather_from_sequence"
    takes_part = True
    wild: ClassVar[Wild] = {"dim": DIMS, "dim_size": SIZES}

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (OWN,)

    def reference(self, values: SimpleNamespace, options: SimpleNamespace, places: list[Place]) -> tuple[Value, ...]:
        return ([values.x for _ in places],)


class ReduceScatterToSequence(AlongDim):
    name = "reduce_scatter_to_sequence"
    is_own = True
    gives_part = True


class AllToAll(Pair):
    name = "all_to_all"
    fewest_dims = 2
    wild: ClassVar[Wild] = {"split_dim": DIMS, "cat_dim": DIMS, "cat_size": SIZES}

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        values, _ = super().draw(draw)
        num_dims = values["x"].dim()
        split, cat = draw.random.sample(range(num_dims), 2)
        size = draw.told(values["x"].size(cat))
        split, cat = (dim if draw.chance(0.5) else dim - num_dims for dim in (split, cat))
        return values, {"split_dim": split, "cat_dim": cat, "cat_size": size}

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"x": Cut(options["cat_dim"])}

    def findings(self, given: SimpleNamespace, place: Place) -> Findings:
        yield from super().findings(given, place)
        x, split, cat = given.x, given.split_dim, given.cat_dim
        yield from rules.any_dim(x, split, "split_dim")
        yield from rules.any_dim(x, cat, "cat_dim")
        if rules.has_dim(x, split) and rules.has_dim(x, cat) and split % x.dim() == cat % x.dim():
            yield Refusal(ValueError, f"got {split % x.dim()} as split_dim and as cat_dim")
        yield from rules.told(x, cat, given.cat_size, place, "cat_size")

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (Cut(options["split_dim"]),)

    def reference(self, values: SimpleNamespace, options: SimpleNamespace, places: list[Place]) -> tuple[Value, ...]:
        return (values.x,)
