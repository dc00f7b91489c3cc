#include "wire.h"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace weft::ops {

namespace {

constexpr std::uint32_t kMagic = 0x77656674;  // "weft" in ASCII

class LayoutHash {
 public:
  // FNV-1a
  void add(std::uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      hash_ = (hash_ ^ ((value >> (8 * byte)) & 0xFFU)) * 0x100000001B3U;
    }
  }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xCBF29CE484222325U;
};

}  // namespace

PipelineHeader header_of(PipelineHeader::Kind kind,
                         std::int64_t channel,
                         std::uint64_t sequence,
                         const std::vector<TensorLayout>& layouts) {
  PipelineHeader header;
  header.magic = kMagic;
  header.kind = kind;
  header.channel = static_cast<std::uint32_t>(channel);
  header.num_tensors = static_cast<std::uint32_t>(layouts.size());
  header.sequence = sequence;
  LayoutHash hash;
  for (const auto& layout : layouts) {
    hash.add(static_cast<std::uint64_t>(layout.options.dtype().toScalarType()));
    hash.add(static_cast<std::uint64_t>(layout.differentiable));
    hash.add(layout.sizes.size());
    for (const auto size : layout.sizes) {
      hash.add(static_cast<std::uint64_t>(size));
    }
  }
  header.layout_hash = hash.value();
  if (!layouts.empty()) {
    const auto& first = layouts.front();
    header.first_dtype = static_cast<std::uint8_t>(first.options.dtype().toScalarType());
    header.first_differentiable = first.differentiable;
    header.first_num_dims = static_cast<std::uint8_t>(first.sizes.size());
    const auto num_sizes = std::min(first.sizes.size(), header.first_sizes.size());
    for (std::size_t dim = 0; dim < num_sizes; ++dim) {
      header.first_sizes.at(dim) = static_cast<std::uint32_t>(first.sizes[dim]);
    }
  }
  return header;
}

bool is_header(const PipelineHeader& bytes) { return bytes.magic == kMagic; }

bool operator==(const PipelineHeader& a, const PipelineHeader& b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

std::string describe(const PipelineHeader& header) {
  std::ostringstream text;
  text << header.num_tensors << (header.num_tensors == 1 ? " tensor" : " tensors");
  if (header.num_tensors > 0) {
    text << (header.num_tensors == 1 ? ", " : ", the first ")
         << static_cast<at::ScalarType>(header.first_dtype) << " [";
    for (std::size_t dim = 0; dim < header.first_num_dims; ++dim) {
      text << (dim > 0 ? ", " : "");
      if (dim == header.first_sizes.size()) {
        text << "...";
        break;
      }
      text << header.first_sizes.at(dim);
    }
    text << ']' << (header.first_differentiable ? " that needs a gradient" : "");
  }
  return text.str();
}

}  // namespace weft::ops
