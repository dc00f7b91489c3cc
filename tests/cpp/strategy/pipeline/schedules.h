#pragma once

#include "weft/strategy/pipeline/generate.h"

#include <cstdint>

namespace weft::strategy {

inline Schedule make(ScheduleKind kind,
                     int64_t ranks,
                     int64_t micro_batches,
                     int64_t stages_per_rank = 1) {
  return generate(
      kind,
      {.num_ranks = ranks, .num_micro_batches = micro_batches, .stages_per_rank = stages_per_rank});
}

// Calls `attempt` with every kind of schedule for 1 to 16 stages, on every number of ranks that
// divides the stages, and with 1 to 64 micro-batches: every number below `all_below`, and then in
// steps of `step`.
template <typename Try>
void for_schedules(int64_t all_below, int64_t step, Try attempt) {
  for (const ScheduleKind kind : all_schedule_kinds()) {
    for (int64_t stages = 1; stages <= 16; ++stages) {
      for (int64_t v = 1; v <= stages; ++v) {
        if (stages % v != 0 || !supports_stages_per_rank(kind, v)) {
          continue;
        }
        for (int64_t m = 1; m <= 64; m += m < all_below ? 1 : step) {
          attempt(make(kind, stages / v, m, v));
        }
      }
    }
  }
}

}  // namespace weft::strategy
