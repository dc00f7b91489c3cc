#pragma once

// Inline, because both libweft_ops.so and libweft_ops_cuda.so need it and neither exports it.

#include <weft/kernels/activation_kind.h>

#include <c10/util/Exception.h>

#include <string_view>

namespace weft::ops {

// Returns the activation of this name. Raises ValueError, listing the names, for any other.
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
