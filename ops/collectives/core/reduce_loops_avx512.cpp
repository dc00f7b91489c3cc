#include "reduce_loops.h"

namespace weft::collectives::detail {

void reduce_avx512(const ReduceJob& job) { run_loops(job); }

}  // namespace weft::collectives::detail
