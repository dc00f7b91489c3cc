// The memory of a training with sequence parallelism, compared with closed forms.
// tests/strategy/test_estimate_sequence.py compares it with dry runs.

#include "error_of.h"
#include "weft/strategy/memory_model.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace weft::strategy {
namespace {

using enum MemoryCategory;

constexpr int64_t kModelDim = 64;
constexpr int64_t kNumTokens = 4096;

TrainingSpec sharded_training(int64_t num_ranks, int64_t tokens = kNumTokens) {
  return {.model = DecoderModel{.dim = kModelDim,
                                .hidden_dim = 192,
                                .num_layers = 2,
                                .num_heads = 8,
                                .num_kv_heads = 4,
                                .head_dim = 8,
                                .vocab_size = 2048},
          .mesh = Mesh({{"tensor_parallel", num_ranks}}),
          .plan = {},
          .tokens = tokens,
          .sequence_parallel = true};
}

MemoryUsage usage_in(const TrainingSpec& spec, const std::string& name, int64_t rank = 0) {
  for (const PhaseMemory& each : predict_memory(spec, rank)) {
    if (each.phase == name) {
      return each.at_peak;
    }
  }
  ADD_FAILURE() << "no phase " << name;
  return {};
}

// Returns the bytes that two more blocks save for the backward. The forward's peak is at the loss.
int64_t saved_by_two_blocks(TrainingSpec spec) {
  const int64_t before = usage_in(spec, "forward")[kSavedActivations];
  std::get<DecoderModel>(spec.model).num_layers += 2;
  return usage_in(spec, "forward")[kSavedActivations] - before;
}

TEST(SequenceMemory, NormsAndSumsSaveAShardAndAttentionItsGatheredInput) {
  for (const int64_t num_ranks : {2, 4}) {
    TrainingSpec spec = sharded_training(num_ranks);
    const int64_t sharded = saved_by_two_blocks(spec);
    spec.sequence_parallel = false;
    const int64_t full = saved_by_two_blocks(spec);
    // Two inputs and two normalised inputs of norms with their scales, and the input of the MLP.
    const int64_t others = kNumTokens - kNumTokens / num_ranks;  // tokens of other ranks
    EXPECT_EQ(full - sharded, 2 * others * (5 * kModelDim + 2) * 4);
  }
}

TEST(SequenceMemory, CheckpointsSaveAShard) {
  TrainingSpec spec = sharded_training(4);
  spec.checkpointing = Checkpointing::kFull;
  EXPECT_EQ(saved_by_two_blocks(spec), 2 * (kNumTokens / 4 * kModelDim * 4 + 5056));
  // A selective checkpoint also saves what is gathered and scattered, and the results of products.
  spec.checkpointing = Checkpointing::kSelective;
  const int64_t attention = (64 + 2 * 32 + 64) / 4 * 4 + 2 * 4;  // with the sums of two heads
  const int64_t hidden = 2 * 192 / 4 * 4;
  EXPECT_EQ(saved_by_two_blocks(spec),
            2 * (3 * kNumTokens / 4 * kModelDim * 4 +
                 kNumTokens * (kModelDim * 4 + attention + hidden) + 5056));
}

TEST(SequenceMemory, PersistentBytesDoNotChange) {
  TrainingSpec spec = sharded_training(2);
  const MemoryUsage sharded = usage_in(spec, "step");
  spec.sequence_parallel = false;
  const MemoryUsage full = usage_in(spec, "step");
  for (const MemoryCategory category : {kParameters, kGradients, kOptimizerState}) {
    EXPECT_EQ(sharded[category], full[category]);
  }
}

TEST(SequenceMemory, UnevenShardsGiveRanksDifferentPredictions) {
  const TrainingSpec spec = sharded_training(4, 5);
  // The ranks have 2, 2, 1 and 0 tokens.
  std::vector<std::pair<int64_t, int64_t>> ranks;
  for (const RankClass& each : distinct_ranks(spec)) {
    ranks.emplace_back(each.global_rank, each.num_ranks);
  }
  EXPECT_EQ(ranks, (std::vector<std::pair<int64_t, int64_t>>{{0, 2}, {2, 1}, {3, 1}}));
  const auto saved = [&](int64_t rank) {
    return usage_in(spec, "forward", rank)[kSavedActivations];
  };
  EXPECT_EQ(saved(0), saved(1));
  EXPECT_EQ(saved(0) - saved(2), saved(2) - saved(3));
  EXPECT_GT(saved(0), saved(2));
}

TEST(SequenceMemory, OneRankHasNothingToShard) {
  TrainingSpec decoder = sharded_training(1);
  TrainingSpec mlp = {.model = FeedForwardModel{.dim = 8, .hidden_dim = 24},
                      .mesh = Mesh(),
                      .plan = {},
                      .sequence_parallel = true};
  for (TrainingSpec& spec : std::vector<TrainingSpec>{decoder, mlp}) {
    const int64_t with = usage_in(spec, "backward").total();
    spec.sequence_parallel = false;
    EXPECT_EQ(usage_in(spec, "backward").total(), with);
  }
}

TEST(SequenceMemoryErrors, NameTheLayerAndTheRemedy) {
  TrainingSpec mlp = {.model = FeedForwardModel{.dim = 8, .hidden_dim = 24},
                      .mesh = Mesh({{"tensor_parallel", 2}}),
                      .plan = {},
                      .sequence_parallel = true};
  EXPECT_EQ(error_of([&] { return predict_memory(mlp, 0).size(); }),
            "memory: got sequence parallelism for one MLP, which has no blocks between which "
            "tokens are sharded; leave it out");
  TrainingSpec spec = sharded_training(2);
  spec.plan = Plan({{"model.layers.*.mlp", Style::kColumnRowMlp, {}}});
  EXPECT_EQ(error_of([&] { return predict_memory(spec, 0).size(); }),
            "memory: with sequence parallelism, there is a prediction only for blocks whose "
            "attention and MLP are sharded by column and row rules, but the plan gives "
            "'model.layers.0.self_attn.q_proj' the style 'replicate'; give it the style 'column', "
            "or leave sequence parallelism out");
}

}  // namespace
}  // namespace weft::strategy
