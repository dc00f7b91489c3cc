"""The operators on ranks that share one GPU: the bodies of this folder's tests, over gloo with CUDA tensors.

They compare with the unsharded computation on the same device. Random arguments are in test_fuzz.py, schemas and
numerical gradients in test_registration.py. A CPU test has no CUDA version here if it

- counts host bytes, or uses staging buffers, which only the backend weft has: test_kept_bytes, test_memory,
  test_collectives_and_bytes, test_two_shards_at_a_time, test_what_is_saved, test_keeps_no_mask, test_copies_of_logits,
  test_memory_of_messages_is_used_again, test_a_flush_lets_memory_go, test_scratch.py;
- expects a mismatch between ranks, or a time-out. Only the weft backend detects these for collectives; messages detect
  them by their headers, which are on the host: test_modes_that_differ_are_named, test_mismatches_raise_on_both_sides,
  test_a_refused_message_is_told_by_the_next_call, test_a_message_that_never_comes_ends_in_a_timeout;
- expects token ids to be checked in advance, which is done only on the CPU: test_token_ids_are_read_in_advance,
  test_targets_are_read_in_advance;
- uses deterministic algorithms, for which cuBLAS raises an error by default: test_what_is_not_measured;
- creates a mesh of the backend weft: test_groups_measure_apart;
- links ranks: NCCL does not support two ranks on one GPU, and gloo links send CPU tensors: test_pipeline_links.py;
- does not depend on the device: test_known_answers, test_modules_are_traced_for_a_gpu,
  test_rebind_group_refuses_a_module_without_weft_modules, the refusals of test_overlap.py and its test_environment,
  test_table_without_dims, test_vocabularies_beyond_int32, test_classes_beyond_int64;
- has programs of its own for the CPU: test_script_fresh_process.py, test_installed.py.

The tests of the backend weft, collectives/, and of host memory, memory/, are for the CPU.
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
    test_tracing,
)
from ops.on_device import on_device

# Also without a GPU: a linear layer of each kind, an operator without arithmetic, counts of collectives and of
# messages.
test_linears_and_embedding_on_cpu = on_device("cpu", test_sharded.test_linears_and_embedding)
test_all_to_all_on_cpu = on_device("cpu", test_shard_ops.test_all_to_all)
test_collectives_of_sharded_linears_on_cpu = on_device("cpu", test_sharded_linear.test_number_of_collectives)
test_number_of_messages_on_cpu = on_device("cpu", test_pipeline.test_number_of_messages)

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
test_ranks_agree_on_pieces = on_device("cuda", test_overlap.test_ranks_agree_on_what_they_measured)
test_pieces_of_layers_in_turn = on_device("cuda", test_overlap.test_layers_in_step_with_the_turns)
test_a_loaded_table_chooses = on_device("cuda", test_overlap.test_a_loaded_table_chooses)
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

# Numbers of collectives.
test_number_of_all_reduces = on_device("cuda", test_sharded.test_number_of_all_reduces)
test_collectives_of_the_mlp = on_device("cuda", test_sequence_mlp.test_number_of_collectives)
test_collectives_of_sequence_linears = on_device("cuda", test_sequence_linear.test_number_of_collectives)
test_collectives_of_sharded_linears = on_device("cuda", test_sharded_linear.test_number_of_collectives)
test_collectives_of_pairs = on_device("cuda", test_shard_ops.test_number_of_collectives)
test_collectives_of_losses = on_device("cuda", test_cross_entropy.test_number_of_collectives)
test_collectives_of_norms = on_device("cuda", test_norms.test_number_of_collectives)
test_collectives_of_attention = on_device("cuda", test_attention.test_number_of_collectives, num_ranks=4)
test_number_of_messages = on_device("cuda", test_pipeline.test_number_of_messages)

# Traced, compiled, exported, in TorchScript and under autocast.
test_compile_linears = on_device("cuda", test_tracing.test_compile_fullgraph)
test_compile_with_dynamic_shapes = on_device("cuda", test_tracing.test_compile_with_dynamic_shapes)
test_export = on_device("cuda", test_tracing.test_export)
test_script_save_load = on_device("cuda", test_tracing.test_script_save_load)
test_compile_the_mlp = on_device("cuda", test_sequence_mlp.test_compile_export_and_script)
test_compile_sequence_linears = on_device("cuda", test_sequence_linear.test_compile_export_script_and_autocast)
test_inductor_on_uneven_parts = on_device("cuda", test_sequence_linear.test_inductor_on_uneven_parts)
test_compile_sharded_linears = on_device("cuda", test_sharded_linear.test_compile_export_script_and_autocast)
test_compile_pairs = on_device("cuda", test_shard_ops.test_compile_export_and_script)
test_compile_losses = on_device("cuda", test_cross_entropy.test_compile_export_script_and_autocast)
test_compile_norms = on_device("cuda", test_norms.test_compile_export_script_and_autocast)
test_compile_dropout = on_device("cuda", test_dropout.test_module_compile_export_script_checkpoint)
test_compile_attention = on_device("cuda", test_attention.test_compile_and_export)
test_script_of_attention = on_device("cuda", test_attention.test_script_save_load_rebind)
test_script_of_shared_heads = on_device("cuda", test_attention.test_script_save_load_rebind, num_ranks=4)
test_autocast_of_attention = on_device("cuda", test_attention.test_autocast)

# Errors.
test_refusals = on_device("cuda", test_sharded.test_refusals_leave_the_group_usable)
test_refusals_of_the_mlp = on_device("cuda", test_sequence_mlp.test_refusals_leave_the_group_usable)
test_refusals_of_sequence_linears = on_device("cuda", test_sequence_linear.test_refusals_leave_the_group_usable)
test_refusals_of_sharded_linears = on_device("cuda", test_sharded_linear.test_refusals_leave_the_group_usable)
test_refusals_of_pairs = on_device("cuda", test_shard_ops.test_refusals_leave_the_group_usable)
test_refusals_of_losses = on_device("cuda", test_cross_entropy.test_refusals_leave_the_group_usable)
test_refusals_of_norms = on_device("cuda", test_norms.test_refusals_leave_the_group_usable)
test_refusals_of_dropout = on_device("cuda", test_dropout.test_refusals)
test_refusals_of_head_counts = on_device("cuda", test_attention.test_refusals_of_head_counts, num_ranks=4)
test_refusals_of_messages = on_device("cuda", test_pipeline.test_refusals)

# Ranks that share key/value heads.
test_first_values_of_attention = on_device("cuda", test_attention.test_first_values, num_ranks=4)
test_shared_heads = on_device("cuda", test_attention.test_heads_cut_and_replicated, num_ranks=4)
test_groups_of_heads = on_device("cuda", test_heads.test_kv_groups, num_ranks=4)

# Without a group: each rank by itself.
test_dropout_by_its_definition = on_device("cuda", test_dropout.test_equals_its_definition)
test_dropout_of_specials = on_device("cuda", test_dropout.test_probabilities_seeds_and_specials)
test_dropout_twice_differentiated = on_device("cuda", test_dropout.test_second_derivative)
test_float32_parameters = on_device("cuda", test_norms.test_float32_parameters_beside_half_types)
test_large_means_and_strides = on_device("cuda", test_norms.test_large_means_and_strides)
test_changed_sums = on_device("cuda", test_norms.test_saved_sum_is_guarded)
test_one_result_alone = on_device("cuda", test_norms.test_gradient_of_one_result_alone)
test_order_with_views = on_device("cuda", test_gradient_order.test_weights_that_enter_through_views_made_before)
test_what_the_mlp_saves = on_device("cuda", test_gradient_order.test_saves_x_and_the_hidden_values_and_nothing_else)
test_partial_backwards = on_device("cuda", test_gradient_order.test_partial_backwards_and_two_backwards)
test_autocast_of_linears = on_device("cuda", test_tracing.test_autocast_runs_in_its_dtype)
test_refusals_of_attention = on_device("cuda", test_attention.test_refusals_of_inputs)
test_rows_of_heads = on_device("cuda", test_heads.test_shard_qkv)
