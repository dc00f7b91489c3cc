#pragma once

#include <span>
#include <string_view>

namespace weft::strategy {

// How one module is sharded over the tensor-parallel axis.
enum class Style {
  kColumn,                 // a linear layer's output features; its input is whole on every rank
  kColumnGatherOutput,     // as kColumn, and the output is gathered
  kRow,                    // a linear layer's input features; its output is summed over the ranks
  kRowSplitInput,          // as kRow, of an input that is whole on every rank
  kColumnRowMlp,           // an MLP, gated or plain: outer layers by column, the inner one by row
  kAttention,              // its query, key and value by column, its output by row, by heads
  kVocabEmbedding,         // an embedding's rows, that is, its vocabulary
  kVocabHead,              // an output layer's rows; the loss is computed from sharded logits
  kSequenceParallel,       // whole, and computes on this rank's tokens; gradients are summed
  kReplicate,              // not sharded: whole on every rank
  kReplicateSumGradients,  // whole, where each rank uses it for a part: gradients are summed
  kIgnore,                 // left as it is, with everything below
};

// All styles, in the order above.
std::span<const Style> all_styles();

// Whether a module of this style owns everything below it.
bool owns_modules_below(Style style);

// The enumerators' names in snake case: "column", "column_gather_output", ...
std::string_view to_string(Style style);

// The inverse of to_string. Throws std::invalid_argument with the valid styles and the nearest one.
Style parse_style(std::string_view text);

}  // namespace weft::strategy
