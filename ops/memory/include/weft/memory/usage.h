#pragma once

// The memory of a process by category.

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
  kSavedActivations,  // tensors that the forward saves for the backward
  kScratch,           // temporaries of operators and optimizers
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
  Usage peak;                    // when the sum was largest
  uint64_t num_allocations = 0;  // since the ledger was first used
  uint64_t num_blocks = 0;       // live
};

// A period of a run, such as a forward.
struct Phase {
  std::string name;
  double seconds = 0;  // from the first use of the ledger to the start of the phase
  Usage peak;          // when the sum was largest within the phase
};

}  // namespace weft::memory
