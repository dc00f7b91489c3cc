#pragma once

// Inline, because the CPU and the CUDA library both need it and neither shows its insides to the
// other.

#include <weft/kernels/activation_kind.h>

#include <c10/util/Exception.h>

#include <string_view>

namespace weft::ops {

// The activation of that name, or a refusal that lists the known ones.
inline kernels::Activation checked_activation(std::string_view op, std::string_view name) {
  const auto activation = kernels::parse_activation(name);
  TORCH_CHECK_VALUE(activation.has_value(),
                    op,
                    ": got activation '",
                    name,
                    "'; pass one of 'silu', 'gelu', 'gelu_tanh', 'relu'.");
  return *activation;
}

}  // namespace weft::ops
