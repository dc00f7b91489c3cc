#pragma once

#include "layer_work.h"

#include <vector>

namespace weft::strategy::detail {

// The time of an optimizer's step. On the device, it is that of the bytes that the step reads and
// writes: the weight, the gradient and the states, of which the weight and the states are written.
//
// With offloads_states, the gradient and the weight of a parameter are copied to CPU memory, the
// CPU steps them, and the new weight is copied back. A parameter is copied while the CPU steps the
// one before. So the step takes the longest of three times: that of the copies to the host, of
// those back, and of all bytes in CPU memory, whose rate the devices of a host share.
class OptimizerStep {
 public:
  // The bytes of an element that cross a link, or that a memory reads and writes.
  struct Traffic {
    double num_sharing = 1;  // ranks that share the rate
    double num_bytes = 0;
    double bytes_per_second = 0;
  };

  // Throws std::invalid_argument for offloads_states and a cluster without CPU memory.
  OptimizerStep(const TrainingSpec& spec, const Cluster& cluster);

  // Return the seconds between the end of the last backward and that of the step: if the step
  // begins after the backward, with `num_elements` of the tensor-parallel shards; and if each layer
  // is stepped after its own backward. `layers`: of a rank, in the order of the forward.
  [[nodiscard]] double seconds(double num_elements) const;
  [[nodiscard]] double seconds_after_backward(const std::vector<Work>& layers) const;

  // Whether offloaded steps run while the backward computes. In a pipeline, FSDP2 reduces gradients
  // after the schedule.
  [[nodiscard]] bool overlaps() const { return overlaps_; }

 private:
  std::vector<Traffic> traffic_;
  double num_shards_;
  bool overlaps_;
};

}  // namespace weft::strategy::detail
