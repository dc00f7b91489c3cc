#include "measured_layers.h"

#include <string>
#include <string_view>
#include <utility>

namespace weft::strategy::detail {

namespace {

constexpr std::string_view kTensorAxis = "tensor_parallel";

LayerPart part_of(std::size_t layer, std::size_t num_layers) {
  return layer == 0                ? LayerPart::kEmbedding
         : layer + 1 == num_layers ? LayerPart::kHead
                                   : LayerPart::kBlock;
}

TrainingSpec as_measured(TrainingSpec spec, int64_t tensor_size) {
  spec.sequence_parallel = false;
  std::vector<Axis> axes = spec.mesh.axes();
  std::erase_if(axes, [](const Axis& axis) { return axis.name == kTensorAxis; });
  axes.push_back({.name = std::string(kTensorAxis), .size = tensor_size});
  spec.mesh = Mesh(std::move(axes));
  return spec;
}

// Returns the roofline of the measured tensor-parallel size, on a device that computes alone, as
// when it was measured.
std::vector<Work> measured_roofline(const TrainingSpec& spec,
                                    const Cluster& cluster,
                                    int64_t measured_size,
                                    const Roofline& roofline) {
  Cluster alone = cluster;
  alone.cores_per_host = 0;
  return roofline(as_measured(spec, measured_size), alone);
}

}  // namespace

void replace_by_measured(std::vector<Work>& layers,
                         const TrainingSpec& spec,
                         const Cluster& cluster,
                         const Roofline& roofline) {
  const LayerTimes& times = *cluster.layer_times;
  check_layer_times(times, spec);
  const int64_t tensor_size = axis_size(spec.mesh, kTensorAxis);
  const int64_t measured_size = nearest_tensor_size(times, tensor_size);
  std::vector<Work> references;
  if (measured_size != tensor_size || spec.sequence_parallel) {
    references = measured_roofline(spec, cluster, measured_size, roofline);
  }
  const double slowed = slowdown(cluster, spec.mesh.size());
  LayerSeconds measured;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (i < 2 || i + 1 == layers.size()) {  // all blocks have the same times
      measured = layer_seconds(
          times, part_of(i, layers.size()), measured_size, spec.sequences * spec.tokens);
    }
    Work& work = layers[i];
    const auto factor_of = [&](double Work::*seconds) {
      const bool has_ratio = !references.empty() && references[i].*seconds > 0;
      return has_ratio ? work.*seconds / (references[i].*seconds) : slowed;
    };
    const double forward = measured.forward * factor_of(&Work::forward);
    const double backward = measured.backward * factor_of(&Work::backward);
    if (work.recomputed > 0) {
      const bool is_full = spec.checkpointing == Checkpointing::kFull;
      work.recomputed = is_full ? forward : forward * work.recomputed / work.forward;
    }
    work.forward = forward;
    work.backward = backward;
  }
}

}  // namespace weft::strategy::detail
