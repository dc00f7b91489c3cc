#pragma once

#include "weft/strategy/pipeline/generate.h"

#include <cstdint>
#include <vector>

namespace weft::strategy::detail {

// Return the lists of the ranks of a V-shaped schedule, with two stages on each rank; see
// generate.h.

// REQUIRES: kind is kZeroBubbleV, kVHalf or kVMin.
std::vector<std::vector<Action>> pack_blocks(ScheduleKind kind,
                                             int64_t num_ranks,
                                             int64_t num_micro_batches);

std::vector<std::vector<Action>> generate_dual_pipe_v(int64_t num_ranks, int64_t num_micro_batches);

}  // namespace weft::strategy::detail
