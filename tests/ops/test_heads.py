"""shard_qkv returns a rank's heads of a checkpoint; kv_groups returns the group of ranks with equal key/value heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from support.ranks import on_ranks


def test_shard_qkv_returns_rows_of_local_heads() -> None:
    def rows(*args: int, **layout: Any) -> list[int]:
        num_blocks = args[0] + 2 * args[1]
        return weft.nn.shard_qkv(torch.arange(num_blocks), *args, **layout).tolist()

    # One row per head. Layout "blocks": q0 q1 q2 q3 k0 k1 v0 v1; "grouped": q0 q1 k0 v0 q2 q3 k1 v1.
    assert rows(4, 2, 1, 0) == list(range(8))
    assert rows(4, 2, 1, 0, layout="grouped") == [0, 1, 4, 5, 2, 6, 3, 7]
    assert rows(4, 2, 2, 1) == [2, 3, 5, 7]
    assert rows(4, 2, 2, 1, layout="grouped") == [4, 5, 6, 7]
    assert [rows(4, 2, 4, rank) for rank in range(4)] == [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]
    assert rows(4, 2, 4, 3, layout="grouped") == [5, 6, 7]
    assert rows(4, 1, 2, 1) == [2, 3, 4, 5]
    assert rows(2, 2, 2, 1, layout="grouped") == [3, 4, 5]  # q k v of head 1: GPT-NeoX
    weight = torch.randn(8 * 3, 5)  # heads of three rows
    expected = torch.cat([weight[6:12], weight[15:18], weight[21:24]])
    assert torch.equal(weft.nn.shard_qkv(weight, 4, 2, 2, 1), expected)

    for args, layout, text in [
        ((4, 2, 3, 0), "blocks", "shard_qkv: got num_heads 4 on 3 ranks; num_heads must be a multiple of the number"),
        ((4, 2, 2, 2), "blocks", "shard_qkv: got rank 2 of 2 ranks"),
        (
            (4, 4, 2, 0),
            "blocks",
            r"got a tensor of shape \[8, 2\] for 4 query and 4 key/value heads; .* a multiple of 12",
        ),
        ((4, 2, 2, 0), "rows", "shard_qkv: got layout 'rows'; pass 'blocks' or 'grouped'"),
    ]:
        with pytest.raises(ValueError, match=text):
            weft.nn.shard_qkv(torch.ones(8, 2), *args, layout=layout)


@on_ranks(4)
def test_kv_groups_have_ranks_with_equal_heads(rank: int) -> None:
    world = dist.group.WORLD.group_name
    assert weft.nn.kv_groups(4, world) == weft.nn.kv_groups(8, world) == weft.nn.kv_groups(1, "") == ""
    assert weft.nn.kv_groups(1, world) == world
    pair = dist.distributed_c10d._resolve_process_group(weft.nn.kv_groups(2, world))
    assert dist.get_process_group_ranks(pair) == ([0, 1] if rank < 2 else [2, 3])
    assert dist.get_backend_config(pair) == dist.get_backend_config(dist.group.WORLD)
    with pytest.raises(ValueError, match=r"^kv_groups: got num_kv_heads 3 on 4 ranks; one must be a multiple"):
        weft.nn.kv_groups(3, world)
