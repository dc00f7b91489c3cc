#include "backoff.h"

#include <sched.h>

namespace weft::collectives {

namespace {

std::atomic<int> num_crowded_groups{0};

}  // namespace

int num_processors(const SharedState& shared) {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int rank = 0; rank < shared.num_ranks(); ++rank) {
    CPU_OR(&all, &all, &shared.rank(rank).processors);
  }
  return CPU_COUNT(&all);
}

CrowdedGroup::CrowdedGroup(bool is_crowded) : is_crowded_(is_crowded) {
  if (is_crowded_) ++num_crowded_groups;
}

CrowdedGroup::~CrowdedGroup() {
  if (is_crowded_) --num_crowded_groups;
}

bool CrowdedGroup::exists() { return num_crowded_groups.load(std::memory_order_relaxed) > 0; }

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
