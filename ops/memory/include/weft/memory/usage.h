#pragma once

// What the bytes of a process are for, and how many there are of each kind.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft::memory {

enum class Category : uint8_t {
  kParameters,  // and buffers
  kGradients,
  kOptimizerState,
  kSavedActivations,  // what the forward left alive for the backward
  kScratch,           // what operators and optimizers need for a moment
  kCommunication,
  kOther,
};
constexpr size_t kNumCategories = 7;
constexpr std::array<std::string_view, kNumCategories> kCategoryNames{
    "parameters",
    "gradients",
    "optimizer_state",
    "saved_activations",
    "scratch",
    "communication",
    "other",
};

// Bytes by category.
class Usage {
 public:
  int64_t& operator[](Category category) { return bytes_[static_cast<size_t>(category)]; }
  int64_t operator[](Category category) const { return bytes_[static_cast<size_t>(category)]; }
  int64_t total() const {
    int64_t sum = 0;
    for (const int64_t bytes : bytes_) sum += bytes;
    return sum;
  }
  bool operator==(const Usage&) const = default;

 private:
  std::array<int64_t, kNumCategories> bytes_{};
};

struct Totals {
  Usage current;
  Usage peak;  // at the moment at which the sum was largest
  uint64_t num_allocations = 0;
  uint64_t num_blocks = 0;  // alive
};

// A part of a run, such as a forward.
struct Phase {
  std::string name;
  double seconds = 0;  // from the beginning of the count to that of the phase
  Usage peak;          // as of the totals, within the phase
};

}  // namespace weft::memory
