#include "attended_tokens.h"

#include <algorithm>

namespace weft::ops {

namespace {

constexpr std::int64_t kMinQueries = 128;  // of a call with a window, unless fewer attend

// A query attends to `window` keys, and a call computes all pairs of its n queries and n + window
// keys: with n = window / 4, it computes a quarter more than needed.
std::int64_t queries_of_call(std::int64_t window) {
  return std::max(kMinQueries, (window + 3) / 4);
}

// Adds the calls for two chunks of the sequence.
void add_calls_in_window(const SequenceShards::Chunk& queries,
                         const SequenceShards::Chunk& keys,
                         std::int64_t window,
                         std::vector<AttendedTokens>& calls) {
  const auto begin = std::max(queries.position, keys.position);
  const auto end = std::min(queries.end_position(), keys.end_position() + window - 1);
  if (keys.size == 0) {
    return;
  }
  const auto step = queries_of_call(window);
  for (auto first = begin; first < end; first += step) {
    const auto num_queries = std::min(step, end - first);
    const auto first_key = std::max(keys.position, first - window + 1);
    const auto num_keys = std::min(keys.end_position(), first + num_queries) - first_key;
    const auto offset = first - first_key;
    AttentionOptions options;
    if (offset < num_keys - 1 || offset + num_queries > window) {
      options.band = AttentionBand{offset, window};
    }
    calls.push_back({{queries.begin + first - queries.position, num_queries},
                     {keys.begin + first_key - keys.position, num_keys},
                     options});
  }
}

}  // namespace

SequenceShards::SequenceShards(SequenceOrder order, std::int64_t size, int num_ranks)
    : order_(order), size_(size), num_ranks_(num_ranks) {
  const auto num_chunks = order == SequenceOrder::kHeadTail ? 2 * num_ranks : num_ranks;
  chunk_size_ = (size + num_chunks - 1) / num_chunks;
}

SequenceShards::Chunk SequenceShards::tail(int rank) const {
  const auto begin = head(rank).size;
  if (order_ == SequenceOrder::kContiguous) {
    return {begin, size_, 0};
  }
  return chunk(2 * num_ranks_ - 1 - rank, begin);
}

SequenceShards::Chunk SequenceShards::chunk(std::int64_t index, std::int64_t begin) const {
  const auto position = std::min(index * chunk_size_, size_);
  return {begin, position, std::min(chunk_size_, size_ - position)};
}

std::vector<AttendedTokens> attended_tokens(const SequenceShards& shards,
                                            const SequenceMask& mask,
                                            int rank,
                                            int source) {
  std::vector<AttendedTokens> calls;
  if (mask.window.has_value()) {
    for (const auto& queries : {shards.head(rank), shards.tail(rank)}) {
      for (const auto& keys : {shards.head(source), shards.tail(source)}) {
        add_calls_in_window(queries, keys, *mask.window, calls);
      }
    }
    return calls;
  }
  TokenRange queries{0, shards.size_of(rank)}, keys{0, shards.size_of(source)};
  AttentionOptions options;
  if (mask.is_causal) {
    if (source == rank) {
      options.is_causal = true;
    } else if (source < rank) {
      keys = {0, shards.head(source).size};
    } else {
      queries = {shards.head(rank).size, shards.tail(rank).size};
    }
  }
  if (queries.size > 0 && keys.size > 0) {
    calls.push_back({queries, keys, options});
  }
  return calls;
}

int num_attended_shards(const SequenceShards& shards, const SequenceMask& mask) {
  if (!mask.window.has_value() || shards.order() != SequenceOrder::kContiguous) {
    return shards.num_ranks();  // the tail of a rank is before that of the rank before it
  }
  const auto keys_before = *mask.window - 1;
  if (keys_before == 0 || shards.chunk_size() == 0) {
    return 1;
  }
  const auto num_shards_before = (keys_before - 1) / shards.chunk_size() + 1;
  return static_cast<int>(std::min<std::int64_t>(shards.num_ranks(), num_shards_before + 1));
}

}  // namespace weft::ops
