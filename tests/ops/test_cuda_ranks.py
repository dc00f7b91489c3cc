"""The operators on ranks that share one GPU: the bodies of this folder's tests, over gloo with CUDA tensors.

They compare with the unsharded computation on the same device. Random arguments are in test_fuzz.py, schemas and
numerical gradients in test_registration.py. A CPU test has no CUDA version here if it

- counts host bytes, or uses staging buffers, which only the backend weft has: test_saved_bytes, test_memory_is_bounded,
  test_collectives_and_bytes, test_at_most_two_remote_shards_exist, test_saves_no_mask, test_copied_bytes_of_logits,
  test_message_memory_is_reused, test_flush_frees_memory, test_scratch.py;
- expects a mismatch between ranks, or a time-out. Only the weft backend detects these for collectives; messages detect
  them by their headers, which are on the host: test_different_modes_raise, test_mismatches_raise_on_both_sides,
  test_mismatch_raises_in_next_send, test_missing_message_times_out;
- expects token ids to be checked in advance, which is done only on the CPU:
  test_token_ids_are_checked_before_communication, test_targets_are_checked_before_communication;
- uses deterministic algorithms, for which cuBLAS raises an error by default: test_some_calls_are_not_measured;
- creates a mesh of the backend weft: test_groups_measure_separately;
- links ranks: NCCL does not support two ranks on one GPU, and gloo links send CPU tensors: test_pipeline_links.py;
- does not depend on the device: test_known_answers, test_module_traces_with_fake_cuda_tensors,
  test_rebind_group_without_weft_modules_raises, test_invalid_modes_and_tables_raise,
  test_environment_sets_mode_and_table,
  test_table_without_dims_raises, test_vocab_start_beyond_int32_is_accepted, test_classes_beyond_int64_raise;
- calls ring_attention, which needs NCCL on CUDA: test_ring_attention.py. test_nccl_ranks.py has CUDA versions;
- runs its own programs on the CPU: test_script_fresh_process.py, test_installed.py.

The tests of the backend weft, collectives/, and of host memory, memory/, are for the CPU.
"""

from __future__ import annotations

from ops import (
    test_attention,
    test_cross_entropy,
    test_dropout,
    test_gate_up,
    test_gradient_order,
    test_heads,
    test_moe,
    test_norms,
    test_overlap,
    test_pipeline,
    test_sequence_linear,
    test_sequence_mlp,
    test_shard_ops,
    test_sharded,
    test_sharded_linear,
    test_tracing,
    test_ulysses_attention,
)
from ops.on_device import on_device

INDUCTOR = "inductor compiles kernels with Triton"

# These run without a GPU, too: a linear layer of each kind, an operator without arithmetic, counts of collectives and
# of messages.
test_linears_and_embedding_on_cpu = on_device("cpu", test_sharded.test_linears_and_embedding_match_unsharded)
test_all_to_all_on_cpu = on_device("cpu", test_shard_ops.test_all_to_all_swaps_dims)
test_collectives_of_sharded_linears_on_cpu = on_device("cpu", test_sharded_linear.test_number_of_collectives)
test_number_of_messages_on_cpu = on_device("cpu", test_pipeline.test_number_of_messages)

test_linears_and_embedding = on_device("cuda", test_sharded.test_linears_and_embedding_match_unsharded)
test_column_row_mlp = on_device("cuda", test_sharded.test_column_row_mlp_matches_unsharded)
test_sequence_column_row_mlp = on_device("cuda", test_sequence_mlp.test_values_and_gradients)
test_joined_weights = on_device("cuda", test_gate_up.test_matches_the_unsharded_mlp)
test_order_of_gradients = on_device("cuda", test_gradient_order.test_gradients_of_plain_weights_are_in_order)
test_steps_in_hooks = on_device("cuda", test_gradient_order.test_step_in_hook_matches_step_after_backward)

test_sequence_linears = on_device("cuda", test_sequence_linear.test_values_and_gradients)
test_dispatch_mode_on_one_rank = on_device("cuda", test_sequence_linear.test_dispatch_mode_on_one_rank)
test_many_chunks = on_device("cuda", test_overlap.test_many_chunks_match_unchunked)
test_ranks_agree_on_measured_choice = on_device("cuda", test_overlap.test_ranks_agree_on_measured_choice)
test_alternating_layers_are_all_timed = on_device("cuda", test_overlap.test_alternating_layers_are_all_timed)
test_loaded_table_is_used = on_device("cuda", test_overlap.test_loaded_table_is_used)
test_half_types_are_summed_in_float32 = on_device("cuda", test_overlap.test_half_types_are_summed_in_float32)
test_sharded_linears = on_device("cuda", test_sharded_linear.test_values_and_gradients)

test_pairs = on_device("cuda", test_shard_ops.test_values_and_gradients)
test_all_to_all = on_device("cuda", test_shard_ops.test_all_to_all_swaps_dims)
test_omitted_sizes_are_equal = on_device("cuda", test_shard_ops.test_omitted_sizes_mean_equal_shards)

test_losses = on_device("cuda", test_cross_entropy.test_losses_and_gradients_match_torch)
test_chunked_losses = on_device("cuda", test_cross_entropy.test_chunked_losses_match_torch)
test_masked_and_large_logits = on_device("cuda", test_cross_entropy.test_masked_and_large_logits_match_torch)
test_noncontiguous_logits = on_device("cuda", test_cross_entropy.test_noncontiguous_logits_match_torch)
test_ignored_tokens = on_device("cuda", test_cross_entropy.test_ignored_tokens_have_no_gradient)

test_sharded_norms = on_device("cuda", test_norms.test_values_and_gradients)
test_sharded_dropout = on_device("cuda", test_dropout.test_shards_match_unsharded)

test_attention_by_heads = on_device("cuda", test_ulysses_attention.test_matches_unsharded_attention)
test_rows_of_experts = on_device("cuda", test_moe.test_rows_are_sorted_by_expert_rank_and_pair)
test_combine_inverts_dispatch = on_device("cuda", test_moe.test_combine_inverts_dispatch)
test_mixture_of_experts = on_device("cuda", test_moe.test_layer_matches_a_loop_over_tokens_and_experts)
test_half_precision_of_experts = on_device("cuda", test_moe.test_half_precision_is_summed_in_float32)
test_sharded_and_replicated_kv_heads = on_device(
    "cuda", test_attention.test_sharded_and_replicated_kv_heads_match_reference
)
test_attention_on_sequence_shards = on_device("cuda", test_attention.test_sequence_shards_match_reference)
test_attention_in_other_dtypes = on_device("cuda", test_attention.test_float32_and_bfloat16_match_reference)
test_masks_and_rotary = on_device("cuda", test_attention.test_masks_and_rotary_match_reference)
test_gradients_of_masks_and_rotary = on_device(
    "cuda", test_attention.test_gradients_of_masks_and_rotary_match_reference
)

test_stages_match_full_model = on_device("cuda", test_pipeline.test_stages_match_full_model)
test_messages_of_all_dtypes = on_device("cuda", test_pipeline.test_many_messages_of_all_dtypes_on_two_channels)
test_tensors_for_backward_are_not_overwritten = on_device(
    "cuda", test_pipeline.test_tensors_for_backward_are_not_overwritten
)
test_unused_results = on_device("cuda", test_pipeline.test_unused_results_have_zero_gradients)
test_second_backward_raises = on_device("cuda", test_pipeline.test_second_backward_raises)
test_wait_under_no_grad_raises = on_device("cuda", test_pipeline.test_wait_under_no_grad_raises)
test_script_of_messages = on_device("cuda", test_pipeline.test_script_keeps_messages_in_order)

# Numbers of collectives.
test_number_of_all_reduces = on_device("cuda", test_sharded.test_number_of_all_reduces)
test_collectives_of_the_mlp = on_device("cuda", test_sequence_mlp.test_number_of_collectives)
test_collectives_of_sequence_linears = on_device("cuda", test_sequence_linear.test_number_of_collectives)
test_collectives_of_sharded_linears = on_device("cuda", test_sharded_linear.test_number_of_collectives)
test_collectives_of_pairs = on_device("cuda", test_shard_ops.test_number_of_collectives)
test_collectives_of_losses = on_device("cuda", test_cross_entropy.test_number_of_collectives)
test_collectives_of_norms = on_device("cuda", test_norms.test_number_of_collectives)
test_collectives_of_attention = on_device("cuda", test_attention.test_number_of_collectives, num_ranks=4)
test_collectives_of_attention_by_heads = on_device("cuda", test_ulysses_attention.test_number_of_collectives)
test_number_of_messages = on_device("cuda", test_pipeline.test_number_of_messages)

# Traced, compiled, exported, in TorchScript and under autocast.
test_compile_linears = on_device("cuda", test_tracing.test_compiled_block_matches_eager, needs_gpu=INDUCTOR)
test_compile_with_dynamic_shapes = on_device("cuda", test_tracing.test_compiled_mlp_with_dynamic_shapes_matches_eager)
test_export = on_device("cuda", test_tracing.test_exported_block_matches_eager)
test_script_save_load = on_device("cuda", test_tracing.test_scripted_block_matches_eager_and_loads)
test_compile_the_mlp = on_device("cuda", test_sequence_mlp.test_compile_export_and_script)
test_compile_sequence_linears = on_device("cuda", test_sequence_linear.test_compile_export_script_and_autocast)
test_inductor_on_uneven_shards = on_device(
    "cuda", test_sequence_linear.test_inductor_on_uneven_shards, needs_gpu=INDUCTOR
)
test_compile_sharded_linears = on_device("cuda", test_sharded_linear.test_compile_export_script_and_autocast)
test_compile_pairs = on_device("cuda", test_shard_ops.test_compile_export_and_script)
test_compile_losses = on_device("cuda", test_cross_entropy.test_compile_export_script_and_autocast)
test_compile_norms = on_device("cuda", test_norms.test_compile_export_script_and_autocast, needs_gpu=INDUCTOR)
test_compile_dropout = on_device("cuda", test_dropout.test_module_compile_export_script_checkpoint)
test_compile_attention = on_device("cuda", test_attention.test_compiled_and_exported_blocks_match_eager)
test_compile_attention_by_heads = on_device("cuda", test_ulysses_attention.test_compile_export_script_and_autocast)
test_compile_experts = on_device("cuda", test_moe.test_compile_export_and_script)
test_script_of_attention = on_device("cuda", test_attention.test_scripted_block_loads_and_rebinds)
test_script_of_shared_heads = on_device("cuda", test_attention.test_scripted_block_loads_and_rebinds, num_ranks=4)
test_autocast_of_attention = on_device("cuda", test_attention.test_autocast_computes_in_bfloat16)

# Errors.
test_errors = on_device("cuda", test_sharded.test_errors_leave_group_usable)
test_errors_of_mlp = on_device("cuda", test_sequence_mlp.test_errors_leave_group_usable)
test_errors_of_sequence_linears = on_device("cuda", test_sequence_linear.test_errors_leave_group_usable)
test_errors_of_sharded_linears = on_device("cuda", test_sharded_linear.test_errors_leave_group_usable)
test_errors_of_pairs = on_device("cuda", test_shard_ops.test_errors_leave_group_usable)
test_errors_of_losses = on_device("cuda", test_cross_entropy.test_errors_leave_group_usable)
test_errors_of_norms = on_device("cuda", test_norms.test_errors_leave_group_usable)
test_errors_of_dropout = on_device("cuda", test_dropout.test_invalid_arguments_raise)
test_invalid_head_counts_raise = on_device("cuda", test_attention.test_invalid_head_counts_raise, num_ranks=4)
test_errors_of_attention_by_heads = on_device("cuda", test_ulysses_attention.test_errors_leave_group_usable)
test_errors_of_experts = on_device("cuda", test_moe.test_invalid_ids_raise_on_all_ranks)
test_errors_of_messages = on_device("cuda", test_pipeline.test_invalid_arguments_raise)

# Ranks that share key/value heads.
test_initial_values_of_attention = on_device("cuda", test_attention.test_only_replicated_heads_start_equal, num_ranks=4)
test_shared_heads = on_device("cuda", test_attention.test_sharded_and_replicated_kv_heads_match_reference, num_ranks=4)
test_kv_groups = on_device("cuda", test_heads.test_kv_groups_have_ranks_with_equal_heads, num_ranks=4)

# Tests without a group, which run on each rank.
test_dropout_matches_philox_mask = on_device("cuda", test_dropout.test_matches_philox_mask)
test_dropout_special_values = on_device("cuda", test_dropout.test_probabilities_seeds_and_special_values)
test_dropout_twice_differentiated = on_device("cuda", test_dropout.test_second_derivative_is_correct)
test_float32_parameters = on_device("cuda", test_norms.test_float32_parameters_with_half_inputs)
test_bfloat16_parameters = on_device("cuda", test_norms.test_bfloat16_parameters_match_float64, num_ranks=1)
test_large_means_and_strides = on_device("cuda", test_norms.test_large_means_and_strides_match_torch)
test_changed_sums = on_device("cuda", test_norms.test_changing_saved_sum_raises)
test_gradient_of_one_result = on_device("cuda", test_norms.test_unused_result_adds_no_gradient)
test_order_with_views = on_device("cuda", test_gradient_order.test_gradients_of_earlier_views_are_in_order)
test_tensors_saved_by_mlp = on_device("cuda", test_gradient_order.test_saves_only_x_and_hidden_values)
test_partial_backwards = on_device("cuda", test_gradient_order.test_partial_and_repeated_backwards_agree)
test_autocast_of_linears = on_device("cuda", test_tracing.test_autocast_runs_in_its_dtype)
test_invalid_attention_inputs_raise = on_device("cuda", test_attention.test_invalid_inputs_raise)
test_shard_qkv = on_device("cuda", test_heads.test_shard_qkv_returns_rows_of_local_heads)
