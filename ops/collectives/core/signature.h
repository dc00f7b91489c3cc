#pragma once

// What a rank brings to a collective. Each publishes its own before any data is read, all compare
// all, so all come to the same verdict.

#include "types.h"

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace weft::collectives {

// Has a fixed size, for shared memory; the per-rank element counts lie behind it.
struct SignatureHead {
  static constexpr size_t kMaxDims = 6;

  uint64_t sequence = 0;  // of this group's collectives, from 1
  Op op = Op::kBarrier;
  ReduceOp reduce_op = ReduceOp::kNone;
  DType dtype = DType::kUInt8;
  uint8_t num_dims = 0;  // of the tensor; where it has more than kMaxDims, the last item of `shape`
                         // is a digest of all from there on
  int32_t root = -1;
  int32_t position = 0;  // among the tensors of one coalesced call
  int32_t num_coalesced = 1;
  int64_t num_elements = 0;  // of the tensor that goes in, or of all of them together
  int64_t num_chunks = 1;
  std::array<int64_t, kMaxDims> shape{};
};

struct Signature {
  SignatureHead head;
  // By peer, in elements: what this rank gives to it and expects from it. Empty where the operation
  // has no such thing.
  std::span<const int64_t> gives;
  std::span<const int64_t> expects;
};

// Whether signatures of `op` have counts by peer.
bool has_counts(Op op);

// "all_reduce(sum, float32 [2, 6])"
std::string describe(const Signature& signature);

// Nothing where the calls belong together by the rule of their operation:
//   all             operation, dtype, place in a coalesced call
//   all_reduce, broadcast, reduce   shape; reduction, root
//   reduce_scatter  reduction; the elements for each rank
//   all_gather      each rank's elements as all others expect them; gather: as the root does
//   scatter         root; what it gives as each rank expects it
//   all_to_all      what each gives each as that one expects it
// Otherwise a sentence with what each rank brought.
std::optional<std::string> mismatch(const std::vector<Signature>& by_rank);

}  // namespace weft::collectives
