"""The operators on 2 ranks that share one GPU: the bodies of this folder's tests, over gloo with CUDA tensors.

They compare values and gradients with the unsharded computation on the same device. Left out is what

- counts collectives, host memory or times, or uses memory of the group: that is the backend weft's, which is for the
  CPU (test_number_of_*, test_kept_bytes, test_memory*, test_two_shards_at_a_time, test_what_is_saved,
  test_keeps_no_mask, test_copies_of_logits, test_a_flush_lets_memory_go, test_scratch.py, most of test_overlap.py);
- expects a CollectiveMismatchError or a time-out: the backend weft tells them, and pipelines from headers on the host;
- expects refusals: they come before a device has any part in it, and on CUDA nobody reads token ids in advance;
- traces or autocasts: test_cuda.py compiles on CUDA, and the autocast of these tests is the CPU's;
- needs 4 ranks, for groups of some of them;
- draws its arguments: test_fuzz.py does so on the CPU, for groups of the backend weft.
"""

from __future__ import annotations

from ops import (
    test_attention,
    test_cross_entropy,
    test_dropout,
    test_gradient_order,
    test_heads,
    test_norms,
    test_overlap,
    test_pipeline,
    test_sequence_linear,
    test_sequence_mlp,
    test_shard_ops,
    test_sharded,
    test_sharded_linear,
)
from ops.on_device import on_device

# Without a GPU, too: a linear layer of each kind and an operator without arithmetic.
test_linears_and_embedding_on_cpu = on_device("cpu", test_sharded.test_linears_and_embedding)
test_all_to_all_on_cpu = on_device("cpu", test_shard_ops.test_all_to_all)

test_linears_and_embedding = on_device("cuda", test_sharded.test_linears_and_embedding)
test_column_row_mlp = on_device("cuda", test_sharded.test_column_row_mlp)
test_sequence_column_row_mlp = on_device("cuda", test_sequence_mlp.test_values_and_gradients)
test_order_of_gradients = on_device("cuda", test_gradient_order.test_plain_weights)
test_steps_in_hooks = on_device(
    "cuda", test_gradient_order.test_stepping_in_the_hook_gives_the_gradients_of_the_old_weights
)

test_sequence_linears = on_device("cuda", test_sequence_linear.test_values_and_gradients)
test_one_rank_under_a_dispatch_mode = on_device("cuda", test_sequence_linear.test_one_rank_under_a_dispatch_mode)
test_many_pieces = on_device("cuda", test_overlap.test_many_pieces)
test_sums_of_pieces_in_half_types = on_device("cuda", test_overlap.test_half_types_are_summed_in_float32)
test_sharded_linears = on_device("cuda", test_sharded_linear.test_values_and_gradients)

test_pairs = on_device("cuda", test_shard_ops.test_values_and_gradients)
test_all_to_all = on_device("cuda", test_shard_ops.test_all_to_all)
test_sizes_that_are_not_told = on_device("cuda", test_shard_ops.test_sizes_that_are_not_told_are_equal)

test_losses = on_device("cuda", test_cross_entropy.test_losses_and_gradients)
test_chunks_of_losses = on_device("cuda", test_cross_entropy.test_chunks_add_up)
test_masked_and_large_logits = on_device("cuda", test_cross_entropy.test_masked_and_large_logits)
test_logits_in_place = on_device("cuda", test_cross_entropy.test_logits_in_place)
test_ignored_tokens = on_device("cuda", test_cross_entropy.test_ignored_tokens_have_no_gradient)

test_norms_of_parts = on_device("cuda", test_norms.test_values_and_gradients)
test_dropout_of_parts = on_device("cuda", test_dropout.test_parts_equal_the_whole)

test_heads_of_attention = on_device("cuda", test_attention.test_heads_cut_and_replicated)
test_attention_on_parts = on_device("cuda", test_attention.test_parts_of_a_sequence)
test_attention_in_other_dtypes = on_device("cuda", test_attention.test_other_dtypes)
test_masks_and_rotary = on_device("cuda", test_attention.test_masks_and_rotary)
test_gradients_of_masks_and_rotary = on_device("cuda", test_attention.test_gradients_of_masks_and_rotary)

test_stages = on_device("cuda", test_pipeline.test_stages_equal_the_whole_model)
test_messages_of_all_dtypes = on_device("cuda", test_pipeline.test_many_messages_of_all_dtypes_on_two_channels)
test_received_for_a_backward = on_device("cuda", test_pipeline.test_what_a_backward_needs_is_not_overwritten)
test_unused_results = on_device("cuda", test_pipeline.test_unused_results_have_zero_gradients)
test_gradients_travel_once = on_device("cuda", test_pipeline.test_gradients_travel_once)
test_needs_of_gradients_under_no_grad = on_device("cuda", test_pipeline.test_needs_of_gradients_under_no_grad)
test_script_of_messages = on_device("cuda", test_pipeline.test_script)

# Without a group: each rank by itself.
test_dropout_by_its_definition = on_device("cuda", test_dropout.test_equals_its_definition)
test_dropout_of_specials = on_device("cuda", test_dropout.test_probabilities_seeds_and_specials)
test_dropout_twice_differentiated = on_device("cuda", test_dropout.test_second_derivative)
test_float32_parameters = on_device("cuda", test_norms.test_float32_parameters_beside_half_types)
test_large_means_and_strides = on_device("cuda", test_norms.test_large_means_and_strides)
test_one_result_alone = on_device("cuda", test_norms.test_gradient_of_one_result_alone)
test_order_with_views = on_device("cuda", test_gradient_order.test_weights_that_enter_through_views_made_before)
test_what_the_mlp_saves = on_device("cuda", test_gradient_order.test_saves_x_and_the_hidden_values_and_nothing_else)
test_partial_backwards = on_device("cuda", test_gradient_order.test_partial_backwards_and_two_backwards)
test_rows_of_heads = on_device("cuda", test_heads.test_shard_qkv)
