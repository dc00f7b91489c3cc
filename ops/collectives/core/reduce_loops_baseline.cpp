#include "reduce_loops.h"

namespace weft::collectives::detail {

void reduce_baseline(const ReduceJob& job) { run_loops(job); }

}  // namespace weft::collectives::detail
