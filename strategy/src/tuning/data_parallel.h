#pragma once

#include "layer_work.h"

namespace weft::strategy::detail {

// The collectives of data-parallel ranks and replicas. FSDP2 gathers parameters and reduces shards
// of gradients; without it, all ranks average gradients and, with zero_stage 1, gather the
// parameters of which each has stepped a shard.
class DataParallel {
 public:
  DataParallel(const TrainingSpec& spec, const Cluster& cluster)
      : data_size_(num_fsdp_shards(spec)),
        num_replicas_(data_size_ > 1 ? axis_size(spec.mesh, "data_replicate")
                                     : num_averaged_replicas(spec)),
        num_state_shards_(spec.zero_stage == 1 ? axis_size(spec.mesh, "data_parallel") : 1),
        gathers_again_(spec.zero_stage == 3),
        gathered_bytes_(
            spec.precision == Precision::k32True || spec.precision == Precision::kAutocast ? 4 : 2),
        gradient_bytes_(spec.precision == Precision::kHalfTrue && data_size_ == 1 ? 2 : 4) {
    const int64_t tensor_size = axis_size(spec.mesh, "tensor_parallel");
    data_group_ = group_of(cluster, data_size_, tensor_size);
    replica_group_ = group_of(cluster, num_replicas_, tensor_size * data_size_);
    state_group_ = group_of(cluster, num_state_shards_, tensor_size);
  }

  [[nodiscard]] double gather_seconds(const Work& unit) const {
    return all_gather_seconds(data_group_, unit.elements * gathered_bytes_);
  }
  // Returns the time of a gather in a backward, whose unit may still be gathered since the forward.
  [[nodiscard]] double gather_again_seconds(const Work& unit) const {
    return gathers_again_ ? gather_seconds(unit) : 0;
  }
  [[nodiscard]] double reduce_seconds(const Work& unit) const {
    const double num_bytes = unit.elements * gradient_bytes_;
    return reduce_scatter_seconds(data_group_, num_bytes) +
           all_reduce_seconds(replica_group_, num_bytes / static_cast<double>(data_size_));
  }
  // Returns the time of the gather of parameters after a step, which nothing overlaps.
  [[nodiscard]] double gather_stepped_seconds(double num_elements) const {
    return all_gather_seconds(state_group_, num_elements * gradient_bytes_);
  }
  // Return the bytes that a rank sends: for gathers of a unit, for the reduction of its gradients,
  // and for the parameters after a step.
  [[nodiscard]] double gather_bytes(const Work& unit, bool stays_gathered) const {
    const double num_gathers = stays_gathered || !gathers_again_ ? 1 : 2;
    return share(data_size_) * num_gathers * unit.elements * gathered_bytes_;
  }
  [[nodiscard]] double reduce_bytes(const Work& unit) const {
    const double reduced = unit.elements * gradient_bytes_;
    return share(data_size_) * reduced +
           2 * share(num_replicas_) * reduced / static_cast<double>(data_size_);
  }
  [[nodiscard]] double gather_stepped_bytes(double num_elements) const {
    return share(num_state_shards_) * num_elements * gradient_bytes_;
  }

 private:
  static double share(int64_t size) {
    return static_cast<double>(size - 1) / static_cast<double>(size);
  }

  int64_t data_size_;
  int64_t num_replicas_;
  int64_t num_state_shards_;
  bool gathers_again_;
  double gathered_bytes_;
  double gradient_bytes_;
  Group data_group_;
  Group replica_group_;
  Group state_group_;
};

}  // namespace weft::strategy::detail
