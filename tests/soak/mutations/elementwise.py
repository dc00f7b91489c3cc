"""Faults in the activations and in dropout."""

from __future__ import annotations

from soak.mutations.mutation import Mutation

KERNEL = "cuda/activation_launch.cu"
MATH = "src/activation_math.h"
DROPOUT = "cuda/dropout_launch.cu"
PHILOX = "src/philox.h"

# Only these tests find faults in philox.h: the other dropout tests compute their expected values with it.
KNOWN_ANSWERS = "*Philox*"
PDF_CONSTANT = "0.39894228040143267793994605993438"
FIT_TERMS = "i = kTerms - 2; i >= 0"
SIDES = "x > 0 ? 1 - tail : tail"
FRESH = "the kernel's entry allocates these tensors, and allocations are aligned"

MUTATIONS = [
    # Activations.
    Mutation("activation_up_unchecked", KERNEL, "job.up != nullptr", "true"),
    Mutation("activation_never_gated", KERNEL, "job.up != nullptr", "false"),
    Mutation("activation_grad_unchecked", KERNEL, "if (job.grad_h == nullptr)", "if (false)"),
    Mutation("activation_forward_gate", KERNEL, "Formula::value(x[i]) * up[i] :", "Formula::value(x[i]) :"),
    Mutation("activation_pdf_constant_of_double", KERNEL, PDF_CONSTANT, "0.398942280401", 1, 3),
    Mutation("activation_pdf_constant", KERNEL, PDF_CONSTANT, "0.3989", 2, 3),
    Mutation("activation_rough_pdf_constant", KERNEL, PDF_CONSTANT, "0.3999", 3, 3),
    Mutation("activation_exponent_of_double", KERNEL, "::exp(-0.5 * x * x)", "::exp(-0.5 * x)"),
    Mutation("activation_fit_first", KERNEL, "0.75528512121297372228F", "0.7552F"),
    Mutation("activation_fit_last", KERNEL, "-0.0001607627685665886083F", "-0.0005F"),
    Mutation("activation_fit_one_term_less", KERNEL, FIT_TERMS, FIT_TERMS.replace(">=", ">"), 1, 2),
    Mutation("activation_fit_center", KERNEL, "(a - kCenter) * inverse", "a * inverse", 1, 2),
    Mutation("activation_sides", KERNEL, SIDES, "x < 0 ? 1 - tail : tail", 1, 2),
    Mutation("activation_one_side", KERNEL, SIDES, "tail", 1, 2),
    Mutation("activation_rough_fit_first", KERNEL, "0.72909086942672729492F", "0.7280F"),
    Mutation("activation_rough_fit_last", KERNEL, "0.0049891024827957153320F", "0.0F"),
    Mutation("activation_rough_fit_no_constant", KERNEL, FIT_TERMS, FIT_TERMS.replace(">=", ">"), 2, 2),
    Mutation("activation_rough_fit_one_term_less", KERNEL, FIT_TERMS, FIT_TERMS.replace("- 2", "- 3"), 2, 2),
    Mutation("activation_rough_fit_center", KERNEL, "(a - kCenter) * inverse", "a * inverse", 2, 2),
    Mutation("activation_rough_center", KERNEL, "kCenter = 3.0F", "kCenter = 3.01F"),
    Mutation("activation_rough_exponent", KERNEL, "-0.72134752044448170368F;  // -log2", "-0.7203F;  // -log2"),
    Mutation("activation_rough_sides", KERNEL, SIDES, "x < 0 ? 1 - tail : tail", 2, 2),
    Mutation("activation_rough_one_side", KERNEL, SIDES, "tail", 2, 2),
    Mutation("activation_rough_unbounded", KERNEL, "::fminf(::fabsf(x), 15.0F);\n", "::fabsf(x);\n"),
    Mutation("activation_rough_bound", KERNEL, "15.0F);\n", "5.0F);\n"),
    Mutation(
        "activation_rough_for_float", KERNEL, "sizeof(Storage) < sizeof(float)", "sizeof(Storage) <= sizeof(float)"
    ),
    Mutation("activation_square_rounded", KERNEL, "::fmaf(a, a, -square) * kHalfLog2E", "0.0F"),
    Mutation("activation_no_low_part", KERNEL, "::fmaf(power, low * 0.69314718055994530942F, power)", "power"),
    Mutation("activation_no_grad_up", KERNEL, "    store_pack<Storage>(job.grad_up, gate_begin, grad_up);\n", ""),
    Mutation("activation_no_grad_x", KERNEL, "  store_pack<Storage>(job.grad_x, gate_begin, grad_x);\n", ""),
    Mutation("activation_gate_up_of_one_row", KERNEL, "begin + row_idx * job.row_size", "begin"),
    Mutation("activation_gate_up_row_of_one", KERNEL, "begin + row_idx * job.row_size", "begin + row_idx"),
    Mutation("activation_gate_up_always_32_bits", KERNEL, "job.num_elements <= UINT32_MAX", "true"),
    Mutation("activation_gate_up_16_bits", KERNEL, "uint32_t>(begin) / ", "uint16_t>(begin) / "),
    Mutation("activation_gate_up_load_of_x", KERNEL, "(job.x, gate_begin, x)", "(job.x, begin, x)"),
    Mutation("activation_gate_up_load_of_up", KERNEL, "(job.up, gate_begin, up)", "(job.up, begin, up)"),
    Mutation("activation_gate_up_store_of_x", KERNEL, "(job.grad_x, gate_begin, ", "(job.grad_x, begin, "),
    Mutation("activation_gate_up_store_of_up", KERNEL, "(job.grad_up, gate_begin, ", "(job.grad_up, begin, "),
    Mutation("activation_gate_up_grad_h", KERNEL, "(job.grad_h, begin, ", "(job.grad_h, gate_begin, "),
    Mutation("activation_gate_up_h_of_backward", KERNEL, "(job.h, begin, h)", "(job.h, gate_begin, h)", 2, 2),
    Mutation("activation_gate_up_h_of_forward", KERNEL, "(job.h, begin, h)", "(job.h, gate_begin, h)", 1, 2),
    Mutation("activation_swapped_grads", KERNEL, "grad_up[i] = result.grad_up", "grad_up[i] = result.grad_gate"),
    Mutation("activation_alignment_of_grad", KERNEL, "is_vector_aligned({job.grad_h, ", "is_vector_aligned({"),
    Mutation("activation_alignment_of_x", KERNEL, "job.x, job.up, job.h", "job.up, job.h"),
    Mutation("activation_alignment_of_up", KERNEL, "job.x, job.up, job.h", "job.x, job.h"),
    Mutation(
        "activation_alignment_of_h",
        KERNEL,
        "job.up, job.h, job.grad_x, job.grad_up}",
        "job.up}",
        equivalent=FRESH,
    ),
    Mutation("logistic_exponent", MATH, "Math::exp(-std::fabs(x))", "Math::exp(-x)"),
    Mutation("logistic_sides", MATH, "? smaller : inverse", "? inverse : smaller"),
    Mutation("logistic_slope", MATH, "smaller * inverse};", "smaller};"),
    Mutation("silu_slope", MATH, "sigmoid.value + x * sigmoid.slope", "sigmoid.value + sigmoid.slope"),
    Mutation("gelu_slope", MATH, "point.cdf + x * point.pdf", "point.cdf"),
    Mutation("gelu_tanh_constant", MATH, "Scalar(0.044715)", "Scalar(0.0447)"),
    Mutation("gelu_tanh_slope", MATH, "Scalar(3) * kCubic", "Scalar(2) * kCubic"),
    Mutation("gelu_tanh_bound", MATH, "Scalar(40) ? above : Scalar(40)", "Scalar(2) ? above : Scalar(2)"),
    Mutation("gelu_tanh_unbounded", MATH, "const Scalar y = clamp_x(x);", "const Scalar y = x;", 2, 2),
    Mutation("relu_slope_at_zero", MATH, "{x <= Scalar(0) ?", "{x < Scalar(0) ?"),
    Mutation("relu_of_nan", MATH, "return x <= Scalar(0) ? Scalar(0) : x;", "return x > Scalar(0) ? x : Scalar(0);"),
    Mutation("gate_without_up", MATH, "backward(grad_h * up, gate)", "backward(grad_h, gate)"),
    # Dropout.
    Mutation("dropout_int32_position", DROPOUT, "const int64_t position", "const int position"),
    Mutation("dropout_run_begin", DROPOUT, " + job.run_begin +", " +"),
    Mutation("dropout_run_stride", DROPOUT, "run_idx * job.full_run_size", "run_idx * job.run_size"),
    Mutation("dropout_place_in_run", DROPOUT, "(begin - run_idx * job.run_size)", "begin"),
    Mutation("dropout_always_one_run", DROPOUT, "if (job.run_size == job.num_elements) return", "return"),
    Mutation(
        "dropout_never_one_run",
        DROPOUT,
        "  if (job.run_size == job.num_elements) return job.run_begin + begin;\n",
        "",
        equivalent="the general formula has the same result for one run; only the speed differs",
    ),
    Mutation("dropout_32_bit_division", DROPOUT, "job.num_elements <= UINT32_MAX", "true"),
    Mutation(
        "dropout_64_bit_division",
        DROPOUT,
        "job.num_elements <= UINT32_MAX",
        "false",
        equivalent="both divisions have the same result; only the speed differs",
    ),
    Mutation("dropout_words_of_any_position", DROPOUT, "kWidth % 4 == 0 && (position & 3) == 0", "kWidth % 4 == 0"),
    Mutation(
        "dropout_never_aligned",
        DROPOUT,
        "kWidth % 4 == 0 && (position & 3) == 0",
        "false",
        equivalent="both branches have the same result; only the speed differs",
    ),
    Mutation("dropout_word_of_four", DROPOUT, "bits.words[word], scale", "bits.words[0], scale"),
    Mutation("dropout_word_mask", DROPOUT, "(position + i) & 3", "(position + i) & 1"),
    Mutation("dropout_word_of_pack", DROPOUT, "(position + i) & 3", "i & 3"),
    Mutation("dropout_first_word", DROPOUT, "if (i == 0 || word == 0)", "if (word == 0)"),
    Mutation("dropout_next_counter", DROPOUT, "if (i == 0 || word == 0)", "if (i == 0)"),
    Mutation("dropout_counter_of_aligned_packs", DROPOUT, "((position + i) >> 2)", "(position >> 2)", 1, 2),
    Mutation("dropout_counter", DROPOUT, "((position + i) >> 2)", "(position >> 2)", 2, 2),
    Mutation(
        "dropout_counter_width_of_aligned_packs",
        DROPOUT,
        "static_cast<uint64_t>((pos",
        "static_cast<uint32_t>((pos",
        1,
        2,
    ),
    Mutation("dropout_counter_width", DROPOUT, "static_cast<uint64_t>((pos", "static_cast<uint32_t>((pos", 2, 2),
    Mutation("dropout_third_word", DROPOUT, "word == 2 ? bits.words[2]", "word == 2 ? bits.words[3]"),
    Mutation("dropout_threshold", DROPOUT, "random < job.threshold", "random <= job.threshold"),
    Mutation("dropout_no_scale", DROPOUT, "value * scale", "value"),
    Mutation("dropout_no_seed_of_aligned_packs", DROPOUT, ">> 2), job.seed)", ">> 2), 0)", 1, 2),
    Mutation("dropout_no_seed", DROPOUT, ">> 2), job.seed)", ">> 2), 0)", 2, 2),
    Mutation("dropout_capture_unchecked", DROPOUT, "status == cudaStreamCaptureStatusNone", "true"),
    Mutation("dropout_alignment_of_x", DROPOUT, "is_vector_aligned({job.x, job.y})", "is_vector_aligned({job.y})"),
    Mutation("dropout_pack_crosses_run", DROPOUT, " && job.run_size % kWidth == 0", ""),
    Mutation("dropout_pack_crosses_run_by_half", DROPOUT, "job.run_size % kWidth ==", "job.run_size % (kWidth / 2) =="),
    Mutation("philox_rounds", PHILOX, "round < 10", "round < 9", cases=KNOWN_ANSWERS),
    Mutation("philox_multiplier", PHILOX, "0xCD9E8D57U", "0xCD9E8D55U", cases=KNOWN_ANSWERS),
    Mutation("philox_key", PHILOX, "k1 += 0xBB67AE85U;", "", cases=KNOWN_ANSWERS),
    Mutation("philox_counter_high", PHILOX, "(counter >> 32)", "(0)", cases=KNOWN_ANSWERS),
    Mutation("philox_key_high", PHILOX, "(key >> 32)", "(0)", cases=KNOWN_ANSWERS),
]
