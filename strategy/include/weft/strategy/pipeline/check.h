#pragma once

#include "weft/strategy/pipeline/schedule.h"

#include <cstdint>

namespace weft::strategy {

// Verifies that a schedule is complete and does not deadlock:
// - each stage has one forward for each micro-batch and, unless the schedule has no backwards, one
//   backward, either full or as two halves, in the order forward, input, weights;
// - if there is communication: one send and one receive for every tensor that crosses ranks, the
//   send after the action that computes the tensor, the receive before the action that needs it,
//   and the receives on a channel in the order of its sends;
// - if stages are unsharded: all compute actions of a stage lie between its UNSHARD and RESHARD,
//   which alternate;
// - ranks never block in a cycle, if each channel buffers up to `channel_capacity` messages whose
//   receives have not been posted. With 0, a send blocks until its receive is posted.
//
// A channel is one boundary between stages in one direction. Throws std::invalid_argument. The
// error names the first action at fault; for a wrong number of forwards, it states the numbers, and
// for a deadlock, the actions of up to four blocked ranks.
void check(const Schedule& schedule, int64_t channel_capacity = 0);

}  // namespace weft::strategy
