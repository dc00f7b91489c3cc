#include "gate_up.h"

#include <ATen/DimVector.h>
#include <ATen/ops/as_strided.h>

namespace weft::ops {

namespace {

// Returns whether both have one storage, and the first element of `second` is `distance` elements
// after that of `first`.
bool is_at_distance(const at::Tensor& first, const at::Tensor& second, std::int64_t distance) {
  return first.has_storage() && second.has_storage() &&
         first.storage().is_alias_of(second.storage()) &&
         first.scalar_type() == second.scalar_type() &&
         second.storage_offset() == first.storage_offset() + distance;
}

}  // namespace

at::Tensor joined_weight(const at::Tensor& gate, const OptionalTensor& up) {
  if (!up.has_value() || gate.numel() == 0 || gate.sizes() != up->sizes() ||
      !gate.is_contiguous() || !up->is_contiguous() || !is_at_distance(gate, *up, gate.numel())) {
    return {};
  }
  return at::as_strided(gate, {2 * gate.size(0), gate.size(1)}, gate.strides());
}

at::Tensor joined_columns(const at::Tensor& gate, const at::Tensor& up) {
  if (!up.defined() || gate.numel() == 0 || gate.sizes() != up.sizes() ||
      gate.strides() != up.strides() || !is_at_distance(gate, up, gate.size(-1))) {
    return {};
  }
  at::DimVector sizes(gate.sizes());
  sizes.back() *= 2;
  const auto gate_up = at::as_strided(gate, sizes, gate.strides());
  return gate_up.is_contiguous() ? gate_up : at::Tensor();
}

at::Tensor half_of(const at::Tensor& gate_up, std::int64_t idx) {
  const auto hidden = gate_up.size(-1) / 2;
  return gate_up.narrow(-1, idx * hidden, hidden);
}

}  // namespace weft::ops
