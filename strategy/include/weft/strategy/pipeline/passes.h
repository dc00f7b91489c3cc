#pragma once

#include "weft/strategy/pipeline/schedule.h"

#include <cstdint>

namespace weft::strategy {

// Functions from schedule to schedule. A generated or hand-written schedule of arithmetic alone
// becomes one that a rank can run: merge_backwards, then add_communication, then add_unshards.
// All throw std::invalid_argument where check() refuses their input.

struct CommunicationOptions {
  // Messages of a channel (one boundary, one direction) that may be sent before their receives are
  // posted. The result never dead-locks with channels that hold as many, or more. 0: none may.
  int64_t channel_capacity = 0;
  // By how many steps of arithmetic a receive is posted ahead of the one that needs it: with 1,
  // the message travels while the rank computes, and one more message waits in memory.
  int64_t prefetch = 1;
};

// Adds the sends, each right after what it sends, and the receives. Receives are posted early
// where a sender would deadlock.
// REQUIRES: no communication yet.
Schedule add_communication(const Schedule& schedule, const CommunicationOptions& options = {});

// Adds UNSHARD before a stage's arithmetic and RESHARD after it, such that a rank never holds
// more than `max_unsharded` stages' parameters at once. The next stage is gathered one step of
// arithmetic early where that leaves room; freed is what is needed again last.
// REQUIRES: none yet; max_unsharded >= 1.
Schedule add_unshards(const Schedule& schedule, int64_t max_unsharded = 2);

// Makes one whole backward of two halves that follow each other directly, where the gradient
// between them is sent to no other rank: nothing is gained by splitting those.
Schedule merge_backwards(const Schedule& schedule);

// The forwards alone, for an evaluation.
// REQUIRES: arithmetic alone.
Schedule forward_only(const Schedule& schedule);

// The same order for the first `num_micro_batches` alone: a batch may have samples for fewer.
// REQUIRES: arithmetic alone; 1 to as many as there are.
Schedule first_micro_batches(const Schedule& schedule, int64_t num_micro_batches);

}  // namespace weft::strategy
