#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace weft::strategy {

// The uses of a rank's bytes: the categories of `weft.memory`, in its order.
enum class MemoryCategory {
  kParameters,        // parameters and buffers
  kGradients,         // complete gradients of parameters
  kOptimizerState,    // tensors that an optimizer keeps between its steps
  kSavedActivations,  // the batch, and tensors that the forward saves for the backward
  kScratch,           // everything else that the forward, the backward and the step allocate
  kCommunication,     // shared memory of the collectives
  kOther,             // outside a training step
};

constexpr std::size_t kNumMemoryCategories = 7;

// Returns "parameters", "gradients", "optimizer_state", "saved_activations", "scratch",
// "communication" and "other".
std::span<const std::string_view> memory_category_names();

// Bytes by category, at one moment.
struct MemoryUsage {
  std::array<int64_t, kNumMemoryCategories> by_category = {};

  int64_t& operator[](MemoryCategory category) {
    return by_category.at(static_cast<std::size_t>(category));
  }
  int64_t operator[](MemoryCategory category) const {
    return by_category.at(static_cast<std::size_t>(category));
  }
  [[nodiscard]] int64_t total() const;

  bool operator==(const MemoryUsage&) const = default;
};

}  // namespace weft::strategy
