#pragma once

// Copies with non-temporal stores, for results larger than the caches: a cache line of the target
// is neither read first nor kept in a cache. Everything here is local to the file that includes it,
// and inlined, because files are compiled for several instruction sets.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace weft::collectives {
namespace {

// The result of a collective that does not reduce is streamed if it has at least this many bytes on
// a rank; the result of a reduce-scatter, if its input has at least twice as many. Little of such a
// result would stay in a cache anyway. Measured with benchmarks/collectives.py: streamed, an
// all-gather of 32 MiB takes 0.5 to 0.6 of the time, a reduce-scatter of 32 MiB about 0.8. A
// smaller reduce-scatter, of 1 or 4 MiB on 2 ranks, would take 0.9 to 0.96 of the time, but 1.15 to
// 1.45 of the time together with an addition to its result.
constexpr size_t kStreamedBytes = size_t{4} << 20;

// Copies kBytes, a multiple of a cache line. `to` is aligned to a line. Other threads see the data
// after finish_streaming().
template <int64_t kBytes>
__attribute__((always_inline)) inline void stream_lines(std::byte* to, const std::byte* from) {
  static_assert(kBytes % 64 == 0);
#if defined(__SSE2__)
  __m128i lines[kBytes / 16];
  __builtin_memcpy(lines, from, kBytes);
  for (int64_t i = 0; i < kBytes / 16; ++i) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, lines[i]);
  }
#else
  __builtin_memcpy(to, from, kBytes);
#endif
}

// Copies like memcpy. Other threads see the data after finish_streaming().
__attribute__((always_inline)) inline void stream_bytes(std::byte* to,
                                                        const std::byte* from,
                                                        size_t num_bytes) {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  const size_t misaligned = reinterpret_cast<uintptr_t>(to) % kLine;
  const size_t head = misaligned == 0 ? 0 : kLine - misaligned;
  if (num_bytes < head + kLine) {
    std::memcpy(to, from, num_bytes);
    return;
  }
  std::memcpy(to, from, head);
  size_t done = head;
  for (; done + kLine <= num_bytes; done += kLine) {
    __m128i line[4];
    std::memcpy(line, from + done, kLine);
    for (int i = 0; i < 4; ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + done) + i, line[i]);
    }
  }
  std::memcpy(to + done, from + done, num_bytes - done);
#else
  std::memcpy(to, from, num_bytes);
#endif
}

__attribute__((always_inline)) inline void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace weft::collectives
