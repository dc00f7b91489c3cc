#include "attention_mask.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace weft::ops {

namespace {

// Returns the documents of the rows of the batch: see SequenceMask.
std::vector<DocumentOffsets> read_documents(std::string_view op,
                                            const at::Tensor& document_offsets,
                                            std::int64_t sequence_size) {
  auto offsets = document_offsets.to(at::kCPU, at::kLong).contiguous();
  if (offsets.dim() == 1) {
    offsets = offsets.unsqueeze(0);
  }
  std::vector<DocumentOffsets> documents;
  for (std::int64_t row = 0; row < offsets.size(0); ++row) {
    const auto* first = offsets.const_data_ptr<std::int64_t>() + row * offsets.size(1);
    DocumentOffsets of_row(first, first + offsets.size(1));
    TORCH_CHECK_VALUE(
        std::ranges::is_sorted(of_row) &&
            (of_row.empty() || (of_row.front() >= 0 && of_row.back() <= sequence_size)),
        op,
        ": got document_offsets ",
        at::IntArrayRef(of_row),
        " for a sequence of ",
        sequence_size,
        " tokens; pass positions from 0 to the number of tokens, in order.");
    documents.push_back(std::move(of_row));
  }
  return documents;
}

}  // namespace

void check_offsets(std::string_view op,
                   const at::Tensor& document_offsets,
                   std::int64_t sequence_size) {
  read_documents(op, document_offsets, sequence_size);
}

void check_mask(std::string_view op,
                const at::Tensor& query,
                const SequenceMaskArguments& arguments) {
  const auto& window = arguments.window;
  TORCH_CHECK_VALUE(!window.has_value() || (*window > 0 && arguments.is_causal),
                    op,
                    ": got window ",
                    window.value_or(0),
                    " with is_causal ",
                    arguments.is_causal ? "true" : "false",
                    "; pass the positive number of keys that a query attends to, and is_causal.");
  if (!arguments.document_offsets.has_value()) {
    return;
  }
  const auto& offsets = *arguments.document_offsets;
  const auto dtype = offsets.scalar_type();
  const bool is_by_row = offsets.dim() == 2 && offsets.sym_size(0) == query.sym_size(0);
  TORCH_CHECK_VALUE((dtype == at::kLong || dtype == at::kInt) && (offsets.dim() == 1 || is_by_row),
                    op,
                    ": got document_offsets of dtype ",
                    dtype,
                    " and shape ",
                    offsets.sym_sizes(),
                    " with query of shape ",
                    query.sym_sizes(),
                    "; pass int32 or int64 positions [documents] or [batch, documents].");
  TORCH_CHECK_VALUE(offsets.device() == query.device() || offsets.is_cpu(),
                    op,
                    ": got document_offsets on ",
                    offsets.device(),
                    " with query on ",
                    query.device(),
                    "; move them to one device, or the offsets to the CPU.");
}

SequenceMask read_mask(std::string_view op,
                       const SequenceMaskArguments& arguments,
                       std::int64_t sequence_size) {
  SequenceMask mask{arguments.is_causal, {}, {}};
  if (arguments.window.has_value() && *arguments.window < sequence_size) {
    mask.window = arguments.window;
  }
  if (arguments.document_offsets.has_value()) {
    mask.documents = read_documents(op, *arguments.document_offsets, sequence_size);
  }
  return mask;
}

}  // namespace weft::ops
