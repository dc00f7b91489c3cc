#pragma once

#include "activation_job.h"
#include "cross_entropy_job.h"
#include "dropout_job.h"
#include "float_codes_job.h"
#include "norm_job.h"
#include "optimizer_step_job.h"

#include <cstdint>

// The entry points of the *_loops.h files, which are compiled once per instruction set.
namespace weft::kernels::cpu {

// These are compiled without fused multiply-adds: a compiler may fuse a product with either of two
// sums, and choose differently in each loop. A step must have the same bits in every format of
// weights and at every place of an element in a loop.
struct OptimizerLoops {
  // Run blocks [first, last) of kCodeBlock elements.
  void (*adam_step)(const detail::AdamStepJob& job, int64_t first, int64_t last);
  void (*momentum_step)(const detail::MomentumStepJob& job, int64_t first, int64_t last);
  void (*float_codes)(const detail::FloatCodesJob& job, int64_t first, int64_t last);
};

struct Loops {
  // Runs elements [first, last).
  void (*activation)(const detail::ActivationJob& job, int64_t first, int64_t last);
  // Runs elements [first, last).
  void (*dropout)(const detail::DropoutJob& job, int64_t first, int64_t last);
  // Runs rows [first, last).
  void (*norm_forward)(const detail::NormForwardJob& job, int64_t first, int64_t last);
  // Runs rows [first, last). Adds their contribution to the parameters' gradients to `param_sums`,
  // [1 or 2, row_size] in the compute type, unless `param_sums` is null.
  void (*norm_backward)(const detail::NormBackwardJob& job,
                        int64_t first,
                        int64_t last,
                        void* param_sums);
  // Runs rows [first, last).
  void (*cross_entropy_statistics)(const detail::CrossEntropyStatisticsJob& job,
                                   int64_t first,
                                   int64_t last);
  // Runs rows [first, last).
  void (*cross_entropy_gradient)(const detail::CrossEntropyGradientJob& job,
                                 int64_t first,
                                 int64_t last);
  OptimizerLoops optimizer;
};

OptimizerLoops optimizer_loops_baseline();
OptimizerLoops optimizer_loops_avx2();
OptimizerLoops optimizer_loops_avx512();

Loops loops_baseline();
Loops loops_avx2();
Loops loops_avx512();

}  // namespace weft::kernels::cpu
