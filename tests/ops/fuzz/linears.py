"""Random calls of column_row_mlp and the linear layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.nn.functional as F

from ops.fuzz import rules
from ops.fuzz.draws import PER_RANK, REPLICATED, Draw, Placement, RankInGroup, Sharded, Value
from ops.fuzz.operator import EdgeCaseOptions, Operator, Options, Values
from ops.fuzz.rules import ExpectedError, Violations
from ops.operators import ACTIVATIONS, mlp_reference

DIMS = (-(2**63), -5, -3, -2, -1, 0, 1, 2, 3, 7, 2**63 - 1)
SIZES = (-1, 0, 1, 4, 9, 2**62, 2**63 - 1, None)


class ColumnRowMLP(Operator):
    name = "column_row_mlp"
    optional = ("w3", "b1", "b2", "b3")
    edge_case_options: ClassVar[EdgeCaseOptions] = {
        "activation": ("swish", "", "GELU"),
        "sequence_dim": (*DIMS, None),
        "sequence_size": SIZES,
        "recompute": (True, False),
    }

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        dtype = draw.dtype()
        lead, width, hidden, out = draw.sizes(0, 3), draw.size(), draw.size(), draw.size()
        gated, bias = draw.chance(0.5), draw.chance(0.5)
        values: Values = {
            "x": draw.values((*lead, width), dtype),
            "w1": draw.values((hidden, width), dtype, 0.4),
            "w2": draw.values((out, hidden), dtype, 0.4),
            "w3": draw.values((hidden, width), dtype, 0.4) if gated else None,
            "b1": draw.maybe((hidden,), dtype, 0.8 if bias else 0.1),
            "b2": draw.maybe((out,), dtype, 0.8 if bias else 0.1),
            "b3": draw.maybe((hidden,), dtype, 0.8 if bias else 0.1) if gated else None,
        }
        options: Options = {
            "activation": draw.random.choice(sorted(ACTIVATIONS)),
            "recompute": draw.chance(0.4),
            "sequence_dim": None,
            "sequence_size": None,
        }
        if options["activation"] == "relu" and dtype in (torch.bfloat16, torch.float16):
            # Make products exact in these dtypes: rounding could flip a pre-activation's sign, and so its gradient.
            for name in ("x", "w1", "b1"):
                values[name] = None if values[name] is None else values[name].clamp(-1, 1).mul(4).round().div(4)
        if lead and draw.chance(0.5):
            dim = draw.random.randrange(len(lead))
            options["sequence_size"] = draw.optional_size(lead[dim])
            options["sequence_dim"] = dim if draw.chance(0.5) else dim - len(lead) - 1
        return values, options

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        dim = options["sequence_dim"]
        x = REPLICATED if dim is None else Sharded(dim)
        return {
            "x": x,
            "w1": Sharded(0),
            "w2": Sharded(1),
            "w3": Sharded(0),
            "b1": Sharded(0),
            "b2": REPLICATED,
            "b3": Sharded(0),
        }

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        x, w1, w3 = given.x, given.w1, given.w3
        yield from rules.token_matrix(x)
        for name in ("w1", "w2", "w3", "b1", "b2", "b3"):
            yield from rules.like(x, getattr(given, name), name)
        yield from rules.matrix(w1, "w1", x.size(-1) if x.dim() else None)
        yield from rules.matrix(given.w2, "w2", w1.size(0) if w1.dim() else None)
        yield from rules.bias_of(given.b1, "b1", w1)
        yield from rules.bias_of(given.b2, "b2", given.w2)
        if w3 is not None:
            if w3.shape != w1.shape:
                yield ExpectedError(ValueError, "got w3 of shape ")
            yield from rules.bias_of(given.b3, "b3", w3)
        elif given.b3 is not None:
            yield ExpectedError(ValueError, "got b3 without w3")
        if given.activation not in ACTIVATIONS:
            yield ExpectedError(ValueError, f"got activation '{given.activation}'; pass one of")
        if given.sequence_dim is None:
            if given.sequence_size is not None:
                yield ExpectedError(ValueError, f"got sequence_size {given.sequence_size} without sequence_dim")
        else:
            yield from rules.token_dim(x, given.sequence_dim, "sequence_dim")
            yield from rules.unsharded_size(x, given.sequence_dim, given.sequence_size, rank_in_group, "sequence_size")

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (self.placements(values, options)["x"],)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        weights = {name: value for name, value in vars(values).items() if name != "x" and value is not None}
        return (mlp_reference(values.x, weights, options.activation),)


class Linear(Operator):
    """Common base of the linear layers."""

    optional = ("bias",)

    def tensors(self, draw: Draw, fewest_dims: int) -> Values:
        dtype, lead, width, rows = draw.dtype(), draw.sizes(fewest_dims, 3), draw.size(), draw.size()
        x, weight = draw.values((*lead, width), dtype), draw.values((rows, width), dtype, 0.5)
        return {"x": x, "weight": weight, "bias": draw.maybe((rows,), dtype)}

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        return self.tensors(draw, 0), {}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        yield from rules.linear(given.x, given.weight, given.bias)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        return (F.linear(values.x, values.weight, values.bias),)


class ColumnLinear(Linear):
    name = "column_linear"

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"weight": Sharded(0), "bias": Sharded(0)}

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (Sharded(-1),)


class RowLinear(Linear):
    name = "row_linear"

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"x": Sharded(-1), "weight": Sharded(1)}

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (REPLICATED,)


class AllGatherLinear(Linear):
    name = "all_gather_linear"
    edge_case_options: ClassVar[EdgeCaseOptions] = {"gather_dim": DIMS, "dim_size": SIZES}

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        values = self.tensors(draw, 1)
        num_dims = values["x"].dim()
        dim = draw.random.randrange(num_dims - 1)
        size = draw.optional_size(values["x"].size(dim))
        return values, {"gather_dim": dim if draw.chance(0.5) else dim - num_dims, "dim_size": size}

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"x": Sharded(options["gather_dim"]), "weight": Sharded(0), "bias": Sharded(0)}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        yield from super().violations(given, rank_in_group)
        yield from rules.token_dim(given.x, given.gather_dim, "gather_dim")
        yield from rules.unsharded_size(given.x, given.gather_dim, given.dim_size, rank_in_group)

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (Sharded(-1),)


class LinearReduceScatter(Linear):
    name = "linear_reduce_scatter"
    edge_case_options: ClassVar[EdgeCaseOptions] = {"scatter_dim": DIMS}

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        values = self.tensors(draw, 1)
        num_dims = values["x"].dim()
        dim = draw.random.randrange(num_dims - 1)
        return values, {"scatter_dim": dim if draw.chance(0.5) else dim - num_dims}

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"x": Sharded(-1), "weight": Sharded(1)}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        yield from super().violations(given, rank_in_group)
        yield from rules.token_dim(given.x, given.scatter_dim, "scatter_dim")

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (Sharded(options["scatter_dim"]),)


class ShardedLinear(Linear):
    """Ranks may have different numbers of tokens."""

    name = "sharded_linear"
    edge_case_options: ClassVar[EdgeCaseOptions] = {"out_features": SIZES}

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        values = self.tensors(draw, 0)
        x, rows = values["x"], values["weight"].size(0)
        shapes = [x.shape if draw.chance(0.5) else (*draw.sizes(0, 3), x.size(-1)) for _ in range(draw.num_ranks)]
        values["x"] = [draw.values(shape, x.dtype) for shape in shapes]
        return values, {"out_features": draw.optional_size(rows)}

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"x": PER_RANK, "weight": Sharded(0), "bias": Sharded(0)}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        yield from super().violations(given, rank_in_group)
        yield from rules.unsharded_size(given.weight, 0, given.out_features, rank_in_group, "out_features", "weight")

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (PER_RANK,)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        return ([F.linear(x, values.weight, values.bias) for x in values.x],)

    def result_dtype(self, values: Values):
        return values["x"][0].dtype
