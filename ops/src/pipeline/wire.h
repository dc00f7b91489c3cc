#pragma once

// The wire format of a message: its header, its tags and the bytes of its tensors. The receiver
// compares the header with the one that it expects.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace weft::ops {

constexpr std::int64_t kMaxChannel = 1022;
// Channel of the announcements: see link.h.
constexpr std::int64_t kLinkChannel = kMaxChannel + 1;

// Returns a tag from 2^29 to 2^30 - 2, made of the channel, the sequence number modulo 2^18 - 1 and
// is_answer. A multi-host group supports no larger tags. The two tags below are those of
// ring_attention; users' own messages in the group must have smaller tags.
constexpr int tag_of(std::int64_t channel, std::uint64_t sequence, bool is_answer) {
  constexpr int kFirstTag = 1 << 29;
  constexpr int kSequenceBits = 18;
  constexpr int kChannelBits = 10;
  const auto number = static_cast<int>(sequence % ((1U << kSequenceBits) - 1));
  return kFirstTag + (static_cast<int>(is_answer) << (kSequenceBits + kChannelBits)) +
         (static_cast<int>(channel) << kSequenceBits) + number;
}
static_assert(tag_of(kLinkChannel, (1U << 18) - 1, true) == tag_of(kLinkChannel, 0, true));
static_assert(tag_of(kLinkChannel, (1U << 18) - 2, true) == (1 << 30) - 2);

// Views a contiguous tensor as bytes, which all backends accept. Uses as_strided, because a tensor
// of one element counts as contiguous with any stride.
inline at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
}

// The metadata of a tensor.
struct TensorLayout {
  std::vector<std::int64_t> sizes;
  at::TensorOptions options;
  bool differentiable;
};

// The first 64 bytes of a message; the wire format. The members first_* describe the first tensor,
// for error messages.
struct PipelineHeader {
  enum class Kind : std::uint8_t { kData = 1, kGradients, kMismatch };

  std::uint32_t magic = 0;
  Kind kind = Kind::kData;
  std::uint8_t first_dtype = 0;
  std::uint8_t first_num_dims = 0;
  bool first_differentiable = false;
  std::uint32_t channel = 0;
  std::uint32_t num_tensors = 0;
  std::uint64_t sequence = 0;
  std::uint64_t layout_hash = 0;  // of dtype, shape and differentiability of all tensors
  std::array<std::uint32_t, 8> first_sizes = {};
};
static_assert(sizeof(PipelineHeader) == 64);

// Returns the header of a message of these tensors.
PipelineHeader header_of(PipelineHeader::Kind kind,
                         std::int64_t channel,
                         std::uint64_t sequence,
                         const std::vector<TensorLayout>& layouts);

// Whether received `bytes` are a header.
bool is_header(const PipelineHeader& bytes);
bool operator==(const PipelineHeader& a, const PipelineHeader& b);

// "2 tensors, the first Float [2, 3] that needs a gradient"
std::string describe(const PipelineHeader& header);

}  // namespace weft::ops
