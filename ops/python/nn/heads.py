"""Maps ranks to the heads of an attention that they hold, and key/value heads to the ranks that hold copies."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from weft.nn.shard import process_group


def shard_qkv(
    weight: Tensor,
    num_heads: int,
    num_kv_heads: int,
    num_ranks: int,
    rank: int,
    *,
    layout: Literal["blocks", "grouped"] = "blocks",
) -> Tensor:
    """Return a copy of a rank's rows of an unsharded fused qkv weight or bias, in the order of `ParallelAttention.qkv`.

    Args:
        weight: `[(num_heads + 2 * num_kv_heads) * head_dim, ...]`.
        num_heads, num_kv_heads: of the unsharded attention.
        num_ranks, rank: the number of ranks, and the rank whose rows are returned.
        layout: the order of the rows. "blocks": all of q, then k, then v, as torch.cat of q, k and v gives them.
            "grouped": for each key/value head, the query heads that attend to it, then its key rows, then its value
            rows. This is the order of Megatron and, with one key/value head per query head, of GPT-NeoX.

    Returns:
        `[(h + 2 * kv) * head_dim, ...]` with the rank's h query heads and kv key/value heads. If there are more ranks
        than key/value heads, kv is 1 and neighbouring ranks get the same head.

    Raises:
        ValueError: numbers of heads that ParallelAttention does not support, a wrong number of rows, an unknown layout,
            or a rank outside of `num_ranks`.
    """
    heads, kv_heads = local_heads("shard_qkv", num_heads, num_kv_heads, num_ranks, rank)
    num_blocks = num_heads + 2 * num_kv_heads
    if weight.dim() < 1 or weight.size(0) % num_blocks:
        raise ValueError(
            f"shard_qkv: got a tensor of shape {list(weight.shape)} for {num_heads} query and {num_kv_heads} key/value "
            f"heads; its first dim must be a multiple of {num_blocks}."
        )
    if layout == "blocks":
        picked = [*heads, *(num_heads + h for h in kv_heads), *(num_heads + num_kv_heads + h for h in kv_heads)]
    elif layout == "grouped":
        per_kv = num_heads // num_kv_heads
        stride = per_kv + 2
        picked = [h // per_kv * stride + h % per_kv for h in heads]
        picked += [h * stride + per_kv for h in kv_heads] + [h * stride + per_kv + 1 for h in kv_heads]
    else:
        raise ValueError(f"shard_qkv: got layout {layout!r}; pass 'blocks' or 'grouped'.")
    rows = weight.unflatten(0, (num_blocks, weight.size(0) // num_blocks))
    return rows.index_select(0, torch.tensor(picked, device=weight.device)).flatten(0, 1)


def kv_groups(num_kv_heads: int, group_name: str) -> str:
    """Create the groups of ranks that hold the same key/value head; return the name of this rank's group.

    Pass the name to `ParallelAttention` as `kv_group_name`. All ranks of `group_name` must call this function; one call
    serves all layers with this number of heads. If no head is replicated, no group is created and the result is "". If
    all ranks hold the same head, no group is created and the result is `group_name`.

    Args:
        num_kv_heads: of the unsharded attention.
        group_name: c10d name of the group over which the heads are sharded.

    Raises:
        ValueError: the key/value heads can neither be sharded nor replicated evenly.
    """
    num_ranks = 1 if not group_name else process_group(group_name).size()
    num_copies = ranks_per_kv_head("kv_groups", num_kv_heads, num_ranks)
    if num_copies == 1:
        return ""
    if num_copies == num_ranks:
        return group_name
    group = process_group(group_name)
    # Only the ranks of a new group synchronise, so that ranks outside of `group_name` need not call new_group.
    made = dist.new_group(
        _ranks_with_same_head(group_name, num_copies),
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made.group_name


def local_heads(owner: str, num_heads: int, num_kv_heads: int, num_ranks: int, rank: int) -> tuple[range, range]:
    """Return (query heads, key/value heads) of a rank; invalid numbers of heads raise ValueError on every rank."""
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{owner}: got num_heads {num_heads} with num_kv_heads {num_kv_heads}; num_heads must be a multiple of "
            "num_kv_heads, and both at least 1."
        )
    if num_ranks < 1 or not 0 <= rank < num_ranks:
        raise ValueError(f"{owner}: got rank {rank} of {num_ranks} ranks; ranks count from 0.")
    if num_heads % num_ranks:
        raise ValueError(
            f"{owner}: got num_heads {num_heads} on {num_ranks} ranks; num_heads must be a multiple of the number of "
            "ranks."
        )
    num_copies = ranks_per_kv_head(owner, num_kv_heads, num_ranks)
    num_local = num_heads // num_ranks
    num_kv_local = num_kv_heads * num_copies // num_ranks
    kv_start = rank // num_copies * num_kv_local
    return range(rank * num_local, (rank + 1) * num_local), range(kv_start, kv_start + num_kv_local)


def ranks_per_kv_head(owner: str, num_kv_heads: int, num_ranks: int) -> int:
    """Return the number of ranks that hold the same key/value head; 1 if the heads are sharded."""
    if num_kv_heads < 1 or (num_kv_heads % num_ranks and num_ranks % num_kv_heads):
        raise ValueError(
            f"{owner}: got num_kv_heads {num_kv_heads} on {num_ranks} ranks; one must be a multiple of the other."
        )
    return 1 if num_kv_heads % num_ranks == 0 else num_ranks // num_kv_heads


def check_kv_group(owner: str, num_kv_heads: int, group_name: str, kv_group_name: str | None) -> str:
    """Return the name of the group of ranks that hold this rank's key/value head; "" if only this rank holds it.

    Raises:
        ValueError: `kv_group_name` names a wrong group, is required and missing, or is given for sharded heads.
    """
    num_ranks = 1 if not group_name else process_group(group_name).size()
    num_copies = ranks_per_kv_head(owner, num_kv_heads, num_ranks)
    if num_copies == 1:
        if kv_group_name:
            raise ValueError(
                f"{owner}: got kv_group_name, but the {num_kv_heads} key/value heads are sharded over {num_ranks} "
                "ranks; leave it out."
            )
        return ""
    if kv_group_name is None and num_copies == num_ranks:
        return group_name
    if not kv_group_name or dist.get_process_group_ranks(process_group(kv_group_name)) != _ranks_with_same_head(
        group_name, num_copies
    ):
        raise ValueError(
            f"{owner}: got num_kv_heads {num_kv_heads} on {num_ranks} ranks without the group of the {num_copies} "
            "ranks that hold the same head; pass kv_group_name=weft.nn.kv_groups(num_kv_heads, group_name)."
        )
    return kv_group_name


def broadcast_values(tensor: Tensor, group_name: str) -> None:
    """Broadcast the values of the group's first rank, in place; does nothing for a meta tensor."""
    if not tensor.is_meta:
        group = process_group(group_name)
        dist.broadcast(tensor, src=dist.get_process_group_ranks(group)[0], group=group)


def _ranks_with_same_head(group_name: str, num_copies: int) -> list[int]:
    """Return the global ranks, including this one, that hold the same key/value head as this rank."""
    group = process_group(group_name)
    start = group.rank() // num_copies * num_copies
    return dist.get_process_group_ranks(group)[start : start + num_copies]
