#pragma once

#include "rank_memory.h"

#include <cstdint>

namespace weft::strategy::detail {

// The tokens of a micro-batch. With sequence parallelism, layers that are sharded by features get
// all of them; norms, residual sums and the tensors between blocks have this rank's shard.
struct Rows {
  int64_t all = 0;
  int64_t own = 0;          // of this rank's shard; all without sequence parallelism
  int64_t largest = 0;      // of the largest shard
  int64_t padded = 0;       // of shards that are all padded to the largest
  bool is_sharded = false;  // over tensor-parallel ranks
  // Whether the tokens of a rank are not adjacent among all, because there are several sequences.
  bool has_batch = false;

  [[nodiscard]] bool is_even() const { return padded == all; }
};

// Returns the tokens of `num_sequences` sequences on a tensor-parallel rank.
Rows rows_of(const TrainingSpec& spec, int64_t num_sequences, int64_t tp_rank);

// Collectives on tokens of `row_bytes` each, unchunked, with the buffers of group_collectives.cpp
// among weft's operators. They return the buffer of the result; the caller holds that of the input.

// Returns all tokens, as the result of an operator, which a selective checkpoint keeps. `is_saved`:
// whether autograd saves them in any case.
Buffer gather_tokens(RankMemory& memory, const Rows& rows, int64_t row_bytes, bool is_saved);
// Returns all tokens, as a temporary inside of an operator or of a backward; or in two steps: the
// buffer of the all-gather in flight, and the tokens in their order.
Buffer gather_inside(RankMemory& memory, const Rows& rows, int64_t row_bytes);
Buffer start_gather(RankMemory& memory, const Rows& rows, int64_t row_bytes);
Buffer finish_gather(RankMemory& memory, const Rows& rows, int64_t row_bytes, Buffer in_flight);

// Returns this rank's shard of the sum over the ranks of `x`, which has all tokens.
Buffer scatter_tokens(RankMemory& memory, const Rows& rows, int64_t row_bytes, const Buffer& x);
// Returns what a reduce-scatter of `x` sends: `x` itself, or a copy ordered by rank.
Buffer sent_tokens(RankMemory& memory, const Rows& rows, int64_t row_bytes, const Buffer& x);

// Returns the output of a row-sharded layer with `dim` features: all-reduced or, with sequence
// parallelism, reduce-scattered. `is_summed`: false for a layer that is not sharded.
Buffer sum_output(RankMemory& memory, const Rows& rows, int64_t dim, bool is_summed);

}  // namespace weft::strategy::detail
