#pragma once

#include "layer_work.h"

#include <functional>
#include <vector>

namespace weft::strategy::detail {

using Roofline = std::function<std::vector<Work>(const TrainingSpec&, const Cluster&)>;

// Replaces the seconds of kernels in `layers`, which are the roofline's, by the layer times of the
// cluster, with its slowdown.
//
// - If the tensor-parallel size was not measured, the times are those of the nearest measured size,
//   times the ratio of the rooflines of the two sizes; those of the embedding, which has no
//   roofline, do not change. Sequence parallelism, with which nothing is measured, scales in the
//   same way.
// - A full checkpoint recomputes the measured forward; a selective one as large a share of it as in
//   the roofline.
//
// Throws std::invalid_argument for layer times of another training (see check_layer_times).
// REQUIRES: the cluster has layer times.
void replace_by_measured(std::vector<Work>& layers,
                         const TrainingSpec& spec,
                         const Cluster& cluster,
                         const Roofline& roofline);

}  // namespace weft::strategy::detail
