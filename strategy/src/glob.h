#pragma once

#include <span>
#include <string_view>
#include <vector>

namespace weft::strategy::detail {

// Returns the levels of a dotted name or pattern: "" has none, "a.b" two. The views point into
// `text`.
std::vector<std::string_view> split_levels(std::string_view text);

// Returns whether one level of a pattern matches one level of a name; `*` matches any run of
// characters.
bool matches_level(std::string_view pattern, std::string_view level);

// Returns whether the levels of a pattern match the levels of a name.
bool matches_name(std::span<const std::string_view> pattern,
                  std::span<const std::string_view> name);

}  // namespace weft::strategy::detail
