// Searches in which optimizer states may be in CPU memory.

#include "../error_of.h"
#include "all_layouts.h"
#include "weft/strategy/tuning/search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace weft::strategy {
namespace {

constexpr int64_t kEnough = 100'000'000;

// Hosts of four devices. Copies are fast, so that steps in the backward are hidden and take less
// time than on the device; or slow, so that they take most of a step.
LayoutSearch offload_search(int64_t num_devices, int64_t memory_limit, bool is_fast = true) {
  LayoutSearch search = small_search(num_devices, memory_limit);
  search.training.device = DeviceKind::kCuda;
  search.cluster.device.overlaps = true;
  search.cluster.copy_bytes_per_second = is_fast ? 1e10 : 1e7;
  search.cluster.host_bytes_per_second = is_fast ? 4e10 : 1e9;
  search.cluster.host_bytes = kEnough;
  search.offloads_states = {false, true};
  return search;
}

int64_t num_offloaded(const LayoutSearchResult& result) {
  return std::count_if(result.layouts.begin(), result.layouts.end(), [](const auto& layout) {
    return layout.training.offloads_states;
  });
}

void expect_all_that_fit(const LayoutSearch& search) {
  const std::vector<double> wanted = all_that_fit(search);
  if (wanted.empty() && search.offloads_states.size() == 1) {
    return;  // see the other tests
  }
  const LayoutSearchResult result = search_layouts(search);
  ASSERT_EQ(result.layouts.size(), wanted.size());
  EXPECT_EQ(result.smallest.has_value(), wanted.empty());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const FoundLayout& layout = result.layouts[i];
    EXPECT_DOUBLE_EQ(layout.time.total(), wanted[i]) << i;
    EXPECT_EQ(layout.time.total(), predict_step_time(layout.training, search.cluster).total());
    EXPECT_EQ(layout.at_peak.total(), peak_bytes(layout.training));
    EXPECT_LE(layout.at_peak.total(), search.memory_limit);
  }
  const auto num_with_all_or_none =
      std::count_if(result.layouts.begin(), result.layouts.end(), [](const auto& layout) {
        return !layout.training.checkpointed_blocks;
      });
  EXPECT_EQ(result.num_candidates, result.num_above_limit + num_with_all_or_none);
}

TEST(OffloadSearch, FindsWhatTryingAllLayoutsFinds) {
  for (const int64_t num_devices : {1, 4}) {
    for (const int64_t memory_limit : {600'000, 1'500'000}) {
      SCOPED_TRACE(::testing::Message() << num_devices << " " << memory_limit);
      expect_all_that_fit(offload_search(num_devices, memory_limit));
      LayoutSearch search = offload_search(num_devices, memory_limit, false);
      expect_all_that_fit(search);
      search.offloads_states = {true};
      expect_all_that_fit(search);
    }
  }
}

TEST(OffloadSearch, FindsWhatTryingAllLayoutsOnHostsWithLittleMemoryFinds) {
  LayoutSearch search = offload_search(4, 1'500'000);
  const int64_t num_before = num_offloaded(search_layouts(search));
  search.cluster.host_bytes = 3'000'000;  // too little for four replicas of the states
  expect_all_that_fit(search);
  const int64_t num_after = num_offloaded(search_layouts(search));
  EXPECT_LT(num_after, num_before);
  EXPECT_GT(num_after, 0);
}

TEST(OffloadSearch, OffloadIsChosenOnlyWhereThatIsNeeded) {
  EXPECT_EQ(num_offloaded(search_layouts(offload_search(4, kEnough))), 0);
  LayoutSearch search = offload_search(1, kEnough);
  search.micro_batches = 24;
  search.checkpointing = {Checkpointing::kFull};
  search.steps_in_backward = {false};
  const int64_t usual = search_layouts(search).layouts.front().at_peak.total();
  search.memory_limit = usual - 1;
  const LayoutSearchResult result = search_layouts(search);
  ASSERT_EQ(result.layouts.size(), 1U);
  EXPECT_TRUE(result.layouts.front().training.offloads_states);
  EXPECT_EQ(result.num_above_limit, 0);
  // Steps in the backward hide the copies.
  search.micro_batches = 1;
  search.offloads_states = {true};
  search.memory_limit = kEnough;
  const double after = search_layouts(search).layouts.front().time.total();
  search.steps_in_backward = {false, true};
  const FoundLayout hidden = search_layouts(search).layouts.front();
  EXPECT_TRUE(hidden.training.steps_in_backward);
  EXPECT_LT(hidden.time.total(), after);
}

TEST(OffloadSearch, TheFrontHasVariantsWithAndWithoutOffload) {
  LayoutSearch search = offload_search(4, kEnough, false);
  const std::vector<FoundLayout> both = search_front(search);
  std::vector<FoundLayout> alone;
  for (const bool offloads : {false, true}) {
    search.offloads_states = {offloads};
    const std::vector<FoundLayout> front = search_front(search);
    for (const FoundLayout& layout : front) {
      EXPECT_EQ(layout.training.offloads_states, offloads);
      EXPECT_EQ(layout.time.total(), predict_step_time(layout.training, search.cluster).total());
    }
    alone.insert(alone.end(), front.begin(), front.end());
  }
  const auto beats = [](const FoundLayout& one, const FoundLayout& other) {
    const int64_t bytes = one.at_peak.total();
    const int64_t other_bytes = other.at_peak.total();
    return one.time.total() <= other.time.total() && bytes <= other_bytes &&
           (one.time.total() < other.time.total() || bytes < other_bytes);
  };
  const auto num_unbeaten = std::count_if(alone.begin(), alone.end(), [&](const auto& layout) {
    return std::none_of(
        alone.begin(), alone.end(), [&](const auto& other) { return beats(other, layout); });
  });
  EXPECT_EQ(both.size(), static_cast<std::size_t>(num_unbeaten));
  EXPECT_GT(std::count_if(both.begin(),
                          both.end(),
                          [](const auto& layout) { return layout.training.offloads_states; }),
            0);
}

TEST(OffloadSearch, TheSmallestLayoutMayBeOffloaded) {
  LayoutSearch search = offload_search(4, 1000);
  const LayoutSearchResult none = search_layouts(search);
  ASSERT_TRUE(none.smallest);
  EXPECT_TRUE(none.smallest->training.offloads_states);
  search.memory_limit = none.smallest->at_peak.total();
  EXPECT_EQ(num_offloaded(search_layouts(search)), 1);
  search.memory_limit -= 1;
  EXPECT_TRUE(search_layouts(search).layouts.empty());
}

TEST(OffloadSearch, OffloadIsLeftOutWhereItIsNotPossible) {
  LayoutSearch search = offload_search(4, 600'000);
  search.training.optimizer = OptimizerKind::kSgd;
  EXPECT_EQ(num_offloaded(search_layouts(search)), 0);
  search.offloads_states = {true};
  const auto error = [&] { return error_of([&] { return search_layouts(search); }); };
  EXPECT_TRUE(error().starts_with("memory: got offloaded optimizer states and SGD without"));
  search.training.optimizer = OptimizerKind::kAdamW;
  search.cluster.host_bytes = 1000;
  EXPECT_EQ(error(),
            "tune: got offloaded optimizer states, which take more than the 1000 bytes of CPU "
            "memory of a host in each layout; use more hosts or int8 states, or leave offload out");
  search.cluster.host_bytes = 0;
  EXPECT_TRUE(error().starts_with("tune: got offloaded optimizer states, and the cluster 'cpu'"));
  search.offloads_states = {};
  EXPECT_TRUE(error().starts_with("tune: got no values for the ZeRO stage"));
  search.offloads_states = {false, true};
  EXPECT_EQ(num_offloaded(search_layouts(search)), 0);
}

}  // namespace
}  // namespace weft::strategy
