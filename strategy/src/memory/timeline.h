#pragma once

#include "weft/strategy/memory_model.h"

#include <memory>
#include <string>
#include <vector>

namespace weft::strategy::detail {

class Timeline;

// Holds bytes as long as a copy of the Buffer lives; an empty Buffer holds none.
using Buffer = std::shared_ptr<const void>;

// Counts bytes by category, and records the peak of each phase. Must outlive its buffers.
class Timeline {
 public:
  Timeline() = default;
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;
  Timeline(Timeline&&) = delete;
  Timeline& operator=(Timeline&&) = delete;
  ~Timeline() = default;

  // Holds `num_bytes` until the last copy of the result is destroyed.
  Buffer hold(MemoryCategory category, int64_t num_bytes);

  // Ends the previous phase. The new phase's peak starts at the bytes held now.
  void begin_phase(std::string name);

  [[nodiscard]] const std::vector<PhaseMemory>& phases() const { return phases_; }

 private:
  MemoryUsage current_;
  std::vector<PhaseMemory> phases_;
};

}  // namespace weft::strategy::detail
