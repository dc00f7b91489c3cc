#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::strategy::detail {

// Small tools for reading text and for writing the sentences of errors.

std::string_view trim(std::string_view text);

// "a.b.c" -> {"a", "b", "c"}; the views borrow from `text`. An empty text is one empty part.
std::vector<std::string_view> split(std::string_view text, char separator);

// A decimal integer, nothing before or after it.
std::optional<int64_t> parse_integer(std::string_view text);

std::string join(std::span<const std::string> parts, std::string_view separator);

// 'name', with "the model itself" after the empty one.
std::string quote_module(std::string_view name);
std::string quote(std::string_view text);

// Insertions, deletions and substitutions that turn one text into the other, ignoring ASCII case.
size_t edit_distance(std::string_view a, std::string_view b);

// The candidate with the smallest edit distance, the first of several. REQUIRES: candidates.
std::string_view nearest(std::string_view text, std::span<const std::string_view> candidates);

}  // namespace weft::strategy::detail
