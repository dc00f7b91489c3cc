#pragma once

// Tags and wire format of pipeline messages.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace weft::ops {

constexpr std::int64_t kMaxChannel = 1022;
// Channel of the announcements: see pipeline_link.h.
constexpr std::int64_t kLinkChannel = kMaxChannel + 1;

// Returns a tag of at least 2^29, within the limit of weft's backend; users' messages have smaller
// ones.
inline int tag_of(std::int64_t channel, std::uint64_t sequence, bool is_answer) {
  constexpr int kFirstTag = 1 << 29;
  constexpr int kSequenceBits = 18;
  constexpr int kChannelBits = 10;
  const auto number = static_cast<int>(sequence & ((1U << kSequenceBits) - 1));
  return kFirstTag + (static_cast<int>(is_answer) << (kSequenceBits + kChannelBits)) +
         (static_cast<int>(channel) << kSequenceBits) + number;
}

// Views a contiguous tensor as bytes, which all backends accept. as_strided, because a tensor of
// one element counts as contiguous with any stride.
inline at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
}

}  // namespace weft::ops
