// The gradient of column_row_mlp: a chain of autograd nodes, one per weight, so that each weight
// gradient can be consumed (by an optimizer step or a reduce-scatter) before the next one exists.
//
//   forward    x -> InputGradient -> x'    x, w1 -> Column -> h1    x, w3 -> Column -> h3
//              x', h1, h3, w2 -> Row -> y
//   backward   Row:     grad_h = grad_y w2; grad_h1, grad_h3 and h in one pass through the
//                       activation; grad_x = grad_h1 w1 + grad_h3 w3, whose all-reduce starts here;
//                       grad_w2
//              Column:  grad_w3 (its node is younger, so the engine runs it first), then grad_w1,
//                       while the all-reduce is in flight
//              InputGradient:  waits for the all-reduce; it is the oldest node, so it runs last
//
// Besides the weights, the Column nodes save x, and Row saves h1 and h3. With `recompute`, Row
// saves x instead of h1 and h3.
//
// With a sharded sequence, only Row saves x, this rank's shard, for all nodes. Row's backward
// gathers grad_y, starts to gather x again for the Column nodes (and with `recompute` for itself),
// and starts to reduce-scatter grad_x, which InputGradient waits for.
//
// When traced, all communication uses registered operators called below autograd, in program order,
// so that compile and export see it; the all-reduce is weft::reduce_from_group.
//
// If w1 and w3 are halves of one weight (gate_up.h), h1 and h3 are halves of one tensor, and so are
// their gradients: grad_x is one product. This is for eager mode; traced tensors have no storage.
//
// A WeightSink may use the gradients of weights: Row and Column then pass the two factors of a
// gradient to the sink and do not compute their product.

#include "autograd_support.h"
#include "column_row_mlp.h"
#include "dispatch.h"
#include "gate_up.h"
#include "group_collectives.h"
#include "reduced_products.h"
#include "weight_sink.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace weft::ops {

namespace {

constexpr std::string_view kOp = "weft::column_row_mlp";

enum Weight : std::uint8_t { kW1, kW2, kW3 };

// The state that the nodes of one call share: the collectives that Row's backward starts and other
// nodes wait for, and the weights whose gradients a sink may use.
struct SharedState : torch::CustomClassHolder {
  SinkableWeights weights;
  PendingCollective all_reduce;  // of grad_x, in place
  // With a sharded sequence: this rank's shard of grad_x, and x, which is gathered again and freed
  // after `num_reads_left` calls of read_x().
  std::optional<PendingTensor> grad_x;
  std::optional<PendingTensor> pending_x;  // all-gather in flight
  at::Tensor full_x;                       // gathered
  int num_reads_left = 0;

  at::Tensor read_x() {
    if (pending_x.has_value()) {
      full_x = pending_x->get();
      pending_x.reset();
    }
    const auto x = full_x;
    if (--num_reads_left == 0) {
      full_x.reset();
    }
    return x;
  }
};
using SharedStatePtr = c10::intrusive_ptr<SharedState>;

c10::IValue to_ivalue(const SharedStatePtr& shared) {
  return c10::IValue::make_capsule(
      c10::static_intrusive_pointer_cast<torch::CustomClassHolder>(shared));
}

SharedState& shared_of(AutogradContext* ctx) {
  return static_cast<SharedState&>(*ctx->saved_data.at("shared").toCapsule());
}

// Returns the gradient of a weight; undefined if this backward does not need it, or if a sink has
// used it. `input_idx`: the weight's position among the inputs of the node.
at::Tensor required_weight_grad(AutogradContext* ctx,
                                std::size_t input_idx,
                                Weight index,
                                const at::Tensor& grad,
                                const at::Tensor& x) {
  if (!ctx->needs_input_grad(input_idx) || shared_of(ctx).weights.take(index, grad, x)) {
    return {};
  }
  return weight_grad(grad, x);
}

class InputGradient : public torch::autograd::Function<InputGradient> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const SharedStatePtr& shared) {
    ctx->saved_data["shared"] = to_ivalue(shared);
    return x.detach();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto& shared = shared_of(ctx);
    shared.all_reduce.wait();
    if (!shared.grad_x.has_value()) {
      return {grads[0], at::Tensor()};
    }
    auto grad_x = shared.grad_x->get();
    shared.grad_x.reset();
    return {grad_x, at::Tensor()};
  }
};

// The values that a Column node saves or returns. They are in a struct so that autograd does not
// see these tensors as inputs of the node.
struct ColumnValues {
  at::Tensor x;  // undefined with a sharded sequence: `shared` has it
  at::Tensor h;  // x weightᵀ + bias, the node's output
  SharedStatePtr shared;
  bool weight_requires_grad;  // then the backward reads x
  Weight index;
};

class Column : public torch::autograd::Function<Column> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& /*weight*/,
                            const OptionalTensor& bias,
                            const ColumnValues& values) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({values.x});
    ctx->saved_data["shared"] = to_ivalue(values.shared);
    ctx->saved_data["weight_requires_grad"] = values.weight_requires_grad;
    ctx->saved_data["index"] = static_cast<std::int64_t>(values.index);
    ctx->saved_data["has_bias"] = bias.has_value();
    return values.h.detach();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& grad_h = grads[0];
    if (!grad_h.defined()) {
      return variable_list(3);
    }
    auto x = ctx->get_saved_variables()[0];
    // Read x even if this backward does not need the weight's gradient: Row has counted the read.
    if (!x.defined() && ctx->saved_data.at("weight_requires_grad").toBool()) {
      x = shared_of(ctx).read_x();
    }
    const bool needs_bias = ctx->saved_data.at("has_bias").toBool() && ctx->needs_input_grad(1);
    auto grad_bias = needs_bias ? bias_grad(grad_h) : at::Tensor();
    const auto index = static_cast<Weight>(ctx->saved_data.at("index").toInt());
    return {required_weight_grad(ctx, 0, index, grad_h, x), std::move(grad_bias), at::Tensor()};
  }
};

// The values that the Row node saves or returns, in a struct for the same reason.
struct RowValues {
  at::Tensor y;               // the node's output
  at::Tensor x_shard;         // this rank's shard; undefined without a sharded sequence
  at::Tensor w1, w3, b1, b3;  // undefined if absent
  std::string activation;
  std::string group_name;
  SharedStatePtr shared;
  bool recompute;
  std::optional<ShardedDim> sequence;
  bool w1_requires_grad, w3_requires_grad;  // then the weight's Column node reads x
};

class Row : public torch::autograd::Function<Row> {
 public:
  // The order of the tensor arguments is the order of the gradients.
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const at::Tensor& h1,
                            const at::Tensor& w2,
                            const OptionalTensor& h3,
                            const OptionalTensor& b2,
                            const RowValues& values) {
    // save_for_backward() gets the tensors in the order of Saved.
    const at::Tensor none;
    const auto& x_shard = values.x_shard;
    if (values.recompute) {
      const auto& full_x = values.sequence.has_value() ? none : x;
      ctx->save_for_backward(
          {full_x, none, values.w1, w2, values.w3, values.b1, values.b3, x_shard});
    } else {
      ctx->save_for_backward(
          {h1, h3.value_or(none), values.w1, w2, values.w3, none, none, x_shard});
    }
    if (values.sequence.has_value()) {
      ctx->saved_data["sequence_dim"] = values.sequence->dim;
      ctx->saved_data["sequence_size"] = values.sequence->full_size;
      ctx->saved_data["w1_requires_grad"] = values.w1_requires_grad;
      ctx->saved_data["w3_requires_grad"] = values.w3_requires_grad;
    }
    ctx->saved_data["activation"] = values.activation;
    ctx->saved_data["group_name"] = values.group_name;
    ctx->saved_data["recompute"] = values.recompute;
    ctx->saved_data["gated"] = h3.has_value();
    ctx->saved_data["has_bias"] = b2.has_value();
    ctx->saved_data["shared"] = to_ivalue(values.shared);
    return values.y.detach();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kOp);
    const auto saved = ctx->get_saved_variables();
    shared_of(ctx).weights.begin_backward();
    const auto &w1 = saved[kSavedW1], &w2 = saved[kSavedW2], &w3 = saved[kSavedW3];
    const auto& activation = ctx->saved_data.at("activation").toStringRef();
    const auto grad_y = gather_sequence(ctx, grads[0]);
    // autograd::Function does not count absent optional inputs.
    const bool gated = ctx->saved_data.at("gated").toBool();
    const bool has_bias = ctx->saved_data.at("has_bias").toBool();
    start_gathering_x(ctx, saved[kSavedXShard], gated);
    auto hidden = hidden_of(ctx, saved, !is_traced(grad_y));

    variable_list result(kNumInputs);
    if (has_bias && ctx->needs_input_grad(gated ? kB2 : kB2 - 1)) {
      result[kB2] = bias_grad(grad_y);
    }
    at::Tensor h, grad_gate_up;
    if (ctx->needs_input_grad(kX) || ctx->needs_input_grad(kH1) ||
        (gated && ctx->needs_input_grad(kH3))) {
      const auto grad_h = at::matmul(grad_y, w2);
      if (hidden.gate_up.defined()) {
        std::tie(grad_gate_up, h) =
            dispatch::gate_up_activation_backward(grad_h, hidden.gate_up, activation);
        result[kH1] = half_of(grad_gate_up, 0);
        result[kH3] = half_of(grad_gate_up, 1);
      } else if (hidden.h3.defined()) {
        std::tie(result[kH1], result[kH3], h) =
            dispatch::gated_activation_backward(grad_h, hidden.h1, hidden.h3, activation);
      } else {
        std::tie(result[kH1], h) = dispatch::activation_backward(grad_h, hidden.h1, activation);
      }
    } else if (ctx->needs_input_grad(kInputW2)) {
      h = activate(hidden, activation);
    }
    hidden = {};
    if (ctx->needs_input_grad(kX)) {
      const auto weight = grad_gate_up.defined() ? joined_weight(w1, w3) : at::Tensor();
      result[kX] = weight.defined() ? input_grad(ctx, grad_gate_up, {}, weight, {})
                                    : input_grad(ctx, result[kH1], result[kH3], w1, w3);
    }
    result[kInputW2] = required_weight_grad(ctx, kInputW2, kW2, grad_y, h);
    return result;
  }

 private:
  enum Input : std::size_t { kX, kH1, kInputW2, kH3, kB2, kValues, kNumInputs };
  // The saved tensors. With `recompute`, the first is x (undefined with a sharded sequence) instead
  // of h1, and there is no h3; without `recompute`, there are no b1 and b3.
  enum Saved : std::size_t {
    kSavedH1OrX,
    kSavedH3,
    kSavedW1,
    kSavedW2,
    kSavedW3,
    kSavedB1,
    kSavedB3,
    kSavedXShard
  };

  static bool has_sequence(AutogradContext* ctx) {
    return ctx->saved_data.count("sequence_dim") != 0;
  }
  static ShardedDim sequence_of(AutogradContext* ctx) {
    return {ctx->saved_data.at("sequence_dim").toInt(),
            ctx->saved_data.at("sequence_size").toSymInt()};
  }

  static at::Tensor gather_sequence(AutogradContext* ctx, const at::Tensor& shard) {
    if (!has_sequence(ctx)) {
      return shard;
    }
    const auto& group_name = ctx->saved_data.at("group_name").toStringRef();
    const auto [dim, size] = sequence_of(ctx);
    if (is_traced(shard)) {
      return dispatch::gather_from_sequence(shard, dim, group_name, size);
    }
    return all_gather(kOp, shard, dim, size.expect_int(), resolve_group(kOp, group_name));
  }

  // Starts to gather x for hidden() and for the Column nodes, which run next.
  static void start_gathering_x(AutogradContext* ctx, const at::Tensor& shard, bool gated) {
    if (!has_sequence(ctx)) {
      return;
    }
    auto& shared = shared_of(ctx);
    // A failed backward may have left its state.
    shared.grad_x.reset();
    shared.pending_x.reset();
    shared.full_x.reset();
    const auto reads_x = [&](std::size_t input, const char* key) {
      return ctx->needs_input_grad(input) && ctx->saved_data.at(key).toBool() ? 1 : 0;
    };
    shared.num_reads_left = reads_x(kH1, "w1_requires_grad") +
                            (gated ? reads_x(kH3, "w3_requires_grad") : 0) +
                            (ctx->saved_data.at("recompute").toBool() ? 1 : 0);
    if (shared.num_reads_left == 0) {
      return;
    }
    const auto [dim, size] = sequence_of(ctx);
    if (is_traced(shard)) {
      shared.full_x = gather_sequence(ctx, shard);
    } else {
      const auto group = resolve_group(kOp, ctx->saved_data.at("group_name").toStringRef());
      // Without `recompute`, grad_h is computed before x is read.
      const bool overlaps = !ctx->saved_data.at("recompute").toBool();
      shared.pending_x = start_all_gather(kOp, shard, dim, size.expect_int(), group, overlaps);
    }
  }

  static Hidden hidden_of(AutogradContext* ctx, const variable_list& saved, bool may_join) {
    if (!ctx->saved_data.at("recompute").toBool()) {
      const auto &h1 = saved[kSavedH1OrX], &h3 = saved[kSavedH3];
      return {h1, h3, may_join ? joined_columns(h1, h3) : at::Tensor()};
    }
    const auto optional = [](const at::Tensor& tensor) {
      return tensor.defined() ? OptionalTensor(tensor) : OptionalTensor();
    };
    const auto x = has_sequence(ctx) ? shared_of(ctx).read_x() : saved[kSavedH1OrX];
    return column_half(x,
                       saved[kSavedW1],
                       optional(saved[kSavedW3]),
                       optional(saved[kSavedB1]),
                       optional(saved[kSavedB3]),
                       may_join);
  }

  // Whether Row and the Column nodes compute gradients of weights after grad_x.
  static bool needs_weight_grads(AutogradContext* ctx) {
    return ctx->needs_input_grad(kInputW2) || ctx->needs_input_grad(kH1) ||
           (ctx->saved_data.at("gated").toBool() && ctx->needs_input_grad(kH3));
  }

  // Returns grad_x; with a sharded sequence, see scatter_input_grad(). Otherwise, its all-reduce is
  // in flight in eager mode, and complete when traced or in anomaly mode, which reads the tensor.
  static at::Tensor input_grad(AutogradContext* ctx,
                               const at::Tensor& grad_h1,
                               const at::Tensor& grad_h3,
                               const at::Tensor& w1,
                               const at::Tensor& w3) {
    const auto& group_name = ctx->saved_data.at("group_name").toStringRef();
    if (is_traced(grad_h1) || has_sequence(ctx)) {
      auto grad_x = at::matmul(grad_h1, w1);
      if (w3.defined()) {
        as_matrix(grad_x).addmm_(as_matrix(grad_h3), w3);
      }
      return has_sequence(ctx) ? scatter_input_grad(ctx, grad_x)
                               : dispatch::reduce_from_group(grad_x, group_name);
    }
    const bool is_anomaly_mode = torch::autograd::AnomalyMode::is_enabled();
    const auto group = resolve_group(kOp, group_name);
    auto [grad_x, all_reduce] = start_reduced_input_product(
        kOp, group, !is_anomaly_mode && needs_weight_grads(ctx), grad_h1, w1, grad_h3, w3);
    if (is_anomaly_mode) {
      all_reduce.wait();
    }
    shared_of(ctx).all_reduce = std::move(all_reduce);
    return grad_x;
  }

  // Returns this rank's shard of the sum of grad_x when traced or in anomaly mode. Otherwise, the
  // reduce-scatter is in flight, and the returned tensor is a placeholder of the shard's shape;
  // InputGradient returns the shard.
  static at::Tensor scatter_input_grad(AutogradContext* ctx, const at::Tensor& grad_x) {
    const auto& group_name = ctx->saved_data.at("group_name").toStringRef();
    const auto dim = sequence_of(ctx).dim;
    if (is_traced(grad_x) || torch::autograd::AnomalyMode::is_enabled()) {
      return dispatch::reduce_scatter_to_sequence(grad_x, dim, group_name);
    }
    const auto group = resolve_group(kOp, group_name);
    shared_of(ctx).grad_x = start_reduce_scatter(kOp, grad_x, dim, group, needs_weight_grads(ctx));
    auto sizes = grad_x.sizes().vec();
    auto& size = sizes[static_cast<std::size_t>(dim)];
    size = shard_size(size, rank_in(group)).expect_int();
    return at::empty({1}, grad_x.options()).expand(sizes);
  }
};

at::Tensor detach_or_undefined(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->detach() : at::Tensor();
}

// Returns h (h1 or h3) with a Column node, which computes the gradients of weight and bias; without
// one if neither requires a gradient.
at::Tensor attach(const at::Tensor& x,
                  const at::Tensor& weight,
                  const OptionalTensor& bias,
                  const at::Tensor& h,
                  const SharedStatePtr& shared,
                  Weight index) {
  if (!weight.requires_grad() && !needs_grad(bias)) {
    return h;
  }
  prioritize_leaf_gradient(weight);
  return Column::apply(weight, bias, ColumnValues{x, h, shared, weight.requires_grad(), index});
}

at::Tensor column_row_mlp_autograd(const at::Tensor& x,
                                   const at::Tensor& w1,
                                   const at::Tensor& w2,
                                   const OptionalTensor& w3,
                                   const OptionalTensor& b1,
                                   const OptionalTensor& b2,
                                   const OptionalTensor& b3,
                                   std::string_view activation,
                                   std::string_view group_name,
                                   bool recompute,
                                   std::optional<std::int64_t> sequence_dim,
                                   std::optional<c10::SymInt> sequence_size) {
  if (!torch::autograd::compute_requires_grad(x, w1, w2, w3, b1, b2, b3)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::column_row_mlp(
        x, w1, w2, w3, b1, b2, b3, activation, group_name, recompute, sequence_dim, sequence_size);
  }
  at::Tensor y, h1, h3;
  {
    const bool joins = !is_traced(x);
    const at::AutoDispatchBelowADInplaceOrView below;
    std::tie(y, h1, h3) = dispatch::column_row_mlp_saving(
        x, w1, w2, w3, b1, b2, b3, activation, group_name, sequence_dim, sequence_size, joins);
    if (joins && h1.size(-1) != w1.size(0)) {
      const auto hidden = Hidden::of_gate_up(h1);
      h1 = hidden.h1;
      h3 = hidden.h3;
    }
  }
  const auto group = resolve_group(kOp, std::string(group_name));
  auto sequence = mlp_sequence_dim(x, sequence_dim, sequence_size, rank_in(group));
  if (!group) {
    sequence.reset();
  }
  const auto shared = c10::make_intrusive<SharedState>();
  shared->weights = SinkableWeights(current_weight_sink(), w1, w2, w3.value_or(at::Tensor()));
  const auto x_in = x.requires_grad() ? InputGradient::apply(x, shared) : x;
  // With a sharded sequence, Row saves x for the Column nodes.
  const auto x_value = sequence.has_value() ? at::Tensor() : x.detach();
  const auto h1_in = attach(x_value, w1, b1, h1, shared, kW1);
  const auto h3_in =
      w3.has_value() ? OptionalTensor(attach(x_value, *w3, b3, h3, shared, kW3)) : std::nullopt;
  prioritize_leaf_gradient(w2);
  return Row::apply(x_in,
                    h1_in,
                    w2,
                    h3_in,
                    b2,
                    RowValues{y,
                              sequence.has_value() ? x.detach() : at::Tensor(),
                              w1.detach(),
                              detach_or_undefined(w3),
                              detach_or_undefined(b1),
                              detach_or_undefined(b3),
                              std::string(activation),
                              std::string(group_name),
                              shared,
                              recompute,
                              sequence,
                              w1.requires_grad(),
                              w3.has_value() && w3->requires_grad()});
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("column_row_mlp", TORCH_FN(column_row_mlp_autograd));
}

}  // namespace weft::ops
