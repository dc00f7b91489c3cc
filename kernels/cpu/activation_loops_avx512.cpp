#include "activation_loops.h"
#include "activation_loops_api.h"

namespace weft::kernels::cpu {

void activation_loops_avx512(const detail::ActivationJob& job, int64_t first, int64_t last) {
  run_loops(job, first, last);
}

}  // namespace weft::kernels::cpu
