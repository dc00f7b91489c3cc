#pragma once

// Predicts the bytes that a rank holds while it trains a model. The phases of a training step are
// simulated with the sizes of all tensors, without allocating any. A layer saves and allocates what
// weft's operators and torch's eager kernels save and allocate on the CPU, so that a prediction can
// be compared with the bytes that `weft.memory` counts. Predictions for CUDA differ only in the
// number of rows that steps_by_rows steps at a time, and in the units that FSDP2 gathers ahead.

#include "weft/strategy/memory_usage.h"
#include "weft/strategy/mesh.h"
#include "weft/strategy/pipeline/generate.h"
#include "weft/strategy/plan.h"
#include "weft/strategy/row_blocks.h"

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace weft::strategy {

// w2(act(w1 x) [* w3 x]): one MLP, module "", with layers "w1", "w2" and, if gated, "w3".
struct FeedForwardModel {
  int64_t dim = 0;
  int64_t hidden_dim = 0;
  bool is_gated = true;
  bool has_bias = false;
};

// A Llama-style language model: a token embedding; blocks of causal attention with rotary positions
// and a gated MLP, both with an RMSNorm in front and a residual connection; a norm and an output
// layer. Modules are named as in Hugging Face's LlamaForCausalLM.
struct DecoderModel {
  int64_t dim = 0;
  int64_t hidden_dim = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab_size = 0;
  int64_t max_tokens = 0;           // rows of the rotary tables
  bool has_attention_bias = false;  // of query, key and value
  bool is_tied = false;             // the output layer's weight is the embedding's
};

using ModelSpec = std::variant<FeedForwardModel, DecoderModel>;

// Returns the names of a model's modules, parents first, for Plan::resolve.
std::vector<std::string> module_names(const ModelSpec& model);

enum class Precision {
  k32True,     // all float32
  kHalfTrue,   // all bfloat16 or float16
  kHalfMixed,  // float32 parameters, gradients and optimizer states; activations in half precision.
               // FSDP2 gathers parameters in half precision; without it, autocast copies them.
  kAutocast,   // the same, but autocast copies parameters with FSDP2, too
};

// The format of an optimizer's states of a parameter with several dims and at least 4096 elements.
// The states of other parameters are float32.
enum class StateFormat {
  kLikeParameters,  // the dtype of the parameters: torch's optimizers
  kFloat32,
  kBFloat16,
  kInt8,  // 1 byte for each element, and a float32 scale for each block of 256 elements of a row
};

// The format of weights with several dims and at least 4096 elements; with a data_parallel axis, of
// all weights.
enum class WeightFormat {
  kLikePrecision,
  kSplit,   // bfloat16, and 2 bytes of lower bits among the optimizer's states
  kSplit8,  // the same with 1 byte
};

enum class OptimizerKind { kSgd, kSgdMomentum, kAdam, kAdamW, kAdagrad };

// The activations that each block saves for the backward, which recomputes the others.
enum class Checkpointing {
  kNone,       // all that autograd saves
  kSelective,  // the block's input, and the results of matrix products, attention and communication
  kFull,       // the block's input
};

// The division of a decoder into stages of blocks. The stages are on the ranks of place_stages().
// The first stage also has the embedding, the last one the final norm and the output layer.
struct PipelineSpec {
  std::vector<int64_t> first_blocks;  // of each stage but the first, in ascending order
  ScheduleKind schedule = ScheduleKind::kOneForwardOneBackward;  // without split backwards
  int64_t micro_batches = 1;  // into which a batch is split as evenly as possible
};

// The training of a model on a mesh.
//
// Axes: the plan applies to tensor_parallel; data_parallel is as zero_stage says; data_replicate
// holds replicas; pipeline_parallel needs `pipeline`. context_parallel above 1 is not supported.
struct TrainingSpec {
  ModelSpec model;
  Mesh mesh;
  std::optional<Plan> plan;   // nullopt: "auto"
  int64_t sequences = 1;      // number in the batch of one data-parallel rank
  int64_t tokens = 1;         // per sequence; a FeedForwardModel has sequences * tokens rows
  int64_t micro_batches = 1;  // batches of a step, whose gradients are accumulated; 1 in a pipeline
  // The data-parallel ranks shard: 0: nothing; 1: optimizer states; 2: also gradients, and
  // parameters outside of a step's forward and backward; 3: parameters always. 2 and 3 are FSDP2
  // with one unit for each block and one for the rest; in stages, with one for each layer, gathered
  // while a stage computes.
  int64_t zero_stage = 3;
  std::optional<PipelineSpec> pipeline = {};
  // Whether tensor-parallel ranks have shards of the tokens between the layers that are sharded by
  // features (Korthikanti et al. 2022), as with the strategies' option. Their collectives are not
  // chunked. No effect on one tensor-parallel rank; otherwise only for a decoder whose plan shards
  // attention and MLP of each block.
  bool sequence_parallel = false;
  Precision precision = Precision::k32True;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  StateFormat states = StateFormat::kLikeParameters;    // not with SGD without momentum, Adagrad
  WeightFormat weights = WeightFormat::kLikePrecision;  // only with half precision
  bool has_fused_optimizer = true;  // false: torch's loop over parameters (foreach=False)
  bool steps_in_backward = false;   // the optimizer steps each parameter in the backward
  bool steps_by_rows = false;       // in addition, weights of fused MLPs some rows at a time
  bool has_deferred_init = true;    // false: each rank first holds the full parameters
  // Whether the optimizer's states, with the lower bits of split weights, are in CPU memory, and
  // the CPU steps copies of the parameters (weft.strategy.offload_states). Only with kCuda: states
  // of CPU ranks are in CPU memory anyway. Not with SGD without momentum, which has no states, nor
  // with zero_stage 1 and data-parallel ranks.
  bool offloads_states = false;
  Checkpointing checkpointing = Checkpointing::kNone;
  std::optional<int64_t> checkpointed_blocks = {};  // of each rank, the first ones; nullopt: all
  DeviceKind device = DeviceKind::kCpu;
};

struct PhaseMemory {
  std::string phase;    // "init", "forward", "backward" or "step"
  MemoryUsage at_peak;  // at the moment of the phase with the most bytes
};

// Returns, in order, the initialization of a rank and the phases of a training step in which the
// optimizer already has its states. With offloads_states, these are not in the phases, which are
// those of the device. As in Lightning's Trainer, the gradients of the previous step
// are dropped between the forward and the backward of the first micro-batch. With several
// micro-batches, the phases are those of the last one, to whose gradients those of the earlier ones
// are added. In a pipeline, a phase has the peak of all forwards, or of all backwards, of a step;
// the last message that a rank has sent on a channel counts as in flight.
//
// Throws std::invalid_argument for sizes out of range, numbers of heads that the tensor-parallel
// size does not divide, a plan that does not match the model (see Plan::resolve), a style or option
// of a rule for which there is no prediction, an axis that is not supported, a rank outside the
// mesh, and options that exclude each other.
std::vector<PhaseMemory> predict_memory(const TrainingSpec& spec, int64_t global_rank);

// Returns the bytes of CPU memory that a rank needs for offloads_states, 0 without: its states, and
// four pinned buffers of the size of its largest parameter, rounded up to a power of two as torch's
// allocator of pinned memory does. Throws for an invalid spec, like predict_memory.
int64_t offloaded_bytes(const TrainingSpec& spec, int64_t global_rank);

// Ranks with the same local shapes, which need the same memory: one of them, and their number.
struct RankClass {
  int64_t global_rank = 0;
  int64_t num_ranks = 0;
};

// Returns one class for each distinct set of local shapes, in ascending order of the ranks. Throws
// for an invalid spec, like predict_memory.
std::vector<RankClass> distinct_ranks(const TrainingSpec& spec);

// The number of parameter elements of the unsharded model, with tied parameters counted once, and
// the bytes that training needs for each element: the parameter, its gradient (0 bytes with
// steps_in_backward), optimizer state (0 bytes with offloads_states) and autocast's copy of it.
struct ParameterCost {
  int64_t num_elements = 0;
  double bytes_per_element = 0;
};
// Throws for an invalid spec, like predict_memory.
ParameterCost parameter_cost(const TrainingSpec& spec);

}  // namespace weft::strategy
