#pragma once

#include <span>
#include <string_view>

namespace weft::strategy {

// How one module is sharded over the tensor-parallel axis.
enum class Style {
  kColumn,                 // a linear layer's output features; every rank has the full input
  kColumnGatherOutput,     // as kColumn, and the output is all-gathered
  kRow,                    // a linear layer's input features; partial outputs are summed over ranks
  kRowSplitInput,          // as kRow, for an input that is full on every rank
  kColumnRowMlp,           // an MLP, gated or plain: gate and up by column, down by row
  kAttention,              // by heads: query, key and value by column, output by row
  kVocabEmbedding,         // an embedding's rows, that is, its vocabulary
  kVocabHead,              // an output layer's rows; the loss is computed from sharded logits
  kExperts,                // a mixture's experts, each on one rank; tokens travel to their experts
  kSequenceParallel,       // replicated, computes on this rank's tokens; gradients are summed
  kReplicate,              // replicated on every rank
  kReplicateSumGradients,  // replicated, with partial gradients on each rank that are summed
  kIgnore,                 // left unchanged, with all modules below
};

// Returns all styles, in the order above.
std::span<const Style> all_styles();

// Returns whether a module of this style owns the modules below it, which then may not get another
// style.
bool owns_modules_below(Style style);

// Returns the enumerator's name in snake case: "column", "column_gather_output", ...
std::string_view to_string(Style style);

// The inverse of to_string. Throws std::invalid_argument with the valid styles and the nearest one.
Style parse_style(std::string_view text);

}  // namespace weft::strategy
