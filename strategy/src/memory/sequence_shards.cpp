#include "sequence_shards.h"

#include "weft/strategy/shard.h"

#include <utility>

namespace weft::strategy::detail {

namespace {

int64_t result_rows(const Rows& rows) { return rows.has_batch ? rows.all : rows.padded; }

}  // namespace

Rows rows_of(const TrainingSpec& spec, int64_t num_sequences, int64_t tp_rank) {
  const int64_t all = num_sequences * spec.tokens;
  const int64_t tp_size = axis_size(spec.mesh, "tensor_parallel");
  if (!spec.sequence_parallel || tp_size == 1) {
    return {.all = all, .own = all, .largest = all, .padded = all};
  }
  const int64_t largest = num_sequences * shard_range(spec.tokens, tp_size, 0).length;
  return {.all = all,
          .own = num_sequences * shard_range(spec.tokens, tp_size, tp_rank).length,
          .largest = largest,
          .padded = largest * tp_size,
          .is_sharded = true,
          .has_batch = num_sequences > 1};
}

Buffer start_gather(RankMemory& memory, const Rows& rows, int64_t row_bytes) {
  memory.communicate_shards(rows.largest * row_bytes);
  // Uneven shards are padded, and have the tokens as their first dim.
  const bool is_copied = !rows.is_even() && (rows.has_batch || rows.own < rows.largest);
  const Buffer sent =
      is_copied ? memory.hold_bytes(MemoryCategory::kScratch, rows.largest * row_bytes) : Buffer();
  return memory.hold_bytes(MemoryCategory::kScratch, rows.padded * row_bytes);
}

Buffer finish_gather(RankMemory& memory, const Rows& rows, int64_t row_bytes, Buffer in_flight) {
  return rows.has_batch ? memory.hold_bytes(MemoryCategory::kScratch, rows.all * row_bytes)
                        : std::move(in_flight);
}

Buffer gather_inside(RankMemory& memory, const Rows& rows, int64_t row_bytes) {
  return finish_gather(memory, rows, row_bytes, start_gather(memory, rows, row_bytes));
}

Buffer gather_tokens(RankMemory& memory, const Rows& rows, int64_t row_bytes, bool is_saved) {
  Buffer in_flight = memory.reuses_products() ? Buffer() : start_gather(memory, rows, row_bytes);
  if (!rows.has_batch) {
    in_flight.reset();  // it is the result
  }
  return memory.product(is_saved ? MemoryCategory::kSavedActivations : MemoryCategory::kScratch,
                        result_rows(rows) * row_bytes);
}

Buffer sent_tokens(RankMemory& memory, const Rows& rows, int64_t row_bytes, const Buffer& x) {
  return rows.has_batch || !rows.is_even()
             ? memory.hold_bytes(MemoryCategory::kScratch, rows.padded * row_bytes)
             : x;
}

Buffer scatter_tokens(RankMemory& memory, const Rows& rows, int64_t row_bytes, const Buffer& x) {
  if (!memory.reuses_products()) {
    memory.communicate_shards(rows.largest * row_bytes);
    const Buffer sent = sent_tokens(memory, rows, row_bytes, x);
    // The sum of a padded shard; the shard itself is a copy of a part, or all of it.
    memory.hold_bytes(MemoryCategory::kScratch, rows.largest * row_bytes);
  }
  return memory.product(MemoryCategory::kScratch, rows.own * row_bytes);
}

Buffer sum_output(RankMemory& memory, const Rows& rows, int64_t dim, bool is_summed) {
  if (!rows.is_sharded) {
    Buffer y = memory.scratch_product(rows.all * dim);
    if (is_summed) {
      memory.communicate(memory.product_bytes(rows.all * dim));
    }
    return y;
  }
  const Buffer partial = memory.reuses_products() ? Buffer() : memory.scratch(rows.all * dim);
  return scatter_tokens(memory, rows, memory.product_bytes(dim), partial);
}

}  // namespace weft::strategy::detail
