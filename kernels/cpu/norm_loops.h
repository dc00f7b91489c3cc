#pragma once

#include "norm_job.h"
#include "tiles.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// Runs the norm jobs with the instruction set this file is compiled for. Internal linkage
// throughout: see polynomial_math.h. Weight and bias always have the compute type here
// (`params_in_compute_type`).
//
// A sum has the same number of lanes for every instruction set, and the lanes are added in one
// order, so results are bitwise equal on every processor, except for fused multiply-adds. The lanes
// are a vector of the compiler's vector extension: an array would stay in memory, and each addition
// would wait for the previous store.
namespace weft::kernels::cpu {
namespace {

template <typename Scalar>
struct Vector {
  static constexpr int64_t kLanes = 64 / sizeof(Scalar);
  typedef Scalar Lanes __attribute__((vector_size(64)));

  // Loads the first `count` elements of `data`; the other lanes are 0.
  C10_ALWAYS_INLINE explicit Vector(const Scalar* data, int64_t count = kLanes) : lanes{} {
    if (count == kLanes) {
      std::memcpy(&lanes, data, sizeof lanes);
    } else {
      for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = data[lane];
    }
  }

  Lanes lanes;
};

// Stores the first `count` lanes.
template <typename Scalar>
C10_ALWAYS_INLINE void store_lanes(const typename Vector<Scalar>::Lanes& lanes,
                                   Scalar* data,
                                   int64_t count) {
  if (count == Vector<Scalar>::kLanes) {
    std::memcpy(data, &lanes, sizeof lanes);
  } else {
    for (int64_t lane = 0; lane < count; ++lane) data[lane] = lanes[lane];
  }
}

// A sum in two vectors, to which values are added alternately, so that an addition does not depend
// on the previous one.
template <typename Scalar>
struct LaneSum {
  static constexpr int64_t kLanes = Vector<Scalar>::kLanes;
  using Lanes = typename Vector<Scalar>::Lanes;

  Scalar total() const {
    Scalar sum = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) sum += even[lane] + odd[lane];
    return sum;
  }

  template <typename IsOdd>
  C10_ALWAYS_INLINE void add(IsOdd /*is_odd*/, const Lanes& values) {
    if constexpr (IsOdd::value) {
      odd = odd + values;
    } else {
      even = even + values;
    }
  }

  Lanes even = {};
  Lanes odd = {};
};

// Calls body(i, count, is_odd) for the elements [i, i + count) of a tile, a vector at a time.
template <typename Scalar, typename Body>
C10_ALWAYS_INLINE void for_each_vector(int64_t size, const Body& body) {
  constexpr int64_t kLanes = Vector<Scalar>::kLanes;
  int64_t begin = 0;
  for (; begin + 2 * kLanes <= size; begin += 2 * kLanes) {
    body(begin, kLanes, std::false_type());
    body(begin + kLanes, kLanes, std::true_type());
  }
  if (begin + kLanes <= size) {
    body(begin, kLanes, std::false_type());
    begin += kLanes;
  }
  if (begin < size) body(begin, size - begin, std::true_type());
}

// Not inlined, like the tiles of activation_loops.h.
template <typename Scalar>
C10_NOINLINE void add_tile(const Scalar* __restrict a,
                           const Scalar* __restrict b,
                           Scalar* __restrict sum,
                           int64_t size) {
  for (int64_t i = 0; i < size; ++i) sum[i] = a[i] + b[i];
}

template <typename Scalar>
C10_NOINLINE void sum_tile(const Scalar* __restrict v, int64_t size, LaneSum<Scalar>& sum) {
  LaneSum<Scalar> local = sum;
  for_each_vector<Scalar>(size,
                          [&](int64_t i, int64_t count, auto is_odd) C10_ALWAYS_INLINE_ATTRIBUTE {
                            const Vector<Scalar> values(v + i, count);
                            local.add(is_odd, values.lanes);
                          });
  sum = local;
}

template <typename Scalar>
C10_NOINLINE void squares_tile(const Scalar* __restrict v,
                               Scalar mean,
                               int64_t size,
                               LaneSum<Scalar>& sum) {
  LaneSum<Scalar> local = sum;
  for_each_vector<Scalar>(size,
                          [&](int64_t i, int64_t count, auto is_odd) C10_ALWAYS_INLINE_ATTRIBUTE {
                            const Vector<Scalar> values(v + i, count);
                            auto centered = values.lanes - mean;
                            for (int64_t lane = count; lane < Vector<Scalar>::kLanes; ++lane)
                              centered[lane] = 0;
                            local.add(is_odd, centered * centered);
                          });
  sum = local;
}

template <typename Scalar, bool kWeight, bool kBias>
C10_NOINLINE void normalize_tile(const Scalar* __restrict v,
                                 Scalar mean,
                                 Scalar rstd,
                                 const Scalar* __restrict weight,
                                 const Scalar* __restrict bias,
                                 Scalar* __restrict y,
                                 int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    Scalar value = (v[i] - mean) * rstd;
    if constexpr (kWeight) value *= weight[i];
    if constexpr (kBias) value += bias[i];
    y[i] = value;
  }
}

// Adds the tile's sums of g and g * n, as in norm_job.h, to `sum_g` and `sum_gn`, and the tile's
// contribution to the gradients of kNumParams parameters: none, weight, or weight and bias.
template <typename Scalar, bool kWeight, int kNumParams>
C10_NOINLINE void gradient_sums_tile(const Scalar* __restrict grad_y,
                                     const Scalar* __restrict v,
                                     const Scalar* __restrict weight,
                                     Scalar mean,
                                     Scalar rstd,
                                     int64_t size,
                                     LaneSum<Scalar>& sum_g,
                                     LaneSum<Scalar>& sum_gn,
                                     Scalar* __restrict grad_weight,
                                     Scalar* __restrict grad_bias) {
  LaneSum<Scalar> local_g = sum_g;
  LaneSum<Scalar> local_gn = sum_gn;
  for_each_vector<Scalar>(
      size, [&](int64_t i, int64_t count, auto is_odd) C10_ALWAYS_INLINE_ATTRIBUTE {
        const Vector<Scalar> grads(grad_y + i, count);
        const Vector<Scalar> values(v + i, count);
        const auto n = (values.lanes - mean) * rstd;
        auto g = grads.lanes;
        if constexpr (kWeight) {
          const Vector<Scalar> weights(weight + i, count);
          g = g * weights.lanes;
        }
        local_g.add(is_odd, g);
        local_gn.add(is_odd, g * n);
        if constexpr (kNumParams > 0) {
          const Vector<Scalar> before(grad_weight + i, count);
          store_lanes<Scalar>(before.lanes + grads.lanes * n, grad_weight + i, count);
        }
        if constexpr (kNumParams > 1) {
          const Vector<Scalar> before(grad_bias + i, count);
          store_lanes<Scalar>(before.lanes + grads.lanes, grad_bias + i, count);
        }
      });
  sum_g = local_g;
  sum_gn = local_gn;
}

template <typename Scalar, bool kWeight>
auto gradient_sums_of(int num_params) {
  return num_params == 0   ? gradient_sums_tile<Scalar, kWeight, 0>
         : num_params == 1 ? gradient_sums_tile<Scalar, kWeight, 1>
                           : gradient_sums_tile<Scalar, kWeight, 2>;
}

template <typename Scalar>
C10_NOINLINE void accumulate_tile(const Scalar* __restrict values,
                                  Scalar* __restrict sum,
                                  int64_t size) {
  for (int64_t i = 0; i < size; ++i) sum[i] += values[i];
}

template <typename Scalar, bool kWeight>
C10_NOINLINE void input_gradient_tile(const Scalar* __restrict grad_y,
                                      const Scalar* __restrict v,
                                      const Scalar* __restrict weight,
                                      Scalar mean,
                                      Scalar rstd,
                                      Scalar mean_g,
                                      Scalar mean_gn,
                                      Scalar* __restrict grad_v,
                                      int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const Scalar g = kWeight ? grad_y[i] * weight[i] : grad_y[i];
    const Scalar n = (v[i] - mean) * rstd;
    grad_v[i] = rstd * (g - mean_g - n * mean_gn);
  }
}

template <typename Scalar>
const Scalar* offset_or_null(const Scalar* data, int64_t by) {
  return data == nullptr ? nullptr : data + by;
}

template <typename Storage>
void run_norm_forward(const detail::NormForwardJob& job, int64_t first, int64_t last) {
  using Scalar = ScalarOf<Storage>;
  const int64_t size = job.row_size;
  const auto* weight = static_cast<const Scalar*>(job.weight);
  const auto* bias = static_cast<const Scalar*>(job.bias);
  TileReader<Storage> x(job.x);
  TileReader<Storage> residual(job.residual);
  TileWriter<Storage> sum(job.sum);
  TileReader<Storage> v(job.residual == nullptr ? job.x : job.sum);
  TileWriter<Storage> y(job.y);
  for (int64_t row = first; row < last; ++row) {
    const int64_t row_begin = row * size;
    const int64_t row_end = row_begin + size;
    if (job.residual != nullptr) {
      for_each_tile(row_begin, row_end, [&](int64_t begin, int64_t count) {
        add_tile<Scalar>(
            x.read(begin, count), residual.read(begin, count), sum.start_tile(begin), count);
        sum.finish_tile(begin, count);
      });
    }
    Scalar mean = 0;
    if (job.centered) {
      LaneSum<Scalar> row_sum;
      for_each_tile(row_begin, row_end, [&](int64_t begin, int64_t count) {
        sum_tile(v.read(begin, count), count, row_sum);
      });
      mean = row_sum.total() / static_cast<Scalar>(size);
      static_cast<Scalar*>(job.mean)[row] = mean;
    }
    LaneSum<Scalar> squares;
    for_each_tile(row_begin, row_end, [&](int64_t begin, int64_t count) {
      squares_tile(v.read(begin, count), mean, count, squares);
    });
    const Scalar mean_square = squares.total() / static_cast<Scalar>(size);
    const Scalar rstd = Scalar(1) / std::sqrt(mean_square + static_cast<Scalar>(job.eps));
    static_cast<Scalar*>(job.rstd)[row] = rstd;
    for_each_tile(row_begin, row_end, [&](int64_t begin, int64_t count) {
      const int64_t column = begin - row_begin;
      const auto* weights = offset_or_null(weight, column);
      const auto* biases = offset_or_null(bias, column);
      const auto normalize = bias != nullptr     ? normalize_tile<Scalar, true, true>
                             : weight != nullptr ? normalize_tile<Scalar, true, false>
                                                 : normalize_tile<Scalar, false, false>;
      normalize(v.read(begin, count), mean, rstd, weights, biases, y.start_tile(begin), count);
      y.finish_tile(begin, count);
    });
  }
}

template <typename Storage>
void run_norm_backward(const detail::NormBackwardJob& job,
                       int64_t first,
                       int64_t last,
                       void* param_sums) {
  using Scalar = ScalarOf<Storage>;
  const int64_t size = job.row_size;
  const auto* weight = static_cast<const Scalar*>(job.weight);
  auto* grad_weight = static_cast<Scalar*>(param_sums);
  const int num_params = grad_weight == nullptr ? 0 : job.has_bias ? 2 : 1;
  TileReader<Storage> grad_y(job.grad_y);
  TileReader<Storage> grad_sum(job.grad_sum);
  TileReader<Storage> v(job.v);
  TileWriter<Storage> grad_v(job.grad_v);
  for (int64_t row = first; row < last; ++row) {
    const int64_t row_begin = row * size;
    const int64_t row_end = row_begin + size;
    const Scalar rstd = static_cast<const Scalar*>(job.rstd)[row];
    const Scalar mean = job.centered ? static_cast<const Scalar*>(job.mean)[row] : Scalar(0);
    LaneSum<Scalar> sum_g;
    LaneSum<Scalar> sum_gn;
    for_each_tile(row_begin, row_end, [&](int64_t begin, int64_t count) {
      const int64_t column = begin - row_begin;
      const Scalar* grads = grad_y.read(begin, count);
      const Scalar* values = v.read(begin, count);
      Scalar* to_weight = grad_weight == nullptr ? nullptr : grad_weight + column;
      Scalar* to_bias = num_params < 2 ? nullptr : grad_weight + size + column;
      const auto add_sums = weight != nullptr ? gradient_sums_of<Scalar, true>(num_params)
                                              : gradient_sums_of<Scalar, false>(num_params);
      const auto* weights = offset_or_null(weight, column);
      add_sums(grads, values, weights, mean, rstd, count, sum_g, sum_gn, to_weight, to_bias);
    });
    if (job.grad_v == nullptr) continue;
    const Scalar mean_g = job.centered ? sum_g.total() / static_cast<Scalar>(size) : Scalar(0);
    const Scalar mean_gn = sum_gn.total() / static_cast<Scalar>(size);
    for_each_tile(row_begin, row_end, [&](int64_t begin, int64_t count) {
      const auto write = weight != nullptr ? input_gradient_tile<Scalar, true>
                                           : input_gradient_tile<Scalar, false>;
      Scalar* out = grad_v.start_tile(begin);
      write(grad_y.read(begin, count),
            v.read(begin, count),
            offset_or_null(weight, begin - row_begin),
            mean,
            rstd,
            mean_g,
            mean_gn,
            out,
            count);
      if (job.grad_sum != nullptr) accumulate_tile(grad_sum.read(begin, count), out, count);
      grad_v.finish_tile(begin, count);
    });
  }
}

// This function and the next one run rows [first, last) of the job.
void run_norm_forward_loops(const detail::NormForwardJob& job, int64_t first, int64_t last) {
  switch (job.type) {
    case detail::StorageType::kFloat32:
      return run_norm_forward<float>(job, first, last);
    case detail::StorageType::kFloat64:
      return run_norm_forward<double>(job, first, last);
    case detail::StorageType::kBFloat16:
      return run_norm_forward<BFloat16>(job, first, last);
    case detail::StorageType::kFloat16:
      return run_norm_forward<Float16>(job, first, last);
  }
}

void run_norm_backward_loops(const detail::NormBackwardJob& job,
                             int64_t first,
                             int64_t last,
                             void* param_sums) {
  switch (job.type) {
    case detail::StorageType::kFloat32:
      return run_norm_backward<float>(job, first, last, param_sums);
    case detail::StorageType::kFloat64:
      return run_norm_backward<double>(job, first, last, param_sums);
    case detail::StorageType::kBFloat16:
      return run_norm_backward<BFloat16>(job, first, last, param_sums);
    case detail::StorageType::kFloat16:
      return run_norm_backward<Float16>(job, first, last, param_sums);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu
