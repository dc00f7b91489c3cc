"""Compares tensors that several ranks should hold with equal values, by hashes of their bytes.

Each rank hashes its tensors one by one. The tensors that are replicated along the same mesh axes form a set; a rank
combines the hashes of a set into one digest. All ranks exchange their digests, one number for each possible set, in one
all-gather, whose size does not depend on the model. Only if digests differ, the ranks exchange the hashes of the
tensors in the sets that differ, and each rank derives the same list of differences from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.strategy.checkpoint.blocks import bytes_of

_PART_BYTES = 16 << 20  # copied to the host at a time

_HashesBySet = dict[int, dict[str, int]]  # set of axes, as a mask -> name -> hash


@dataclasses.dataclass(frozen=True)
class Replica:
    """A tensor of this rank that other ranks hold, too.

    name: the same on all of these ranks, and unique among the tensors with the same axes.
    local: this rank's chunk.
    axes: the mesh axes along which all ranks hold the same chunk.
    """

    name: str
    local: Tensor
    axes: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor that is not equal on all ranks that hold it; ranks are global.

    ranks: all ranks that should hold equal values.
    minority: the ranks that differ from more than half of `ranks`; empty if there is no such majority.
    """

    name: str
    ranks: tuple[int, ...]
    minority: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare_replicas`.

    num_compared: the tensors of this rank that at least one other rank holds.
    differences: the same on all ranks, in the order in which the ranks list the tensors.
    """

    num_compared: int
    differences: list[Difference]


def compare_replicas(
    replicas: Iterable[Replica],
    mesh: DeviceMesh,
    device: torch.device,
    stage_axis: str | None = None,
) -> Comparison:
    """Compare tensors between the ranks that hold them; collective over all ranks.

    Takes one all-gather of 2**n int64 for n mesh axes; two exchanges of objects more if tensors differ.

    Args:
        replicas: this rank's tensors, in the same order on all ranks that hold them. They are hashed one at a time, so
            that an iterator that creates them keeps only one in memory.
        mesh: has all ranks of the default group.
        device: of the numbers that are exchanged; the default group has a backend for it.
        stage_axis: the axis of pipeline stages; of several ranks along it, only some may hold a tensor. Along other
            axes, a tensor that only some ranks list is a difference.

    Raises:
        ValueError: the mesh does not have all ranks.
    """
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"compare_replicas got a mesh of {mesh.size()} ranks, and the default group has {dist.get_world_size()}; "
            "pass the mesh of all ranks."
        )
    names = mesh.mesh_dim_names or ()
    hashes: _HashesBySet = {}
    for replica in replicas:
        mask = sum(1 << i for i, name in enumerate(names) if name in replica.axes and mesh.size(i) > 1)
        if mask:
            hashes.setdefault(mask, {})[replica.name] = hash_of(replica.local)
    num_compared = sum(len(each) for each in hashes.values())
    if mesh.size() == 1:
        return Comparison(num_compared, [])
    digests = _exchanged_digests(hashes, 1 << len(names), device)
    stage_bit = 1 << names.index(stage_axis) if stage_axis in names else 0
    differing = [
        mask
        for mask in range(1, len(digests[0]))
        if any(
            len({digests[rank][mask] for rank in ranks if digests[rank][mask] or not mask & stage_bit}) > 1
            for ranks in _groups_along(mesh, mask)
        )
    ]
    if not differing:
        return Comparison(num_compared, [])
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {mask: hashes.get(mask, {}) for mask in differing})
    found = [
        difference
        for mask in differing
        for ranks in _groups_along(mesh, mask)
        for difference in _differences(ranks, [gathered[rank][mask] for rank in ranks], bool(mask & stage_bit))
    ]
    return Comparison(num_compared, found)


def _exchanged_digests(hashes: _HashesBySet, num_sets: int, device: torch.device) -> list[list[int]]:
    """Return [rank][set] -> digest; 0: the rank has no tensors of this set. Collective."""
    digests = torch.zeros(num_sets, dtype=torch.int64)
    for mask, by_name in hashes.items():
        digest = _xxh3()
        for name, value in by_name.items():
            digest.update(f"{name}\0{value}\0".encode())
        digests[mask] = (digest.intdigest() >> 1) or 1  # 63 bits, and not 0
    digests = digests.to(device)
    gathered = digests.new_empty(dist.get_world_size(), num_sets)
    dist.all_gather_into_tensor(gathered.view(-1), digests)
    result: list[list[int]] = gathered.tolist()
    return result


def _groups_along(mesh: DeviceMesh, mask: int) -> list[list[int]]:
    """Return the groups of ranks that differ only in their coordinates along the axes of a mask."""
    ranks = mesh.mesh
    inside = [i for i in range(ranks.dim()) if mask >> i & 1]
    outside = [i for i in range(ranks.dim()) if not mask >> i & 1]
    size = 1
    for i in inside:
        size *= ranks.shape[i]
    groups: list[list[int]] = ranks.permute(*outside, *inside).reshape(-1, size).tolist()
    return groups


def _differences(ranks: list[int], hashes: list[dict[str, int]], may_be_absent: bool) -> Iterator[Difference]:
    """Yield the tensors whose hashes differ in a group; `may_be_absent`: some ranks need not have them."""
    for name in dict.fromkeys(name for by_name in hashes for name in by_name):
        holders = {
            rank: by_name.get(name)
            for rank, by_name in zip(ranks, hashes, strict=True)
            if name in by_name or not may_be_absent
        }
        values: list[int | None] = list(holders.values())
        if len(set(values)) > 1:
            commonest = max(values, key=values.count)
            has_majority = 2 * values.count(commonest) > len(values)
            minority = tuple(rank for rank, value in holders.items() if value != commonest) if has_majority else ()
            yield Difference(name, tuple(holders), minority)


def hash_of(tensor: Tensor) -> int:
    """Return 64 bits of a tensor's values, dtype and shape, equal for equal bytes, whatever the strides.

    XXH3: other bytes have the same hash by chance in one case of 2**64. NaNs are compared by their bytes, and 0.0
    differs from -0.0. A tensor on a device is copied to the host in parts of at most 16 MiB (a non-contiguous tensor:
    unless a row is larger).
    """
    result = _xxh3()
    result.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for part in _parts(tensor.detach().resolve_conj().resolve_neg()):
        result.update(bytes_of(part.cpu()))
    return int(result.intdigest())


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's elements, in the order of its dims, as contiguous tensors."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(max(_PART_BYTES // tensor.element_size(), 1))
    else:
        row_bytes = tensor.nbytes // tensor.shape[0]
        for rows in tensor.split(max(_PART_BYTES // row_bytes, 1)):
            yield rows.contiguous()


def _xxh3() -> Any:
    try:
        import xxhash
    except ImportError:
        raise ImportError("weft needs the package xxhash to compare replicas; `pip install xxhash`.") from None
    return xxhash.xxh3_64()
