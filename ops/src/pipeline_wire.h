#pragma once

// How what pipelines send in a group is numbered and looks.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace weft::ops {

constexpr std::int64_t kMaxChannel = 1022;
// The channel of announcements: see pipeline_link.h.
constexpr std::int64_t kLinkChannel = kMaxChannel + 1;

// Users' own messages have smaller tags than 2^29; the largest here is below what the backend of
// weft takes.
inline int tag_of(std::int64_t channel, std::uint64_t sequence, bool is_answer) {
  constexpr int kFirstTag = 1 << 29;
  constexpr int kSequenceBits = 18;
  constexpr int kChannelBits = 10;
  const auto number = static_cast<int>(sequence & ((1U << kSequenceBits) - 1));
  return kFirstTag + (static_cast<int>(is_answer) << (kSequenceBits + kChannelBits)) +
         (static_cast<int>(channel) << kSequenceBits) + number;
}

// The bytes of a contiguous tensor: every backend takes those, whatever the dtype. One of one
// element may have any stride.
inline at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
}

}  // namespace weft::ops
