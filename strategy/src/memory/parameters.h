#pragma once

#include "weft/strategy/memory_model.h"
#include "weft/strategy/style.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace weft::strategy::detail {

// One parameter of a model, and what becomes of it.
struct Parameter {
  std::string module;
  std::vector<int64_t> shape;
  std::optional<std::size_t> shard_dim;  // over the tensor-parallel axis; none: whole on every rank
  int64_t unit = 0;  // of fully sharded data parallelism: 0 the root, then blocks
};

// A module's style; of a layer, whether it is a part of a column_row_mlp, and whether that computes
// its hidden values again.
struct ModuleStyle {
  Style style = Style::kReplicate;
  bool recompute = false;
  bool is_fused = false;
};
using Styles = std::map<std::string, ModuleStyle>;

// The style of each module that has one, fused MLPs with those of their layers. Throws
// std::invalid_argument for a plan that does not fit the model.
Styles resolve_styles(const TrainingSpec& spec);

// The parameters in the order of the modules.
std::vector<Parameter> parameters_of(const ModelSpec& model, const Styles& styles);

// What `tp_rank` of `tp_size` holds of a parameter.
std::vector<int64_t> tensor_parallel_shape(const Parameter& parameter,
                                           int64_t tp_size,
                                           int64_t tp_rank);

int64_t num_elements(const std::vector<int64_t>& shape);

// Elements of buffers, which are whole on every rank.
int64_t num_buffer_elements(const ModelSpec& model);

}  // namespace weft::strategy::detail
