#pragma once

// The operators of weft for C++ programs: typed calls into the dispatcher, so autograd, autocast
// and Meta tensors work as in Python. Linking libweft_ops.so registers the operators.
//
// Shape legend: `...` leading dims, d = model dim, f = this rank's shard of the hidden dim, o =
// output dim, r = this rank's shard of the output features, v = this rank's shard of the
// vocabulary, S and s = full sequence and this rank's shard of it. Weights are this rank's shards
// in nn.Linear's layout (`[out, in]`), except the replicated weights of norms; shards may be uneven
// or empty. `group_name` names a c10d process group (c10d::resolve_process_group); "" is a group of
// one, which needs no c10d.
//
// Sequence shards have the sizes of torch.chunk: ceil(S / ranks), the last ones shorter or empty.
// An optional full size (`sequence_size`, `dim_size`, ...) defaults to this rank's size times the
// number of ranks.
//
// dtypes: all tensors of a call have one dtype, float32, float64, bfloat16 or float16. Exceptions:
// ids and targets are int64 or int32, seeds int64; a norm whose x has a half-precision type also
// takes float32 parameters; the collectives (copy_to_group to all_to_all) take the dtypes that the
// group's backend supports; pipeline messages take any dtype.
// "Saves" lists the tensors that are kept for the backward, besides weights, ids and targets.
// Errors: c10::Error for invalid arguments, one sentence, before anything is allocated or sent; the
// errors of the group's backend.

#include <weft/ops/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace weft::ops {

struct ColumnRowMlpWeights {
  at::Tensor w1;                      // [f, d]: act is applied to x w1ᵀ + b1
  at::Tensor w2;                      // [o, f]
  std::optional<at::Tensor> w3 = {};  // [f, d]: with it the MLP is gated, act(x w1ᵀ) * (x w3ᵀ)
  std::optional<at::Tensor> b1 = {};  // [f]
  std::optional<at::Tensor> b2 = {};  // [o], replicated; added once, after the sum over the group
  std::optional<at::Tensor> b3 = {};  // [f]
};

// act(x w1ᵀ + b1) [* (x w3ᵀ + b3)] w2ᵀ, summed over the group, + b2. x [..., d] -> [..., o].
// activation: "silu", "gelu", "gelu_tanh", "relu". Communication: one all-reduce forward, one
// backward (none if x does not require a gradient). Saves x, h1 = x w1ᵀ + b1 and h3 = x w3ᵀ + b3;
// with `recompute` only x.
//
// With `sequence_dim` (not the last), x and the result are sharded along it: x [..., s, ..., d] ->
// [..., s, ..., o], of full size `sequence_size`. Communication: forward, all-gather of x and
// reduce-scatter of the result; backward, all-gather of the result's gradient and of x, of which
// only the shard is saved, and reduce-scatter of x's gradient.
WEFT_OPS_API at::Tensor column_row_mlp(const at::Tensor& x,
                                       const ColumnRowMlpWeights& weights,
                                       std::string_view activation,
                                       std::string_view group_name,
                                       bool recompute = false,
                                       std::optional<std::int64_t> sequence_dim = {},
                                       std::optional<std::int64_t> sequence_size = {});

// x [..., d] -> x weightᵀ + bias, [..., f]; weight [f, d], bias [f]. Backward: one all-reduce of
// x's gradient. Saves x.
WEFT_OPS_API at::Tensor column_linear(const at::Tensor& x,
                                      const at::Tensor& weight,
                                      const std::optional<at::Tensor>& bias,
                                      std::string_view group_name);

// x [..., f] -> x weightᵀ summed over the group, + bias, [..., o]; weight [o, f], bias [o]
// replicated. Forward: one all-reduce. Saves x.
WEFT_OPS_API at::Tensor row_linear(const at::Tensor& x,
                                   const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias,
                                   std::string_view group_name);

// The column-parallel and row-parallel linear layers of sequence parallelism. Their collectives run
// once, or once per chunk: see <weft/ops/overlap.h>.
//
// x [..., s, ..., d], sharded along `gather_dim` (not the last), of full size `dim_size` ->
// gather(x) weightᵀ + bias, [..., S, ..., f]; weight [f, d], bias [f]. Forward: one all-gather.
// Backward: one all-gather of x, of which only the shard is saved, and one reduce-scatter of x's
// gradient.
WEFT_OPS_API at::Tensor all_gather_linear(const at::Tensor& x,
                                          const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias,
                                          std::int64_t gather_dim,
                                          std::string_view group_name,
                                          std::optional<std::int64_t> dim_size = {});

// x [..., S, ..., f] -> this rank's shard along `scatter_dim` (not the last) of x weightᵀ summed
// over the group, + bias, [..., s, ..., o]; weight [o, f], bias [o] replicated. Forward: one
// reduce-scatter; backward: one all-gather. Saves x.
WEFT_OPS_API at::Tensor linear_reduce_scatter(const at::Tensor& x,
                                              const at::Tensor& weight,
                                              const std::optional<at::Tensor>& bias,
                                              std::int64_t scatter_dim,
                                              std::string_view group_name);

// A linear layer with an FSDP-style sharded weight; each rank passes its own x. x [..., d] ->
// x weightᵀ + bias, [..., out_features], where weight [r, d] and bias [r] are this rank's rows of
// `out_features`, sharded like torch.chunk. A rank stores at most two shards of other ranks at a
// time. Gradients of weight and bias are summed over the group. Forward: one broadcast of each
// weight shard and one all-gather of the bias. Backward: one broadcast of each weight shard, for
// x's gradient, one reduce of each weight shard's gradient, and one reduce-scatter of the bias's
// gradient. Saves x.
WEFT_OPS_API at::Tensor sharded_linear(const at::Tensor& x,
                                       const at::Tensor& weight,
                                       const std::optional<at::Tensor>& bias,
                                       std::string_view group_name,
                                       std::optional<std::int64_t> out_features = {});

// Global ids [...], int64 or int32 -> rows of the full table, [..., d]; weight [v, d] holds the
// rows [vocab_start, vocab_start + v). Forward: one all-reduce. With `vocab_size`, CPU ids outside
// [0, vocab_size) raise c10::IndexError. Without `vocab_size`, and on CUDA, where a check would
// synchronize, ids outside the table give zeros.
WEFT_OPS_API at::Tensor vocab_parallel_embedding(const at::Tensor& ids,
                                                 const at::Tensor& weight,
                                                 std::int64_t vocab_start,
                                                 std::string_view group_name,
                                                 std::optional<std::int64_t> vocab_size = {});

struct CrossEntropyOptions {
  // Full size of the vocabulary; default: v times the number of ranks.
  std::optional<std::int64_t> vocab_size = {};
  std::int64_t ignore_index = -100;  // targets of this value have no loss or gradient
  double label_smoothing = 0.0;
  std::string_view reduction = "mean";  // over the targets that are not ignored; or "sum", "none"
};

// Cross-entropy over classes that are sharded over the group: logits [..., v] of the classes
// [vocab_start, vocab_start + v), target [...] of global classes, int64 or int32 -> the loss of
// torch's cross_entropy, [], or [...] with reduction "none", in float32 (float64 for float64).
// Forward: one all-gather of four numbers per token; backward: no communication. Saves the logits
// and two numbers per token. If the logits can be viewed as a matrix, the only tensor of their size
// that is allocated is their gradient. With `vocab_size`, CPU targets that are neither ignore_index
// nor in [0, vocab_size) raise c10::IndexError.
WEFT_OPS_API at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits,
                                                     const at::Tensor& target,
                                                     std::int64_t vocab_start,
                                                     std::string_view group_name,
                                                     const CrossEntropyOptions& options = {});

// Like vocab_parallel_cross_entropy, for logits = x weightᵀ, computed for one chunk of tokens at a
// time: x [..., d], weight [v, d]. Forward: one all-gather as above; backward: one all-reduce of
// x's gradient. Saves x and two numbers per token.
WEFT_OPS_API at::Tensor vocab_parallel_linear_cross_entropy(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& target,
    std::int64_t vocab_start,
    std::string_view group_name,
    const CrossEntropyOptions& options = {});

// The RMS norm of x [..., d] over its last dim, times weight [d]. weight has the dtype of x, or
// float32 if x has a half-precision type; half precision is computed in float32. The tokens are
// sharded over the group `group_name`. Backward: one all-reduce sums weight's gradient. Saves x and
// one number per token.
WEFT_OPS_API at::Tensor rms_norm(const at::Tensor& x,
                                 const std::optional<at::Tensor>& weight,
                                 std::string_view group_name,
                                 double eps = 1e-6);

// The layer norm, like rms_norm, plus bias [d]; a bias requires a weight. Backward: one all-reduce
// for both parameters. Saves x and two numbers per token.
WEFT_OPS_API at::Tensor layer_norm(const at::Tensor& x,
                                   const std::optional<at::Tensor>& weight,
                                   const std::optional<at::Tensor>& bias,
                                   std::string_view group_name,
                                   double eps = 1e-5);

// (norm of x + residual, x + residual); otherwise like the norms above. residual has x's shape and
// dtype. Saves the sum instead of x.
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

// x / (1 - p), or 0 with probability p. The dropped elements depend on `seed`, one int64 on the
// CPU, and on their positions in the full tensor: if x, of any shape, is this rank's shard along
// `dim`, of full size `dim_size`, ranks with equal seeds drop the elements that an unsharded call
// drops. Without `dim`, x is replicated. No communication; saves only the seed.
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

// The following operators shard and unshard tensors over the group. Results are contiguous copies.
// Further errors: c10::IndexError for a dim that x does not have.

// This rank's shard of x along `dim`. Backward: one all-gather.
WEFT_OPS_API at::Tensor scatter_to_group(const at::Tensor& x,
                                         std::int64_t dim,
                                         std::string_view group_name);

// The full tensor along `dim`, of which x is this rank's shard. Forward: one all-gather. The
// gradient must be equal on all ranks: the backward takes this rank's shard of it, without
// communication.
WEFT_OPS_API at::Tensor gather_from_group(const at::Tensor& x,
                                          std::int64_t dim,
                                          std::string_view group_name,
                                          std::optional<std::int64_t> dim_size = {});

// Like gather_from_group, but the ranks' gradients may differ. Forward: one all-gather; backward:
// one reduce-scatter of the gradient.
WEFT_OPS_API at::Tensor gather_from_sequence(const at::Tensor& x,
                                             std::int64_t dim,
                                             std::string_view group_name,
                                             std::optional<std::int64_t> dim_size = {});

// This rank's shard along `dim` of x summed over the group. Forward: one reduce-scatter; backward:
// one all-gather.
WEFT_OPS_API at::Tensor reduce_scatter_to_sequence(const at::Tensor& x,
                                                   std::int64_t dim,
                                                   std::string_view group_name);

// x, full along split_dim and sharded along cat_dim -> sharded along split_dim and full along
// cat_dim. One all-to-all forward, one backward.
WEFT_OPS_API at::Tensor all_to_all(const at::Tensor& x,
                                   std::int64_t split_dim,
                                   std::int64_t cat_dim,
                                   std::string_view group_name,
                                   std::optional<std::int64_t> cat_size = {});

struct SequenceAttentionOptions {
  bool is_causal = false;            // a query attends to the keys of its token and of those before
  std::optional<double> scale = {};  // of the scores; default: 1 / sqrt(head_dim)
  std::optional<std::int64_t> sequence_size = {};  // full size S
  // A query attends to the key of its token and to those of the window - 1 tokens before it.
  // Requires is_causal.
  std::optional<std::int64_t> window = {};
  // A query attends to keys of its document only. Offsets are the positions in the full sequence at
  // which documents begin, in order, int32 or int64, for all rows [documents] or for each row
  // [batch, documents], the same on all ranks.
  std::optional<at::Tensor> document_offsets = {};
};

// torch's scaled_dot_product_attention over a sequence whose tokens are sharded over the group:
// query [batch, heads, s, head_dim], key and value [batch, kv_heads, s, head_dim], where kv_heads
// divides heads -> [batch, heads, s, head_dim].
//
// Ring attention. With `order` "head_tail", the sequence is divided into 2n chunks for n ranks,
// like torch.chunk, and rank r has chunk r and behind it chunk 2n - 1 - r, which balances causal
// attention; with "contiguous", rank r has chunk r of n. Communication: each rank sends n - 1
// messages (with a window and "contiguous" shards, fewer) with the key and value of one shard
// forward, and as many backward together with as many messages of their gradients (in float32 for
// half precision), while it computes. Saves query, key, value, the result and one number per token
// and head. Further errors: c10::NotImplementedError for CUDA tensors in a group with the backend
// gloo.
WEFT_OPS_API at::Tensor ring_attention(const at::Tensor& query,
                                       const at::Tensor& key,
                                       const at::Tensor& value,
                                       std::string_view group_name,
                                       const SequenceAttentionOptions& options = {},
                                       std::string_view order = "head_tail");

// The same by heads: the number of ranks must divide heads. Communication: two all-to-alls forward,
// two backward. With `ring_group_name`, the sequence is sharded over a grid of ranks, for more
// ranks than heads: the r ranks at the same place in r groups `group_name` of u ranks form a ring,
// which computes ring attention of the tokens that the u ranks have together. Rank j of group i has
// the shard of rank i * u + j in `order`, and the ring sends r - 1 messages instead of r * u - 1.
WEFT_OPS_API at::Tensor ulysses_attention(const at::Tensor& query,
                                          const at::Tensor& key,
                                          const at::Tensor& value,
                                          std::string_view group_name,
                                          const SequenceAttentionOptions& options = {},
                                          std::string_view order = "contiguous",
                                          std::string_view ring_group_name = "");

// Mixture of experts. The experts are sharded over the group like torch.chunk; e = experts of this
// rank, h = features, m = rows of this rank's experts.
//
// x [m, in], sorted by expert -> x weightᵀ + bias for each row's expert, [m, out]; weight
// [e, out, in], counts int64 [e] with sum m, bias [e, out]. No communication. On CUDA, the host
// waits for the counts unless the dtype is bfloat16 and in and out are multiples of 8; then counts
// are not checked. Saves x.
WEFT_OPS_API at::Tensor grouped_linear(const at::Tensor& x,
                                       const at::Tensor& weight,
                                       const at::Tensor& counts,
                                       const std::optional<at::Tensor>& bias = {});

struct DispatchedRows {
  at::Tensor rows;      // [m, h], sorted by expert, then by source rank, then by pair
  at::Tensor counts;    // [e] int64: the rows of each expert
  at::Tensor order;     // [tokens * k] int64: the pairs of this rank's tokens, sorted by expert
  at::Tensor sent;      // [ranks] int64 on the CPU: the pairs that go to each rank
  at::Tensor received;  // [ranks, e] int64 on the CPU: the rows from each rank for each expert
};

// Sends each token of x [tokens, h] to the k experts expert_ids [tokens, k], int64 or int32; pair
// t * k + c is choice c of token t. Forward: one all-to-all of counts, which the host reads, and
// one of rows; backward: one. Further errors: c10::IndexError on all ranks for an id of any rank
// outside [0, num_experts). Saves order.
WEFT_OPS_API DispatchedRows moe_dispatch(const at::Tensor& x,
                                         const at::Tensor& expert_ids,
                                         std::int64_t num_experts,
                                         std::string_view group_name);

// The sum over each token's choices of weights [tokens, k] times the rows of its experts, [tokens,
// h]; summed in float32 for half precision. rows [m, h] are in the order of DispatchedRows, whose
// order, sent and received are the arguments. weights have the dtype of rows, or float32 if rows
// have a half-precision type. Forward: one all-to-all of rows; backward: one. Saves weights and
// order, and if weights require a gradient the rows of this rank's pairs.
WEFT_OPS_API at::Tensor moe_combine(const at::Tensor& rows,
                                    const at::Tensor& weights,
                                    const at::Tensor& order,
                                    const at::Tensor& sent,
                                    const at::Tensor& received,
                                    std::string_view group_name);

// The torch release that libweft_ops.so was compiled for, such as "2.15.0".
WEFT_OPS_API std::string_view built_for_torch();

// Point-to-point messages; several may be in flight at a time. `peer` is another rank of the group.
// `channel` is 0 to 1022: the n-th send on a channel matches the peer's n-th receive on it. Tensors
// are strided and have any dtype. If the two sides differ in the number, shapes, dtypes or
// requires_grad of the tensors, the receiver raises CollectiveMismatchError. The sender raises it
// too; over a backend other than "weft", it does so when it receives the gradients. Under
// torch.compile and torch.export, sends and receives raise NotImplementedError.
//
// Starts to send `tensors` and returns a token, an empty tensor of shape [0]. The tensors must not
// change until pipeline_wait(token) returns or the gradient has been received. The backward of the
// token receives the gradients of the tensors that require one.
WEFT_OPS_API at::Tensor pipeline_send(at::TensorList tensors,
                                      std::int64_t peer,
                                      std::int64_t channel,
                                      std::string_view group_name);

// Posts the receive of tensors with the shapes, dtypes, devices and requires_grad of `like`, whose
// values are not read; returns a token, an empty tensor of shape [0].
WEFT_OPS_API at::Tensor pipeline_recv(at::TensorList like,
                                      std::int64_t peer,
                                      std::int64_t channel,
                                      std::string_view group_name);

// Waits for the message of a token. Receive: returns the tensors, once per token; their backward
// sends the gradients in one message. Send: returns an empty list as soon as the caller may
// overwrite the sent tensors.
WEFT_OPS_API std::vector<at::Tensor> pipeline_wait(const at::Tensor& token);

// Waits until all messages that this rank has sent in the group are transmitted. Call it at the end
// of a step and before a group is destroyed.
WEFT_OPS_API void pipeline_flush(std::string_view group_name);

// Returns a copy of x with autograd edges to the tokens of sends, so that the copy's backward also
// receives the gradients of the sent tensors. A stage that computes no loss passes a zero as x and
// calls backward on the result.
WEFT_OPS_API at::Tensor join(const at::Tensor& x, at::TensorList tokens);

}  // namespace weft::ops
