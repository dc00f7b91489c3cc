#pragma once

#include "weft/strategy/memory_model.h"
#include "weft/strategy/style.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace weft::strategy::detail {

// One parameter of a model, and how it is sharded.
struct Parameter {
  std::string module;
  std::vector<int64_t> shape;
  std::optional<std::size_t> shard_dim;  // sharded over tensor_parallel; nullopt: replicated
  int64_t unit = 0;                      // FSDP unit: 0 is the root unit, i + 1 is block i
};

// A module's style. `recompute`: whether the module is a fused column_row_mlp, or one of its
// layers, that recomputes its hidden activations. `is_fused`: whether the module is a layer of a
// fused MLP.
struct ModuleStyle {
  Style style = Style::kReplicate;
  bool recompute = false;
  bool is_fused = false;
};
using Styles = std::map<std::string, ModuleStyle>;

// Returns the style of each module that has one, and of the layers of fused MLPs. Throws
// std::invalid_argument for a plan that does not match the model.
Styles resolve_styles(const TrainingSpec& spec);

// Returns the parameters in the order of the modules.
std::vector<Parameter> parameters_of(const ModelSpec& model, const Styles& styles);

// Returns the shape of the shard of a parameter that `tp_rank` of `tp_size` holds.
std::vector<int64_t> tensor_parallel_shape(const Parameter& parameter,
                                           int64_t tp_size,
                                           int64_t tp_rank);

int64_t num_elements(const std::vector<int64_t>& shape);

// Returns the number of elements of buffers, which are replicated on every rank.
int64_t num_buffer_elements(const ModelSpec& model);

}  // namespace weft::strategy::detail
