"""The documented rules of the operators' arguments, as the errors that a rank must raise.

Each rule is a generator of Violations. A call is invalid if a rule yields an ExpectedError; the operator may raise any
of the yielded errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ops.fuzz.draws import FLOATS, RankInGroup


@dataclass(frozen=True)
class ExpectedError:
    """An error class and a part of its message."""

    error: type[Exception]
    text: str
    reads_values: bool = False  # whether the check reads tensor values, as operators do only on the CPU

    def on(self, device: torch.device) -> ExpectedError:
        """Return the error for tensors on `device` instead of the CPU."""
        return replace(self, text=self.text.replace(" on cpu ", f" on {device} "))


@dataclass(frozen=True)
class MustMatchAcrossRanks:
    """A property that a rank cannot compare with the other ranks': the call is drawn again if the ranks differ."""

    what: str
    value: object


@dataclass(frozen=True)
class Undetectable:
    """An invalid argument that no rank can detect: the call is drawn again."""

    what: str


Violations = Iterator[ExpectedError | MustMatchAcrossRanks | Undetectable]


def floating(tensor: Tensor, name: str) -> Violations:
    if tensor.dtype not in FLOATS:
        yield ExpectedError(TypeError, f"got {name} of dtype ")


def integers(tensor: Tensor, name: str) -> Violations:
    if tensor.dtype not in (torch.int64, torch.int32):
        yield ExpectedError(TypeError, f"got {name} of dtype ")


def one_device(x: Tensor, other: Tensor, name: str) -> Violations:
    if other.device != x.device:
        yield ExpectedError(ValueError, f"got {name} on {other.device} with ")


def like(x: Tensor, other: Tensor | None, name: str) -> Violations:
    """Require the dtype and device of x."""
    if other is None:
        return
    if other.dtype != x.dtype:
        yield ExpectedError(TypeError, f"got {name} of dtype ")
    yield from one_device(x, other, name)


def token_matrix(x: Tensor) -> Violations:
    """Require x [..., features] of a floating dtype."""
    yield from floating(x, "x")
    if x.dim() == 0:
        yield ExpectedError(ValueError, "got x without dims")


def matrix(weight: Tensor, name: str, num_columns: int | None) -> Violations:
    if weight.dim() != 2 or num_columns not in (None, weight.size(1)):
        yield ExpectedError(ValueError, f"got {name} of shape ")


def bias_of(bias: Tensor | None, name: str, weight: Tensor) -> Violations:
    if bias is not None and (bias.dim() != 1 or (weight.dim() > 0 and bias.size(0) != weight.size(0))):
        yield ExpectedError(ValueError, f"got {name} of shape ")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Violations:
    yield from token_matrix(x)
    yield from like(x, weight, "weight")
    yield from like(x, bias, "bias")
    yield from matrix(weight, "weight", x.size(-1) if x.dim() else None)
    yield from bias_of(bias, "bias", weight)


def has_dim(x: Tensor, dim: int, name: str = "dim") -> bool:
    return -x.dim() <= dim < x.dim()


def any_dim(x: Tensor, dim: int, name: str = "dim") -> Violations:
    if not has_dim(x, dim):
        yield ExpectedError(IndexError, f"got {name} {dim} for x with {x.dim()} dims")


def token_dim(x: Tensor, dim: int, name: str) -> Violations:
    yield from any_dim(x, dim, name)
    if has_dim(x, dim) and dim % x.dim() == x.dim() - 1:
        yield ExpectedError(ValueError, f"got {name} {dim % x.dim()}, the last dim of x")


def unsharded_size(
    x: Tensor, dim: int, size: int | None, rank_in_group: RankInGroup, size_name: str = "dim_size", name: str = "x"
) -> Violations:
    """Require `size` to be the unsharded size along `dim`; if it is None, require shards of equal sizes."""
    if not has_dim(x, dim):
        return
    if size is None:
        yield MustMatchAcrossRanks(f"{name} along {dim}", x.size(dim))
    elif size < 0 or x.size(dim) != rank_in_group.shard_range(size)[1]:
        where = f"on rank {rank_in_group.rank} of {rank_in_group.num_ranks} with {size_name} {size}"
        yield ExpectedError(ValueError, f"got {name} of shape {list(x.shape)} {where}")
