// Device and Meta kernels of column_row_mlp: local matrix products, one all-reduce, then the bias
// b2. With sequence parallelism, the input is all-gathered and the output is reduce-scattered
// instead of all-reduced.

#include "column_row_mlp.h"

#include "chunked_sequence.h"
#include "dispatch.h"
#include "gate_up.h"
#include "group_collectives.h"
#include "overlap.h"
#include "reduced_products.h"
#include "row_products.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace weft::ops {

Hidden Hidden::of_gate_up(const at::Tensor& gate_up) {
  return {half_of(gate_up, 0), half_of(gate_up, 1), gate_up};
}

Hidden column_half(const at::Tensor& x,
                   const at::Tensor& w1,
                   const OptionalTensor& w3,
                   const OptionalTensor& b1,
                   const OptionalTensor& b3,
                   bool may_join) {
  if (may_join && !b1.has_value() && !b3.has_value()) {
    if (const auto weight = joined_weight(w1, w3); weight.defined()) {
      return Hidden::of_gate_up(at::linear(x, weight));
    }
  }
  return {at::linear(x, w1, b1), w3.has_value() ? at::linear(x, *w3, b3) : at::Tensor(), {}};
}

at::Tensor activate(const Hidden& hidden, std::string_view activation) {
  if (hidden.gate_up.defined()) return dispatch::gate_up_activation(hidden.gate_up, activation);
  return hidden.h3.defined() ? dispatch::gated_activation(hidden.h1, hidden.h3, activation)
                             : dispatch::activation(hidden.h1, activation);
}

namespace {

constexpr std::string_view kOp = "weft::column_row_mlp";

// The checked arguments of a call.
struct Call {
  ProcessGroupPtr group;               // null for one rank
  std::optional<ShardedDim> sequence;  // nullopt without a group, too
  std::string_view activation;
};

Call checked_call(const at::Tensor& x,
                  const at::Tensor& w1,
                  const at::Tensor& w2,
                  const OptionalTensor& w3,
                  const OptionalTensor& b1,
                  const OptionalTensor& b2,
                  const OptionalTensor& b3,
                  std::string_view activation,
                  std::string_view group_name,
                  const std::optional<std::int64_t>& sequence_dim,
                  const std::optional<c10::SymInt>& sequence_size) {
  column_row_mlp_shape(x, w1, w2, w3, b1, b2, b3, activation);
  Call call{resolve_group(kOp, std::string(group_name)), std::nullopt, activation};
  const auto sequence = mlp_sequence_dim(x, sequence_dim, sequence_size, rank_in(call.group));
  if (call.group) {
    call.sequence = sequence;
  }
  return call;
}

struct Weights {
  const at::Tensor& w1;
  const at::Tensor& w2;
  const OptionalTensor& w3;
  const OptionalTensor& b1;
  const OptionalTensor& b2;
  const OptionalTensor& b3;
};

struct Result {
  at::Tensor y;
  Hidden hidden;  // undefined unless requested
};

// Whether to return the hidden values, and in which form: see `joins` of _column_row_mlp_saving.
enum class Saves : std::uint8_t { kNothing, kHidden, kJoinedHidden };

// Returns x, gathered if the sequence is sharded.
at::Tensor gathered_input(const at::Tensor& x, const Call& call) {
  if (!call.sequence.has_value()) {
    return x;
  }
  const auto& [dim, size] = *call.sequence;
  return all_gather(kOp, x, dim, size.expect_int(), call.group);
}

// Returns h w2ᵀ summed over the group, + b2; if the sequence is sharded, this rank's shard of it.
at::Tensor row_half(const at::Tensor& h,
                    const at::Tensor& w2,
                    const OptionalTensor& b2,
                    const Call& call) {
  if (!call.group) {
    return at::linear(h, w2, b2);
  }
  auto y = call.sequence.has_value()
               ? reduce_scatter(kOp, at::linear(h, w2), call.sequence->dim, call.group)
               : reduced_linear(kOp, h, w2, call.group);
  return b2.has_value() ? y.add_(*b2) : y;
}

Result run_unchunked(const at::Tensor& x, const Weights& w, const Call& call, Saves saves) {
  Result result;
  auto hidden =
      column_half(gathered_input(x, call), w.w1, w.w3, w.b1, w.b3, saves != Saves::kHidden);
  auto h = activate(hidden, call.activation);
  if (saves == Saves::kNothing) {
    hidden = {};
  } else {
    result.hidden = std::move(hidden);
  }
  result.y = row_half(h, w.w2, w.b2, call);
  return result;
}

// Copies the rows of merged ranks, contiguous, into a view of a full tensor.
void copy_into(const at::Tensor& view, const at::Tensor& rows) {
  view.copy_(rows.view(view.sizes()));
}

// In memory at a time: at most two chunks of the gathered x and of the products with w2, and h for
// the rows of one step (on the CPU the rows of one rank in one chunk, on CUDA those of the merged
// ranks). The full h1 and h3 exist only if they are saved. Separate h1 and h3 of a step's rows
// exist unless the step has one rank and writes into the full tensors.
Result run_chunked(const at::Tensor& x,
                   const Weights& w,
                   const Call& call,
                   bool saves_hidden,
                   std::int64_t rows_per_chunk) {
  const auto dim = call.sequence->dim;
  const auto size = call.sequence->full_size.expect_int();
  Result result;
  at::Tensor h1_rows, h3_rows;
  if (saves_hidden) {
    auto sizes = x.sizes().vec();
    sizes[static_cast<std::size_t>(dim)] = size;
    sizes.back() = w.w1.size(0);
    result.hidden.h1 = at::empty(sizes, x.options());
    h1_rows = result.hidden.h1.movedim(dim, 0);
    if (w.w3.has_value()) {
      result.hidden.h3 = at::empty(sizes, x.options());
      h3_rows = result.hidden.h3.movedim(dim, 0);
    }
  }
  ChunkedSequence chunks(kOp, call.group, size, rows_per_chunk);
  chunks.add_input(x.movedim(dim, 0).contiguous());
  chunks.set_output(row_sizes(x, dim, w.w2.size(0)), x.options());
  chunks.run([&](const ChunkRows& rows) {
    const auto& x_rows = rows.gathered[0];
    Hidden hidden;
    if (saves_hidden && rows.num_ranks == 1) {
      hidden.h1 = rows.of(h1_rows);
      linear_into(hidden.h1, x_rows, w.w1, w.b1, rows.num_ranks);
      if (w.w3.has_value()) {
        hidden.h3 = rows.of(h3_rows);
        linear_into(hidden.h3, x_rows, *w.w3, w.b3, rows.num_ranks);
      }
    } else {
      // The activation reads contiguous rows; in h1_rows, the rows of merged ranks are not
      // contiguous.
      hidden = column_half(x_rows, w.w1, w.w3, w.b1, w.b3, !saves_hidden);
      if (saves_hidden) {
        copy_into(rows.of(h1_rows), hidden.h1);
        if (hidden.h3.defined()) copy_into(rows.of(h3_rows), hidden.h3);
      }
    }
    product_into(rows.output, activate(hidden, call.activation), w.w2.t(), rows.num_ranks);
  });
  result.y = chunks.take_output().movedim(0, dim).contiguous();
  if (w.b2.has_value()) result.y.add_(*w.b2);
  return result;
}

Result run(const at::Tensor& x, const Weights& w, const Call& call, Saves saves) {
  if (!call.sequence.has_value()) {
    return run_unchunked(x, w, call, saves);
  }
  const auto& [dim, size] = *call.sequence;
  const auto features = std::max(x.size(-1), w.w2.size(0));
  OverlapChoice overlap(
      kOp, x, communication_of(x, dim, size.expect_int(), w.w1.size(0), features), call.group);
  auto result = overlap.is_chunked()
                    ? run_chunked(x, w, call, saves != Saves::kNothing, overlap.rows_per_chunk())
                    : run_unchunked(x, w, call, saves);
  overlap.end_timing();
  return result;
}

at::Tensor column_row_mlp(const at::Tensor& x,
                          const at::Tensor& w1,
                          const at::Tensor& w2,
                          const OptionalTensor& w3,
                          const OptionalTensor& b1,
                          const OptionalTensor& b2,
                          const OptionalTensor& b3,
                          std::string_view activation,
                          std::string_view group_name,
                          bool /*recompute: no effect without autograd*/,
                          std::optional<std::int64_t> sequence_dim,
                          std::optional<c10::SymInt> sequence_size) {
  const auto call =
      checked_call(x, w1, w2, w3, b1, b2, b3, activation, group_name, sequence_dim, sequence_size);
  return run(x, {w1, w2, w3, b1, b2, b3}, call, Saves::kNothing).y;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> column_row_mlp_saving(
    const at::Tensor& x,
    const at::Tensor& w1,
    const at::Tensor& w2,
    const OptionalTensor& w3,
    const OptionalTensor& b1,
    const OptionalTensor& b2,
    const OptionalTensor& b3,
    std::string_view activation,
    std::string_view group_name,
    std::optional<std::int64_t> sequence_dim,
    std::optional<c10::SymInt> sequence_size,
    bool joins) {
  const auto call =
      checked_call(x, w1, w2, w3, b1, b2, b3, activation, group_name, sequence_dim, sequence_size);
  const auto [y, hidden] =
      run(x, {w1, w2, w3, b1, b2, b3}, call, joins ? Saves::kJoinedHidden : Saves::kHidden);
  if (hidden.gate_up.defined()) return {y, hidden.gate_up, at::empty({0}, x.options())};
  return {y, hidden.h1, hidden.h3.defined() ? hidden.h3 : at::empty({0}, x.options())};
}

std::optional<ShardedDim> sequence_of(const at::Tensor& x,
                                      std::string_view group_name,
                                      const std::optional<std::int64_t>& sequence_dim,
                                      const std::optional<c10::SymInt>& sequence_size) {
  const auto group_rank = rank_in(kOp, group_name);
  return mlp_sequence_dim(x, sequence_dim, sequence_size, group_rank);
}

at::Tensor column_row_mlp_meta(const at::Tensor& x,
                               const at::Tensor& w1,
                               const at::Tensor& w2,
                               const OptionalTensor& w3,
                               const OptionalTensor& b1,
                               const OptionalTensor& b2,
                               const OptionalTensor& b3,
                               std::string_view activation,
                               std::string_view group_name,
                               bool /*recompute*/,
                               std::optional<std::int64_t> sequence_dim,
                               std::optional<c10::SymInt> sequence_size) {
  sequence_of(x, group_name, sequence_dim, sequence_size);
  return at::empty_symint(column_row_mlp_shape(x, w1, w2, w3, b1, b2, b3, activation), x.options());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> column_row_mlp_saving_meta(
    const at::Tensor& x,
    const at::Tensor& w1,
    const at::Tensor& w2,
    const OptionalTensor& w3,
    const OptionalTensor& b1,
    const OptionalTensor& b2,
    const OptionalTensor& b3,
    std::string_view activation,
    std::string_view group_name,
    std::optional<std::int64_t> sequence_dim,
    std::optional<c10::SymInt> sequence_size,
    bool /*joins: false where tensors are traced*/) {
  auto y =
      at::empty_symint(column_row_mlp_shape(x, w1, w2, w3, b1, b2, b3, activation), x.options());
  c10::SymDimVector hidden(x.sym_sizes().begin(), x.sym_sizes().end());
  hidden.back() = w1.sym_size(0);
  if (const auto sequence = sequence_of(x, group_name, sequence_dim, sequence_size)) {
    hidden[static_cast<std::size_t>(sequence->dim)] = sequence->full_size;
  }
  return {y,
          at::empty_symint(hidden, x.options()),
          w3.has_value() ? at::empty_symint(hidden, x.options()) : at::empty({0}, x.options())};
}

void register_kernels(torch::Library& m) {
  m.impl("column_row_mlp", TORCH_FN(column_row_mlp));
  m.impl("_column_row_mlp_saving", TORCH_FN(column_row_mlp_saving));
}

}  // namespace

// All devices use the same kernels: the products, activations and collectives that they call
// dispatch by device.
TORCH_LIBRARY_IMPL(weft, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("column_row_mlp", TORCH_FN(column_row_mlp_meta));
  m.impl("_column_row_mlp_saving", TORCH_FN(column_row_mlp_saving_meta));
}

}  // namespace weft::ops
