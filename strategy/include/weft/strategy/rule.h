#pragma once

#include "weft/strategy/style.h"

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace weft::strategy {

// A floating dtype that a module computes in.
enum class ComputeDtype { kFloat32, kBFloat16, kFloat16 };

// torch's names: "float32", "bfloat16", "float16".
std::string_view to_string(ComputeDtype dtype);

// The inverse of to_string. Throws std::invalid_argument with the valid names.
ComputeDtype parse_compute_dtype(std::string_view text);

// Modules whose names match `pattern` get `style`, and these options:
// - heads, for kColumn and kRow: the attribute of the parent module that counts the heads in the
//   layer's output (kRow: input);
// - recompute, for styles that modules with layers inside take: the forward keeps the input alone,
//   and the backward computes the rest again;
// - offload: what is kept for the backward waits in CPU memory;
// - precision: what the module and those below compute in.
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

// Whether a rule has any option.
bool has_options(const Rule& rule);

// "style 'row' with heads 'n_heads'", for messages.
std::string describe(const Rule& rule);

// Throws std::invalid_argument for a malformed pattern (see check_pattern), for `heads` that is no
// attribute name and for an option that means nothing to the style.
void check_rule(const Rule& rule);

}  // namespace weft::strategy

template <>
struct std::hash<weft::strategy::Rule> {
  size_t operator()(const weft::strategy::Rule& rule) const noexcept;
};
