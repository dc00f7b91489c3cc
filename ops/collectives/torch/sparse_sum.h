#pragma once

// The all-reduce of a sparse COO tensor: the stored entries of all ranks are gathered, and each
// rank adds them up in rank order, which gives the same bits on every rank.

#include "call.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace weft::collectives {

class SparseSum {
 public:
  // tensor: a sparse COO tensor, which write_result() replaces by the sum. Coalesces the entries.
  // Errors: c10::Error unless it is a CPU tensor of a dtype that torch can add in sparse tensors.
  explicit SparseSum(const at::Tensor& tensor);

  // Returns the call that gathers the entries; it keeps `sum`.
  static CollectiveCall call(const std::shared_ptr<SparseSum>& sum);

  // The bytes of this rank's entries.
  int64_t num_bytes() const { return own_.bytes.numel(); }

  // Writes the sum to the tensor, coalesced; half types are added in float32 and rounded once. Call
  // it when the collective is done.
  void write_result();

 private:
  // Entries as bytes: the values, padded to a multiple of 8 bytes, then the indices.
  struct Entries {
    int64_t num = 0;
    at::Tensor bytes;
  };
  Entries allocate(int64_t num_entries) const;
  at::Tensor values_of(const Entries& entries) const;
  at::Tensor indices_of(const Entries& entries) const;
  std::vector<Output> allocate_all(const std::vector<int64_t>& num_entries);

  at::Tensor tensor_;
  int64_t value_bytes_;  // of an entry
  Entries own_;
  std::vector<Entries> of_ranks_;
};

}  // namespace weft::collectives
