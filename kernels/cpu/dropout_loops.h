#pragma once

#include "dropout_job.h"
#include "philox.h"
#include "tiles.h"

#include <cstdint>

// Runs a DropoutJob with the instruction set this file is compiled for. Internal linkage
// throughout: see polynomial_math.h.
namespace weft::kernels::cpu {
namespace {

constexpr int64_t kWordsPerCounter = 4;
constexpr int64_t kCountersPerTile =
    kTileSize / kWordsPerCounter + 1;  // a tile may begin between a counter's words

// Writes word w of counter first + i to words[w][i], for i in [0, count).
C10_NOINLINE void random_words(uint64_t first,
                               uint64_t key,
                               int64_t count,
                               uint32_t (&words)[kWordsPerCounter][kCountersPerTile]) {
  for (int64_t i = 0; i < count; ++i) {
    const detail::PhiloxBits bits = detail::philox(first + static_cast<uint64_t>(i), key);
    for (int64_t word = 0; word < kWordsPerCounter; ++word) words[word][i] = bits.words[word];
  }
}

template <typename Scalar>
C10_NOINLINE void dropout_tile(const Scalar* __restrict x,
                               const uint32_t* __restrict random,
                               uint64_t threshold,
                               Scalar scale,
                               Scalar* __restrict y,
                               int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    y[i] = random[i] < threshold ? Scalar(0) : x[i] * scale;
  }
}

template <typename Storage>
void run_dropout(const detail::DropoutJob& job, int64_t first, int64_t last) {
  using Scalar = ScalarOf<Storage>;
  TileReader<Storage> x(job.x);
  TileWriter<Storage> y(job.y);
  uint32_t words[kWordsPerCounter][kCountersPerTile];
  uint32_t random[kCountersPerTile * kWordsPerCounter];
  for (int64_t begin = first; begin < last;) {
    const int64_t run_idx = begin / job.run_size;
    const int64_t idx_in_run = begin % job.run_size;
    const int64_t run_end = (run_idx + 1) * job.run_size;
    const int64_t end = run_end < last ? run_end : last;
    // The position of an element of this run in the unsharded tensor, minus its index in the shard.
    const int64_t shift = run_idx * job.full_run_size + job.run_begin + idx_in_run - begin;
    for_each_tile(begin, end, [&](int64_t tile_begin, int64_t size) {
      const int64_t position = tile_begin + shift;
      const int64_t counter = position / kWordsPerCounter;
      const int64_t num_counters = (position + size - 1) / kWordsPerCounter - counter + 1;
      random_words(static_cast<uint64_t>(counter), job.seed, num_counters, words);
      for (int64_t i = 0; i < num_counters; ++i) {
        for (int64_t word = 0; word < kWordsPerCounter; ++word) {
          random[i * kWordsPerCounter + word] = words[word][i];
        }
      }
      dropout_tile<Scalar>(x.read(tile_begin, size),
                           random + position % kWordsPerCounter,
                           job.threshold,
                           static_cast<Scalar>(job.scale),
                           y.start_tile(tile_begin),
                           size);
      y.finish_tile(tile_begin, size);
    });
    begin = end;
  }
}

// Runs elements [first, last) of the job.
void run_dropout_loops(const detail::DropoutJob& job, int64_t first, int64_t last) {
  switch (job.type) {
    case detail::StorageType::kFloat32:
      return run_dropout<float>(job, first, last);
    case detail::StorageType::kFloat64:
      return run_dropout<double>(job, first, last);
    case detail::StorageType::kBFloat16:
      return run_dropout<BFloat16>(job, first, last);
    case detail::StorageType::kFloat16:
      return run_dropout<Float16>(job, first, last);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu
