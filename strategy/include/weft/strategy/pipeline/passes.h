#pragma once

#include "weft/strategy/pipeline/schedule.h"

#include <cstdint>

namespace weft::strategy {

// Passes that transform schedules. merge_backwards, then add_communication, then add_unshards turn
// a generated or hand-written schedule of compute actions into one that ranks can execute. All
// throw std::invalid_argument if check(), with a channel capacity of 0, rejects their input. Hence
// add_unshards may reject a result of add_communication for a larger capacity.

struct CommunicationOptions {
  // The number of messages of a channel (one boundary, one direction) that may be sent before their
  // receives are posted; with 0, a send blocks until its receive is posted. The result does not
  // deadlock on channels of this capacity or more.
  int64_t channel_capacity = 0;
  // The number of compute actions between the post of a receive and the action that needs its
  // message. With 1, the message is in flight while the rank computes, at the cost of one more
  // message in memory.
  int64_t prefetch = 1;
};

// Adds sends, each right after the action that computes its tensor, and receives. A receive is
// posted earlier than `prefetch` says if the ranks would deadlock otherwise.
// REQUIRES: no communication yet.
Schedule add_communication(const Schedule& schedule, const CommunicationOptions& options = {});

// Adds UNSHARD before a stage's compute actions and RESHARD after them, so that a rank never holds
// the unsharded parameters of more than `max_unsharded` stages at once. Below that limit, a
// rank unshards the stage of its next compute action before the current one. At the limit, it first
// reshards the stage whose next use is the latest. REQUIRES: no UNSHARD yet; max_unsharded >= 1.
Schedule add_unshards(const Schedule& schedule, int64_t max_unsharded = 2);

// Merges the halves of a split backward into a full backward if they are adjacent and the gradient
// of the input is not sent to another rank: such a split gains nothing.
Schedule merge_backwards(const Schedule& schedule);

// Returns the forwards only, for an evaluation. REQUIRES: compute actions only.
Schedule forward_only(const Schedule& schedule);

// Returns the actions of the first `num_micro_batches` only, in the same order, for a batch that
// has samples for fewer micro-batches.
// REQUIRES: compute actions only; 1 <= num_micro_batches <= those of the schedule.
Schedule first_micro_batches(const Schedule& schedule, int64_t num_micro_batches);

}  // namespace weft::strategy
