#include "shape.h"

#include <c10/core/SymIntArrayRef.h>

namespace weft::ops {

void check_like_x(std::string_view op,
                  const at::Tensor& x,
                  const at::Tensor& other,
                  std::string_view name,
                  std::string_view x_name) {
  TORCH_CHECK_TYPE(other.scalar_type() == x.scalar_type(),
                   op,
                   ": got ",
                   name,
                   " of dtype ",
                   other.scalar_type(),
                   " with ",
                   x_name,
                   " of dtype ",
                   x.scalar_type(),
                   "; convert one of them, or run under torch.autocast.");
  TORCH_CHECK_VALUE(other.device() == x.device(),
                    op,
                    ": got ",
                    name,
                    " on ",
                    other.device(),
                    " with ",
                    x_name,
                    " on ",
                    x.device(),
                    "; move them to one device.");
}

void check_floating(std::string_view op, const at::Tensor& x, std::string_view name) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      op,
      ": got ",
      name,
      " of dtype ",
      dtype,
      "; pass float32, float64, bfloat16 or float16.");
}

void check_input(std::string_view op, const at::Tensor& x) {
  check_floating(op, x, "x");
  TORCH_CHECK_VALUE(
      x.dim() >= 1, op, ": got x without dims; pass at least one dim, x [..., features].");
}

namespace {

constexpr std::string_view kMlp = "weft::column_row_mlp";
constexpr std::string_view kGatherLinear = "weft::all_gather_linear";
constexpr std::string_view kLinearScatter = "weft::linear_reduce_scatter";
constexpr std::string_view kShardedLinear = "weft::sharded_linear";
constexpr std::string_view kLinearLoss = "weft::vocab_parallel_linear_cross_entropy";
constexpr std::string_view kEmbedding = "weft::vocab_parallel_embedding";

// Checks that `weight` is a matrix with `num_cols` columns. `source` says in the error where that
// number comes from.
void check_matrix(std::string_view op,
                  const at::Tensor& weight,
                  std::string_view name,
                  const c10::SymInt& num_cols,
                  std::string_view source) {
  TORCH_CHECK_VALUE(weight.dim() == 2,
                    op,
                    ": got ",
                    name,
                    " of shape ",
                    weight.sym_sizes(),
                    "; pass a matrix [out, in] as nn.Linear holds it.");
  TORCH_CHECK_VALUE(weight.sym_size(1) == num_cols,
                    op,
                    ": got ",
                    name,
                    " of shape ",
                    weight.sym_sizes(),
                    ", whose second dim must be ",
                    num_cols,
                    ", the ",
                    source,
                    "; pass this rank's shard in nn.Linear's layout [out, in].");
}

void check_bias(std::string_view op,
                const at::Tensor& x,
                const OptionalTensor& bias,
                std::string_view name,
                const at::Tensor& weight,
                std::string_view weight_name) {
  if (!bias.has_value()) {
    return;
  }
  check_like_x(op, x, *bias, name);
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0),
                    op,
                    ": got ",
                    name,
                    " of shape ",
                    bias->sym_sizes(),
                    ", which must be [",
                    weight.sym_size(0),
                    "], one entry for each row of ",
                    weight_name,
                    "; shard bias and weight alike.");
}

c10::SymDimVector with_last_dim(const at::Tensor& x, const c10::SymInt& last) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = last;
  return sizes;
}

// Returns `dim` counted from 0; it must not be the last.
std::int64_t checked_token_dim(std::string_view op,
                               const at::Tensor& x,
                               std::int64_t dim,
                               std::string_view name) {
  dim = checked_dim(op, x, dim, name);
  TORCH_CHECK_VALUE(dim + 1 < x.dim(),
                    op,
                    ": got ",
                    name,
                    " ",
                    dim,
                    ", the last dim of x of shape ",
                    x.sym_sizes(),
                    ", which holds the features; pass the dim that is sharded over the group, the "
                    "sequence's.");
  return dim;
}

}  // namespace

c10::SymDimVector column_row_mlp_shape(const at::Tensor& x,
                                       const at::Tensor& w1,
                                       const at::Tensor& w2,
                                       const OptionalTensor& w3,
                                       const OptionalTensor& b1,
                                       const OptionalTensor& b2,
                                       const OptionalTensor& b3,
                                       std::string_view activation) {
  checked_activation(kMlp, activation);
  check_input(kMlp, x);
  check_like_x(kMlp, x, w1, "w1");
  check_like_x(kMlp, x, w2, "w2");
  check_matrix(kMlp, w1, "w1", x.sym_size(-1), "last dim of x");
  check_matrix(kMlp, w2, "w2", w1.sym_size(0), "number of rows of w1");
  check_bias(kMlp, x, b1, "b1", w1, "w1");
  check_bias(kMlp, x, b2, "b2", w2, "w2");
  TORCH_CHECK_VALUE(w3.has_value() || !b3.has_value(),
                    kMlp,
                    ": got b3 without w3, whose bias it is; pass w3 too, or no b3.");
  if (w3.has_value()) {
    check_like_x(kMlp, x, *w3, "w3");
    TORCH_CHECK_VALUE(w3->dim() == 2 && w3->sym_sizes() == w1.sym_sizes(),
                      kMlp,
                      ": got w3 of shape ",
                      w3->sym_sizes(),
                      ", which must be w1's, ",
                      w1.sym_sizes(),
                      "; shard w1 and w3 alike.");
    check_bias(kMlp, x, b3, "b3", *w3, "w3");
  }
  return with_last_dim(x, w2.sym_size(0));
}

std::optional<ShardedDim> mlp_sequence_dim(const at::Tensor& x,
                                           const std::optional<std::int64_t>& sequence_dim,
                                           const std::optional<c10::SymInt>& sequence_size,
                                           const GroupRank& group_rank) {
  if (!sequence_dim.has_value()) {
    TORCH_CHECK_VALUE(!sequence_size.has_value(),
                      kMlp,
                      ": got sequence_size ",
                      *sequence_size,
                      " without sequence_dim, the dim that has it; pass both, or neither for an x "
                      "that every rank has in full.");
    return std::nullopt;
  }
  const auto dim = checked_token_dim(kMlp, x, *sequence_dim, "sequence_dim");
  return ShardedDim{dim, gathered_size(kMlp, x, dim, sequence_size, group_rank, "sequence_size")};
}

c10::SymDimVector linear_shape(std::string_view op,
                               const at::Tensor& x,
                               const at::Tensor& weight,
                               const OptionalTensor& bias) {
  check_input(op, x);
  check_like_x(op, x, weight, "weight");
  check_matrix(op, weight, "weight", x.sym_size(-1), "last dim of x");
  check_bias(op, x, bias, "bias", weight, "weight");
  return with_last_dim(x, weight.sym_size(0));
}

c10::SymDimVector all_gather_linear_shape(const at::Tensor& x,
                                          const at::Tensor& weight,
                                          const OptionalTensor& bias,
                                          std::int64_t gather_dim,
                                          const std::optional<c10::SymInt>& dim_size,
                                          const GroupRank& group_rank) {
  auto sizes = linear_shape(kGatherLinear, x, weight, bias);
  const auto dim = checked_token_dim(kGatherLinear, x, gather_dim, "gather_dim");
  sizes[static_cast<std::size_t>(dim)] = gathered_size(kGatherLinear, x, dim, dim_size, group_rank);
  return sizes;
}

c10::SymDimVector linear_reduce_scatter_shape(const at::Tensor& x,
                                              const at::Tensor& weight,
                                              const OptionalTensor& bias,
                                              std::int64_t scatter_dim,
                                              const GroupRank& group_rank) {
  auto sizes = linear_shape(kLinearScatter, x, weight, bias);
  const auto dim = checked_token_dim(kLinearScatter, x, scatter_dim, "scatter_dim");
  sizes[static_cast<std::size_t>(dim)] = shard_size(x.sym_size(dim), group_rank);
  return sizes;
}

c10::SymDimVector sharded_linear_shape(const at::Tensor& x,
                                       const at::Tensor& weight,
                                       const OptionalTensor& bias,
                                       const std::optional<c10::SymInt>& out_features,
                                       const GroupRank& group_rank) {
  auto sizes = linear_shape(kShardedLinear, x, weight, bias);
  sizes.back() =
      gathered_size(kShardedLinear, weight, 0, out_features, group_rank, "out_features", "weight");
  return sizes;
}

c10::SymDimVector cross_entropy_shape(std::string_view op,
                                      const at::Tensor& logits,
                                      const at::Tensor& target,
                                      std::int64_t vocab_start,
                                      double label_smoothing,
                                      std::string_view reduction) {
  const std::string_view name = op == kLinearLoss ? "x" : "logits";
  check_floating(op, logits, name);
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong || target.scalar_type() == at::kInt,
                   op,
                   ": got target of dtype ",
                   target.scalar_type(),
                   "; pass classes as int64 or int32.");
  TORCH_CHECK_VALUE(target.device() == logits.device(),
                    op,
                    ": got target on ",
                    target.device(),
                    " with ",
                    name,
                    " on ",
                    logits.device(),
                    "; move them to one device.");
  TORCH_CHECK_VALUE(
      logits.dim() >= 1 && target.sym_sizes() == logits.sym_sizes().slice(0, logits.dim() - 1),
      op,
      ": got target of shape ",
      target.sym_sizes(),
      " with ",
      name,
      " of shape ",
      logits.sym_sizes(),
      "; pass one class per token, in a target of that shape without the last dim.");
  TORCH_CHECK_VALUE(vocab_start >= 0,
                    op,
                    ": got vocab_start ",
                    vocab_start,
                    "; pass the class of this rank's first entry, 0 or more.");
  TORCH_CHECK_VALUE(label_smoothing >= 0 && label_smoothing <= 1,
                    op,
                    ": got label_smoothing ",
                    label_smoothing,
                    "; pass a number from 0 to 1.");
  TORCH_CHECK_VALUE(reduction == "none" || reduction == "mean" || reduction == "sum",
                    op,
                    ": got reduction '",
                    reduction,
                    "'; pass 'none', 'mean' or 'sum'.");
  return reduction == "none"
             ? c10::SymDimVector(target.sym_sizes().begin(), target.sym_sizes().end())
             : c10::SymDimVector();
}

void check_classes(std::string_view op,
                   std::int64_t vocab_start,
                   const c10::SymInt& num_entries,
                   std::optional<std::int64_t> vocab_size) {
  // vocab_start + num_entries might overflow.
  const auto fits = [&] {
    return *vocab_size >= vocab_start && num_entries <= *vocab_size - vocab_start;
  };
  TORCH_CHECK_VALUE(!vocab_size.has_value() || fits(),
                    op,
                    ": got ",
                    num_entries,
                    " classes from vocab_start ",
                    vocab_start,
                    " on, with vocab_size ",
                    *vocab_size,
                    "; pass only the classes of this rank, without padding, and as vocab_size the "
                    "number of classes of all ranks.");
}

c10::SymDimVector linear_cross_entropy_shape(const at::Tensor& x,
                                             const at::Tensor& weight,
                                             const at::Tensor& target,
                                             std::int64_t vocab_start,
                                             double label_smoothing,
                                             std::string_view reduction) {
  linear_shape(kLinearLoss, x, weight, std::nullopt);
  return cross_entropy_shape(kLinearLoss, x, target, vocab_start, label_smoothing, reduction);
}

c10::SymDimVector vocab_embedding_shape(const at::Tensor& ids,
                                        const at::Tensor& weight,
                                        std::int64_t vocab_start) {
  check_floating(kEmbedding, weight, "weight");
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt,
                   kEmbedding,
                   ": got input of dtype ",
                   ids.scalar_type(),
                   "; pass token ids as int64 or int32.");
  TORCH_CHECK_VALUE(ids.device() == weight.device(),
                    kEmbedding,
                    ": got input on ",
                    ids.device(),
                    " with weight on ",
                    weight.device(),
                    "; move them to one device.");
  TORCH_CHECK_VALUE(weight.dim() == 2,
                    kEmbedding,
                    ": got weight of shape ",
                    weight.sym_sizes(),
                    "; pass this rank's rows of the table, [rows, d].");
  TORCH_CHECK_VALUE(vocab_start >= 0,
                    kEmbedding,
                    ": got vocab_start ",
                    vocab_start,
                    "; pass the index of this rank's first row, 0 or more.");
  c10::SymDimVector sizes(ids.sym_sizes().begin(), ids.sym_sizes().end());
  sizes.push_back(weight.sym_size(1));
  return sizes;
}

}  // namespace weft::ops
