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
  // 0: the embedding; i + 1: block i; the number of blocks + 1: the final norm and the output
  // layer. An MLP is one layer, 0.
  int64_t layer = 0;
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

// Returns the size of an axis; 1 if the mesh does not have it.
int64_t axis_size(const Mesh& mesh, std::string_view axis);

// Returns the number of ranks over which FSDP2 shards parameters.
int64_t num_fsdp_shards(const TrainingSpec& spec);

// Returns the number of ranks that average gradients which none of them shards.
int64_t num_averaged_replicas(const TrainingSpec& spec);

// Returns the bytes of an element of the residual stream. Embeddings with split weights, or that
// FSDP2 gathers in half precision, make it half precision.
int64_t residual_bytes(const TrainingSpec& spec);

// The layers of a stage of a decoder; without a pipeline, of the model.
struct StageLayers {
  int64_t first_block = 0;
  int64_t last_block = 0;  // exclusive
  bool has_embedding = true;
  bool has_head = true;  // the final norm, the output layer and the loss
};

// Returns the layers of each stage, in order.
std::vector<StageLayers> stages_of(const DecoderModel& model, const TrainingSpec& spec);

// Returns the pipeline rank of each stage. REQUIRES: check_training() accepts the pipeline.
std::vector<int32_t> ranks_of_stages(const TrainingSpec& spec);

// Returns the stages of a pipeline rank: `stages` itself without a pipeline.
std::vector<StageLayers> stages_on_rank(const std::vector<StageLayers>& stages,
                                        const TrainingSpec& spec,
                                        int64_t global_rank);

// Returns for each block whether it has a checkpoint: the first `checkpointed_blocks` of each
// pipeline rank, or all. All false with Checkpointing::kNone.
std::vector<bool> checkpointed_blocks(const DecoderModel& model, const TrainingSpec& spec);

// Returns the parameters that a rank has, of those of the model; a tied weight is on the first and
// on the last stage.
std::vector<Parameter> parameters_on_rank(std::vector<Parameter> parameters,
                                          const TrainingSpec& spec,
                                          int64_t global_rank);

// Returns a rank's position on an axis; 0 if the mesh does not have it.
int64_t coordinate_on(const Mesh& mesh, std::string_view axis, int64_t global_rank);

// Returns the shape of the shard of a parameter that `tp_rank` of `tp_size` holds.
std::vector<int64_t> tensor_parallel_shape(const Parameter& parameter,
                                           int64_t tp_size,
                                           int64_t tp_rank);

int64_t num_elements(const std::vector<int64_t>& shape);

// Returns the number of elements of buffers, which are replicated on every rank.
int64_t num_buffer_elements(const ModelSpec& model);

}  // namespace weft::strategy::detail
