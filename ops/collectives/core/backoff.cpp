#include "backoff.h"

#include <sched.h>

namespace weft::collectives {

void publish_processor(const SharedState& shared, int rank) {
  std::atomic<int32_t>& own = shared.rank(rank).processor;
  const int32_t current = sched_getcpu();
  if (own.load(std::memory_order_relaxed) != current) {
    own.store(current, std::memory_order_relaxed);
  }
}

bool shares_processor(const SharedState& shared, int rank) {
  const int32_t current = sched_getcpu();
  for (int other = 0; other < shared.num_ranks(); ++other) {
    if (other == rank) continue;
    if (shared.rank(other).processor.load(std::memory_order_relaxed) == current) return true;
  }
  return false;
}

}  // namespace weft::collectives
