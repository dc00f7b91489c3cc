#pragma once

// Describes a collective that a rank asks of all ranks of its group. Pointers stay the caller's and
// must live until the collective is done; counts are in elements.

#include "signature.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace weft::collectives {

struct Input {
  const std::byte* data = nullptr;
  int64_t num_elements = 0;
};

struct Output {
  std::byte* data = nullptr;
  int64_t num_elements = 0;
};

// What a tensor looks like to the other ranks.
struct TensorFacts {
  DType dtype = DType::kUInt8;
  std::vector<int64_t> shape;
};

// Made by the functions below. By operation, what `inputs` and `outputs` hold on a rank:
//   all_reduce      one; one, which may be the input
//   reduce          one; one on the root, which may be the input
//   reduce_scatter  one for each rank; one
//   all_gather      one; one for each rank
//   broadcast       one on the root; one elsewhere
//   gather          one; one for each rank on the root
//   scatter         one for each rank on the root; one
//   all_to_all      one for each rank; one for each rank
struct CollectiveCall {
  SignatureHead head;  // sequence and num_chunks are for the one who carries it out
  std::vector<int64_t> gives;
  std::vector<int64_t> expects;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  std::string purpose{};  // for texts, where this is a part of something larger

  Signature signature() const { return {head, gives, expects}; }
  size_t bytes_of(int64_t num_elements) const {
    return static_cast<size_t>(num_elements) * size_of(head.dtype);
  }
};

CollectiveCall barrier_call();
// REQUIRES (all that reduce): can_reduce(op, dtype).
CollectiveCall all_reduce_call(const TensorFacts& facts, ReduceOp op, Input input, Output output);
// `output` is ignored but on the root.
CollectiveCall reduce_call(
    const TensorFacts& facts, ReduceOp op, Input input, Output output, int root, int rank);
// inputs[r] is this rank's share of what rank r receives; sizes may differ from r to r.
CollectiveCall reduce_scatter_call(
    DType dtype, ReduceOp op, std::vector<Input> inputs, Output output, int rank);
// `tensor` is read on the root, written elsewhere.
CollectiveCall broadcast_call(const TensorFacts& facts, Output tensor, int root, int rank);
// outputs[r] takes rank r's input; their sizes may differ.
CollectiveCall all_gather_call(DType dtype, Input input, std::vector<Output> outputs);
// `outputs` is empty but on the root.
CollectiveCall gather_call(
    DType dtype, Input input, std::vector<Output> outputs, int root, int rank, int num_ranks);
// `inputs` is empty but on the root.
CollectiveCall scatter_call(
    DType dtype, std::vector<Input> inputs, Output output, int root, int rank, int num_ranks);
// inputs[r] goes to rank r, outputs[r] comes from it.
CollectiveCall all_to_all_call(DType dtype, std::vector<Input> inputs, std::vector<Output> outputs);

}  // namespace weft::collectives
