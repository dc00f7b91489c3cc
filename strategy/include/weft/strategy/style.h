#pragma once

#include <span>
#include <string_view>

namespace weft::strategy {

// How one module is sharded over the tensor-parallel axis.
enum class Style {
  kColumn,          // a linear layer's output features; its input is whole on every rank
  kRow,             // a linear layer's input features; its output is summed over the ranks
  kColumnRowMlp,    // an MLP, gated or plain: the outer layers by column, the inner one by row
  kVocabEmbedding,  // an embedding's rows, that is, its vocabulary
  kReplicate,       // not sharded: whole on every rank
};

// All styles, in the order above.
std::span<const Style> all_styles();

// "column", "row", "column_row_mlp", "vocab_embedding", "replicate".
std::string_view to_string(Style style);

// The inverse of to_string. Throws std::invalid_argument with the valid styles and the nearest one.
Style parse_style(std::string_view text);

}  // namespace weft::strategy
