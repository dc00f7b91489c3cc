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
  std::optional<std::size_t> shard_dim;  // over the tensor-parallel axis; nullopt: replicated
  int64_t unit = 0;                      // of FSDP: 0 is the root, block i is i + 1
};

// A module's style. `recompute`, of a fused column_row_mlp and its layers: whether the MLP
// recomputes its hidden activations. `is_fused`: whether a layer belongs to such an MLP.
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
