#pragma once

// A signature describes a rank's call of a collective. Each rank publishes its own before any rank
// reads data, and compares those of all ranks, so all ranks detect the same mismatch.

#include "types.h"

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace weft::collectives {

// Has a fixed size, for shared memory, where the element counts by rank follow it.
struct SignatureHead {
  static constexpr size_t kMaxDims = 6;

  uint64_t sequence = 0;  // of this group's collectives, from 1
  Op op = Op::kBarrier;
  ReduceOp reduce_op = ReduceOp::kNone;
  DType dtype = DType::kUInt8;
  uint8_t num_dims = 0;  // of the tensor; if it has more than kMaxDims, the last item of `shape` is
                         // a digest of the remaining ones
  int32_t root = -1;
  int32_t position = 0;  // among the tensors of one coalesced call
  int32_t num_coalesced = 1;
  int64_t num_elements = 0;  // of the input tensor, or of all input tensors together
  int64_t num_chunks = 1;
  std::array<int64_t, kMaxDims> shape{};
};

struct Signature {
  SignatureHead head;
  // By peer: the number of elements that this rank sends to it and expects from it. Empty unless
  // has_counts().
  std::span<const int64_t> send_counts;
  std::span<const int64_t> receive_counts;
};

// Whether signatures of `op` have counts by peer.
bool has_counts(Op op);

// "all_reduce(sum, float32 [2, 6])"
std::string describe(const Signature& signature);

// Returns nothing if the calls match, otherwise a sentence that lists each rank's call. The values
// that must match, by operation:
//   all             operation, dtype, position in a coalesced call
//   all_reduce, broadcast, reduce   shape; reduction, root
//   reduce_scatter  reduction; the element counts for each rank
//   all_gather      each rank's count and what all others expect; gather: what the root expects
//   scatter         root; the count it sends to each rank and what that rank expects
//   all_to_all      the count of each pair of ranks and what the receiver expects
std::optional<std::string> mismatch(const std::vector<Signature>& by_rank);

}  // namespace weft::collectives
