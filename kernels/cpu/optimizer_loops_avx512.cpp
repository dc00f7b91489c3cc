#include "float_codes_loops.h"
#include "loops.h"
#include "optimizer_loops.h"

namespace weft::kernels::cpu {

OptimizerLoops optimizer_loops_avx512() {
  return {run_adam_loops<ElementTiles>, run_momentum_loops<ElementTiles>, run_float_codes_loops};
}

}  // namespace weft::kernels::cpu
