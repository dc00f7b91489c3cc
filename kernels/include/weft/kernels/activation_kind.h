#pragma once

#include <optional>
#include <string_view>

namespace weft::kernels {

// kGelu is the exact form x * Phi(x); kGeluTanh its tanh approximation, as in torch.
enum class Activation { kSilu, kGelu, kGeluTanh, kRelu };

// "silu", "gelu", "gelu_tanh" or "relu".
std::string_view to_string(Activation activation);

// The inverse of to_string; nullopt for any other name.
std::optional<Activation> parse_activation(std::string_view name);

}  // namespace weft::kernels
