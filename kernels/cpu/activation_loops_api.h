#pragma once

#include "activation_job.h"

#include <cstdint>

// activation_loops.h compiled once per instruction set.
namespace weft::kernels::cpu {

// Each computes elements [first, last) of a job.
void activation_loops_baseline(const detail::ActivationJob& job, int64_t first, int64_t last);
void activation_loops_avx2(const detail::ActivationJob& job, int64_t first, int64_t last);
void activation_loops_avx512(const detail::ActivationJob& job, int64_t first, int64_t last);

}  // namespace weft::kernels::cpu
