#include "weft/strategy/pipeline/action.h"

#include "../text.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <stdexcept>

namespace weft::strategy {

namespace {

// Indexed by the enumerator.
constexpr std::array<std::string_view, 10> kKindNames = {
    "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD"};

bool has_micro_batch(ActionKind kind) {
  return kind != ActionKind::kUnshard && kind != ActionKind::kReshard;
}

std::optional<int32_t> parse_index(std::string_view text) {
  // "+1" and "01" would print as something else.
  if (text.empty() || (text.size() > 1 && text.front() == '0') ||
      !std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; })) {
    return std::nullopt;
  }
  const auto value = detail::parse_integer(text);
  if (!value || *value > std::numeric_limits<int32_t>::max()) {
    return std::nullopt;
  }
  return static_cast<int32_t>(*value);
}

}  // namespace

std::string_view to_string(ActionKind kind) { return kKindNames.at(static_cast<size_t>(kind)); }

std::string to_string(const Action& action) {
  std::string text = std::to_string(action.stage);
  text += to_string(action.kind);
  if (has_micro_batch(action.kind)) {
    text += std::to_string(action.micro_batch);
  }
  return text;
}

Action parse_action(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789";
  const size_t begin = std::min(text.find_first_not_of(kDigits), text.size());
  const size_t end = text.find_last_not_of(kDigits) + 1;  // 0 if all are digits
  if (end > begin) {
    const auto found =
        std::find(kKindNames.begin(), kKindNames.end(), text.substr(begin, end - begin));
    const auto stage = parse_index(text.substr(0, begin));
    if (found != kKindNames.end() && stage) {
      const auto kind = static_cast<ActionKind>(found - kKindNames.begin());
      const auto micro_batch = parse_index(text.substr(end));
      if (has_micro_batch(kind) && micro_batch) {
        return {.stage = *stage, .micro_batch = *micro_batch, .kind = kind};
      }
      if (!has_micro_batch(kind) && end == text.size()) {
        return {.stage = *stage, .micro_batch = Action::kNoMicroBatch, .kind = kind};
      }
    }
  }
  throw std::invalid_argument(
      "cannot read the action " + detail::quote(text) +
      "; write stage, kind and micro-batch such as '2F0', with a kind of " +
      detail::join(std::vector<std::string>(kKindNames.begin(), kKindNames.end()), ", ") +
      " (the last two without a micro-batch)");
}

bool is_compute(ActionKind kind) { return kind <= ActionKind::kBackwardWeight; }

bool is_communication(ActionKind kind) {
  return kind >= ActionKind::kSendForward && kind <= ActionKind::kRecvBackward;
}

}  // namespace weft::strategy
