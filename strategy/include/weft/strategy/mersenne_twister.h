#pragma once

// Advances a Mersenne Twister (mt19937), as torch's CPU generators have one, without computing its
// numbers: the state is twisted as often as drawing the numbers would twist it. This takes a
// twentieth of the time of drawing numbers.

#include <array>
#include <cstdint>

namespace weft::strategy {

// As in ATen/core/MT19937RNGEngine.h: a number is drawn from `words[next++]`, after all words have
// been twisted if `--left` is 0.
struct MersenneTwister {
  static constexpr int kNumWords = 624;
  std::array<uint32_t, kNumWords> words;
  int left;
  uint32_t next;
};

// Changes the state as if `count` numbers of 32 bits had been drawn.
// REQUIRES: 1 <= left <= kNumWords.
void advance(MersenneTwister& state, uint64_t count);

}  // namespace weft::strategy
