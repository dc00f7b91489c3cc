// Compares predictions with closed forms. benchmarks/memory_gate.py compares them with measured
// bytes.

#include "weft/strategy/memory_model.h"

#include "error_of.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace weft::strategy {
namespace {

using enum MemoryCategory;

constexpr int64_t kRows = 8;
constexpr int64_t kWidth = 8192;
constexpr int64_t kWeight = kWidth * kWidth * 4;  // bytes of one of the three weights

// Lightning's documented FeedForward(8192, 8192).
TrainingSpec documented(int64_t num_ranks) {
  return {.model = FeedForwardModel{.dim = kWidth, .hidden_dim = kWidth},
          .mesh = Mesh({{"tensor_parallel", num_ranks}}),
          .plan = {},
          .sequences = kRows};
}

DecoderModel llama_70b() {
  return {.dim = 8192,
          .hidden_dim = 28672,
          .num_layers = 80,
          .num_heads = 64,
          .num_kv_heads = 8,
          .head_dim = 128,
          .vocab_size = 128256};
}

DecoderModel small_decoder() {
  return {.dim = 64,
          .hidden_dim = 192,
          .num_layers = 3,
          .num_heads = 8,
          .num_kv_heads = 4,
          .head_dim = 8,
          .vocab_size = 100};
}

MemoryUsage phase(const TrainingSpec& spec, const std::string& name, int64_t rank = 0) {
  for (const PhaseMemory& each : predict_memory(spec, rank)) {
    if (each.phase == name) {
      return each.at_peak;
    }
  }
  ADD_FAILURE() << "no phase " << name;
  return {};
}

int64_t peak(const TrainingSpec& spec, int64_t rank = 0) {
  int64_t most = 0;
  for (const PhaseMemory& each : predict_memory(spec, rank)) {
    most = std::max(most, each.at_peak.total());
  }
  return most;
}

TEST(MemoryModel, FeedForwardStateIsDividedByTheNumberOfRanks) {
  for (const int64_t n : {1, 2, 4, 8}) {
    const MemoryUsage step = phase(documented(n), "step");
    EXPECT_EQ(step[kParameters], 3 * kWeight / n);
    EXPECT_EQ(step[kGradients], 3 * kWeight / n);
    EXPECT_EQ(step[kOptimizerState], 6 * kWeight / n + 3 * 4);
    EXPECT_EQ(step[kScratch], 0);
    EXPECT_EQ(phase(documented(n), "init")[kParameters], 3 * kWeight / n);
  }
}

TEST(MemoryModel, OptimizerAndStartUpOptionsChangeThePeak) {
  TrainingSpec spec = documented(2);
  const int64_t by_default = peak(spec);
  spec.has_fused_optimizer = false;
  // The loop over parameters: two temporaries of one parameter, and one of the previous parameter.
  EXPECT_EQ(phase(spec, "step")[kScratch], 3 * kWeight / 2);
  spec.has_fused_optimizer = true;
  spec.steps_in_backward = true;
  EXPECT_EQ(phase(spec, "backward")[kGradients], kWeight / 2);
  EXPECT_NEAR(static_cast<double>(by_default - peak(spec)), kWeight, 0.01 * kWeight);
  const int64_t without_rows = peak(spec);
  spec.steps_by_rows = true;
  EXPECT_EQ(phase(spec, "backward")[kGradients], 0);
  // At a time, only kNumRows rows of a weight's gradient exist, and as many columns of the expanded
  // gradient of y.
  constexpr int64_t kNumRows = (1 << 20) / (4096 * 4);
  EXPECT_EQ(without_rows - peak(spec), (8192 - kNumRows) * (4096 + 8) * 4);
  spec.device = DeviceKind::kCuda;
  EXPECT_EQ(without_rows - peak(spec), (8192 - 8192 / 4) * (4096 + 8) * 4);
  spec.has_deferred_init = false;
  // The unsharded model, and the first shard before the first unsharded weight is freed.
  EXPECT_EQ(phase(spec, "init")[kParameters], 3 * kWeight + kWeight / 2);
}

TEST(MemoryModel, RecomputeSavesTheInputOfAnMlpOnly) {
  for (const bool recompute : {false, true}) {
    TrainingSpec spec{.model = FeedForwardModel{.dim = 1024, .hidden_dim = 4096},
                      .mesh = Mesh({{"tensor_parallel", 4}}),
                      .plan = Plan({{"", Style::kColumnRowMlp, {}, recompute}}),
                      .sequences = 8192};
    const MemoryUsage forward = phase(spec, "forward");
    const int64_t hidden = recompute ? 0 : 2 * 8192 * (4096 / 4);
    EXPECT_EQ(forward[kSavedActivations], (8192 * 1024 + hidden) * 4);
  }
}

TEST(MemoryModel, UnevenShardsGiveRanksDifferentPredictions) {
  TrainingSpec spec{.model = FeedForwardModel{.dim = 4, .hidden_dim = 5, .has_bias = true},
                    .mesh = Mesh({{"tensor_parallel", 4}}),
                    .plan = {}};
  // The ranks have 2, 2, 1 and 0 hidden units; w1 and w3 with biases by column, w2's bias full.
  const std::vector<int64_t> hidden = {2, 2, 1, 0};
  for (int64_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(phase(spec, "init", rank)[kParameters], (hidden[rank] * (3 * 4 + 2) + 4) * 4);
  }
  std::vector<std::pair<int64_t, int64_t>> ranks;
  for (const RankClass& each : distinct_ranks(spec)) {
    ranks.emplace_back(each.global_rank, each.num_ranks);
  }
  EXPECT_EQ(ranks, (std::vector<std::pair<int64_t, int64_t>>{{0, 2}, {2, 1}, {3, 1}}));
}

TEST(MemoryModel, MixedPrecisionAddsCopiesOfWeightsUnlessTheyAreGathered) {
  TrainingSpec spec{.model = llama_70b(), .mesh = Mesh(), .plan = {}};
  spec.precision = Precision::kHalfMixed;
  EXPECT_EQ(parameter_cost(spec).num_elements, 70'553'706'496);
  EXPECT_EQ(parameter_cost(spec).bytes_per_element, 18);
  spec.mesh = Mesh({{"data_parallel", 8}});
  EXPECT_EQ(parameter_cost(spec).bytes_per_element, 16);
  spec.precision = Precision::k32True;
  EXPECT_EQ(parameter_cost(spec).bytes_per_element, 16);
  spec.precision = Precision::kHalfTrue;
  spec.optimizer = OptimizerKind::kSgd;
  EXPECT_EQ(parameter_cost(spec).bytes_per_element, 4);
}

TEST(MemoryModel, FullyShardedStateIsDividedByTheNumberOfRanks) {
  TrainingSpec spec{.model = llama_70b(),
                    .mesh = Mesh({{"data_parallel", 32}, {"tensor_parallel", 8}}),
                    .plan = {}};
  const MemoryUsage step = phase(spec, "step", 255);
  // The norms are replicated over the tensor-parallel axis.
  const int64_t replicated = (2 * 80 + 1) * 8192;
  const int64_t sharded = 70'553'706'496 - replicated;
  EXPECT_EQ(step[kParameters], (replicated + sharded / 8) / 32 * 4);
  EXPECT_EQ(step[kGradients], step[kParameters]);
  ASSERT_EQ(distinct_ranks(spec).size(), 1U);
  EXPECT_EQ(distinct_ranks(spec).front().num_ranks, 256);
}

TEST(MemoryModel, ZeroStagesShardStatesThenGradientsThenParameters) {
  TrainingSpec spec{.model = small_decoder(), .mesh = Mesh({{"data_parallel", 4}}), .plan = {}};
  const int64_t all = parameter_cost(spec).num_elements * 4;
  constexpr int64_t kCounts = 40 * 4;  // more than the step counts of the states
  for (const int64_t stage : {0, 1, 2, 3}) {
    spec.zero_stage = stage;
    const MemoryUsage step = phase(spec, "step");
    EXPECT_EQ(step[kParameters], stage < 2 ? all : all / 4) << stage;
    EXPECT_EQ(step[kGradients], stage < 2 ? all : all / 4) << stage;
    const int64_t states = 2 * (stage < 1 ? all : all / 4);
    EXPECT_GE(step[kOptimizerState], states) << stage;
    EXPECT_LT(step[kOptimizerState], states + kCounts) << stage;
  }
  // Stage 2 keeps the blocks gathered until their backwards.
  constexpr int64_t kBlock = (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64) * 4;
  const auto forward_peak = [&](int64_t stage) {
    spec.zero_stage = stage;
    return phase(spec, "forward").total();
  };
  EXPECT_GE(forward_peak(2) - forward_peak(3), kBlock);
}

TEST(MemoryModel, CheckpointedBlocksSaveTheirInputs) {
  TrainingSpec spec{.model = small_decoder(), .mesh = Mesh(), .plan = {}, .tokens = 4096};
  spec.checkpointing = Checkpointing::kFull;
  const int64_t full = phase(spec, "backward")[kSavedActivations];
  std::get<DecoderModel>(spec.model).num_layers += 2;
  // The backward's peak is in the last block, when all inputs are held. Each checkpoint also saves
  // the 5056 bytes of the CPU generator's state.
  const int64_t more = phase(spec, "backward")[kSavedActivations] - full;
  EXPECT_EQ(more, 2 * (4096 * 64 * 4 + 5056));
  const int64_t selective = [&] {
    TrainingSpec other = spec;
    other.checkpointing = Checkpointing::kSelective;
    return phase(other, "backward")[kSavedActivations];
  }();
  spec.checkpointing = Checkpointing::kNone;
  EXPECT_GT(selective, 2 * full);
  EXPECT_LT(5 * selective, 4 * phase(spec, "backward")[kSavedActivations]);
}

TEST(MemoryModel, TiedWeightsCountOnce) {
  TrainingSpec spec{.model = small_decoder(), .mesh = Mesh(), .plan = {}, .tokens = 16};
  const int64_t untied = parameter_cost(spec).num_elements;
  std::get<DecoderModel>(spec.model).is_tied = true;
  EXPECT_EQ(untied - parameter_cost(spec).num_elements, 100 * 64);
  EXPECT_EQ(phase(spec, "init")[kParameters], parameter_cost(spec).num_elements * 4);
}

TEST(MemoryModel, PlansMatchTheModuleNames) {
  TrainingSpec spec{.model = small_decoder(),
                    .mesh = Mesh({{"tensor_parallel", 2}}),
                    .plan = Plan({{"model.layers.*.mlp", Style::kColumnRowMlp, {}}})};
  const int64_t mlps = 3 * (3 * 64 * 192);
  EXPECT_EQ(phase(spec, "init")[kParameters], (parameter_cost(spec).num_elements - mlps / 2) * 4);
}

TEST(MemoryModel, SeparateLayersSaveTheActivationAndTheProductToo) {
  TrainingSpec spec{
      .model = FeedForwardModel{.dim = 64, .hidden_dim = 96},
      .mesh = Mesh({{"tensor_parallel", 2}}),
      .plan =
          Plan({{"w1", Style::kColumn, {}}, {"w3", Style::kColumn, {}}, {"w2", Style::kRow, {}}}),
      .sequences = 128};
  EXPECT_EQ(phase(spec, "forward")[kSavedActivations], 128 * (64 + 4 * 96 / 2) * 4);
}

TEST(MemoryModel, ReplicatedParametersAreNotCopiedAtStartUp) {
  TrainingSpec spec{.model = small_decoder(),
                    .mesh = Mesh({{"tensor_parallel", 2}}),
                    .plan = Plan({{"model.layers.0.mlp", Style::kReplicate, {}}})};
  spec.has_deferred_init = false;
  EXPECT_EQ(phase(spec, "init")[kParameters], parameter_cost(spec).num_elements * 4);
}

TEST(MemoryModelErrors, NameTheInputAndTheRemedy) {
  TrainingSpec spec{.model = small_decoder(), .mesh = Mesh({{"tensor_parallel", 8}}), .plan = {}};
  EXPECT_EQ(error_of([&] { return predict_memory(spec, 0).size(); }),
            "model.layers.0.self_attn.k_proj: num_kv_heads = 4 heads do not divide over 8 "
            "tensor-parallel ranks; use a tensor-parallel size that divides 4 or style "
            "'replicate'");
  spec.mesh = Mesh({{"context_parallel", 2}});
  EXPECT_EQ(
      error_of([&] { return predict_memory(spec, 0).size(); }),
      "memory: the mesh 'context_parallel=2' has the axis 'context_parallel', for which there "
      "is no prediction; use pipeline_parallel, data_replicate, data_parallel and "
      "tensor_parallel");
  spec.mesh = Mesh();
  spec.tokens = 0;
  EXPECT_EQ(error_of([&] { return predict_memory(spec, 0).size(); }),
            "memory: got tokens = 0; give a number from 1 to 4194304");
  spec.tokens = 1;
  EXPECT_EQ(error_of([&] { return predict_memory(spec, 1).size(); }),
            error_of([] { return Mesh().coordinates(1).size(); }));
  const auto plan_error = [&](Rule rule) {
    spec.plan = Plan({std::move(rule)});
    return error_of([&] { return predict_memory(spec, 0).size(); });
  };
  EXPECT_EQ(plan_error({"model.layers.0", Style::kColumnRowMlp, {}}),
            "memory: the plan gives 'model.layers.0' the style 'column_row_mlp', but it is no MLP; "
            "use column and row rules for its layers");
  EXPECT_EQ(plan_error({"model.norm", Style::kColumn, {}}),
            "memory: the plan gives 'model.norm' the style 'column', but it is no linear layer; "
            "name the linear layers themselves");
  EXPECT_EQ(plan_error({"lm_head", Style::kVocabHead, {}}),
            "memory: the plan gives 'lm_head' the style 'vocab_head', but there is no prediction "
            "for it; leave its rule out for an upper bound");
  std::get<DecoderModel>(spec.model).is_tied = true;
  EXPECT_EQ(plan_error({"model.embed_tokens", Style::kVocabEmbedding, {}}),
            "memory: the plan shards the tied weight of 'model.embed_tokens' and 'lm_head' in two "
            "ways; give them 'vocab_embedding' and 'column_gather_output', or no rules");
  EXPECT_EQ(plan_error({"model.layers.0.mlp.up_proj", Style::kColumnGatherOutput, {}}),
            "memory: the plan gives 'model.layers.0.mlp.up_proj' the style 'column_gather_output', "
            "but only 'lm_head' has a prediction for it; leave the rule out");
  for (const auto& [option, rule] : std::vector<std::pair<std::string, Rule>>{
           {"recompute", {"model.norm", Style::kReplicate, {}, true}},
           {"offload", {"model.norm", Style::kReplicate, {}, false, true}},
           {"precision",
            {"model.norm", Style::kReplicate, {}, false, false, ComputeDtype::kFloat32}}}) {
    EXPECT_EQ(plan_error(rule),
              "memory: the plan gives 'model.norm' the option '" + option +
                  "', but there is no prediction for it; leave it out for an estimate without it");
  }
  spec.plan = Plan({{"model.layers.*.mlp", Style::kColumnRowMlp, {}, true}});
  spec.checkpointing = Checkpointing::kSelective;
  EXPECT_EQ(error_of([&] { return predict_memory(spec, 0).size(); }),
            "memory: a selective checkpoint would keep activations that the rule of "
            "'model.layers.0.mlp' recomputes; leave out one of the two");
  spec.plan.reset();
  spec.optimizer = OptimizerKind::kAdagrad;
  spec.steps_in_backward = true;
  EXPECT_EQ(error_of([&] { return predict_memory(spec, 0).size(); }),
            "memory: Adagrad does not step inside the backward; use SGD, Adam or AdamW, or step "
            "after it");
  TrainingSpec by_rows = documented(2);
  by_rows.steps_in_backward = by_rows.steps_by_rows = true;
  by_rows.plan = Plan({{"w1", Style::kColumn}, {"w3", Style::kColumn}, {"w2", Style::kRow}});
  EXPECT_EQ(error_of([&] { return predict_memory(by_rows, 0).size(); }),
            "memory: there is no fused MLP whose weights could be stepped by rows; give one "
            "the style 'column_row_mlp' in the plan, or step full weights");
  TrainingSpec mlp = documented(1);
  mlp.checkpointing = Checkpointing::kFull;
  EXPECT_EQ(error_of([&] { return predict_memory(mlp, 0).size(); }),
            "memory: one MLP has no blocks to checkpoint; leave checkpointing out, or set "
            "recompute in the plan's rule");
}

DecoderModel four_blocks() {
  return {.dim = 64,
          .hidden_dim = 192,
          .num_layers = 4,
          .num_heads = 8,
          .num_kv_heads = 4,
          .head_dim = 8,
          .vocab_size = 128};
}

int64_t largest_peak(const TrainingSpec& spec, int64_t global_rank) {
  int64_t most = 0;
  for (const PhaseMemory& phase : predict_memory(spec, global_rank)) {
    most = std::max(most, phase.at_peak.total());
  }
  return most;
}

TEST(MemoryModel, MoreMicroBatchesTakeNoMoreMemoryOnceThePipelineIsFull) {
  TrainingSpec spec = {
      .model = four_blocks(), .mesh = Mesh({{"pipeline_parallel", 2}}), .plan = {}, .tokens = 1024};
  constexpr int64_t kIdBytes = 1025 * 8;  // of a sequence
  const auto peak_of = [&](int64_t micro_batches, int64_t rank) {
    spec.sequences = micro_batches;
    spec.pipeline->micro_batches = micro_batches;
    return largest_peak(spec, rank) - micro_batches * kIdBytes;
  };
  for (const int64_t rank : {0, 1}) {
    spec.pipeline = {.first_blocks = {2}};
    EXPECT_LT(peak_of(1, 0), peak_of(2, 0));  // in flight
    EXPECT_EQ(peak_of(4, rank), peak_of(16, rank)) << rank;
    spec.pipeline = {.first_blocks = {1, 2, 3}, .schedule = ScheduleKind::kInterleaved};
    EXPECT_EQ(peak_of(8, rank), peak_of(16, rank)) << rank;
    spec.pipeline = {.first_blocks = {2}, .schedule = ScheduleKind::kGpipe};
    EXPECT_LT(peak_of(8, rank), peak_of(16, rank)) << rank;
  }
}

TEST(MemoryModel, StagesHaveTheirParametersAndTheEndsSomeMore) {
  TrainingSpec spec = {.model = four_blocks(),
                       .mesh = Mesh({{"pipeline_parallel", 2}, {"tensor_parallel", 2}}),
                       .plan = {},
                       .sequences = 2,
                       .tokens = 16};
  spec.pipeline = {.first_blocks = {2}, .micro_batches = 2};
  const auto parameters = [&](int64_t rank) {
    return predict_memory(spec, rank).back().at_peak[MemoryCategory::kParameters];
  };
  TrainingSpec whole = spec;
  whole.mesh = Mesh({{"tensor_parallel", 2}});
  whole.pipeline = {};
  const int64_t of_whole = predict_memory(whole, 0).back().at_peak[MemoryCategory::kParameters];
  EXPECT_EQ(parameters(0) + parameters(2), of_whole);
  EXPECT_EQ(parameters(2) - parameters(0), 64 * 4);  // the final norm
  std::get<DecoderModel>(spec.model).is_tied = true;
  EXPECT_EQ(parameters(2) - parameters(0), 64 * 4);  // with a copy of the embedding
  const auto classes = distinct_ranks(spec);
  ASSERT_EQ(classes.size(), 2U);
  EXPECT_EQ(classes.back().global_rank, 2);
  EXPECT_EQ(classes.back().num_ranks, 2);
}

TEST(MemoryModel, RanksWithATiedWeightExchangeItsGradientInThreeCopies) {
  TrainingSpec spec = {
      .model = four_blocks(), .mesh = Mesh({{"pipeline_parallel", 2}}), .plan = {}, .tokens = 1};
  auto& model = std::get<DecoderModel>(spec.model);
  model.vocab_size = 1 << 14;
  model.is_tied = true;
  spec.pipeline = {.first_blocks = {2}};
  const auto phases = predict_memory(spec, 0);
  ASSERT_EQ(phases.at(2).phase, "backward");
  // The received gradient, the sent copy and the sum are there beside the token ids of the batch.
  constexpr int64_t kGradientBytes = int64_t{64} * (1 << 14) * 4;
  EXPECT_EQ(phases.at(2).at_peak.total() - phases.back().at_peak.total(),
            3 * kGradientBytes + 2 * 8);
}

TEST(MemoryModel, ReplicasCopyGradientsInBuckets) {
  TrainingSpec spec = {
      .model = four_blocks(), .mesh = Mesh({{"data_replicate", 2}}), .plan = {}, .tokens = 1};
  const auto copied = [&] {
    const auto phases = predict_memory(spec, 0);
    return phases.at(2).at_peak.total() - phases.back().at_peak.total();
  };
  const int64_t gradients = predict_memory(spec, 0).back().at_peak[MemoryCategory::kGradients];
  constexpr int64_t kActivations = 4096;  // more than those of one token
  // All gradients are in one bucket, which is copied when the last one is complete.
  EXPECT_GE(copied(), gradients);
  EXPECT_LT(copied(), gradients + kActivations);
  spec.steps_in_backward = true;  // averages each gradient in place
  EXPECT_LT(copied(), gradients / 2);
}

}  // namespace
}  // namespace weft::strategy
