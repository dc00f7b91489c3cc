#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::strategy::detail {

// Helpers for parsing text and for composing error messages.

std::string_view trim(std::string_view text);

// "a.b.c" -> {"a", "b", "c"}; the views point into `text`. An empty text gives one empty view.
std::vector<std::string_view> split(std::string_view text, char separator);

// Parses a decimal integer; nullopt if there is anything before or after it, or if it overflows.
std::optional<int64_t> parse_integer(std::string_view text);

std::string join(std::span<const std::string> parts, std::string_view separator);

// Quotes a module name, and adds "(the model itself)" to the empty one.
std::string quote_module(std::string_view name);
std::string quote(std::string_view text);

// Returns the number of insertions, deletions and substitutions that turn one text into the other,
// ignoring ASCII case.
size_t edit_distance(std::string_view a, std::string_view b);

// Returns the candidate with the smallest edit distance, the first on a tie.
// REQUIRES: at least one candidate.
std::string_view nearest(std::string_view text, std::span<const std::string_view> candidates);

}  // namespace weft::strategy::detail
