#include "weft/strategy/tuning/search.h"

#include "../error_of.h"
#include "all_layouts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

namespace weft::strategy {
namespace {

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
