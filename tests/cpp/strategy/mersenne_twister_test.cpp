#include "weft/strategy/mersenne_twister.h"

#include <gtest/gtest.h>

#include <random>

namespace weft::strategy {
namespace {

// Returns a state as torch's seeding leaves it, with the words of the standard library's engine.
MersenneTwister seeded(uint32_t seed) {
  MersenneTwister state{{}, 1, 0};
  state.words[0] = seed;
  for (uint32_t i = 1; i < state.words.size(); ++i) {
    const uint32_t before = state.words[i - 1];
    state.words[i] = 1812433253U * (before ^ (before >> 30U)) + i;
  }
  return state;
}

// Returns the next number, as the engine tempers the word at `next`.
uint32_t draw(MersenneTwister& state) {
  advance(state, 1);
  uint32_t y = state.words[state.next - 1];
  y ^= y >> 11U;
  y ^= (y << 7U) & 0x9d2c5680U;
  y ^= (y << 15U) & 0xefc60000U;
  return y ^ (y >> 18U);
}

TEST(MersenneTwister, AdvancesAsTheStandardEngineDiscards) {
  for (const uint64_t count : {0, 1, 2, 226, 227, 228, 622, 623, 624, 625, 1247, 1248, 100000}) {
    MersenneTwister ours = seeded(5);
    std::mt19937 theirs(5);
    advance(ours, count);
    theirs.discard(count);
    for (int i = 0; i < 1300; ++i) ASSERT_EQ(draw(ours), theirs()) << count << " then " << i;
  }
}

TEST(MersenneTwister, AdvancesInSeveralCallsAsInOne) {
  for (const uint64_t first : {1, 100, 623, 624, 1000}) {
    MersenneTwister in_one = seeded(7);
    MersenneTwister in_two = seeded(7);
    advance(in_one, 2000);
    advance(in_two, first);
    advance(in_two, 2000 - first);
    EXPECT_EQ(in_one.words, in_two.words);
    EXPECT_EQ(in_one.left, in_two.left);
    EXPECT_EQ(in_one.next, in_two.next);
  }
}

}  // namespace
}  // namespace weft::strategy
