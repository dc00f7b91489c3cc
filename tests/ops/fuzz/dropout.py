"""Random calls of dropout, with replicated and with sharded tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch

from ops.fuzz import rules
from ops.fuzz.draws import REPLICATED, Draw, Placement, RankInGroup, Sharded, Value
from ops.fuzz.linears import DIMS, SIZES
from ops.fuzz.operator import EdgeCaseOptions, Operator, Options, Values
from ops.fuzz.rules import ExpectedError, Undetectable, Violations
from ops.philox import dropout_mask


class Dropout(Operator):
    name = "dropout"
    on_cpu = ("seed",)
    edge_case_options: ClassVar[EdgeCaseOptions] = {
        "p": (-0.1, 1.1, float("nan"), float("inf"), 0.0, 1.0),
        "dim": DIMS,
        "dim_size": SIZES,
    }

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        shape = draw.sizes(0, 4)
        seed = torch.tensor(draw.random.getrandbits(64) - 2**63)
        values: Values = {"x": draw.values(shape, draw.dtype()), "seed": seed.reshape((1,) * draw.random.randrange(3))}
        options: Options = {"p": draw.random.choice((0.0, 0.1, 0.5, 0.9, 1.0)), "dim": None, "dim_size": None}
        if shape and draw.chance(0.6):
            options["dim"] = draw.dim_of(len(shape))
            options["dim_size"] = draw.optional_size(shape[options["dim"]])
        return values, options

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        dim = options["dim"]
        return {"x": REPLICATED if dim is None else Sharded(dim)}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        x, seed = given.x, given.seed
        if x.is_meta:
            yield Undetectable("no numbers to compare")
        yield from rules.floating(x, "x")
        if seed.dtype != torch.int64 or seed.numel() != 1:
            yield ExpectedError(TypeError, "got seed of dtype ")
        if seed.is_meta:
            yield ExpectedError(ValueError, "got seed on meta")
        if not 0 <= given.p <= 1:
            yield ExpectedError(ValueError, "got p ")
        if given.dim is not None:
            yield from rules.any_dim(x, given.dim)
            yield from rules.unsharded_size(x, given.dim, given.dim_size, rank_in_group)
        elif given.dim_size is not None:
            yield ExpectedError(ValueError, f"got dim_size {given.dim_size} without dim")

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (self.placements(values, options)["x"],)

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        if options.p == 1:
            return (values.x * 0,)
        mask = dropout_mask(values.x.shape, int(values.seed), options.p)
        return (torch.where(mask, values.x / (1 - options.p), 0.0),)
