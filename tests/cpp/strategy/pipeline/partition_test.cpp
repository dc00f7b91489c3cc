#include "weft/strategy/pipeline/partition.h"

#include "../error_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <utility>

namespace weft::strategy {

namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<LayerCost> with_times(const std::vector<double>& times) {
  std::vector<LayerCost> layers;
  for (const double time : times) {
    layers.push_back({.time = time, .activation_bytes = 0, .parameter_bytes = 0});
  }
  return layers;
}

TEST(Partition, MinimizesTheTimeOfTheSlowestStage) {
  const auto layers = with_times({1, 1, 1, 1, 4, 1, 1});
  const Partition result = partition(layers, {.num_stages = 3});
  EXPECT_THAT(result.begins, ElementsAre(0, 4, 5));
  EXPECT_THAT(result.times, ElementsAre(4, 4, 2));
  EXPECT_THAT(partition(layers, {.num_stages = 1}).begins, ElementsAre(0));
  EXPECT_THAT(partition(layers, {.num_stages = 7}).begins, ElementsAre(0, 1, 2, 3, 4, 5, 6));
}

TEST(Partition, BalancesTheOtherStagesToo) {
  // The last layer alone takes 6, so several partitions have the same slowest stage; the chosen one
  // balances the other stages.
  EXPECT_THAT(partition(with_times({2, 2, 2, 2, 6}), {.num_stages = 3}).begins,
              ElementsAre(0, 2, 4));
}

TEST(Partition, RespectsTheLimitWithMicroBatchesInFlight) {
  const std::vector<LayerCost> layers(4, {.time = 1, .activation_bytes = 10, .parameter_bytes = 5});
  // With 1F1B, two micro-batches are in flight on the first of two stages, one on the second.
  const PartitionOptions options{.num_stages = 2, .in_flight = {2, 1}};
  const Partition even = partition(layers, options);
  EXPECT_THAT(even.begins, ElementsAre(0, 2));
  EXPECT_THAT(even.bytes, ElementsAre(50, 30));
  PartitionOptions limited = options;
  limited.memory_limit = 49;
  const Partition result = partition(layers, limited);
  EXPECT_THAT(result.begins, ElementsAre(0, 1));
  EXPECT_THAT(result.bytes, ElementsAre(25, 45));
  limited.memory_limit = 44;
  EXPECT_EQ(error_of([&] { partition(layers, limited); }),
            "partition: no cut of 4 layers into 2 stages keeps each within 44 bytes; allow 45, or "
            "use more stages");
}

TEST(Partition, MemoryWeightTradesTimeForMemory) {
  const std::vector<LayerCost> layers = {{.time = 6, .activation_bytes = 0, .parameter_bytes = 1},
                                         {.time = 1, .activation_bytes = 0, .parameter_bytes = 1},
                                         {.time = 1, .activation_bytes = 0, .parameter_bytes = 1},
                                         {.time = 1, .activation_bytes = 0, .parameter_bytes = 9}};
  const auto begins = [&](double weight) {
    return partition(layers, {.num_stages = 2, .memory_weight = weight}).begins;
  };
  EXPECT_THAT(begins(0), ElementsAre(0, 1));
  EXPECT_THAT(begins(0.5), ElementsAre(0, 2));
  EXPECT_THAT(begins(1), ElementsAre(0, 3));
}

// `cuts` has a bit for each boundary between layers: whether a stage begins there.
TEST(Partition, IsTheBestOfAllPartitions) {
  std::mt19937 random(11);
  std::uniform_int_distribution<int64_t> small(0, 9);
  for (int trial = 0; trial < 300; ++trial) {
    const size_t num_layers = 1 + static_cast<size_t>(small(random));
    const auto num_stages = static_cast<int64_t>(
        std::uniform_int_distribution<size_t>(1, std::min<size_t>(num_layers, 4))(random));
    std::vector<LayerCost> layers;
    for (size_t i = 0; i < num_layers; ++i) {
      layers.push_back({.time = static_cast<double>(small(random)),
                        .activation_bytes = small(random),
                        .parameter_bytes = small(random)});
    }
    PartitionOptions options{.num_stages = num_stages, .memory_limit = 40};
    for (int64_t stage = 0; stage < num_stages; ++stage) {
      options.in_flight.push_back(num_stages - stage);
    }
    double best = std::numeric_limits<double>::infinity();
    for (unsigned cuts = 0; cuts < (1U << (num_layers - 1)); ++cuts) {
      std::vector<std::pair<double, int64_t>> stages(1);  // time and bytes
      for (size_t i = 0; i < num_layers; ++i) {
        if (i > 0 && ((cuts >> (i - 1)) & 1U) != 0) {
          stages.emplace_back();
        }
        if (static_cast<int64_t>(stages.size()) > num_stages) {
          break;
        }
        stages.back().first += layers[i].time;
        stages.back().second += layers[i].parameter_bytes +
                                options.in_flight[stages.size() - 1] * layers[i].activation_bytes;
      }
      double worst = static_cast<int64_t>(stages.size()) == num_stages
                         ? 0
                         : std::numeric_limits<double>::infinity();
      for (const auto& [time, bytes] : stages) {
        worst = std::max(worst, bytes <= 40 ? time : std::numeric_limits<double>::infinity());
      }
      best = std::min(best, worst);
    }
    if (best == std::numeric_limits<double>::infinity()) {
      EXPECT_THAT(error_of([&] { partition(layers, options); }), HasSubstr("no cut of"));
      continue;
    }
    const Partition result = partition(layers, options);
    EXPECT_EQ(*std::max_element(result.times.begin(), result.times.end()), best);
    EXPECT_THAT(result.bytes, testing::Each(testing::Le(40)));
  }
}

TEST(Partition, RejectsSumsThatOverflow) {
  EXPECT_THAT(error_of([] {
                partition(with_times({1e308, 1e308}), {});
              }),
              HasSubstr("add up to more than can be counted"));
  const LayerCost large{.time = 1, .activation_bytes = int64_t{1} << 61, .parameter_bytes = 0};
  EXPECT_THAT(error_of([&] { partition(std::vector<LayerCost>(3, large), {}); }),
              HasSubstr("add up to more than can be counted"));
}

TEST(Partition, RejectsNumbersOutOfRange) {
  const auto layers = with_times({1, 1});
  EXPECT_EQ(error_of([&] { partition(layers, {.num_stages = 3}); }),
            "partition: got 3 stages for 2 layers; pass at most as many stages as layers");
  EXPECT_THAT(error_of([&] { partition(layers, {.num_stages = 0}); }),
              HasSubstr("num_stages is 0"));
  EXPECT_THAT(error_of([&] { partition(layers, {.num_stages = 2, .in_flight = {1}}); }),
              HasSubstr("in_flight has 1 numbers for 2 stages"));
  EXPECT_THAT(error_of([&] { partition(layers, {.num_stages = 1, .in_flight = {-1}}); }),
              HasSubstr("negative"));
  EXPECT_THAT(error_of([&] { partition(layers, {.memory_weight = 1.5}); }),
              HasSubstr("memory_weight is 1.5"));
  EXPECT_THAT(error_of([&] { partition(layers, {.memory_limit = -1}); }),
              HasSubstr("memory_limit is -1"));
  EXPECT_THAT(error_of([&] {
                partition(with_times({1, -1}), {});
              }),
              HasSubstr("layer 1 has a cost"));
}

}  // namespace

}  // namespace weft::strategy
