#pragma once

#include <string_view>

namespace weft::strategy {

// A pattern is a dotted module name in which `*` stands for any run of characters within one
// level: "layers.*.wq" is the wq of every layer, "h*.mlp" also that of "h12"; no `*` crosses a dot.
// The empty pattern is the model itself, whose name is empty, and a `*` never is.

// Throws std::invalid_argument for an empty level ("a..b", ".a"), for "**" and for control
// characters.
void check_pattern(std::string_view pattern);

// Whether the module `name` fits. Throws as check_pattern does.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace weft::strategy
