#pragma once

#include <optional>
#include <string_view>

namespace weft::kernels {

// kGelu is the exact form x * Phi(x); kGeluTanh its tanh approximation, as in torch.
enum class Activation { kSilu, kGelu, kGeluTanh, kRelu };

// Returns the activation named "silu", "gelu", "gelu_tanh" or "relu"; nullopt for any other name.
std::optional<Activation> parse_activation(std::string_view name);

}  // namespace weft::kernels
