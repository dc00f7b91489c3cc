#include "timeline.h"

#include <array>
#include <numeric>
#include <utility>

namespace weft::strategy {

std::span<const std::string_view> memory_category_names() {
  static constexpr std::array<std::string_view, kNumMemoryCategories> kNames = {"parameters",
                                                                                "gradients",
                                                                                "optimizer_state",
                                                                                "saved_activations",
                                                                                "scratch",
                                                                                "communication",
                                                                                "other"};
  return kNames;
}

int64_t MemoryUsage::total() const {
  return std::accumulate(by_category.begin(), by_category.end(), int64_t{0});
}

namespace detail {

Buffer Timeline::hold(MemoryCategory category, int64_t num_bytes) {
  if (num_bytes == 0) {
    return {};
  }
  current_[category] += num_bytes;
  if (!phases_.empty() && current_.total() > phases_.back().at_peak.total()) {
    phases_.back().at_peak = current_;
  }
  return {this, [this, category, num_bytes](const void*) { current_[category] -= num_bytes; }};
}

void Timeline::begin_phase(std::string name) {
  phases_.push_back({.phase = std::move(name), .at_peak = current_});
}

}  // namespace detail
}  // namespace weft::strategy
