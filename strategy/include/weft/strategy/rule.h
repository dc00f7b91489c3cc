#pragma once

#include "weft/strategy/style.h"

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace weft::strategy {

// The floating-point dtype that a module computes in.
enum class ComputeDtype { kFloat32, kBFloat16, kFloat16 };

// Returns torch's name: "float32", "bfloat16" or "float16".
std::string_view to_string(ComputeDtype dtype);

// The inverse of to_string. Throws std::invalid_argument with the valid names.
ComputeDtype parse_compute_dtype(std::string_view text);

// Modules whose names match `pattern` get `style`, and these options:
// - heads, for kColumn and kRow: the attribute of the parent module that counts the heads in the
//   layer's output (for kRow: in its input);
// - recompute, for styles of modules that contain layers: the forward saves only the input, and the
//   backward recomputes the rest;
// - offload: tensors saved for the backward are kept in CPU memory;
// - precision: the dtype that the module and the modules below it compute in.
// kVocabHead and kIgnore take no options.
struct Rule {
  std::string pattern;
  Style style = Style::kReplicate;
  std::optional<std::string> heads = {};
  bool recompute = false;
  bool offload = false;
  std::optional<ComputeDtype> precision = {};

  bool operator==(const Rule&) const = default;
};

// Returns whether a rule has any option.
bool has_options(const Rule& rule);

// Returns "style 'row' with heads 'n_heads'", for messages.
std::string describe(const Rule& rule);

// Throws std::invalid_argument for a malformed pattern (see check_pattern), for `heads` that is not
// an attribute name and for an option that the style does not support.
void check_rule(const Rule& rule);

}  // namespace weft::strategy

template <>
struct std::hash<weft::strategy::Rule> {
  size_t operator()(const weft::strategy::Rule& rule) const noexcept;
};
