// Device kernels of all_gather_linear and linear_reduce_scatter: the column-parallel and the
// row-parallel half of a layer whose input and output are sharded along a dim other than the
// features, usually the sequence. Each runs unchunked (a collective and a matrix product) or in
// chunks whose communication overlaps with the products: see <weft/ops/overlap.h>.
//
//   all_gather_linear      y = gather(x) Wᵀ + b        grad_x = reduce_scatter(grad_y W)
//   linear_reduce_scatter  y = reduce_scatter(x Wᵀ) + b    grad_x = gather(grad_y) W

#include "autograd_support.h"
#include "chunked_sequence.h"
#include "dispatch.h"
#include "group_collectives.h"
#include "overlap.h"
#include "row_products.h"
#include "shape.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>

namespace weft::ops {

namespace {

constexpr std::string_view kGatherLinear = "weft::all_gather_linear";
constexpr std::string_view kLinearScatter = "weft::linear_reduce_scatter";
// The backward is timed apart from the forward: these names are keys of the overlap table.
constexpr std::string_view kGatherLinearBackward = "weft::all_gather_linear backward";
constexpr std::string_view kLinearScatterBackward = "weft::linear_reduce_scatter backward";

using OptionalSize = std::optional<c10::SymInt>;

at::Tensor empty_result(const at::Tensor& like) { return at::empty({0}, like.options()); }

at::Tensor all_gather_linear(const at::Tensor& x,
                             const at::Tensor& weight,
                             const OptionalTensor& bias,
                             std::int64_t gather_dim,
                             std::string_view group_name,
                             OptionalSize dim_size) {
  const auto group = resolve_group(kGatherLinear, std::string(group_name));
  const auto shape = all_gather_linear_shape(x, weight, bias, gather_dim, dim_size, rank_in(group));
  if (!group) {
    return at::linear(x, weight, bias);
  }
  const auto dim = checked_dim(kGatherLinear, x, gather_dim);
  const auto size = shape[static_cast<std::size_t>(dim)].expect_int();
  OverlapChoice overlap(kGatherLinear, x, communication_of(x, dim, size, weight.size(0)), group);
  at::Tensor y;
  if (overlap.is_chunked()) {
    y = at::empty(C10_AS_INTARRAYREF_SLOW(shape), x.options());
    const auto y_rows = y.movedim(dim, 0);
    ChunkedSequence chunks(kGatherLinear, group, size, overlap.rows_per_chunk());
    chunks.add_input(x.movedim(dim, 0).contiguous());
    chunks.run([&](const ChunkRows& rows) {
      linear_into(rows.of(y_rows), rows.gathered[0], weight, bias, rows.num_ranks);
    });
  } else {
    y = at::linear(all_gather(kGatherLinear, x, dim, size, group), weight, bias);
  }
  overlap.end_timing();
  return y;
}

at::Tensor linear_reduce_scatter(const at::Tensor& x,
                                 const at::Tensor& weight,
                                 const OptionalTensor& bias,
                                 std::int64_t scatter_dim,
                                 std::string_view group_name) {
  const auto group = resolve_group(kLinearScatter, std::string(group_name));
  linear_reduce_scatter_shape(x, weight, bias, scatter_dim, rank_in(group));
  if (!group) {
    return at::linear(x, weight, bias);
  }
  const auto dim = checked_dim(kLinearScatter, x, scatter_dim);
  const auto size = x.size(dim);
  OverlapChoice overlap(
      kLinearScatter, x, communication_of(x, dim, size, weight.size(1), weight.size(0)), group);
  at::Tensor y;
  if (overlap.is_chunked()) {
    const auto x_rows = x.movedim(dim, 0);
    ChunkedSequence chunks(kLinearScatter, group, size, overlap.rows_per_chunk());
    chunks.set_output(row_sizes(x, dim, weight.size(0)), x.options());
    chunks.run([&](const ChunkRows& rows) {
      product_into(rows.output, rows.of(x_rows), weight.t(), rows.num_ranks);
    });
    y = chunks.take_output().movedim(0, dim).contiguous();
  } else {
    y = reduce_scatter(kLinearScatter, at::linear(x, weight), dim, group);
  }
  overlap.end_timing();
  return bias.has_value() ? y.add_(*bias) : y;
}

// Gathers the saved shard of x again if the weight's gradient is wanted. Unchunked, this all-gather
// overlaps with the computation of grad_x, and the reduce-scatter of grad_x with that of
// grad_weight.
std::tuple<at::Tensor, at::Tensor> all_gather_linear_backward(const at::Tensor& grad_y,
                                                              const at::Tensor& x,
                                                              const at::Tensor& weight,
                                                              std::int64_t dim,
                                                              std::string_view group_name,
                                                              bool wants_x,
                                                              bool wants_weight) {
  auto grad_x = empty_result(x);
  auto grad_weight = empty_result(weight);
  const auto group = resolve_group(kGatherLinear, std::string(group_name));
  if (!group) {
    if (wants_x) grad_x = at::matmul(grad_y, weight);
    if (wants_weight) grad_weight = weight_grad(grad_y, x);
    return {grad_x, grad_weight};
  }
  const auto size = grad_y.size(dim);
  OverlapChoice overlap(
      kGatherLinearBackward, x, communication_of(x, dim, size, weight.size(0)), group);
  if (overlap.is_chunked()) {
    const auto grad_rows = grad_y.movedim(dim, 0);
    WeightGradSum weight_sum(weight);
    ChunkedSequence chunks(kGatherLinear, group, size, overlap.rows_per_chunk());
    if (wants_weight) chunks.add_input(x.movedim(dim, 0).contiguous());
    if (wants_x) chunks.set_output(row_sizes(x, dim, weight.size(1)), x.options());
    chunks.run([&](const ChunkRows& rows) {
      auto grads = rows.of(grad_rows);
      if (wants_weight) {
        // Multiply the rows of several ranks as one matrix, so that the sum of the gradients is
        // read and written once.
        grads = row_matrix(grads);
        weight_sum.add(grads, row_matrix(rows.gathered[0]));
      }
      if (wants_x) product_into(rows.output, grads, weight, rows.num_ranks);
    });
    if (wants_x) grad_x = chunks.take_output().movedim(0, dim).contiguous();
    if (wants_weight) grad_weight = weight_sum.get();
  } else {
    std::optional<PendingTensor> full_x, pending_grad_x;
    if (wants_weight) {
      full_x = start_all_gather(kGatherLinear, x, dim, size, group, /*overlaps=*/wants_x);
    }
    if (wants_x) {
      pending_grad_x = start_reduce_scatter(
          kGatherLinear, at::matmul(grad_y, weight), dim, group, /*overlaps=*/wants_weight);
    }
    if (wants_weight) {
      grad_weight = weight_grad(grad_y, full_x->get());
    }
    if (wants_x) {
      grad_x = pending_grad_x->get();
    }
  }
  overlap.end_timing();
  return {grad_x, grad_weight};
}

// The bias is replicated but was added to this rank's tokens only; its gradient sums over the
// tokens of all ranks, which the gathered grad_y contains.
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_reduce_scatter_backward(
    const at::Tensor& grad_y,
    const at::Tensor& x,
    const at::Tensor& weight,
    std::int64_t dim,
    std::string_view group_name,
    bool wants_x,
    bool wants_weight,
    bool wants_bias) {
  auto grad_x = empty_result(x);
  auto grad_weight = empty_result(weight);
  auto grad_bias = empty_result(weight);
  const auto group = resolve_group(kLinearScatter, std::string(group_name));
  const auto size = x.size(dim);
  std::optional<OverlapChoice> overlap;
  if (group) {
    overlap.emplace(kLinearScatterBackward,
                    x,
                    communication_of(x, dim, size, weight.size(1), weight.size(0)),
                    group);
  }
  if (overlap.has_value() && overlap->is_chunked()) {
    const auto x_rows = x.movedim(dim, 0);
    if (wants_x) grad_x = at::empty(x.sizes(), x.options());
    const auto grad_x_rows = wants_x ? grad_x.movedim(dim, 0) : grad_x;
    WeightGradSum weight_sum(weight);
    BiasGradSum bias_sum(weight);
    ChunkedSequence chunks(kLinearScatter, group, size, overlap->rows_per_chunk());
    chunks.add_input(grad_y.movedim(dim, 0).contiguous());
    chunks.run([&](const ChunkRows& rows) {
      const auto grads = row_matrix(rows.gathered[0]);
      if (wants_x) product_into(rows.of(grad_x_rows), grads, weight, rows.num_ranks);
      if (wants_weight) weight_sum.add(grads, row_matrix(rows.of(x_rows)));
      if (wants_bias) bias_sum.add(grads);
    });
    if (wants_weight) grad_weight = weight_sum.get();
    if (wants_bias) grad_bias = bias_sum.get();
  } else {
    const auto full_grad_y = group ? all_gather(kLinearScatter, grad_y, dim, size, group) : grad_y;
    if (wants_x) grad_x = at::matmul(full_grad_y, weight);
    if (wants_weight) grad_weight = weight_grad(full_grad_y, x);
    if (wants_bias) grad_bias = bias_grad(full_grad_y);
  }
  if (overlap.has_value()) overlap->end_timing();
  return {grad_x, grad_weight, grad_bias};
}

void register_sequence_linears(torch::Library& m) {
  m.impl("all_gather_linear", TORCH_FN(all_gather_linear));
  m.impl("linear_reduce_scatter", TORCH_FN(linear_reduce_scatter));
  m.impl("_all_gather_linear_backward", TORCH_FN(all_gather_linear_backward));
  m.impl("_linear_reduce_scatter_backward", TORCH_FN(linear_reduce_scatter_backward));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_sequence_linears(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_sequence_linears(m); }

}  // namespace weft::ops
