#pragma once

// The pairs of a query and a key that a mask leaves, for a sequence whose tokens are sharded over
// ranks: ranges of this rank's queries and of a rank's keys for each call of an attention kernel.

#include "attention_block.h"
#include "attention_mask.h"
#include "sequence_order.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace weft::ops {

// A sequence of `size` tokens in shards (sequence_order.h).
class SequenceShards {
 public:
  // A chunk of a shard: the tokens from `begin` on in the shard, and from `position` on in the
  // sequence.
  struct Chunk {
    std::int64_t begin = 0;
    std::int64_t position = 0;
    std::int64_t size = 0;

    std::int64_t end_position() const { return position + size; }
  };

  SequenceShards(SequenceOrder order, std::int64_t size, int num_ranks);

  SequenceOrder order() const { return order_; }
  int num_ranks() const { return num_ranks_; }
  std::int64_t size() const { return size_; }
  // The number of tokens of all chunks but the last ones, which may have fewer.
  std::int64_t chunk_size() const { return chunk_size_; }
  Chunk head(int rank) const { return chunk(rank, 0); }
  // Empty in the order "contiguous".
  Chunk tail(int rank) const;
  std::int64_t size_of(int rank) const { return head(rank).size + tail(rank).size; }

 private:
  Chunk chunk(std::int64_t index, std::int64_t begin) const;

  SequenceOrder order_;
  std::int64_t size_;
  int num_ranks_;
  std::int64_t chunk_size_;
};

struct AttendedTokens {
  TokenRange queries;
  TokenRange keys;
  AttentionOptions options;  // without a scale
};

// Returns the calls that compute the attention of the queries of `rank` to the keys of `source`.
// Each query of a call attends to at least one of its keys. Without a window and documents there is
// at most one call. With a window, calls have so few queries that most of their pairs are in it.
std::vector<AttendedTokens> attended_tokens(const SequenceShards& shards,
                                            const SequenceMask& mask,
                                            int rank,
                                            int source);

// Returns the smallest d such that no rank attends to keys of a rank d or more ranks before it on
// the ring, which has the first rank behind the last one.
int num_attended_shards(const SequenceShards& shards, const SequenceMask& mask);

}  // namespace weft::ops
