#include "weft/strategy/style.h"

#include "text.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

namespace weft::strategy {

namespace {

// Indexed by the enumerator.
constexpr std::array<std::string_view, 5> kNames = {
    "column", "row", "column_row_mlp", "vocab_embedding", "replicate"};
constexpr std::array<Style, 5> kStyles = {
    Style::kColumn, Style::kRow, Style::kColumnRowMlp, Style::kVocabEmbedding, Style::kReplicate};

}  // namespace

std::span<const Style> all_styles() { return kStyles; }

std::string_view to_string(Style style) { return kNames.at(static_cast<size_t>(style)); }

Style parse_style(std::string_view text) {
  const auto found = std::find(kNames.begin(), kNames.end(), text);
  if (found != kNames.end()) {
    return kStyles.at(static_cast<size_t>(found - kNames.begin()));
  }
  const std::vector<std::string> names(kNames.begin(), kNames.end());
  throw std::invalid_argument("unknown style " + detail::quote(text) + ": use one of " +
                              detail::join(names, ", ") + "; the nearest is " +
                              detail::quote(detail::nearest(text, kNames)));
}

}  // namespace weft::strategy
