"""Random calls of rms_norm, layer_norm and their variants with a fused residual add."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from ops.fuzz import rules
from ops.fuzz.draws import PER_RANK, Draw, Placement, RankInGroup, Sharded, Value, local_shard
from ops.fuzz.operator import EdgeCaseOptions, Operator, Options, Values
from ops.fuzz.rules import ExpectedError, Undetectable, Violations

EPS = (1e-12, 1e-6, 1e-5, 0.02, 0.1, 1.0)
HALF = (torch.bfloat16, torch.float16)
# The largest 1 / std that is compared. Above this limit, a token's features are so close to each other, or to 0, that a
# comparison measures the rounding error of their mean. An eps of 0.02 or more keeps 1 / std below the limit.
MAX_RSTD = 10.0


class Norm(Operator):
    """Each rank has tokens of its own: its torch.chunk shard of all tokens, or an arbitrary number."""

    optional = ("weight",)
    edge_case_options: ClassVar[EdgeCaseOptions] = {
        "eps": (-1.0, -1e-30, float("nan"), float("inf"), -0.0, 0.0, 1e-300, 1e-3, 7.0, 1e300)
    }
    tolerates_by_result = True  # half-precision inputs are computed in float32
    is_centered = has_residual = False

    def draw(self, draw: Draw) -> tuple[Values, Options]:
        dtype, width, shapes = draw.dtype(), draw.size(), _shapes(draw)
        weight_dtype = torch.float32 if dtype in HALF and draw.chance(0.4) else dtype
        values: Values = {"x": [draw.values((*shape, width), dtype, 2.0) for shape in shapes]}
        if self.has_residual:
            values["residual"] = [draw.values((*shape, width), dtype) for shape in shapes]
        values["weight"] = draw.maybe((width,), weight_dtype, 0.8)
        if self.is_centered:
            values["bias"] = None if values["weight"] is None else draw.maybe((width,), weight_dtype, 0.7)
        return values, {"eps": draw.random.choice(EPS)}

    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        return {"x": PER_RANK, "residual": PER_RANK}

    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        argument_errors = list(self.argument_errors(given))
        yield from argument_errors
        if not argument_errors and not given.x.is_meta:
            x = given.x.double() + given.residual.double() if self.has_residual else given.x.double()
            if _largest_rstd(x.to(given.x.dtype).double(), given.eps, self.is_centered) > MAX_RSTD:
                yield Undetectable("features whose differences are rounding errors")

    def argument_errors(self, given: SimpleNamespace) -> Violations:
        x, residual = given.x, getattr(given, "residual", None)
        yield from rules.token_matrix(x)
        if not 0 <= given.eps < float("inf"):
            yield ExpectedError(ValueError, "got eps ")
        if residual is not None:
            yield from rules.like(x, residual, "residual")
            if residual.shape != x.shape:
                yield ExpectedError(ValueError, "got residual of shape ")
        weight, bias = given.weight, getattr(given, "bias", None)
        yield from _params_of(x, weight, "weight")
        yield from _params_of(x, bias, "bias")
        if bias is not None and weight is None:
            yield ExpectedError(ValueError, "got a bias without a weight")
        elif bias is not None and bias.dtype != weight.dtype:
            yield ExpectedError(TypeError, "got bias of dtype ")

    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        return (PER_RANK,) * self.num_results

    def sums(self, values: SimpleNamespace, dtype: torch.dtype) -> list[Tensor]:
        """Return the tensor that each rank normalizes; a sum is rounded to `dtype` first."""
        if not self.has_residual:
            return values.x
        sums = [x + residual for x, residual in zip(values.x, values.residual, strict=True)]
        return [total + (total.to(dtype).double() - total).detach() for total in sums]

    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        sums = self.sums(values, options.dtype)
        centered = [_centered(total, self.is_centered) for total in sums]
        normed = [each * _rstd(each, options.eps) for each in centered]
        if values.weight is not None:
            normed = [y * values.weight for y in normed]
        if getattr(values, "bias", None) is not None:
            normed = [y + values.bias for y in normed]
        return (normed, sums) if self.has_residual else (normed,)

    def result_dtype(self, values: Values) -> torch.dtype:
        return values["x"][0].dtype


class RmsNorm(Norm):
    name = "rms_norm"


class LayerNorm(Norm):
    name = "layer_norm"
    optional = ("weight", "bias")
    is_centered = True


class AddRmsNorm(Norm):
    name = "add_rms_norm"
    has_residual = True
    num_results = 2


class AddLayerNorm(LayerNorm):
    name = "add_layer_norm"
    has_residual = True
    num_results = 2


def _shapes(draw: Draw) -> list[tuple[int, ...]]:
    """Draw the shapes of the ranks' tokens."""
    full = draw.sizes(0, 3)
    if not full or draw.chance(0.3):
        return [draw.sizes(0, 3) for _ in range(draw.num_ranks)]
    tokens, dim = torch.empty(full), draw.random.randrange(len(full))
    return [
        tuple(local_shard(tokens, Sharded(dim), RankInGroup(draw.num_ranks, rank)).shape)
        for rank in range(draw.num_ranks)
    ]


def _params_of(x: Tensor, params: Tensor | None, name: str) -> Violations:
    if params is None:
        return
    if x.dtype not in HALF or params.dtype != torch.float32:
        yield from rules.like(x, params, name)
    else:
        yield from rules.one_device(x, params, name)
    if params.dim() != 1 or (x.dim() > 0 and params.size(0) != x.size(-1)):
        yield ExpectedError(ValueError, f"got {name} of shape ")


def _centered(total: Tensor, is_centered: bool) -> Tensor:
    return total - total.mean(-1, keepdim=True) if is_centered else total


def _rstd(centered: Tensor, eps: float) -> Tensor:
    return (centered.square().mean(-1, keepdim=True) + eps).rsqrt()


def _largest_rstd(total: Tensor, eps: float, is_centered: bool) -> float:
    return _rstd(_centered(total, is_centered), eps).max().item() if total.numel() else 0.0
