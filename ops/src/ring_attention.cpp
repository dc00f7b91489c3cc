// ring_attention: attention over a sequence that is sharded over the group (Liu et al., "Ring
// Attention with Blockwise Transformers", 2023). A block is the keys and values of one rank's
// shard.
//
// Forward: the blocks move around the ring of ranks. In step i, a rank computes the attention of
// its queries to the block of the rank i before it, and at the same time sends this block to the
// next rank and receives the block of step i + 1. The results of the blocks are combined by their
// log-sum-exp. Backward: the blocks move in the same way, and the gradient of each block follows
// it, one step behind: a rank receives the sum of the gradients of the ranks before it, adds its
// own and sends the sum on; the last rank is the one before the block's owner, which adds its own
// gradient.
//
// With a causal mask, chunks are before or behind each other (sequence_order.h), so only the rank's
// own block needs a mask: of a block of a rank before it, the queries attend to the head; to a
// block of a rank behind it, only the queries of the tail attend. With a window and contiguous
// shards, a block only moves to the ranks that attend to it, and the last of them sends its
// gradient to the owner.

#include "ring_attention.h"

#include "attended_tokens.h"
#include "attention_shape.h"
#include "group_collectives.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <utility>
#include <vector>

namespace weft::ops {

namespace {

constexpr int kBlockTag = (1 << 29) - 2;
constexpr int kGradientTag = (1 << 29) - 1;

class Ring {
 public:
  Ring(ProcessGroupPtr group, std::int64_t sequence_size, const RingOptions& options)
      : group_(std::move(group)),
        rank_(static_cast<int>(rank_in(group_).rank)),
        scale_(options.scale),
        shards_(checked_order(kRingAttention, options.order),
                sequence_size,
                static_cast<int>(rank_in(group_).num_ranks)),
        mask_(read_mask(kRingAttention, options.mask, sequence_size)),
        num_blocks_(num_attended_shards(shards_, mask_)) {}

  // Calls visit(source, key, value) for the blocks of num_blocks() ranks `source`, this rank's
  // first, while the next block is in flight.
  template <typename Visit>
  void for_each_block(const at::Tensor& key, const at::Tensor& value, const Visit& visit) const {
    if (num_blocks_ == 1) {
      visit(rank_, key, value);
      return;
    }
    auto block = at::stack({key, value});
    for (int step = 0; step < num_blocks_; ++step) {
      const int source = at_distance(-step);
      at::Tensor next;
      PendingExchange moving;
      if (step + 1 < num_blocks_) {
        next = at::empty(stacked_sizes(key, at_distance(-step - 1)), block.options());
        moving = start_to_move(block, next, 1, kBlockTag);
      }
      visit(source, block.select(0, 0), block.select(0, 1));
      moving.wait();
      block = std::move(next);
    }
  }

  // Returns the calls for the queries of this rank and the keys of rank `source`.
  std::vector<AttendedTokens> calls(int source) const {
    auto result = attended_tokens(shards_, mask_, rank_, source);
    for (auto& call : result) {
      call.options.scale = scale_;
    }
    return result;
  }

  // Starts to send the sum of the gradients of a block to the rank `distance` ranks behind this
  // one, and to receive that of another block.
  PendingExchange start_to_move_gradients(const at::Tensor& sent,
                                          const at::Tensor& received,
                                          int distance) const {
    return start_to_move(sent, received, distance, kGradientTag);
  }

  // Returns the sizes of stacked keys and values of rank `source`, or of their gradients; `key` is
  // that of any rank.
  std::vector<std::int64_t> stacked_sizes(const at::Tensor& key, int source) const {
    return {2, key.size(0), key.size(1), shards_.size_of(source), key.size(3)};
  }

  int rank() const { return rank_; }
  int num_blocks() const { return num_blocks_; }
  // Returns the rank that is `distance` ranks behind this one on the ring.
  int at_distance(int distance) const {
    const auto num_ranks = shards_.num_ranks();
    return (rank_ + distance + num_ranks) % num_ranks;
  }

 private:
  PendingExchange start_to_move(const at::Tensor& sent,
                                const at::Tensor& received,
                                int distance,
                                int tag) const {
    return start_exchange(kRingAttention,
                          {sent, at_distance(distance), received, at_distance(-distance), tag},
                          group_);
  }

  ProcessGroupPtr group_;
  int rank_;
  std::optional<double> scale_;
  SequenceShards shards_;
  SequenceMask mask_;
  int num_blocks_;
};

// Whether the full tensors have no elements, whatever their number of tokens is. All ranks agree.
bool is_empty_on_all_ranks(const at::Tensor& query) {
  return query.size(0) == 0 || query.size(1) == 0 || query.size(3) == 0;
}

// Checks that the backend sends tensors on this device. Gloo would read them as host memory.
void check_backend(const at::Tensor& query, const ProcessGroupPtr& group) {
  if (!group || group->getSize() == 1 || query.is_cpu()) {
    return;
  }
  const auto backend = group->getBackend(query.device().type())->getBackendName();
  TORCH_CHECK_NOT_IMPLEMENTED(backend != "gloo",
                              kRingAttention,
                              ": got query on ",
                              query.device(),
                              " and a group with the backend gloo, which sends CPU tensors only; "
                              "use the backend nccl.");
}

// Computes and adds up the gradients of the blocks.
class RingBackward {
 public:
  // `grad_out` is the gradient of attention.out.
  RingBackward(const Ring& ring,
               at::Tensor grad_out,
               at::Tensor query,
               const at::Tensor& key,
               AttentionResult attention)
      : ring_(ring),
        grad_out_(std::move(grad_out)),
        query_(std::move(query)),
        attention_(std::move(attention)),
        options_(attention_.lse.options()),
        sum_{at::zeros(query_.sizes(), options_),
             at::zeros(key.sizes(), options_),
             at::zeros(key.sizes(), options_)} {}

  AttentionGradients run(const at::Tensor& key, const at::Tensor& value) {
    ring_.for_each_block(
        key, value, [&](int source, const at::Tensor& block_key, const at::Tensor& block_value) {
          if (source == ring_.rank()) {
            add_block(source, block_key, block_value, sum_.key, sum_.value);
          } else {
            add_to_moving_sum(source, block_key, block_value);
          }
        });
    if (ring_.num_blocks() > 1) {
      moving_.wait();
      sum_.key.add_(received_.select(0, 0));
      sum_.value.add_(received_.select(0, 1));
    }
    const auto dtype = query_.scalar_type();
    return {sum_.query.to(dtype), sum_.key.to(dtype), sum_.value.to(dtype)};
  }

 private:
  // Adds this rank's gradients of another rank's block to those of the ranks before it, which are
  // in flight unless that rank is the block's owner; starts to send the sum on and to receive the
  // next.
  void add_to_moving_sum(int source, const at::Tensor& block_key, const at::Tensor& block_value) {
    auto gradients = at::zeros(ring_.stacked_sizes(block_key, source), options_);
    auto grad_key = gradients.select(0, 0), grad_value = gradients.select(0, 1);
    add_block(source, block_key, block_value, grad_key, grad_value);
    if (received_.defined()) {
      moving_.wait();
      gradients.add_(received_);
    }
    if (source == ring_.at_distance(1 - ring_.num_blocks())) {  // the last block: home to its owner
      received_ = at::empty(ring_.stacked_sizes(block_key, ring_.rank()), options_);
      moving_ = ring_.start_to_move_gradients(gradients, received_, 1 - ring_.num_blocks());
    } else {
      const auto next_source = ring_.at_distance(source - ring_.rank() - 1);
      received_ = at::empty(ring_.stacked_sizes(block_key, next_source), options_);
      moving_ = ring_.start_to_move_gradients(gradients, received_, 1);
    }
  }

  void add_block(int source,
                 const at::Tensor& block_key,
                 const at::Tensor& block_value,
                 const at::Tensor& grad_key,
                 const at::Tensor& grad_value) const {
    for (const auto& [queries, keys, options] : ring_.calls(source)) {
      add_gradients({queries.of(sum_.query), keys.of(grad_key), keys.of(grad_value)},
                    queries.of(grad_out_),
                    queries.of(query_),
                    keys.of(block_key),
                    keys.of(block_value),
                    {queries.of(attention_.out), queries.of(attention_.lse)},
                    options);
    }
  }

  const Ring& ring_;
  at::Tensor grad_out_;
  at::Tensor query_;
  AttentionResult attention_;
  at::TensorOptions options_;
  AttentionGradients sum_;  // for the queries and the block of this rank
  at::Tensor received_;     // the sum that moving_ receives
  PendingExchange moving_;
};

}  // namespace

c10::SymInt checked_ring_arguments(const at::Tensor& query,
                                   const at::Tensor& key,
                                   const at::Tensor& value,
                                   const RingOptions& options,
                                   const GroupRank& group_rank) {
  check_attention(kRingAttention, query, key, value);
  check_mask(kRingAttention, query, options.mask);
  const auto order = checked_order(kRingAttention, options.order);
  return checked_sequence_size(
      kRingAttention, order, query, 2, options.sequence_size, group_rank, "query");
}

AttentionResult ring_attention_forward(const at::Tensor& query,
                                       const at::Tensor& key,
                                       const at::Tensor& value,
                                       const RingOptions& options) {
  const auto group = resolve_group(kRingAttention, options.group_name);
  const auto sequence_size = checked_ring_arguments(query, key, value, options, rank_in(group));
  check_backend(query, group);
  const Ring ring(group, sequence_size.expect_int(), options);
  AttentionSum sum(query);
  if (!is_empty_on_all_ranks(query)) {
    ring.for_each_block(
        key, value, [&](int source, const at::Tensor& block_key, const at::Tensor& block_value) {
          for (const auto& [queries, keys, mask] : ring.calls(source)) {
            sum.add(attend(queries.of(query), keys.of(block_key), keys.of(block_value), mask),
                    queries);
          }
        });
  }
  if (sum.is_empty()) {  // there are no queries, and no elements in the result
    auto result = empty_attention(query);
    return {std::move(result.out), result.lse.zero_()};
  }
  return sum.take(query.scalar_type());
}

AttentionGradients ring_attention_gradients(const at::Tensor& grad_out,
                                            const at::Tensor& query,
                                            const at::Tensor& key,
                                            const at::Tensor& value,
                                            const AttentionResult& attention,
                                            const RingOptions& options) {
  const auto group = resolve_group(kRingAttention, options.group_name);
  const auto sequence_size = checked_ring_arguments(query, key, value, options, rank_in(group));
  if (is_empty_on_all_ranks(query)) {
    return {at::zeros(query.sizes(), query.options()),
            at::zeros(key.sizes(), key.options()),
            at::zeros(value.sizes(), value.options())};
  }
  const Ring ring(group, sequence_size.expect_int(), options);
  return RingBackward(ring, grad_out, query, key, attention).run(key, value);
}

}  // namespace weft::ops
