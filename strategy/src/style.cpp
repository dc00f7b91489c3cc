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
constexpr std::array<std::string_view, 13> kNames = {"column",
                                                     "column_gather_output",
                                                     "row",
                                                     "row_split_input",
                                                     "column_row_mlp",
                                                     "attention",
                                                     "vocab_embedding",
                                                     "vocab_head",
                                                     "experts",
                                                     "sequence_parallel",
                                                     "replicate",
                                                     "replicate_sum_gradients",
                                                     "ignore"};
constexpr std::array<Style, 13> kStyles = {Style::kColumn,
                                           Style::kColumnGatherOutput,
                                           Style::kRow,
                                           Style::kRowSplitInput,
                                           Style::kColumnRowMlp,
                                           Style::kAttention,
                                           Style::kVocabEmbedding,
                                           Style::kVocabHead,
                                           Style::kExperts,
                                           Style::kSequenceParallel,
                                           Style::kReplicate,
                                           Style::kReplicateSumGradients,
                                           Style::kIgnore};

}  // namespace

std::span<const Style> all_styles() { return kStyles; }

bool owns_modules_below(Style style) {
  return style == Style::kColumnRowMlp || style == Style::kAttention || style == Style::kExperts ||
         style == Style::kSequenceParallel || style == Style::kIgnore;
}

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
