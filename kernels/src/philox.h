#pragma once

#include <c10/macros/Macros.h>

#include <cstdint>

// Philox4x32-10, a random function of a counter and a key: Salmon, Moraes, Dror and Shaw, "Parallel
// random numbers: as easy as 1, 2, 3" (2011). The numbers are the same on every device.
namespace weft::kernels::detail {

struct PhiloxBits {
  uint32_t words[4];
};

C10_HOST_DEVICE C10_ALWAYS_INLINE PhiloxBits philox(uint64_t counter, uint64_t key) {
  uint32_t c0 = static_cast<uint32_t>(counter);
  uint32_t c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = 0;
  uint32_t c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(c0) * 0xD2511F53U;
    const uint64_t product1 = static_cast<uint64_t>(c2) * 0xCD9E8D57U;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace weft::kernels::detail
