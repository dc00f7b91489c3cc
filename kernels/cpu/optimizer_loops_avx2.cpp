#include "float_codes_loops.h"
#include "loops.h"
#include "optimizer_loops.h"
#include "optimizer_tiles_avx2.h"

namespace weft::kernels::cpu {

OptimizerLoops optimizer_loops_avx2() {
  return {run_adam_loops<Avx2Tiles>, run_momentum_loops<Avx2Tiles>, run_float_codes_loops};
}

}  // namespace weft::kernels::cpu
