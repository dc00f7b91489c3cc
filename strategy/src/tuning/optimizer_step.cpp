#include "optimizer_step.h"

#include "../memory/rank_memory.h"

#include <algorithm>
#include <cstdint>
#include <ranges>

namespace weft::strategy::detail {

namespace {

using Traffic = OptimizerStep::Traffic;

// The bytes of an element.
struct ElementBytes {
  double weight = 0;  // and of the gradient
  double states = 0;  // with the lower bits of a split weight
};

ElementBytes bytes_of(const TrainingSpec& spec) {
  const bool is_half =
      spec.precision == Precision::kHalfTrue || spec.weights != WeightFormat::kLikePrecision;
  const double weight_bytes = is_half ? 2 : 4;
  const double low_bytes = spec.weights == WeightFormat::kSplit    ? 2
                           : spec.weights == WeightFormat::kSplit8 ? 1
                                                                   : 0;
  double moment_bytes = weight_bytes;
  if (spec.states == StateFormat::kFloat32) {
    moment_bytes = 4;
  } else if (spec.states == StateFormat::kBFloat16) {
    moment_bytes = 2;
  } else if (spec.states == StateFormat::kInt8) {
    moment_bytes = 1;
  }
  const auto moments = static_cast<double>(num_moments(spec.optimizer));
  return {.weight = weight_bytes, .states = low_bytes + moments * moment_bytes};
}

// Returns what a step waits for, at once: on the device, its memory.
std::vector<Traffic> traffic_of(const TrainingSpec& spec, const Cluster& cluster) {
  const auto [weight_bytes, state_bytes] = bytes_of(spec);
  const double stepped_bytes = weight_bytes + 2 * (weight_bytes + state_bytes);
  const int64_t num_devices = spec.mesh.size();
  if (!spec.offloads_states) {
    return {{.num_sharing = slowdown(cluster, num_devices),
             .num_bytes = stepped_bytes,
             .bytes_per_second = cluster.device.bytes_per_second}};
  }
  check_hosts(cluster);
  const double to_host = 2 * weight_bytes;  // the weight and the gradient
  const double to_device = weight_bytes;
  return {{.num_bytes = to_host, .bytes_per_second = cluster.copy_bytes_per_second},
          {.num_bytes = to_device, .bytes_per_second = cluster.copy_bytes_per_second},
          {.num_sharing = static_cast<double>(num_on_host(cluster, num_devices)),
           .num_bytes = stepped_bytes + to_host + to_device,
           .bytes_per_second = cluster.host_bytes_per_second}};
}

}  // namespace

OptimizerStep::OptimizerStep(const TrainingSpec& spec, const Cluster& cluster)
    : traffic_(traffic_of(spec, cluster)),
      num_shards_(spec.zero_stage > 0 ? static_cast<double>(axis_size(spec.mesh, "data_parallel"))
                                      : 1),
      overlaps_(spec.offloads_states && spec.steps_in_backward &&
                (!spec.pipeline || num_fsdp_shards(spec) == 1)) {}

double OptimizerStep::seconds(double num_elements) const {
  double longest = 0;
  for (const Traffic& each : traffic_) {
    longest = std::max(
        longest,
        each.num_sharing * (num_elements / num_shards_) * each.num_bytes / each.bytes_per_second);
  }
  return longest;
}

double OptimizerStep::seconds_after_backward(const std::vector<Work>& layers) const {
  double now = 0;   // since the last backward has begun
  double done = 0;  // when the steps so far end
  for (const Work& layer : std::views::reverse(layers)) {
    now += layer.backward_seconds();
    done = std::max(done, now) + seconds(layer.elements);
  }
  return done - now;
}

}  // namespace weft::strategy::detail
