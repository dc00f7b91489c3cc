#pragma once

// The header of a pipeline message. The receiver compares it with the header that it expects.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace weft::ops {

// The metadata of a tensor.
struct TensorLayout {
  std::vector<std::int64_t> sizes;
  at::TensorOptions options;
  bool differentiable;
};

// The first 64 bytes of a message; the wire format.
struct PipelineHeader {
  enum class Kind : std::uint8_t { kData = 1, kGradients, kMismatch };

  std::uint32_t magic = 0;
  Kind kind = Kind::kData;
  std::uint8_t first_dtype = 0;
  std::uint8_t first_dim = 0;
  bool first_differentiable = false;
  std::uint32_t channel = 0;
  std::uint32_t num_tensors = 0;
  std::uint64_t sequence = 0;
  std::uint64_t layout = 0;  // hash of dtype, shape and differentiability of all tensors
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
