#include <weft/kernels/activation_kind.h>

#include <array>

namespace weft::kernels {
namespace {

// Indexed by Activation.
constexpr std::array<std::string_view, 4> kNames = {"silu", "gelu", "gelu_tanh", "relu"};

}  // namespace

std::optional<Activation> parse_activation(std::string_view name) {
  for (std::size_t kind_idx = 0; kind_idx < kNames.size(); ++kind_idx) {
    if (kNames.at(kind_idx) == name) return static_cast<Activation>(kind_idx);
  }
  return std::nullopt;
}

}  // namespace weft::kernels
