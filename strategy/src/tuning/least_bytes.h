#pragma once

#include "candidates.h"

#include <array>
#include <cstdint>

namespace weft::strategy::detail {

// Bounds of the memory of a rank, which cost no prediction.
class LeastBytes {
 public:
  explicit LeastBytes(const LayoutSearch& search);

  // Return fewer bytes than a rank needs on the device: in a variant, and in any.
  [[nodiscard]] int64_t of(const TrainingSpec& training, bool offloads_states) const;
  [[nodiscard]] int64_t of(const Candidate& candidate) const;

 private:
  std::array<double, 2> of_all_ranks_ = {};  // without and with offload
};

}  // namespace weft::strategy::detail
