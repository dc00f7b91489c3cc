"""Operators on ranks that have a device each and communicate over NCCL, on the runtime without a device.

Streams run as late as they may, so that a missing wait between a collective's stream and the current one gives other
values than one rank computes.
"""

from __future__ import annotations

from functools import partial

from ops.on_device import on_device

from ops import (
    test_attention,
    test_cross_entropy,
    test_norms,
    test_overlap,
    test_pipeline,
    test_sequence_linear,
    test_sequence_mlp,
    test_shard_ops,
    test_sharded,
    test_sharded_linear,
)

on_nccl = partial(on_device, "cuda", backend="cpu:weft,cuda:nccl")

test_column_row_mlp = on_nccl(test_sharded.test_column_row_mlp)
test_linears_and_embedding = on_nccl(test_sharded.test_linears_and_embedding)
test_sequence_column_row_mlp = on_nccl(test_sequence_mlp.test_values_and_gradients)
test_sequence_linears = on_nccl(test_sequence_linear.test_values_and_gradients)
test_many_chunks = on_nccl(test_overlap.test_many_chunks)
test_sharded_linears = on_nccl(test_sharded_linear.test_values_and_gradients)
test_pairs = on_nccl(test_shard_ops.test_values_and_gradients)
test_all_to_all = on_nccl(test_shard_ops.test_all_to_all)
test_losses = on_nccl(test_cross_entropy.test_losses_and_gradients)
test_chunked_losses = on_nccl(test_cross_entropy.test_chunked_losses)
test_norms = on_nccl(test_norms.test_values_and_gradients)
test_sharded_and_replicated_kv_heads = on_nccl(test_attention.test_sharded_and_replicated_kv_heads)
test_stages_match_full_model = on_nccl(test_pipeline.test_stages_match_full_model)
test_messages_of_all_dtypes = on_nccl(test_pipeline.test_many_messages_of_all_dtypes_on_two_channels)
test_tensors_for_backward_are_not_overwritten = on_nccl(test_pipeline.test_tensors_for_backward_are_not_overwritten)
