#pragma once

#include "weft/strategy/pipeline/schedule.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace weft::strategy::detail {

// Visits the actions of a schedule in an order in which each comes after all that it waits for:
// the order in its rank's list; a forward, for the stage before; a backward, for the stage after
// and for its own forward. In a schedule with communication a message arrives by its send, and a
// send waits while `channel_capacity` messages of its channel have been sent before their receives
// were posted. A channel is one boundary between stages in one direction.
//
// Visits rank after rank, each as far as it gets, so that the order is the same every time.
class Traversal {
 public:
  // `schedule` is borrowed. REQUIRES: its stages times its micro-batches can be counted in memory.
  Traversal(const Schedule& schedule, int64_t channel_capacity);

  using Visit = std::function<void(size_t rank, const Action& action)>;

  // Whether all ranks came to the ends of their lists.
  bool run(const Visit& visit);

  // After a run that did not: "rank 0 at 0F1, rank 1 at 1B0", at most four.
  [[nodiscard]] std::string stuck() const;

  // What one action has to wait for, on another rank or its own; and what its end makes known.
  [[nodiscard]] bool is_ready(const Action& action) const;
  void finish(const Action& action);

 private:
  // Where a flag of (stage, micro-batch) is.
  [[nodiscard]] size_t cell(int64_t stage, int64_t micro_batch) const;
  [[nodiscard]] bool on_other_rank(int64_t stage, int64_t other) const;

  const Schedule& schedule_;
  int64_t channel_capacity_;
  bool has_communication_;
  std::vector<uint8_t> outputs_;    // the stage's output is there for the next stage
  std::vector<uint8_t> gradients_;  // the gradient of its input is there for the stage before
  std::vector<uint8_t> forwards_;   // the stage's own forward is done
  // By the stage that receives: messages sent less receives posted.
  std::vector<int64_t> ahead_forward_;
  std::vector<int64_t> ahead_backward_;
  std::vector<size_t> positions_;  // of the next action in each rank's list
};

}  // namespace weft::strategy::detail
