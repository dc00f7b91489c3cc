"""Compares batches between ranks that compute one together: by tensor or context parallelism, or in a pipeline."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def batch_digest(batch: Any) -> int:
    """Return 63 bits of a hash over the tensors of a nested batch: their order, shapes, dtypes and bytes.

    Finds tensors in mappings, sequences, dataclasses and attributes of objects, such as the batches of Hugging Face and
    PyTorch Geometric. Other values, such as file names, are ignored. A DTensor is hashed as its local shard, a sparse
    tensor as its coalesced indices and values.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in _tensors(batch, set()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{tuple(local.shape)}{local.dtype}".encode())
        plain = local.detach().cpu().contiguous()
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return int.from_bytes(digest.digest(), "little") >> 1


def _tensors(value: Any, visited: set[int]) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            yield value
        else:
            coalesced = value.to_sparse_coo().coalesce()
            yield from (coalesced.indices(), coalesced.values())
        return
    if isinstance(value, str | bytes | int | float | complex | bool | type(None)) or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Mapping):
        children: Iterable[Any] = value.values()
    elif isinstance(value, Sequence):
        children = value
    elif is_dataclass(value) and not isinstance(value, type):
        children = [getattr(value, field.name) for field in fields(value)]
    else:
        children = vars(value).values() if hasattr(value, "__dict__") else ()
    for child in children:
        yield from _tensors(child, visited)


class BatchCheck:
    """Compares some batches between the ranks of a group.

    The compared batches are the first `num_first` of each loop since `restart`, each `every`-th of a loop, and the next
    batch of any loop after each `begin_epoch`. If `every` is 0, only the first and the last rule apply; if `num_first`
    is 0, too, no batch is compared. A loop is "training", "validation", "test" or "prediction"; under
    Fabric "training" or "evaluation".
    """

    def __init__(self, num_first: int, every: int) -> None:
        self._num_first = num_first
        self._every = every
        self._num_batches: dict[str, int] = {}
        self._epoch_begins = False

    @property
    def is_on(self) -> bool:
        """Return whether any batch is compared."""
        return self._num_first > 0 or self._every > 0

    def restart(self) -> None:
        """Count the batches of every loop from zero again: a new run begins."""
        self._num_batches.clear()
        self._epoch_begins = False

    def begin_epoch(self) -> None:
        """Compare the next batch, if the check is on: the random generators of a sampler may differ between ranks."""
        self._epoch_begins = self.is_on

    def check(
        self,
        loop: str,
        batch: Any,
        group: dist.ProcessGroup,
        device: torch.device,
        group_kind: str = "tensor-parallel group",
    ) -> None:
        """Count one batch of `loop` and, if it is due, compare it; the comparison is collective over `group`.

        `group_kind`: the name of the kind of group in the error.

        Raises:
            ValueError: on every rank of the group, if the ranks hold different batches.
        """
        batch_idx = self._num_batches.get(loop, 0)
        self._num_batches[loop] = batch_idx + 1
        is_due = batch_idx < self._num_first or (self._every > 0 and batch_idx % self._every == 0) or self._epoch_begins
        self._epoch_begins = False
        if not is_due or group.size() == 1:
            return
        local = torch.tensor([batch_digest(batch)], dtype=torch.int64, device=device)
        gathered = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(gathered, local, group=group)
        digests = [int(digest) for digest in gathered]
        if len(set(digests)) == 1:
            return
        ranks = dist.get_process_group_ranks(group)
        by_digest: dict[int, list[int]] = {}
        for rank, digest in zip(ranks, digests, strict=True):
            by_digest.setdefault(digest, []).append(rank)
        holders = " and ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for r in by_digest.values())
        raise ValueError(
            f"{loop} batch {batch_idx} differs between {holders}, which are in one {group_kind} and must "
            "get the same data: call seed_everything before making random data, shard data sets by the data-parallel "
            "rank instead of the global one, and draw from the default generators only, on every rank alike."
        )
