#pragma once

#include "activation_job.h"
#include "polynomial_math.h"
#include "tiles.h"

#include <cstdint>

// Runs an ActivationJob with the instruction set this file is compiled for. Internal linkage
// throughout: see polynomial_math.h.
namespace weft::kernels::cpu {
namespace {

// Not inlined: GCC 12 does not vectorise the loop of a long formula once the loop is merged with
// the surrounding code. Each loop also serves several storage types.
template <typename Scalar, Activation kActivation>
C10_NOINLINE void forward_tile(const Scalar* __restrict x, Scalar* __restrict h, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    h[i] = detail::Formula<PolynomialMath<Scalar>, kActivation>::value(x[i]);
  }
}

template <typename Scalar, Activation kActivation>
C10_NOINLINE void backward_tile(const Scalar* __restrict grad_h,
                                const Scalar* __restrict x,
                                Scalar* __restrict grad_x,
                                Scalar* __restrict h,
                                int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const auto result =
        detail::Formula<PolynomialMath<Scalar>, kActivation>::backward(grad_h[i], x[i]);
    grad_x[i] = result.grad_x;
    h[i] = result.h;
  }
}

template <typename Scalar, Activation kActivation>
C10_NOINLINE void gated_forward_tile(const Scalar* __restrict gate,
                                     const Scalar* __restrict up,
                                     Scalar* __restrict h,
                                     int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    h[i] = detail::Formula<PolynomialMath<Scalar>, kActivation>::value(gate[i]) * up[i];
  }
}

template <typename Scalar, Activation kActivation>
C10_NOINLINE void gated_backward_tile(const Scalar* __restrict grad_h,
                                      const Scalar* __restrict gate,
                                      const Scalar* __restrict up,
                                      Scalar* __restrict grad_gate,
                                      Scalar* __restrict grad_up,
                                      Scalar* __restrict h,
                                      int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const auto result =
        detail::gated_gradient<PolynomialMath<Scalar>, kActivation>(grad_h[i], gate[i], up[i]);
    grad_gate[i] = result.grad_gate;
    grad_up[i] = result.grad_up;
    h[i] = result.h;
  }
}

template <typename Storage, Activation kActivation>
void run_plain(const detail::ActivationJob& job, int64_t first, int64_t last) {
  using Scalar = ScalarOf<Storage>;
  TileReader<Storage> x(job.x);
  TileWriter<Storage> h(job.h);
  if (job.op == detail::ActivationOp::kForward) {
    for_each_tile(first, last, [&](int64_t begin, int64_t size) {
      forward_tile<Scalar, kActivation>(x.read(begin, size), h.start_tile(begin), size);
      h.finish_tile(begin, size);
    });
    return;
  }
  TileReader<Storage> grad_h(job.grad_h);
  TileWriter<Storage> grad_x(job.grad_x);
  for_each_tile(first, last, [&](int64_t begin, int64_t size) {
    backward_tile<Scalar, kActivation>(grad_h.read(begin, size),
                                       x.read(begin, size),
                                       grad_x.start_tile(begin),
                                       h.start_tile(begin),
                                       size);
    grad_x.finish_tile(begin, size);
    h.finish_tile(begin, size);
  });
}

template <typename Storage, Activation kActivation>
void run_gated(const detail::ActivationJob& job, int64_t first, int64_t last) {
  using Scalar = ScalarOf<Storage>;
  TileReader<Storage> gate(job.x);
  TileReader<Storage> up(job.up);
  TileWriter<Storage> h(job.h);
  if (job.op == detail::ActivationOp::kGatedForward) {
    for_each_tile(first, last, [&](int64_t begin, int64_t size) {
      gated_forward_tile<Scalar, kActivation>(
          gate.read(begin, size), up.read(begin, size), h.start_tile(begin), size);
      h.finish_tile(begin, size);
    });
    return;
  }
  TileReader<Storage> grad_h(job.grad_h);
  TileWriter<Storage> grad_gate(job.grad_x);
  TileWriter<Storage> grad_up(job.grad_up);
  for_each_tile(first, last, [&](int64_t begin, int64_t size) {
    gated_backward_tile<Scalar, kActivation>(grad_h.read(begin, size),
                                             gate.read(begin, size),
                                             up.read(begin, size),
                                             grad_gate.start_tile(begin),
                                             grad_up.start_tile(begin),
                                             h.start_tile(begin),
                                             size);
    grad_gate.finish_tile(begin, size);
    grad_up.finish_tile(begin, size);
    h.finish_tile(begin, size);
  });
}

template <typename Storage, Activation kActivation>
void run_op(const detail::ActivationJob& job, int64_t first, int64_t last) {
  const bool gated = job.up != nullptr;
  gated ? run_gated<Storage, kActivation>(job, first, last)
        : run_plain<Storage, kActivation>(job, first, last);
}

template <typename Storage>
void run_activation(const detail::ActivationJob& job, int64_t first, int64_t last) {
  switch (job.activation) {
    case Activation::kSilu:
      return run_op<Storage, Activation::kSilu>(job, first, last);
    case Activation::kGelu:
      return run_op<Storage, Activation::kGelu>(job, first, last);
    case Activation::kGeluTanh:
      return run_op<Storage, Activation::kGeluTanh>(job, first, last);
    case Activation::kRelu:
      return run_op<Storage, Activation::kRelu>(job, first, last);
  }
}

// Runs elements [first, last) of the job.
void run_activation_loops(const detail::ActivationJob& job, int64_t first, int64_t last) {
  switch (job.type) {
    case detail::StorageType::kFloat32:
      return run_activation<float>(job, first, last);
    case detail::StorageType::kFloat64:
      return run_activation<double>(job, first, last);
    case detail::StorageType::kBFloat16:
      return run_activation<BFloat16>(job, first, last);
    case detail::StorageType::kFloat16:
      return run_activation<Float16>(job, first, last);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu
