// The schemas of all operators of weft. Those with a leading underscore are the building blocks of
// the others and of their autograd formulas; they are registered so that torch.compile and
// torch.export see each as one call. In the comments, [0] is an empty tensor in place of a result
// that is absent or not wanted.

#include "moe_in_flight.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <vector>

namespace {

const std::vector<at::Tag> kTags = {at::Tag::pt2_compliant_tag};

void define(torch::Library& m, const char* schema) {
  m.def(torch::schema(schema, c10::AliasAnalysisKind::FROM_SCHEMA), kTags);
}

// An operator with side effects: TorchScript must neither drop nor merge its calls.
void define_effect(torch::Library& m, const char* schema) {
  m.def(torch::schema(schema, c10::AliasAnalysisKind::CONSERVATIVE), kTags);
}

}  // namespace

TORCH_LIBRARY(weft, m) {
  define(m,
         "column_row_mlp(Tensor x, Tensor w1, Tensor w2, Tensor? w3=None, Tensor? b1=None, "
         "Tensor? b2=None, Tensor? b3=None, *, str activation, str group_name, "
         "bool recompute=False, int? sequence_dim=None, SymInt? sequence_size=None) -> Tensor");
  define(m,
         "column_linear(Tensor x, Tensor weight, Tensor? bias=None, *, str group_name) -> Tensor");
  define(m, "row_linear(Tensor x, Tensor weight, Tensor? bias=None, *, str group_name) -> Tensor");
  define(m,
         "all_gather_linear(Tensor x, Tensor weight, Tensor? bias=None, *, int gather_dim, "
         "str group_name, SymInt? dim_size=None) -> Tensor");
  define(m,
         "linear_reduce_scatter(Tensor x, Tensor weight, Tensor? bias=None, *, int scatter_dim, "
         "str group_name) -> Tensor");
  define(m,
         "sharded_linear(Tensor x, Tensor weight, Tensor? bias=None, *, str group_name, "
         "SymInt? out_features=None) -> Tensor");
  define(m,
         "vocab_parallel_embedding(Tensor input, Tensor weight, int vocab_start, *, "
         "str group_name, int? vocab_size=None) -> Tensor");
  define(m,
         "vocab_parallel_cross_entropy(Tensor logits, Tensor target, int vocab_start, *, "
         "str group_name, int? vocab_size=None, int ignore_index=-100, float label_smoothing=0.0, "
         "str reduction=\"mean\") -> Tensor");
  define(m,
         "vocab_parallel_linear_cross_entropy(Tensor x, Tensor weight, Tensor target, "
         "int vocab_start, *, str group_name, int? vocab_size=None, int ignore_index=-100, "
         "float label_smoothing=0.0, str reduction=\"mean\") -> Tensor");
  define(m,
         "rms_norm(Tensor x, Tensor? weight=None, *, str group_name, float eps=1e-06) -> Tensor");
  define(m,
         "layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, *, str group_name, "
         "float eps=1e-05) -> Tensor");
  // (norm(x + residual), x + residual)
  define(m,
         "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, *, str group_name, "
         "float eps=1e-06) -> (Tensor, Tensor)");
  define(m,
         "add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, *, "
         "str group_name, float eps=1e-05) -> (Tensor, Tensor)");
  define(m,
         "dropout(Tensor x, Tensor seed, *, float p, str group_name, int? dim=None, "
         "SymInt? dim_size=None) -> Tensor");
  define(m, "copy_to_group(Tensor x, str group_name) -> Tensor");
  define(m, "reduce_from_group(Tensor x, str group_name) -> Tensor");
  define(m, "scatter_to_group(Tensor x, int dim, str group_name) -> Tensor");
  define(m,
         "gather_from_group(Tensor x, int dim, str group_name, *, SymInt? dim_size=None) -> "
         "Tensor");
  define(m,
         "gather_from_sequence(Tensor x, int dim, str group_name, *, SymInt? dim_size=None) -> "
         "Tensor");
  define(m, "reduce_scatter_to_sequence(Tensor x, int dim, str group_name) -> Tensor");
  define(m,
         "all_to_all(Tensor x, int split_dim, int cat_dim, str group_name, *, "
         "SymInt? cat_size=None) -> Tensor");
  define(m,
         "ring_attention(Tensor query, Tensor key, Tensor value, *, str group_name, "
         "bool is_causal=False, float? scale=None, SymInt? sequence_size=None, "
         "str order=\"head_tail\", int? window=None, "
         "Tensor? document_offsets=None) -> Tensor");
  define(m,
         "ulysses_attention(Tensor query, Tensor key, Tensor value, *, str group_name, "
         "bool is_causal=False, float? scale=None, SymInt? sequence_size=None, int? window=None, "
         "Tensor? document_offsets=None, str order=\"contiguous\", str ring_group_name=\"\") -> "
         "Tensor");
  define(m, "grouped_linear(Tensor x, Tensor weight, Tensor counts, Tensor? bias=None) -> Tensor");
  // moe_combine takes the last three results of moe_dispatch: see ExpertRoutes in expert_rows.h.
  define(m,
         "moe_dispatch(Tensor x, Tensor expert_ids, *, int num_experts, str group_name) -> "
         "(Tensor rows, Tensor counts, Tensor order, Tensor sent, Tensor received)");
  define(m,
         "moe_combine(Tensor rows, Tensor weights, Tensor order, Tensor sent, Tensor received, *, "
         "str group_name) -> Tensor");

  define(m,
         "adam_step_(Tensor(a!) parameter, Tensor grad, Tensor(b!) exp_avg, "
         "Tensor(c!)? exp_avg_scale, Tensor(d!) exp_avg_sq, Tensor(e!)? exp_avg_sq_scale, "
         "Tensor(f!)? low_bits, *, int step, float lr, float beta1, float beta2, float eps, "
         "float weight_decay, bool decoupled_weight_decay, bool maximize, int seed, int row, "
         "int column, int full_columns) -> ()");
  define(m,
         "momentum_step_(Tensor(a!) parameter, Tensor grad, Tensor(b!) momentum_buffer, "
         "Tensor(c!)? momentum_scale, Tensor(d!)? low_bits, *, int step, float lr, float momentum, "
         "float dampening, float weight_decay, bool nesterov, bool maximize, int seed, int row, "
         "int column, int full_columns) -> ()");
  define(m, "split_float(Tensor x, ScalarType low_dtype) -> (Tensor, Tensor)");
  define(m, "join_float(Tensor high, Tensor low) -> Tensor");
  define(m, "quantize_blocks(Tensor x, bool signed_codes) -> (Tensor, Tensor)");
  define(m, "dequantize_blocks(Tensor codes, Tensor scale) -> Tensor");

  define_effect(m,
                "pipeline_send(Tensor[] tensors, int peer, int channel, str group_name) -> Tensor");
  define_effect(m, "pipeline_recv(Tensor[] like, int peer, int channel, str group_name) -> Tensor");
  define_effect(m, "pipeline_wait(Tensor token) -> Tensor[]");
  define_effect(m, "pipeline_flush(str group_name) -> ()");
  define(m, "join(Tensor x, Tensor[] tokens) -> Tensor");

  // (y, h1, h3): column_row_mlp and the tensors that its backward needs; h3 is [0] without w3. If
  // `joins`, and w1 and w3 are halves of one weight (gate_up.h), h1 may be h1 and h3 in one tensor
  // [..., 2 * hidden], and h3 is [0]; a compiled graph passes false, because its shapes are fixed.
  define(m,
         "_column_row_mlp_saving(Tensor x, Tensor w1, Tensor w2, Tensor? w3, Tensor? b1, "
         "Tensor? b2, Tensor? b3, str activation, str group_name, int? sequence_dim, "
         "SymInt? sequence_size, bool joins=False) -> (Tensor, Tensor, Tensor)");
  // (grad_x, grad_weight); [0] if not wanted.
  define(m,
         "_all_gather_linear_backward(Tensor grad_y, Tensor x, Tensor weight, int dim, "
         "str group_name, bool wants_x, bool wants_weight) -> (Tensor, Tensor)");
  // (grad_x, grad_weight, grad_bias); [0] if not wanted.
  define(m,
         "_linear_reduce_scatter_backward(Tensor grad_y, Tensor x, Tensor weight, int dim, "
         "str group_name, bool wants_x, bool wants_weight, bool wants_bias) -> "
         "(Tensor, Tensor, Tensor)");
  define(m, "_sharded_linear_input_grad(Tensor grad_y, Tensor weight, str group_name) -> Tensor");
  define(m, "_sharded_linear_shard_grad(Tensor grad_y, Tensor x, str group_name) -> Tensor");
  // Raises if the offsets are no positions in the sequence, in the name of the operator `op`.
  define_effect(m,
                "_check_document_offsets(Tensor document_offsets, SymInt sequence_size, str op) -> "
                "()");
  // (out, lse): ring_attention and the logarithms of the sums of exponentials, [batch, heads,
  // tokens].
  define(m,
         "_ring_attention(Tensor query, Tensor key, Tensor value, str group_name, bool is_causal, "
         "float? scale, SymInt? sequence_size, str order, int? window, "
         "Tensor? document_offsets) -> (Tensor, Tensor)");
  // (grad_query, grad_key, grad_value)
  define(m,
         "_ring_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
         "Tensor out, Tensor lse, str group_name, bool is_causal, float? scale, "
         "SymInt? sequence_size, str order, int? window, "
         "Tensor? document_offsets) -> (Tensor, Tensor, Tensor)");
  define(m, "_grouped_weight_grad(Tensor grad_y, Tensor x, Tensor counts) -> Tensor");
  define(m, "_grouped_bias_grad(Tensor grad_y, Tensor counts) -> Tensor");
  define(m,
         "_moe_dispatch(Tensor x, Tensor expert_ids, int num_experts, str group_name) -> "
         "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  define(m,
         "_moe_dispatch_backward(Tensor grad_rows, Tensor order, Tensor sent, Tensor received, "
         "SymInt num_tokens, str group_name) -> Tensor");
  // (y, the rows that have returned to this rank, in the order `order`); the second is [0] in a
  // group of one, where they are `rows`.
  define(m,
         "_moe_combine(Tensor rows, Tensor weights, Tensor order, Tensor sent, Tensor received, "
         "str group_name) -> (Tensor, Tensor)");
  // (grad_rows, grad_weights); [0] if not wanted.
  define(m,
         "_moe_combine_backward(Tensor grad_y, Tensor weights, Tensor returned, Tensor order, "
         "Tensor sent, Tensor received, SymInt num_rows, str group_name, bool wants_rows, "
         "bool wants_weights) -> (Tensor, Tensor)");
  // The parts of moe_dispatch and moe_combine for chunks of tokens whose rows are in flight at the
  // same time: see moe_in_flight.cpp. (counts, order, sent, received) of each chunk:
  define(m,
         "_moe_routes(Tensor[] expert_ids, int num_experts, str group_name) -> "
         "(Tensor[], Tensor[], Tensor[], Tensor[])");
  m.class_<weft::ops::ExpertRowsInFlight>("ExpertRowsInFlight")
      .def("wait", &weft::ops::ExpertRowsInFlight::wait);
  define_effect(m,
                "_moe_start_dispatch(Tensor x, Tensor order, Tensor? weights, Tensor sent, "
                "Tensor received, str group_name) -> "
                "__torch__.torch.classes.weft.ExpertRowsInFlight");
  define_effect(m,
                "_moe_start_return(Tensor rows, Tensor sent, Tensor received, str group_name) -> "
                "__torch__.torch.classes.weft.ExpertRowsInFlight");
  define(m, "_moe_sum(Tensor rows, Tensor order, int num_tokens, Tensor? weights) -> Tensor");
  define(m, "_moe_weight_grad(Tensor grad_y, Tensor rows, Tensor order, Tensor weights) -> Tensor");
  // (losses, normalizers): see TokenLosses in cross_entropy_math.h.
  define(m,
         "_vocab_cross_entropy(Tensor logits, Tensor target, int vocab_start, str group_name, "
         "int? vocab_size, int ignore_index, float label_smoothing) -> (Tensor, Tensor)");
  define(m,
         "_vocab_cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, "
         "Tensor normalizers, int vocab_start, int num_classes, int ignore_index, "
         "float label_smoothing) -> Tensor");
  define(m,
         "_linear_cross_entropy(Tensor x, Tensor weight, Tensor target, int vocab_start, "
         "str group_name, int? vocab_size, int ignore_index, float label_smoothing) -> "
         "(Tensor, Tensor)");
  // (the contribution of this rank's classes to grad_x, grad_weight); [0] if not wanted.
  define(m,
         "_linear_cross_entropy_backward(Tensor grad, Tensor x, Tensor weight, Tensor target, "
         "Tensor normalizers, int vocab_start, int num_classes, int ignore_index, "
         "float label_smoothing, bool wants_x, bool wants_weight) -> (Tensor, Tensor)");
  // [tokens, 4], of this rank's logits: largest logit, sum of exp(logit - largest), logit of the
  // target (0 if another rank has it), sum of the logits (0 if not wanted).
  define(m,
         "_cross_entropy_statistics(Tensor logits, Tensor target, int vocab_start, "
         "int ignore_index, bool wants_sum) -> Tensor");
  // Writes the gradient of logits into `grad_logits`, which may be the same tensor as logits.
  define(m,
         "_cross_entropy_gradient(Tensor(a!) grad_logits, Tensor grad_losses, Tensor logits, "
         "Tensor target, Tensor normalizers, int vocab_start, int num_classes, int ignore_index, "
         "float label_smoothing) -> ()");
  // x is viewed as [outer, size, inner]: entries [begin, begin + size) of a dim of `full_size`.
  define(m,
         "_dropout_of_shard(Tensor x, int seed, float p, int inner, int size, int begin, "
         "int full_size) -> Tensor");
  // (y, x + residual, mean, rstd); x + residual is [0] without residual, mean is [0] if not
  // centered.
  define(m,
         "_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, bool centered, "
         "float eps) -> (Tensor, Tensor, Tensor, Tensor)");
  // (gradient of x, which is also that of residual; gradients of weight and bias, [num_params, d]);
  // [0] if not wanted.
  define(m,
         "_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor norm_input, Tensor? weight, "
         "Tensor mean, Tensor rstd, bool centered, bool wants_input, int num_params) -> (Tensor, "
         "Tensor)");
  define(m, "_activation(Tensor x, str activation) -> Tensor");
  // (grad_x, act(x))
  define(m, "_activation_backward(Tensor grad, Tensor x, str activation) -> (Tensor, Tensor)");
  define(m, "_gated_activation(Tensor gate, Tensor up, str activation) -> Tensor");
  // (grad_gate, grad_up, act(gate) * up)
  define(m,
         "_gated_activation_backward(Tensor grad, Tensor gate, Tensor up, str activation) -> "
         "(Tensor, Tensor, Tensor)");
  // gate_up [..., 2 * hidden] has gate and up as its halves. -> [..., hidden]
  define(m, "_gate_up_activation(Tensor gate_up, str activation) -> Tensor");
  // (grad_gate_up, act(gate) * up)
  define(m,
         "_gate_up_activation_backward(Tensor grad, Tensor gate_up, str activation) -> (Tensor, "
         "Tensor)");
  define(m,
         "_vocab_embedding_backward(Tensor grad, Tensor input, SymInt num_rows, int vocab_start) "
         "-> Tensor");
}
