#include "weft/strategy/mersenne_twister.h"

#include <algorithm>

namespace weft::strategy {

namespace {

// Matsumoto and Nishimura, "Mersenne Twister" (1998): word i becomes the word kShift further on,
// xor a twist of the words i and i + 1, in a ring of kNumWords words.
constexpr int kShift = 397;

uint32_t twisted(uint32_t word, uint32_t following) {
  const uint32_t mixed = (word & 0x80000000U) | (following & 0x7fffffffU);
  return (mixed >> 1U) ^ ((following & 1U) != 0 ? 0x9908b0dfU : 0U);
}

void twist(std::array<uint32_t, MersenneTwister::kNumWords>& words) {
  constexpr int n = MersenneTwister::kNumWords;
  uint32_t* const w = words.data();
  // Two loops without a division, so that the compiler makes them vector instructions.
  for (int i = 0; i < n - kShift; ++i) w[i] = w[i + kShift] ^ twisted(w[i], w[i + 1]);
  for (int i = n - kShift; i < n - 1; ++i) w[i] = w[i + kShift - n] ^ twisted(w[i], w[i + 1]);
  w[n - 1] = w[kShift - 1] ^ twisted(w[n - 1], w[0]);
}

}  // namespace

void advance(MersenneTwister& state, uint64_t count) {
  while (count > 0) {
    // Drawing from the last word leaves `left` at 1; the next draw twists.
    const auto untwisted = static_cast<uint64_t>(state.left - 1);
    const uint64_t taken = std::min(count, untwisted);
    state.left -= static_cast<int>(taken);
    state.next += static_cast<uint32_t>(taken);
    count -= taken;
    if (count == 0) return;
    twist(state.words);
    state.left = MersenneTwister::kNumWords;
    state.next = 1;
    --count;
  }
}

}  // namespace weft::strategy
