#pragma once

// The mask of attention over a sequence whose tokens are sharded: arguments, checks, and values
// that the host reads.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace weft::ops {

// The arguments of an operator.
struct SequenceMaskArguments {
  bool is_causal = false;
  std::optional<std::int64_t> window = {};
  std::optional<at::Tensor> document_offsets = {};  // [documents] or [batch, documents]
};

// The positions at which documents begin, in order, which may contain 0 and the size of the
// sequence.
using DocumentOffsets = std::vector<std::int64_t>;

struct SequenceMask {
  bool is_causal = false;                   // a query attends to its token and to those before
  std::optional<std::int64_t> window = {};  // and, of them, to the last `window` ones; causal only
  // Queries attend to keys of their document only: one element for all rows of the batch, or one
  // for each row. Empty: the sequence is one document.
  std::vector<DocumentOffsets> documents = {};
};

// Errors: ValueError if the values of the offsets are no positions in order.
void check_offsets(std::string_view op,
                   const at::Tensor& document_offsets,
                   std::int64_t sequence_size);

// Checks what is known without the values of the offsets. Errors: ValueError.
void check_mask(std::string_view op,
                const at::Tensor& query,
                const SequenceMaskArguments& arguments);

// Returns the mask of a sequence of `sequence_size` tokens; on CUDA, waits for the offsets. A
// window that excludes no token is left out. Errors: ValueError if the offsets are no positions in
// order.
SequenceMask read_mask(std::string_view op,
                       const SequenceMaskArguments& arguments,
                       std::int64_t sequence_size);

}  // namespace weft::ops
