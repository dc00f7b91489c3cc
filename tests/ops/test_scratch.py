"""Partial results are computed in the group's staging buffer if it is available; the values are the same if not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import weft
from ops.operators import mlp_reference
from support.ranks import on_ranks

TOKENS, WIDTH, HIDDEN = 300, 64, 48  # 150 KiB of float64: more than kOneShotBytes, less than a staging buffer


@on_ranks(2, 3)
@pytest.mark.parametrize("with_pending_collective", [False, True])
def test_values_do_not_depend_on_staging_buffer(rank: int, world_size: int, with_pending_collective: bool) -> None:
    """A pending collective of the group makes the staging buffer unavailable."""
    group = dist.new_group(backend="cpu:weft")
    torch.manual_seed(3)
    full = {name: torch.randn(HIDDEN, WIDTH, dtype=torch.float64) * 0.2 for name in ("w1", "w3")}
    full["w2"] = torch.randn(WIDTH, HIDDEN, dtype=torch.float64) * 0.2
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    expected_x = x.clone().requires_grad_()
    expected = mlp_reference(expected_x, full, "silu")
    expected.sum().backward()
    dims = {"w1": 0, "w2": 1, "w3": 0}
    shards = {name: full[name].chunk(world_size, dim=dims[name])[rank].clone() for name in full}

    for _ in range(3):
        pending, other = None, torch.ones(200_000)
        if with_pending_collective:
            pending = dist.all_reduce(other, group=group, async_op=True)
        local_x = x.clone().requires_grad_()
        y = weft.ops.column_row_mlp(local_x, **shards, activation="silu", group_name=group.group_name)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        y.sum().backward()
        torch.testing.assert_close(local_x.grad, expected_x.grad, rtol=1e-12, atol=1e-12)
        linear = weft.ops.row_linear(
            local_x.detach().chunk(world_size, dim=1)[rank],
            full["w1"].chunk(world_size, dim=1)[rank],
            group_name=group.group_name,
        )
        torch.testing.assert_close(linear, x @ full["w1"].t(), rtol=1e-12, atol=1e-12)
        # The caller owns the result: overwrite it at once, while a slow peer may still read the staging buffer.
        linear.zero_()
        if pending is not None:
            pending.wait()
            assert torch.equal(other, torch.full_like(other, world_size))
