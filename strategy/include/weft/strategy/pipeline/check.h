#pragma once

#include "weft/strategy/pipeline/schedule.h"

#include <cstdint>

namespace weft::strategy {

// Proves that a schedule can be run to its end and computes what it should:
// - each stage has one forward for each micro-batch, and, unless no stage has any, one backward,
//   whole or as two halves, in the order forward, input, weights;
// - where there are sends and receives: one of each for whatever crosses ranks, a send after what
//   it sends, a receive before what needs it, and receives on a channel in the order of its sends;
// - where a stage is unsharded: all its arithmetic lies between unshard and reshard, in turn;
// - no ranks wait for each other in a circle, with channels that hold `channel_capacity` messages
//   whose receives have not been posted. 0: a send waits for its receive.
//
// Throws std::invalid_argument that names the first action at fault.
void check(const Schedule& schedule, int64_t channel_capacity = 0);

}  // namespace weft::strategy
