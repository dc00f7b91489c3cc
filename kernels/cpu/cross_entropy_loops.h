#pragma once

#include "cross_entropy_job.h"
#include "polynomial_math.h"
#include "tiles.h"

#include <cstdint>
#include <limits>

// Runs the cross-entropy jobs with the instruction set this file is compiled for. Internal linkage
// throughout: see polynomial_math.h.
//
// The statistics are an online softmax, which reads memory once: a tile is scanned for its largest
// logit and then, from the cache, for its sum of exponentials. When the running maximum grows, the
// running sum is scaled down. A tile is reduced by halves, in independent vector operations, and
// the sums of a row's tiles are added in double.
namespace weft::kernels::cpu {
namespace {

template <typename Scalar>
constexpr Scalar kInfinity = std::numeric_limits<Scalar>::infinity();

// Reduces kSize values to one by halves, in the same order for every instruction set.
template <int64_t kSize, typename Scalar, typename Combine>
C10_ALWAYS_INLINE Scalar reduce_by_halves(Scalar* values, const Combine& combine) {
  if constexpr (kSize == 1) {
    return values[0];
  } else {
    constexpr int64_t kHalf = kSize / 2;
    for (int64_t i = 0; i < kHalf; ++i) values[i] = combine(values[i], values[i + kHalf]);
    return reduce_by_halves<kHalf>(values, combine);
  }
}

// Returns the largest logit, ignoring NaN. Not inlined, like the loops of activation_loops.h.
template <typename Scalar>
C10_NOINLINE Scalar largest_of_tile(const Scalar* __restrict logits, int64_t size) {
  alignas(64) Scalar values[kTileSize];
  for (int64_t i = 0; i < size; ++i) {
    values[i] = logits[i] > -kInfinity<Scalar> ? logits[i] : -kInfinity<Scalar>;
  }
  for (int64_t i = size; i < kTileSize; ++i) values[i] = -kInfinity<Scalar>;
  return reduce_by_halves<kTileSize>(values, [](Scalar a, Scalar b) { return a > b ? a : b; });
}

template <typename Scalar>
C10_NOINLINE Scalar sum_exp_of_tile(const Scalar* __restrict logits, Scalar shift, int64_t size) {
  alignas(64) Scalar values[kTileSize];
  for (int64_t i = 0; i < size; ++i) {
    values[i] = PolynomialMath<Scalar>::exp(logits[i] - shift);
  }
  for (int64_t i = size; i < kTileSize; ++i) values[i] = 0;
  return reduce_by_halves<kTileSize>(values, [](Scalar a, Scalar b) { return a + b; });
}

template <typename Scalar>
C10_NOINLINE Scalar sum_of_tile(const Scalar* __restrict logits, int64_t size) {
  alignas(64) Scalar values[kTileSize];
  for (int64_t i = 0; i < size; ++i) values[i] = logits[i];
  for (int64_t i = size; i < kTileSize; ++i) values[i] = 0;
  return reduce_by_halves<kTileSize>(values, [](Scalar a, Scalar b) { return a + b; });
}

// Returns the number to subtract before exp. While all logits so far are masked out (-infinity),
// that number is 0: the sum of exponentials must be 0, not NaN.
template <typename Scalar>
Scalar shift_of(Scalar largest) {
  return largest == -kInfinity<Scalar> ? Scalar(0) : largest;
}

template <typename Storage>
bool has_nan(const Storage* row, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    if (load(row[i]) != load(row[i])) return true;
  }
  return false;
}

template <typename Storage>
void run_statistics(const detail::CrossEntropyStatisticsJob& job, int64_t first, int64_t last) {
  using Scalar = ScalarOf<Storage>;
  const auto* logits = static_cast<const Storage*>(job.logits);
  TileReader<Storage> reader(job.logits);
  for (int64_t row = first; row < last; ++row) {
    const int64_t row_begin = row * job.row_stride;
    Scalar largest = -kInfinity<Scalar>;
    double sum = 0;
    double sum_of_logits = 0;
    for_each_tile(row_begin, row_begin + job.row_size, [&](int64_t begin, int64_t count) {
      const Scalar* tile = reader.read(begin, count);
      const Scalar tile_largest = largest_of_tile(tile, count);
      if (tile_largest > largest) {
        sum *= PolynomialMath<double>::exp(static_cast<double>(largest) - tile_largest);
        largest = tile_largest;
      }
      sum += static_cast<double>(sum_exp_of_tile(tile, shift_of(largest), count));
      if (job.wants_sum) sum_of_logits += static_cast<double>(sum_of_tile(tile, count));
    });
    // NaN and +infinity in the row both make the sum NaN; only NaN makes the maximum NaN.
    if (sum != sum && has_nan(logits + row_begin, job.row_size)) {
      largest = std::numeric_limits<Scalar>::quiet_NaN();
    }
    const int64_t column = job.targets.column(row);
    Scalar* statistics = static_cast<Scalar*>(job.statistics) + row * 4;
    statistics[0] = largest;
    statistics[1] = static_cast<Scalar>(sum);
    statistics[2] = column < 0 ? Scalar(0) : load(logits[row_begin + column]);
    statistics[3] = static_cast<Scalar>(sum_of_logits);
  }
}

// The gradient with respect to one logit of a row. `target_offset` is 1 - smoothing for the target
// and 0 for other classes.
template <typename Scalar>
struct RowGradient {
  C10_ALWAYS_INLINE Scalar operator()(Scalar logit, Scalar target_offset = 0) const {
    const Scalar p = PolynomialMath<Scalar>::exp((logit - largest) - log_sum);
    return ((p - smoothing_per_class) - target_offset) * grad_loss;
  }

  Scalar largest;
  Scalar log_sum;
  Scalar smoothing_per_class;
  Scalar grad_loss;
};

template <typename Scalar>
C10_NOINLINE void gradient_tile(const Scalar* __restrict logits,
                                const RowGradient<Scalar>& row,
                                Scalar* __restrict gradient,
                                int64_t size) {
  const RowGradient<Scalar> local = row;
  for (int64_t i = 0; i < size; ++i) gradient[i] = local(logits[i]);
}

template <typename Scalar>
C10_NOINLINE void gradient_tile_in_place(Scalar* values,
                                         const RowGradient<Scalar>& row,
                                         int64_t size) {
  const RowGradient<Scalar> local = row;
  for (int64_t i = 0; i < size; ++i) values[i] = local(values[i]);
}

template <typename Storage>
void run_gradient(const detail::CrossEntropyGradientJob& job, int64_t first, int64_t last) {
  using Scalar = ScalarOf<Storage>;
  const auto* logits = static_cast<const Storage*>(job.logits);
  auto* grad_logits = static_cast<Storage*>(job.grad_logits);
  TileReader<Storage> reader(job.logits);
  TileWriter<Storage> writer(job.grad_logits);
  for (int64_t row = first; row < last; ++row) {
    const int64_t row_begin = row * job.row_size;
    if (job.targets.is_ignored(row)) {
      for (int64_t i = 0; i < job.row_size; ++i) grad_logits[row_begin + i] = Storage{};
      continue;
    }
    const RowGradient<Scalar> row_gradient = {
        .largest = static_cast<const Scalar*>(job.largest)[row],
        .log_sum = static_cast<const Scalar*>(job.log_sum)[row],
        .smoothing_per_class = static_cast<Scalar>(job.smoothing_per_class),
        .grad_loss = static_cast<const Scalar*>(job.grad_losses)[row]};
    const int64_t column = job.targets.column(row);
    const int64_t logits_begin = row * job.row_stride;
    // Read before the loop, because an in-place gradient overwrites it.
    const Scalar target_logit = column < 0 ? Scalar(0) : load(logits[logits_begin + column]);
    for_each_tile(row_begin, row_begin + job.row_size, [&](int64_t begin, int64_t count) {
      const Scalar* tile = reader.read(logits_begin + (begin - row_begin), count);
      Scalar* out = writer.start_tile(begin);
      if (tile == out) {
        gradient_tile_in_place(out, row_gradient, count);
      } else {
        gradient_tile(tile, row_gradient, out, count);
      }
      writer.finish_tile(begin, count);
    });
    if (column >= 0) {
      store(row_gradient(target_logit, static_cast<Scalar>(1 - job.smoothing)),
            grad_logits[row_begin + column]);
    }
  }
}

// This function and the next one run rows [first, last) of the job.
void run_cross_entropy_statistics_loops(const detail::CrossEntropyStatisticsJob& job,
                                        int64_t first,
                                        int64_t last) {
  switch (job.type) {
    case detail::StorageType::kFloat32:
      return run_statistics<float>(job, first, last);
    case detail::StorageType::kFloat64:
      return run_statistics<double>(job, first, last);
    case detail::StorageType::kBFloat16:
      return run_statistics<BFloat16>(job, first, last);
    case detail::StorageType::kFloat16:
      return run_statistics<Float16>(job, first, last);
  }
}

void run_cross_entropy_gradient_loops(const detail::CrossEntropyGradientJob& job,
                                      int64_t first,
                                      int64_t last) {
  switch (job.type) {
    case detail::StorageType::kFloat32:
      return run_gradient<float>(job, first, last);
    case detail::StorageType::kFloat64:
      return run_gradient<double>(job, first, last);
    case detail::StorageType::kBFloat16:
      return run_gradient<BFloat16>(job, first, last);
    case detail::StorageType::kFloat16:
      return run_gradient<Float16>(job, first, last);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu
