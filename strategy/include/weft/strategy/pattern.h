#pragma once

#include <string_view>

namespace weft::strategy {

// A pattern is a dotted module name in which `*` matches any run of characters, also an empty one,
// within one level: "layers.*.wq" matches the wq of every layer, "h*.mlp" matches "h12.mlp". `*`
// never matches a dot. The model itself, whose name is empty, is matched by the empty pattern, but
// not by "*".

// Throws std::invalid_argument for an empty level ("a..b", ".a"), for "**" and for control
// characters.
void check_pattern(std::string_view pattern);

// Returns whether `pattern` matches the module `name`. Throws if check_pattern throws.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace weft::strategy
