#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weft::strategy {

// The work of a rank at one point of a pipeline schedule.
enum class ActionKind : uint8_t {
  kForward,
  kBackward,        // gradients of the stage's input and of its weights
  kBackwardInput,   // the first half of a split backward: the gradient of the stage's input
  kBackwardWeight,  // the second half: the gradients of its weights
  kSendForward,     // sends the stage's output to the next stage
  kRecvForward,     // posts the receive of the previous stage's output
  kSendBackward,    // sends the gradient of the stage's input to the previous stage
  kRecvBackward,    // posts the receive of the gradient of the stage's output
  kUnshard,         // all-gathers the stage's fully sharded parameters
  kReshard,         // frees the parameters that kUnshard gathered
};

// One entry of a schedule, for one stage and, except for kUnshard and kReshard, one micro-batch.
//
// The text forms are those of torch.distributed.pipelining: "2F0" is stage 2, forward,
// micro-batch 0; "0B3", "0I3", "0W3", "1SEND_F0", "1RECV_F0", "1SEND_B0", "1RECV_B0", "1UNSHARD",
// "1RESHARD".
struct Action {
  static constexpr int32_t kNoMicroBatch = -1;

  int32_t stage = 0;
  int32_t micro_batch = 0;
  ActionKind kind = ActionKind::kForward;

  bool operator==(const Action&) const = default;
};

// Returns "F", "SEND_F", ...
std::string_view to_string(ActionKind kind);

std::string to_string(const Action& action);

// The inverse of to_string. Throws std::invalid_argument for anything else.
Action parse_action(std::string_view text);

// Returns whether an action computes: a forward, a backward or half of a backward.
bool is_compute(ActionKind kind);

// Returns whether an action sends, or posts a receive.
bool is_communication(ActionKind kind);

}  // namespace weft::strategy
