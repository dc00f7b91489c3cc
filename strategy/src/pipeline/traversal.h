#pragma once

#include "weft/strategy/pipeline/schedule.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace weft::strategy::detail {

// Visits the actions of a schedule in an order that respects their dependencies. Each action
// follows its predecessor in its rank's list. A forward follows the previous stage's forward of the
// same micro-batch; a backward follows its own stage's forward and the next stage's backward. In a
// schedule with communication, a message arrives with its send, and a send blocks while
// `channel_capacity` messages of its channel have been sent and their receives have not been
// posted. A channel is one boundary between stages in one direction.
//
// Advances rank after rank, each until it blocks, so that the order is deterministic.
class Traversal {
 public:
  // `schedule` must outlive the Traversal. Allocates flags for each stage and micro-batch.
  Traversal(const Schedule& schedule, int64_t channel_capacity);

  using Visit = std::function<void(size_t rank, const Action& action)>;

  // Returns whether all ranks reached the ends of their lists; if not, they deadlock.
  bool run(const Visit& visit);

  // After a run that returned false, names up to four blocked ranks: "rank 0 at 0F1, rank 1 at
  // 1B0".
  [[nodiscard]] std::string describe_deadlock() const;

  // Returns whether an action's inputs have arrived or, for a send, whether its channel has room.
  [[nodiscard]] bool is_ready(const Action& action) const;
  // Records that an action is done.
  void finish(const Action& action);

 private:
  // Returns the index of the flags of a stage and micro-batch.
  [[nodiscard]] size_t cell(int64_t stage, int64_t micro_batch) const;
  [[nodiscard]] bool on_other_rank(int64_t stage, int64_t other) const;

  const Schedule& schedule_;
  int64_t channel_capacity_;
  bool has_communication_;
  std::vector<uint8_t> outputs_;    // the next stage has the stage's output
  std::vector<uint8_t> gradients_;  // the previous stage has the gradient of the stage's input
  std::vector<uint8_t> forwards_;   // the stage's own forward is done
  // By receiving stage: the number of messages sent minus the number of receives posted.
  std::vector<int64_t> ahead_forward_;
  std::vector<int64_t> ahead_backward_;
  std::vector<size_t> positions_;  // of the next action in each rank's list
};

}  // namespace weft::strategy::detail
