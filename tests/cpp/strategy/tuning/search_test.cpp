#include "weft/strategy/tuning/search.h"

#include "../error_of.h"
#include "models.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <tuple>
#include <utility>
#include <vector>

namespace weft::strategy {
namespace {

LayoutSearch small_search(int64_t num_devices, int64_t memory_limit) {
  LayoutSearch search;
  search.training.model = tuned_decoder(4);
  search.training.tokens = 64;
  search.cluster = named_cluster("cpu");
  search.cluster.devices_per_host = 4;
  search.num_devices = num_devices;
  search.global_sequences = 24;
  search.memory_limit = memory_limit;
  search.max_results = 10'000;
  return search;
}

int64_t peak_bytes(const TrainingSpec& training) {
  int64_t most = 0;
  for (int64_t rank = 0; rank < training.mesh.size(); ++rank) {
    for (const PhaseMemory& phase : predict_memory(training, rank)) {
      most = std::max(most, phase.at_peak.total());
    }
  }
  return most;
}

constexpr std::initializer_list<Checkpointing> kCheckpointing = {
    Checkpointing::kNone, Checkpointing::kSelective, Checkpointing::kFull};

std::vector<bool> step_options(const TrainingSpec& training) {
  return training.zero_stage == 1 ? std::vector<bool>{false} : std::vector<bool>{false, true};
}

bool fits(TrainingSpec training, const LayoutSearch& search) {
  for (const bool in_backward : step_options(training)) {
    training.steps_in_backward = in_backward;
    if (peak_bytes(training) <= search.memory_limit) {
      return true;
    }
  }
  return false;
}

// Adds the seconds of a training if it fits; and those with the fewest checkpoints that fit, of
// `num_blocks` on a rank, if it does not fit without.
void add_fitting(TrainingSpec training,
                 int64_t num_blocks,
                 const LayoutSearch& search,
                 std::vector<double>& seconds) {
  if (fits(training, search)) {
    seconds.push_back(predict_step_time(training, search.cluster).total());
  }
  TrainingSpec without = training;
  without.checkpointing = Checkpointing::kNone;
  if (training.checkpointing != Checkpointing::kFull || fits(without, search)) {
    return;
  }
  for (const bool in_backward : step_options(training)) {
    training.steps_in_backward = in_backward;
    for (int64_t blocks = 1; blocks < num_blocks; ++blocks) {
      training.checkpointed_blocks = blocks;
      if (peak_bytes(training) <= search.memory_limit) {
        seconds.push_back(predict_step_time(training, search.cluster).total());
        return;
      }
    }
  }
}

// The same for a mesh without pipeline ranks, with each number of micro-batches.
void add_accumulating(const TrainingSpec& training,
                      int64_t num_data,
                      const LayoutSearch& search,
                      std::vector<double>& seconds) {
  for (int64_t micro_batches = 1; micro_batches <= search.global_sequences; ++micro_batches) {
    if (search.global_sequences % (num_data * micro_batches) == 0) {
      TrainingSpec of_batches = training;
      of_batches.sequences = search.global_sequences / num_data / micro_batches;
      of_batches.micro_batches = micro_batches;
      for (const Checkpointing checkpointing : kCheckpointing) {
        of_batches.checkpointing = checkpointing;
        add_fitting(of_batches, 4, search, seconds);
      }
    }
  }
}

void add_pipelines(const TrainingSpec& training,
                   int64_t num_data,
                   const LayoutSearch& search,
                   std::vector<double>& seconds) {
  const int64_t num_ranks = training.mesh.size("pipeline_parallel");
  const int64_t sequences = search.global_sequences / num_data;
  for (const auto& [kind, stages_per_rank] :
       {std::pair(ScheduleKind::kOneForwardOneBackward, int64_t{1}),
        std::pair(ScheduleKind::kInterleaved, int64_t{2})}) {
    for (int64_t micro_batches = 1; micro_batches <= sequences; ++micro_batches) {
      if (sequences % micro_batches != 0 || num_ranks * stages_per_rank > 4) {
        continue;
      }
      for (const Checkpointing checkpointing : kCheckpointing) {
        TrainingSpec of_stages = training;
        of_stages.mesh = Mesh({{"tensor_parallel", training.mesh.size("tensor_parallel")}});
        of_stages.sequence_parallel = training.sequence_parallel;
        of_stages.sequences = sequences / micro_batches;
        of_stages.checkpointing = checkpointing;
        TrainingSpec pipeline = training;
        pipeline.sequences = sequences;
        pipeline.checkpointing = checkpointing;
        pipeline.pipeline = {
            .first_blocks = even_stages(of_stages, search.cluster, num_ranks * stages_per_rank),
            .schedule = kind,
            .micro_batches = micro_batches};
        const int64_t most = num_ranks == 1 ? 4 : num_ranks == 4 ? 1 : 2;
        add_fitting(pipeline, most, search, seconds);
      }
    }
  }
}

// Returns the seconds of all layouts that fit, by trying all sizes.
std::vector<double> all_that_fit(const LayoutSearch& search) {
  std::vector<double> seconds;
  for (const int64_t pipeline : {1, 2, 3, 4}) {  // of four blocks
    for (int64_t replicas = 1; replicas <= search.num_devices; ++replicas) {
      for (int64_t data = 1; data <= search.num_devices; ++data) {
        for (const int64_t tensor : {1, 2, 4}) {  // four heads of keys
          const bool is_left_out = pipeline > 1 && replicas > 1;
          if (pipeline * replicas * data * tensor != search.num_devices || is_left_out ||
              search.global_sequences % (replicas * data) != 0) {
            continue;
          }
          for (const int64_t zero_stage : {1, 2, 3}) {
            if ((data == 1 && zero_stage < 3) || (pipeline > 1 && zero_stage == 2)) {
              continue;
            }
            TrainingSpec training = search.training;
            training.zero_stage = zero_stage;
            training.mesh = Mesh({{"pipeline_parallel", pipeline},
                                  {"data_replicate", replicas},
                                  {"data_parallel", data},
                                  {"tensor_parallel", tensor}});
            for (const bool sequence_parallel : {false, true}) {
              training.sequence_parallel = sequence_parallel;
              if (sequence_parallel && tensor == 1) {
                continue;
              }
              if (pipeline == 1) {
                add_accumulating(training, replicas * data, search, seconds);
              } else {
                add_pipelines(training, replicas * data, search, seconds);
              }
            }
          }
        }
      }
    }
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

TEST(LayoutSearch, FindsWhatTryingAllLayoutsFinds) {
  for (const int64_t num_devices : {1, 4, 6, 8}) {
    for (const int64_t memory_limit : {600'000, 1'500'000, 4'000'000, 100'000'000}) {
      const LayoutSearch search = small_search(num_devices, memory_limit);
      const std::vector<double> wanted = all_that_fit(search);
      const LayoutSearchResult result = search_layouts(search);
      ASSERT_EQ(result.layouts.size(), wanted.size()) << num_devices << " " << memory_limit;
      EXPECT_EQ(result.smallest.has_value(), wanted.empty());
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_DOUBLE_EQ(result.layouts[i].time.total(), wanted[i]);
        EXPECT_LE(result.layouts[i].at_peak.total(), memory_limit);
      }
      const auto num_with_all_or_none =
          std::count_if(result.layouts.begin(), result.layouts.end(), [](const auto& layout) {
            return !layout.training.checkpointed_blocks;
          });
      EXPECT_EQ(result.num_candidates, result.num_above_limit + num_with_all_or_none);
    }
  }
}

TEST(LayoutSearch, TheFrontHasTheFastestLayoutForEachLimit) {
  for (const int64_t num_devices : {1, 4}) {
    LayoutSearch search = small_search(num_devices, 100'000'000);
    const std::vector<FoundLayout> front = search_front(search);
    search.max_results = 1;
    search.divides_blocks = false;
    int64_t limit = 100'000'000;
    for (const FoundLayout& expected : front) {
      search.memory_limit = limit;
      const FoundLayout found = search_layouts(search).layouts.at(0);
      EXPECT_EQ(found.time.total(), expected.time.total());
      EXPECT_LE(expected.at_peak.total(), found.at_peak.total());
      EXPECT_EQ(expected.at_peak.total(), peak_bytes(expected.training));
      limit = expected.at_peak.total() - 1;
    }
    search.memory_limit = limit;
    EXPECT_TRUE(search_layouts(search).layouts.empty());
  }
}

TEST(LayoutSearch, FindsWhatTryingAllLayoutsOfATiedModelFinds) {
  LayoutSearch search = small_search(4, 1'500'000);
  std::get<DecoderModel>(search.training.model).is_tied = true;
  const std::vector<double> wanted = all_that_fit(search);
  const LayoutSearchResult result = search_layouts(search);
  ASSERT_EQ(result.layouts.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_DOUBLE_EQ(result.layouts[i].time.total(), wanted[i]);
  }
}

// Autocast copies weights unless FSDP2 gathers them, and more processes than cores take turns.
TEST(LayoutSearch, FindsWhatTryingAllLayoutsInMixedPrecisionFinds) {
  LayoutSearch search = small_search(4, 1'500'000);
  search.training.precision = Precision::kHalfMixed;
  search.cluster.cores_per_host = 2;
  const std::vector<double> wanted = all_that_fit(search);
  const LayoutSearchResult result = search_layouts(search);
  ASSERT_FALSE(wanted.empty());
  ASSERT_EQ(result.layouts.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_DOUBLE_EQ(result.layouts[i].time.total(), wanted[i]);
  }
}

TEST(LayoutSearch, ReturnsTheSmallestLayoutIfNoneFits) {
  LayoutSearch search = small_search(4, 1000);
  const LayoutSearchResult none = search_layouts(search);
  ASSERT_TRUE(none.layouts.empty() && none.smallest);
  const int64_t least = none.smallest->at_peak.total();
  EXPECT_EQ(least, peak_bytes(none.smallest->training));
  search.memory_limit = least - 1;
  EXPECT_TRUE(search_layouts(search).layouts.empty());
  search.memory_limit = least;
  EXPECT_FALSE(search_layouts(search).layouts.empty());
}

TEST(LayoutSearch, StepsInTheBackwardOnlyWhereThatIsNeeded) {
  LayoutSearch search = small_search(1, 100'000'000);
  search.micro_batches = 24;
  search.checkpointing = {Checkpointing::kFull};
  EXPECT_FALSE(search_layouts(search).layouts.front().training.steps_in_backward);
  search.micro_batches = 1;
  const int64_t usual = search_layouts(search).layouts.front().at_peak.total();
  search.memory_limit = usual - 1;
  const LayoutSearchResult result = search_layouts(search);
  ASSERT_EQ(result.layouts.size(), 1U);
  EXPECT_TRUE(result.layouts.front().training.steps_in_backward);
}

TEST(LayoutSearch, AdagradNeverStepsInTheBackward) {
  LayoutSearch search = small_search(2, 100'000'000);
  search.training.optimizer = OptimizerKind::kAdagrad;
  for (const int64_t limit : {1000, 2'500'000, 100'000'000}) {
    search.memory_limit = limit;
    const LayoutSearchResult result = search_layouts(search);
    EXPECT_EQ(result.layouts.empty(), limit == 1000);
    for (const FoundLayout& layout : result.layouts) {
      EXPECT_FALSE(layout.training.steps_in_backward);
      EXPECT_LE(peak_bytes(layout.training), limit);
    }
  }
  search.steps_in_backward = {true};
  EXPECT_TRUE(error_of([&] {
                return search_layouts(search);
              }).starts_with("tune: Adagrad does not step inside the backward"));
}

TEST(LayoutSearch, TriesSequenceParallelismWithSeveralTensorParallelRanks) {
  LayoutSearch search = small_search(4, 100'000'000);
  const auto num_sharded = [](const LayoutSearchResult& result) {
    return std::count_if(result.layouts.begin(), result.layouts.end(), [](const auto& layout) {
      return layout.training.sequence_parallel;
    });
  };
  const LayoutSearchResult both = search_layouts(search);
  search.sequence_parallel = {false};
  const LayoutSearchResult full = search_layouts(search);
  EXPECT_EQ(num_sharded(full), 0);
  EXPECT_EQ(num_sharded(both), both.num_candidates - full.num_candidates);
  search.sequence_parallel = {true};
  const LayoutSearchResult sharded = search_layouts(search);
  EXPECT_EQ(num_sharded(sharded), num_sharded(both));
  for (const FoundLayout& layout : sharded.layouts) {
    EXPECT_EQ(layout.training.sequence_parallel, layout.training.mesh.has_axis("tensor_parallel"));
  }
  // There is no prediction for this plan with sequence parallelism.
  search.training.plan = Plan({{"model.layers.*.mlp", Style::kColumnRowMlp, {}}});
  const LayoutSearchResult rejected = search_layouts(search);
  ASSERT_EQ(rejected.rejections.size(), 2U);  // of sizes 2 and 4
  EXPECT_TRUE(rejected.rejections.front().reason.starts_with("memory: with sequence parallelism"));
  EXPECT_EQ(num_sharded(rejected), 0);
  search.sequence_parallel = {false, true};
  EXPECT_TRUE(search_layouts(search).rejections.empty());
}

TEST(LayoutSearch, KeepsFixedSizes) {
  LayoutSearch search = small_search(8, 100'000'000);
  search.tensor = 2;
  search.replicas = 4;
  search.micro_batches = 3;
  for (const FoundLayout& layout : search_layouts(search).layouts) {
    EXPECT_EQ(layout.training.mesh.to_string(), "data_replicate=4,tensor_parallel=2");
    EXPECT_EQ(layout.training.micro_batches, 3);
    EXPECT_EQ(layout.training.sequences, 2);
  }
}

TEST(LayoutSearch, SlowLinksChangeTheChoice) {
  LayoutSearch search = small_search(8, 100'000'000);
  search.cluster.within_host.bytes_per_second = 1e12;
  search.cluster.across_hosts = {.seconds_per_message = 1e-9, .bytes_per_second = 1e12};
  const LayoutSearchResult fast = search_layouts(search);
  search.cluster.across_hosts = {.seconds_per_message = 1e-3, .bytes_per_second = 1e6};
  const LayoutSearchResult slow = search_layouts(search);
  const auto crossing_bytes = [](const LayoutSearchResult& result) {
    const Mesh& mesh = result.layouts.front().training.mesh;
    return std::tuple(mesh.to_string(), result.layouts.front().training.micro_batches);
  };
  EXPECT_NE(crossing_bytes(fast), crossing_bytes(slow));
}

TEST(LayoutSearch, FindsALayoutOf70BOn4096Devices) {
  LayoutSearch search;
  search.training = {.model = DecoderModel{.dim = 8192,
                                           .hidden_dim = 28672,
                                           .num_layers = 80,
                                           .num_heads = 64,
                                           .num_kv_heads = 8,
                                           .head_dim = 128,
                                           .vocab_size = 128256},
                     .mesh = Mesh(),
                     .plan = {},
                     .tokens = 4096,
                     .precision = Precision::kHalfMixed,
                     .device = DeviceKind::kCuda};
  search.cluster = named_cluster("h100");
  search.num_devices = 4096;
  search.global_sequences = 4096;
  search.memory_limit = 70'000'000'000;
  const LayoutSearchResult result = search_layouts(search);
  ASSERT_EQ(result.layouts.size(), 5U);
  // Parameters, gradients and states are sharded, and no collective of tensor-parallel ranks
  // crosses hosts.
  const Mesh& mesh = result.layouts.front().training.mesh;
  EXPECT_TRUE(mesh.has_axis("data_parallel"));
  EXPECT_TRUE(!mesh.has_axis("tensor_parallel") || mesh.size("tensor_parallel") <= 8);
}

TEST(LayoutSearch, NamesTensorParallelSizesThatAreNotPossible) {
  const LayoutSearchResult result = search_layouts(small_search(8, 100'000'000));
  ASSERT_EQ(result.rejections.size(), 1U);
  EXPECT_EQ(result.rejections.front().tensor, 8);
  EXPECT_TRUE(result.rejections.front().reason.starts_with("model.layers.0.self_attn.k_proj"));
}

TEST(LayoutSearch, ImpossibleSearchesAreRefused) {
  LayoutSearch search = small_search(8, 100'000'000);
  search.tensor = 3;
  EXPECT_TRUE(error_of([&] { return search_layouts(search); })
                  .starts_with("tune: got 8 devices and 24 sequences for a step, which no layout "
                               "divides with the sizes that are fixed"));
  search.tensor = 8;
  EXPECT_TRUE(error_of([&] { return search_layouts(search); })
                  .starts_with("tune: no layout of 8 devices is valid: "
                               "model.layers.0.self_attn.k_proj: num_kv_heads = 4"));
  search.zero_stages = {};
  EXPECT_TRUE(error_of([&] {
                return search_layouts(search);
              }).starts_with("tune: got no values for the ZeRO stage"));
  search.num_devices = 0;
  EXPECT_EQ(error_of([&] { return search_layouts(search); }),
            "tune: got num_devices = 0; give a number from 1");
}

}  // namespace
}  // namespace weft::strategy
