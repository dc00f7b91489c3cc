#include "activation_loops.h"
#include "cross_entropy_loops.h"
#include "dropout_loops.h"
#include "loops.h"
#include "norm_loops.h"

namespace weft::kernels::cpu {

Loops loops_baseline() {
  return {run_activation_loops,
          run_dropout_loops,
          run_norm_forward_loops,
          run_norm_backward_loops,
          run_cross_entropy_statistics_loops,
          run_cross_entropy_gradient_loops,
          optimizer_loops_baseline()};
}

}  // namespace weft::kernels::cpu
