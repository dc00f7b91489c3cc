"""Random sizes, dtypes, values and memory layouts, and the placement of tensors on ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.operators import chunk
from ops.sequence_attention import chunks_of

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn)
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded")


@dataclass(frozen=True)
class Sharded:
    """Each rank has its torch.chunk shard along `dim`."""

    dim: int


@dataclass(frozen=True)
class HeadTail:
    """Each rank has its two chunks along `dim`, in the order "head_tail" of ring_attention."""

    dim: int


@dataclass(frozen=True)
class Replicated:
    """All ranks have the same full tensor."""


@dataclass(frozen=True)
class PerRank:
    """Each rank has a different tensor: the value is a list with one tensor per rank."""


Placement = Sharded | HeadTail | Replicated | PerRank
REPLICATED, PER_RANK = Replicated(), PerRank()
Value = Tensor | list[Tensor] | None


@dataclass(frozen=True)
class RankInGroup:
    """A rank of a group."""

    num_ranks: int
    rank: int

    def shard_range(self, size: int) -> tuple[int, int]:
        """Return the first entry and the length of this rank's shard of `size` entries."""
        length = -(-size // self.num_ranks)
        start = min(self.rank * length, size)
        return start, min(start + length, size) - start

    def head_tail_chunks(self, size: int) -> list[range]:
        """Return the positions of this rank's two chunks among `size` tokens."""
        return chunks_of(size, self.num_ranks, self.rank, "head_tail")


def local_shard(value: Value, placement: Placement, rank_in_group: RankInGroup) -> Tensor | None:
    """Return a rank's shard of a value, or the full value if it lacks the dim, for which the operator must raise."""
    if value is None:
        return None
    if isinstance(value, list):
        return value[rank_in_group.rank]
    if isinstance(placement, Sharded) and -value.dim() <= placement.dim < value.dim():
        return chunk(value, placement.dim, rank_in_group.num_ranks, rank_in_group.rank, requires_grad=False)
    if isinstance(placement, HeadTail) and -value.dim() <= placement.dim < value.dim():
        tokens = [token for each in rank_in_group.head_tail_chunks(value.size(placement.dim)) for token in each]
        return value.detach().index_select(placement.dim, torch.tensor(tokens, dtype=torch.int64, device=value.device))
    return value


class Draw:
    """Random choices, which are equal on ranks that pass an equal seed."""

    num_ranks = 1  # in the group of the call

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(60))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def size(self) -> int:
        """Return the size of a dim, from 0 to 7."""
        return self.random.choices(range(8), (6, 12, 16, 16, 16, 14, 10, 10))[0]

    def sizes(self, fewest: int, most: int) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(self.random.randint(fewest, most)))

    def dtype(self) -> torch.dtype:
        return self.random.choices(FLOATS, (25, 40, 15, 20))[0]

    def values(self, shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Return normal numbers, or integers from -4 to 4; drawn on the CPU, so that all devices get equal numbers."""
        if dtype.is_floating_point or dtype.is_complex:
            normal = torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64, device="cpu")
            return (normal * scale).to(dtype)
        return torch.randint(-4, 5, tuple(shape), generator=self.generator, device="cpu").to(dtype)

    def maybe(self, shape: Sequence[int], dtype: torch.dtype, probability: float = 0.5) -> Tensor | None:
        return self.values(shape, dtype) if self.chance(probability) else None

    def layout(self) -> str:
        return self.random.choices(LAYOUTS, (60, 12, 12, 10, 6))[0]

    def dim_of(self, num_dims: int) -> int:
        """Return any of `num_dims` >= 1 dims, counted from the front or from the back."""
        return self.random.randrange(-num_dims, num_dims)

    def optional_size(self, size: int, probability: float = 0.6) -> int | None:
        """Return the size of a sharded dim; if all shards have equal sizes, sometimes None."""
        return size if size % self.num_ranks or self.chance(probability) else None


def constant_along_first_dim(value: Value) -> Value:
    """Return a tensor that is constant along its first dim and can be laid out there with a stride of 0."""
    if isinstance(value, list):
        return [constant_along_first_dim(each) for each in value]
    if value is None or value.dim() == 0 or value.size(0) == 0:
        return value
    return value[:1].expand(value.shape).clone()


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the same values in new memory, in `layout` if the shape allows it, and contiguous otherwise."""
    if layout == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    if layout == "strided" and tensor.dim() >= 1:
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.size(-1) + 1)
        return wide[..., 1::2].copy_(tensor)
    if layout == "offset":
        return tensor.new_zeros(tensor.numel() + 3)[3:].view(tensor.shape).copy_(tensor)
    if layout == "expanded" and tensor.dim() >= 1 and tensor.size(0) >= 1:
        return tensor[:1].clone(memory_format=torch.contiguous_format).expand(tensor.shape)
    return tensor.clone(memory_format=torch.contiguous_format)
