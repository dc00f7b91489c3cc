#include "attended_tokens.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace weft::ops {

namespace {

using Chunk = SequenceShards::Chunk;

constexpr std::int64_t kMinQueries = 128;  // of a call with a window, unless fewer attend

// A query attends to `window` keys, and a call computes all pairs of its n queries and n + window
// keys: with n = window / 4, it computes a quarter more than needed.
std::int64_t queries_of_call(std::int64_t window) {
  return std::max(kMinQueries, (window + 3) / 4);
}

// Returns the part of the chunk at the positions from `first` to before `end`; its size may be
// negative.
Chunk part_of(const Chunk& chunk, std::int64_t first, std::int64_t end) {
  const auto position = std::max(chunk.position, first);
  return {chunk.begin + position - chunk.position,
          position,
          std::min(chunk.end_position(), end) - position};
}

AttendedTokens call_of(const Chunk& queries, const Chunk& keys, std::optional<std::int64_t> row) {
  return {{queries.begin, queries.size, row}, {keys.begin, keys.size, row}, {}};
}

// Adds the calls for two chunks of a document, or none.
void add_calls(const Chunk& queries,
               const Chunk& keys,
               const SequenceMask& mask,
               std::optional<std::int64_t> row,
               std::vector<AttendedTokens>& calls) {
  if (queries.size <= 0 || keys.size <= 0) {
    return;
  }
  if (!mask.is_causal) {
    calls.push_back(call_of(queries, keys, row));
    return;
  }
  const auto window = mask.window.value_or(std::max(queries.end_position(), keys.end_position()));
  const auto begin = std::max(queries.position, keys.position);
  const auto end = std::min(queries.end_position(), keys.end_position() + window - 1);
  const auto step = mask.window.has_value() ? queries_of_call(window) : queries.size;
  for (auto first = begin; first < end; first += step) {
    const auto few_queries = part_of(queries, first, std::min(first + step, end));
    const auto few_keys = part_of(keys, first - window + 1, few_queries.end_position());
    const auto offset = first - few_keys.position;
    auto call = call_of(few_queries, few_keys, row);
    const bool fits_window = offset + few_queries.size <= window;
    if (fits_window && offset == 0 && few_keys.size == few_queries.size) {
      call.options.is_causal = true;
    } else if (!fits_window || offset < few_keys.size - 1) {
      call.options.band = AttentionBand{offset, window};
    }
    calls.push_back(std::move(call));
  }
}

// Adds the calls for the documents of a row.
void add_calls_of_row(const SequenceShards& shards,
                      const SequenceMask& mask,
                      int rank,
                      int source,
                      const DocumentOffsets& offsets,
                      std::optional<std::int64_t> row,
                      std::vector<AttendedTokens>& calls) {
  for (std::size_t i = 0; i <= offsets.size(); ++i) {
    const auto first = i == 0 ? 0 : offsets[i - 1];
    const auto end = i == offsets.size() ? shards.size() : offsets[i];
    for (const auto& queries : {shards.head(rank), shards.tail(rank)}) {
      for (const auto& keys : {shards.head(source), shards.tail(source)}) {
        add_calls(part_of(queries, first, end), part_of(keys, first, end), mask, row, calls);
      }
    }
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
  if (mask.window.has_value() || !mask.documents.empty()) {
    const bool is_by_row = mask.documents.size() > 1;
    const auto num_rows = std::max<std::size_t>(mask.documents.size(), 1);
    for (std::size_t row = 0; row < num_rows; ++row) {
      add_calls_of_row(shards,
                       mask,
                       rank,
                       source,
                       mask.documents.empty() ? DocumentOffsets{} : mask.documents[row],
                       is_by_row ? std::optional(static_cast<std::int64_t>(row)) : std::nullopt,
                       calls);
    }
    return calls;
  }
  TokenRange queries{0, shards.size_of(rank), {}}, keys{0, shards.size_of(source), {}};
  AttentionOptions options;
  if (mask.is_causal) {
    if (source == rank) {
      options.is_causal = true;
    } else if (source < rank) {
      keys.size = shards.head(source).size;
    } else {
      queries = {shards.head(rank).size, shards.tail(rank).size, {}};
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
