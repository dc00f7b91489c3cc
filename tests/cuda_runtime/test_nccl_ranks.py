"""Operators and pipeline links over NCCL, on the runtime without a device or on a GPU that the ranks share.

On the runtime each rank has a device, and streams run as late as possible. So without a wait between a collective's
stream and the current stream, results differ from those of one rank.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from ops.on_device import on_device, world_on
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ops import (
    test_attention,
    test_cross_entropy,
    test_norms,
    test_overlap,
    test_pipeline,
    test_ring_attention,
    test_sequence_linear,
    test_sequence_mlp,
    test_shard_ops,
    test_sharded,
    test_sharded_linear,
    test_ulysses_attention,
)
from support import cuda_runtime
from support.ranks import on_ranks
from weft import pipeline_links

BACKEND = "cpu:weft,cuda:nccl"
on_nccl = partial(on_device, "cuda", backend=BACKEND)

test_column_row_mlp = on_nccl(test_sharded.test_column_row_mlp_matches_unsharded)
test_linears_and_embedding = on_nccl(test_sharded.test_linears_and_embedding_match_unsharded)
test_sequence_column_row_mlp = on_nccl(test_sequence_mlp.test_values_and_gradients)
test_sequence_linears = on_nccl(test_sequence_linear.test_values_and_gradients)
test_many_chunks = on_nccl(test_overlap.test_many_chunks_match_unchunked)
test_lengths_on_two_ranks = on_nccl(test_overlap.test_lengths_and_layouts_match_unchunked)
test_lengths_on_three_ranks = on_nccl(test_overlap.test_lengths_and_layouts_match_unchunked, num_ranks=3)
test_lengths_on_four_ranks = on_nccl(test_overlap.test_lengths_and_layouts_match_unchunked, num_ranks=4)
test_sharded_linears = on_nccl(test_sharded_linear.test_values_and_gradients)
test_pairs = on_nccl(test_shard_ops.test_values_and_gradients)
test_all_to_all = on_nccl(test_shard_ops.test_all_to_all_swaps_dims)
test_losses = on_nccl(test_cross_entropy.test_losses_and_gradients_match_torch)
test_chunked_losses = on_nccl(test_cross_entropy.test_chunked_losses_match_torch)
test_norms = on_nccl(test_norms.test_values_and_gradients)
test_sharded_and_replicated_kv_heads = on_nccl(test_attention.test_sharded_and_replicated_kv_heads_match_reference)
test_ring_attention_on_two_ranks = on_nccl(test_ring_attention.test_matches_unsharded_attention)
test_ring_attention_on_four_ranks = on_nccl(test_ring_attention.test_matches_unsharded_attention, num_ranks=4)
test_windows_of_ring_attention = on_nccl(test_ring_attention.test_window_matches_unsharded_attention, num_ranks=3)
test_documents_of_ring_attention = on_nccl(test_ring_attention.test_documents_match_unsharded_attention, num_ranks=3)
test_dtypes_of_ring_attention = on_nccl(test_ring_attention.test_other_dtypes_scales_and_strides, num_ranks=3)
test_ring_and_ulysses_attention = on_nccl(test_ulysses_attention.test_grids_match_unsharded_attention, num_ranks=4)
test_stages_match_full_model = on_nccl(test_pipeline.test_stages_match_full_model)
test_messages_of_all_dtypes = on_nccl(test_pipeline.test_many_messages_of_all_dtypes_on_two_channels)
test_tensors_for_backward_are_not_overwritten = on_nccl(test_pipeline.test_tensors_for_backward_are_not_overwritten)


@pytest.mark.nccl
@on_ranks(2)
def test_ring_attention_over_gloo_raises() -> None:
    group = dist.new_group(backend="gloo").group_name
    x = torch.ones(1, 1, 4, 4, device="cuda")
    with pytest.raises(NotImplementedError, match=r"got query on cuda:\d and a group with the backend gloo"):
        torch.ops.weft.ring_attention(x, x, x, group_name=group)


@pytest.mark.nccl
@on_ranks(2, 3)
@pytest.mark.parametrize("order", ["all forward, all backward", "one forward, one backward"])
def test_messages_over_links(rank: int, world_size: int, order: str) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = dist.new_group(backend=BACKEND)
    pipeline_links.link(group, [peer for peer in range(world_size) if peer != rank], device)
    sent = cuda_runtime.count("nccl send") if cuda_runtime.is_active() else None
    try:
        with device:
            test_pipeline.check_stages(rank, world_size, order, group.group_name)
        if sent is not None:
            assert cuda_runtime.count("nccl send") > sent
    finally:
        pipeline_links.unlink(group)


@pytest.mark.nccl
@on_ranks(2)
@pytest.mark.parametrize("case", [1, 2])
def test_gradients_are_on_the_mesh_of_their_case(rank: int, case: int) -> None:
    """Ranks are reused: the second case must not find the first one's mesh in the caches of the backward's thread."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with world_on(BACKEND):
        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("rows",))
        x = distribute_tensor(torch.ones(4, 2, device="cuda"), mesh, [Shard(0)]).requires_grad_()
        (x * x).sum().backward()
        dist.all_reduce(x.grad.to_local(), group=x.grad.device_mesh.get_group("rows"))
        assert x.grad.device_mesh is mesh
