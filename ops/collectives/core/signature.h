#pragma once

// A signature holds the properties of a rank's call of a collective that all ranks compare. Each
// rank publishes its signature before any rank reads data, and compares the signatures of all
// ranks, so all ranks detect the same mismatch.

#include "types.h"

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace weft::collectives {

// The part of a signature with a fixed size. In shared memory, the element counts by peer follow
// it.
struct SignatureHeader {
  static constexpr size_t kMaxDims = 6;

  uint64_t sequence = 0;  // of this group's collectives, from 1
  Op op = Op::kBarrier;
  ReduceOp reduce_op = ReduceOp::kNone;
  DType dtype = DType::kUInt8;
  uint8_t num_dims = 0;  // of the tensor; if it has more than kMaxDims, the last item of `shape` is
                         // a hash of the remaining dims
  int32_t root = -1;
  int32_t position = 0;  // of the tensor in a coalesced call, from 0
  int32_t num_coalesced = 1;
  int32_t num_sparse_dims = 0;  // of a sparse tensor: its first dims
  int64_t num_elements = 0;  // of the input tensor, or of all input tensors together; of a sparse
                             // tensor: the number of its stored entries
  int64_t num_chunks = 1;    // that this rank needs; all ranks run the maximum
  std::array<int64_t, kMaxDims> shape{};
};

struct Signature {
  SignatureHeader header;
  // By peer: the number of elements that this rank sends to it and receives from it. Empty unless
  // has_counts().
  std::span<const int64_t> send_counts;
  std::span<const int64_t> receive_counts;
};

// Whether signatures of `op` have counts by peer.
bool has_counts(Op op);

// "all_reduce(sum, float32 [2, 6])"
std::string describe(const Signature& signature);

// Returns nullopt if the calls match, otherwise a text that lists the distinct calls, at most 16,
// each with at most 16 of its ranks. In all calls, these values must be equal: operation,
// reduction, root, position in a coalesced call, number of tensors in it and, except in a barrier,
// dtype. In addition:
//   all_reduce, reduce, broadcast  equal shapes
//   reduce_scatter                 equal counts by destination, each the size of that rank's output
//   all_gather, all_to_all         each rank receives the count that its peer sends to it
//   gather                         the root receives the count that each rank sends
//   scatter                        each rank receives the count that the root sends to it
//   sparse_all_reduce              equal shapes and numbers of sparse dims
std::optional<std::string> mismatch(const std::vector<Signature>& by_rank);

std::vector<int64_t> num_elements_of(const std::vector<Signature>& by_rank);

}  // namespace weft::collectives
