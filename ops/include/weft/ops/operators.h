#pragma once

// The operators of weft for C++ programs: typed calls into the dispatcher, so autograd, autocast
// and Meta tensors work as from Python. Linking libweft_ops.so registers the operators.
//
// Shape legend: `...` leading dims, d = model dim, f = this rank's part of the hidden dim, o =
// output dim, v = this rank's part of the vocabulary. All weights are this rank's shards in
// nn.Linear's layout
// (`[out, in]`); shards may be uneven or empty. `group_name` names a c10d process group
// (c10d::resolve_process_group); "" is a group of one and needs no c10d at all.
//
// dtypes: float32, float64, bfloat16, float16, the same for all tensors of a call (ids apart).
// Errors: c10::Error, one sentence, before anything is allocated or sent.

#include <weft/ops/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace weft::ops {

struct ColumnRowMlpWeights {
  at::Tensor w1;                      // [f, d]: the activated half
  at::Tensor w2;                      // [o, f]
  std::optional<at::Tensor> w3 = {};  // [f, d]: with it the MLP is gated, act(x w1ᵀ) * (x w3ᵀ)
  std::optional<at::Tensor> b1 = {};  // [f]
  std::optional<at::Tensor> b2 = {};  // [o], whole on every rank; added once, after the sum
  std::optional<at::Tensor> b3 = {};  // [f]
};

// act(x w1ᵀ + b1) [* (x w3ᵀ + b3)] w2ᵀ, summed over the group, + b2. x [..., d] -> [..., o].
// activation: "silu", "gelu", "gelu_tanh", "relu". Communication: one all-reduce forward, one
// backward (none when x needs no gradient). Saves x, h1 = x w1ᵀ + b1 and h3; with `recompute` x
// alone.
//
// With `sequence_dim` (not the last) x and the result are cut along it as torch.chunk does, x
// [..., s, ..., d] -> [..., s, ..., o], of `sequence_size` together (default: as if all ranks had
// as much). Communication then: all-gather of x and reduce-scatter of the result forward; backward
// all-gather of the gradient and again of x, of which its part alone is saved, and reduce-scatter
// of x's gradient.
WEFT_OPS_API at::Tensor column_row_mlp(const at::Tensor& x,
                                       const ColumnRowMlpWeights& weights,
                                       std::string_view activation,
                                       std::string_view group_name,
                                       bool recompute = false,
                                       std::optional<std::int64_t> sequence_dim = {},
                                       std::optional<std::int64_t> sequence_size = {});

// x [..., d] -> x weightᵀ + bias, [..., f]; weight [f, d], bias [f]. One all-reduce backward, of
// x's gradient.
WEFT_OPS_API at::Tensor column_linear(const at::Tensor& x,
                                      const at::Tensor& weight,
                                      const std::optional<at::Tensor>& bias,
                                      std::string_view group_name);

// x [..., f] -> x weightᵀ summed over the group + bias, [..., o]; weight [o, f], bias [o] whole on
// every rank. One all-reduce forward.
WEFT_OPS_API at::Tensor row_linear(const at::Tensor& x,
                                   const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias,
                                   std::string_view group_name);

// The halves of a layer in sequence parallelism; parts along the cut dim are those of torch.chunk.
//
// x [..., s, ..., d], this rank's part along `gather_dim` (not the last) of `dim_size` (default: as
// if all ranks had as much) -> gather(x) weightᵀ + bias, [..., S, ..., f]; weight [f, d], bias [f].
// One all-gather forward; backward one all-gather, of x again, which is all that is saved of it,
// and one reduce-scatter, of x's gradient; or one of each for every piece: <weft/ops/overlap.h>.
WEFT_OPS_API at::Tensor all_gather_linear(const at::Tensor& x,
                                          const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias,
                                          std::int64_t gather_dim,
                                          std::string_view group_name,
                                          std::optional<std::int64_t> dim_size = {});

// x [..., S, ..., f] -> this rank's part along `scatter_dim` (not the last) of x weightᵀ summed
// over the group, + bias, [..., s, ..., o]; weight [o, f], bias [o] whole on every rank. One
// reduce-scatter forward, one all-gather backward.
WEFT_OPS_API at::Tensor linear_reduce_scatter(const at::Tensor& x,
                                              const at::Tensor& weight,
                                              const std::optional<at::Tensor>& bias,
                                              std::int64_t scatter_dim,
                                              std::string_view group_name);

// x [..., d], each rank its own -> x weightᵀ + bias, [..., out_features], where weight [v, d] and
// bias [v] are this rank's rows, torch.chunk's part of `out_features` (default: as if all ranks had
// as many). No more than two shards of the weight are there at a time beside this rank's own.
// Gradients of weight and bias are summed over the group. Forward a broadcast for each shard, and
// one all-gather of the bias; backward a broadcast (x's gradient) and a reduce (the weight's) for
// each shard, and one reduce-scatter of the bias's gradient.
WEFT_OPS_API at::Tensor sharded_linear(const at::Tensor& x,
                                       const at::Tensor& weight,
                                       const std::optional<at::Tensor>& bias,
                                       std::string_view group_name,
                                       std::optional<std::int64_t> out_features = {});

// ids [...] int64 or int32, global -> rows of the whole table, [..., d]; weight [v, d] holds the
// rows vocab_start .. vocab_start + v. One all-reduce forward. With `vocab_size`, CPU ids outside
// [0, vocab_size) are refused; without it (and on CUDA, where a check would wait for the device)
// they give zeros.
WEFT_OPS_API at::Tensor vocab_parallel_embedding(const at::Tensor& ids,
                                                 const at::Tensor& weight,
                                                 std::int64_t vocab_start,
                                                 std::string_view group_name,
                                                 std::optional<std::int64_t> vocab_size = {});

struct CrossEntropyOptions {
  std::optional<std::int64_t> vocab_size = {};  // of all ranks; default: as if all had as much
  std::int64_t ignore_index = -100;             // a target without loss and gradient
  double label_smoothing = 0.0;
  std::string_view reduction = "mean";  // over the targets that count; "sum", "none"
};

// The cross-entropy of classes that are cut over the group: logits [..., v] are those of the
// classes vocab_start .. vocab_start + v, target [...] int64 or int32, global. -> a loss, [] or
// [...], in float32 (float64 for float64), as torch's cross_entropy gives it. Communication: one
// all-gather of four numbers a token forward, none backward. Saves the logits and one number a
// token; the gradient of the logits is the one tensor of their size that is made. With `vocab_size`
// CPU targets outside of it are refused (c10::IndexError).
WEFT_OPS_API at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits,
                                                     const at::Tensor& target,
                                                     std::int64_t vocab_start,
                                                     std::string_view group_name,
                                                     const CrossEntropyOptions& options = {});

// The same of logits x weightᵀ, which never exist but for a chunk of tokens: x [..., d], weight
// [v, d]. Forward one all-gather as above, backward one all-reduce of x's gradient.
WEFT_OPS_API at::Tensor vocab_parallel_linear_cross_entropy(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& target,
    std::int64_t vocab_start,
    std::string_view group_name,
    const CrossEntropyOptions& options = {});

// The RMS norm of x [..., d] over its last dim, times weight [d], with the dtype of x or, beside
// half types, float32; those are computed in float32. `group_name` is the group that the tokens are
// cut over: one all-reduce backward sums weight's gradient. Saves x and one number a token.
WEFT_OPS_API at::Tensor rms_norm(const at::Tensor& x,
                                 const std::optional<at::Tensor>& weight,
                                 std::string_view group_name,
                                 double eps = 1e-6);

// The layer norm, with bias [d], which is only given with a weight; else like rms_norm. One
// all-reduce backward for both parameters. Saves x and two numbers a token.
WEFT_OPS_API at::Tensor layer_norm(const at::Tensor& x,
                                   const std::optional<at::Tensor>& weight,
                                   const std::optional<at::Tensor>& bias,
                                   std::string_view group_name,
                                   double eps = 1e-5);

// (norm of x + residual, x + residual), like the norms above; residual like x. Only the sum is
// saved.
WEFT_OPS_API std::tuple<at::Tensor, at::Tensor> add_rms_norm(
    const at::Tensor& x,
    const at::Tensor& residual,
    const std::optional<at::Tensor>& weight,
    std::string_view group_name,
    double eps = 1e-6);
WEFT_OPS_API std::tuple<at::Tensor, at::Tensor> add_layer_norm(
    const at::Tensor& x,
    const at::Tensor& residual,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    std::string_view group_name,
    double eps = 1e-5);

// x / (1 - p), or 0 with probability p. Which elements are dropped depends on `seed`, one int64 on
// the CPU, and on their place in the whole tensor: where x, any shape, is this rank's part along
// `dim`, of `dim_size` together, ranks with one seed drop what an unsharded call would. Without
// `dim` x is whole on every rank. No communication; saves the seed alone.
WEFT_OPS_API at::Tensor dropout(const at::Tensor& x,
                                const at::Tensor& seed,
                                double p,
                                std::string_view group_name,
                                std::optional<std::int64_t> dim = {},
                                std::optional<std::int64_t> dim_size = {});

// Identity forward, all-reduce of the gradient backward.
WEFT_OPS_API at::Tensor copy_to_group(const at::Tensor& x, std::string_view group_name);

// All-reduce (sum) forward, identity backward.
WEFT_OPS_API at::Tensor reduce_from_group(const at::Tensor& x, std::string_view group_name);

// The following cut tensors over the group or put them together. Parts are those of torch.chunk:
// ceil(size / ranks) long, later ones shorter or empty. Sizes of all parts together that are not
// told mean that every rank brings as much as the others. Results are contiguous copies.
// Errors besides those above: c10::IndexError for a dim that x does not have.

// This rank's part of x along `dim`. Backward: one all-gather.
WEFT_OPS_API at::Tensor scatter_to_group(const at::Tensor& x,
                                         std::int64_t dim,
                                         std::string_view group_name);

// All parts along `dim`, of which x is this rank's. One all-gather forward. The gradient is taken
// to be equal on all ranks: each keeps its part.
WEFT_OPS_API at::Tensor gather_from_group(const at::Tensor& x,
                                          std::int64_t dim,
                                          std::string_view group_name,
                                          std::optional<std::int64_t> dim_size = {});

// The same where each rank uses the result for something else: one all-gather forward, one
// reduce-scatter of the gradient backward.
WEFT_OPS_API at::Tensor gather_from_sequence(const at::Tensor& x,
                                             std::int64_t dim,
                                             std::string_view group_name,
                                             std::optional<std::int64_t> dim_size = {});

// This rank's part along `dim` of x summed over the group. One reduce-scatter forward, one
// all-gather backward.
WEFT_OPS_API at::Tensor reduce_scatter_to_sequence(const at::Tensor& x,
                                                   std::int64_t dim,
                                                   std::string_view group_name);

// x whole along split_dim and cut along cat_dim -> cut along split_dim and whole along cat_dim.
// One all-to-all forward, one backward.
WEFT_OPS_API at::Tensor all_to_all(const at::Tensor& x,
                                   std::int64_t split_dim,
                                   std::int64_t cat_dim,
                                   std::string_view group_name,
                                   std::optional<std::int64_t> cat_size = {});

// The torch release that libweft_ops.so was compiled for, such as "2.15.0".
WEFT_OPS_API std::string_view built_for_torch();

// Messages between two ranks, several in flight at a time. `peer` counts in the group, from 0;
// `channel` is 0 to 1022: the n-th send on a channel meets the peer's n-th receive on it. Tensors
// of any dtype. Where the sides do not agree on number, shapes, dtypes or needs of gradients, both
// raise CollectiveMismatchError. Not traced by torch.compile and torch.export.
//
// Sends `tensors`, which stay unchanged until the token, [0], was waited for or its gradient has
// come. The backward of the token waits for the gradients of those that need one.
WEFT_OPS_API at::Tensor pipeline_send(at::TensorList tensors,
                                      std::int64_t peer,
                                      std::int64_t channel,
                                      std::string_view group_name);

// Posts the receive of tensors with the shapes, dtypes, devices and needs of gradients of `like`,
// whose values are not read; gives a token, [0].
WEFT_OPS_API at::Tensor pipeline_recv(at::TensorList like,
                                      std::int64_t peer,
                                      std::int64_t channel,
                                      std::string_view group_name);

// What was received; once a token. Their backward sends the gradients, in one message. For the
// token of a send: empty, when what was sent may be changed again.
WEFT_OPS_API std::vector<at::Tensor> pipeline_wait(const at::Tensor& token);

// Waits until all that this rank has sent in the group has left: at the end of a step, and before a
// group is destroyed.
WEFT_OPS_API void pipeline_flush(std::string_view group_name);

// x; its backward reaches the tokens of sends too, [0] each, so that gradients of what was sent
// are received. A stage without a loss of its own joins them to a zero.
WEFT_OPS_API at::Tensor join(const at::Tensor& x, at::TensorList tokens);

}  // namespace weft::ops
