#include "least_bytes.h"

#include "../memory/parameters.h"
#include "variants.h"

#include <algorithm>
#include <vector>

namespace weft::strategy::detail {

namespace {

// Returns fewer bytes than the parameters, and without offload the optimizer states, of all ranks
// together, each once.
double least_state_bytes(const TrainingSpec& training, bool offloads_states) {
  TrainingSpec one = training;
  one.mesh = Mesh();
  one.pipeline = {};
  one.zero_stage = 3;
  one.micro_batches = 1;
  one.sequences = 1;
  one.steps_in_backward = true;  // leaves the gradients out
  one.steps_by_rows = false;
  one.offloads_states = offloads_states;
  if (one.optimizer == OptimizerKind::kAdagrad) {
    one.optimizer = OptimizerKind::kSgdMomentum;  // which has one state, too, and may step there
  }
  one.precision =
      training.precision == Precision::kHalfTrue ? training.precision : Precision::k32True;
  one.weights = WeightFormat::kLikePrecision;
  one.checkpointing = Checkpointing::kNone;
  one.checkpointed_blocks = {};
  const bool has_other_weights = training.weights != WeightFormat::kLikePrecision;
  const ParameterCost cost = parameter_cost(one);
  const double bytes = static_cast<double>(cost.num_elements) * cost.bytes_per_element;
  return bytes * (has_other_weights ? 0.5 : 1.0);  // split weights take 3 or 4 bytes instead of 4
}

}  // namespace

LeastBytes::LeastBytes(const LayoutSearch& search) {
  for (const bool offloads : offload_options_of(search)) {
    of_all_ranks_.at(offloads ? 1 : 0) = least_state_bytes(search.training, offloads);
  }
}

// A rank has a share: replicas all hold the same bytes.
int64_t LeastBytes::of(const TrainingSpec& training, bool offloads_states) const {
  const int64_t num_replicas = axis_size(training.mesh, "data_replicate");
  return static_cast<int64_t>(of_all_ranks_.at(offloads_states ? 1 : 0)) /
         (training.mesh.size() / num_replicas);
}

int64_t LeastBytes::of(const Candidate& candidate) const {
  const std::vector<bool>& options = candidate.offloads_states;
  return std::min(of(candidate.training, options.front()), of(candidate.training, options.back()));
}

}  // namespace weft::strategy::detail
