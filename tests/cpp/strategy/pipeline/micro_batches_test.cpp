#include "weft/strategy/pipeline/micro_batches.h"

#include "../error_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <vector>

namespace weft::strategy {

namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(DealSamples, SplitsABatchByShares) {
  const auto deal = [](int64_t size, std::vector<double> shares) {
    return deal_samples(size, shares);
  };
  EXPECT_THAT(deal(32, {1, 2, 1}), ElementsAre(8, 16, 8));
  EXPECT_THAT(deal(7, {1, 1, 1, 1}), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(deal(10, {0.1, 0.1, 0.1}), ElementsAre(4, 3, 3));
  EXPECT_THAT(deal(3, {1, 100, 1}), ElementsAre(1, 1, 1));
  EXPECT_THAT(deal(5, {1, 100, 1}), ElementsAre(1, 3, 1));
  EXPECT_THAT(deal(6, {1, 1, 100, 100}), ElementsAre(1, 1, 2, 2));
  EXPECT_THAT(error_of([&] { deal(2, {1, 1, 1}); }), HasSubstr("3 micro-batches of a batch of 2"));
  EXPECT_THAT(error_of([&] { deal(2, {}); }), HasSubstr("0 micro-batches of a batch of 2"));
  EXPECT_THAT(error_of([&] { deal(2, {1, 0}); }), HasSubstr("share is 0"));
}

TEST(TaperedSizes, GrowFromEitherEndOrBoth) {
  const auto sizes = tapered_sizes(32, 5, 2);
  EXPECT_THAT(sizes, testing::Not(testing::Contains(ElementsAre(7, 7, 6, 6, 6))));
  EXPECT_EQ(std::set(sizes.begin(), sizes.end()).size(), sizes.size());
  for (const auto& each : sizes) {
    EXPECT_EQ(std::accumulate(each.begin(), each.end(), int64_t{0}), 32);
    EXPECT_LE(each.front(), each[2] + 1);  // by rounding
    EXPECT_LE(each.back(), each[2] + 1);
  }
  EXPECT_THAT(sizes, testing::Contains(ElementsAre(4, 8, 8, 8, 4)));
  EXPECT_THAT(sizes, testing::Contains(ElementsAre(4, 7, 7, 7, 7)));  // only the first, halved
  EXPECT_TRUE(tapered_sizes(32, 2, 2).empty());
  EXPECT_TRUE(tapered_sizes(4, 4, 4).empty());  // all even
}

}  // namespace

}  // namespace weft::strategy
