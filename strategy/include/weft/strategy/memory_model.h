#pragma once

// How many bytes a rank will hold while it trains a model: the phases of a training step are played
// through with the sizes of all tensors and without any. What a layer keeps and needs is what
// weft's operators and torch's eager kernels keep and need on the CPU, so that the prediction can
// be held against the bytes that `weft.memory` counts.

#include "weft/strategy/memory_usage.h"
#include "weft/strategy/mesh.h"
#include "weft/strategy/plan.h"

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

// A language model of the Llama kind: token embedding, blocks of causal attention with rotary
// positions and of a gated MLP, each behind an RMSNorm and around a residual, a norm and an output
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

// The names of a model's modules, parents first: what a plan's patterns are held against.
std::vector<std::string> module_names(const ModelSpec& model);

enum class Precision {
  k32True,     // all float32
  kHalfTrue,   // all bfloat16 or float16
  kHalfMixed,  // float32 parameters, gradients and states; half-precision copies of weights and of
               // their gradients, and half-precision activations
};

enum class OptimizerKind { kSgd, kSgdMomentum, kAdam, kAdamW, kAdagrad };

// What is kept of each block: all that autograd saves; the results of matrix products, attention
// and communication; or its input alone. What is not kept is computed again in the backward.
enum class Checkpointing { kNone, kSelective, kFull };

// A model in training on a mesh.
//
// Axes: tensor_parallel as the plan says; data_parallel as FSDP2 with one unit for each block and
// one for the rest; data_replicate holds copies. Pipeline and context parallelism are refused.
struct TrainingSpec {
  ModelSpec model;
  Mesh mesh;
  std::optional<Plan> plan;  // nullopt: "auto"
  int64_t sequences = 1;     // of a batch on one data-parallel rank
  int64_t tokens = 1;        // of a sequence; for a FeedForwardModel sequences * tokens rows
  Precision precision = Precision::k32True;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  bool has_fused_optimizer = true;  // else torch's loop over parameters, its default on the CPU
  bool steps_in_backward = false;
  bool steps_by_rows = false;  // in the backward, too: of fused MLPs' weights some rows at a time
  bool has_deferred_init = true;
  Checkpointing checkpointing = Checkpointing::kNone;
};

struct PhaseMemory {
  std::string phase;    // "init", "forward", "backward" or "step"
  MemoryUsage at_peak;  // at the moment of the phase at which most bytes are held
};

// The phases of a rank's training once the optimizer has its states, in order. As in Lightning's
// Trainer the gradients of the last step are dropped between the forward and the backward.
//
// Throws std::invalid_argument, in one sentence, for sizes below one, heads that do not divide, a
// plan that does not fit (see Plan::resolve), an axis that is not supported, a rank outside the
// mesh, and options that exclude each other.
std::vector<PhaseMemory> predict_memory(const TrainingSpec& spec, int64_t global_rank);

// The ranks that a prediction is worth making for: one for each different set of local shapes,
// ascending, each with the number of ranks that are like it.
struct RankClass {
  int64_t global_rank = 0;
  int64_t num_ranks = 0;
};
std::vector<RankClass> distinct_ranks(const TrainingSpec& spec);

// Elements of the model's parameters, tied ones once, and bytes that a parameter element costs on
// one device: itself, gradient, optimizer state and half-precision copies.
struct ParameterCost {
  int64_t num_elements = 0;
  double bytes_per_element = 0;
};
ParameterCost parameter_cost(const TrainingSpec& spec);

}  // namespace weft::strategy
