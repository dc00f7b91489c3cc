#pragma once

// One call of a collective on one rank. Memory belongs to the caller and must stay valid until the
// collective is done; counts are in elements.

#include "signature.h"

#include <cstddef>
#include <cstdint>
#include <functional>
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

// The properties of a tensor that ranks compare.
struct TensorFacts {
  DType dtype = DType::kUInt8;
  std::vector<int64_t> shape;
};

// Returns the outputs of a collective from the number of elements in the header of each rank, which
// are known once the ranks have compared their calls.
using MakeOutputs = std::function<std::vector<Output>(const std::vector<int64_t>&)>;

// Made by the functions below. The number of `inputs` and of `outputs` on a rank:
//   barrier         none; none
//   all_reduce      one; one, which may be the input
//   reduce          one; one on the root, which may be the input
//   reduce_scatter  one per rank; one
//   all_gather      one; one per rank
//   broadcast       one on the root; one on the other ranks
//   gather          one; one per rank on the root
//   scatter         one per rank on the root; one
//   all_to_all      one per rank; one per rank
//   sparse_all_reduce  one; one per rank, from make_outputs
struct CollectiveCall {
  SignatureHeader header;  // sequence and num_chunks are set when the collective begins
  std::vector<int64_t> send_counts;
  std::vector<int64_t> receive_counts;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  std::string purpose{};       // for error messages: the collective of which this is one step
  MakeOutputs make_outputs{};  // for a sparse all-reduce

  Signature signature() const { return {header, send_counts, receive_counts}; }
  // The size of an input or output. Those of a sparse all-reduce are counted in bytes.
  size_t bytes_of(int64_t num_elements) const {
    const size_t size = header.op == Op::kSparseAllReduce ? 1 : size_of(header.dtype);
    return static_cast<size_t>(num_elements) * size;
  }
};

CollectiveCall barrier_call();
// REQUIRES, for all reductions: can_reduce(op, dtype).
CollectiveCall all_reduce_call(const TensorFacts& facts, ReduceOp op, Input input, Output output);
// `output` is used on the root only.
CollectiveCall reduce_call(
    const TensorFacts& facts, ReduceOp op, Input input, Output output, int root, int rank);
// inputs[r] is this rank's contribution to the result of rank r; sizes may differ between ranks.
CollectiveCall reduce_scatter_call(
    DType dtype, ReduceOp op, std::vector<Input> inputs, Output output, int rank);
// The root reads `tensor`, the other ranks write it.
CollectiveCall broadcast_call(const TensorFacts& facts, Output tensor, int root, int rank);
// outputs[r] receives the input of rank r; sizes may differ between ranks.
CollectiveCall all_gather_call(DType dtype, Input input, std::vector<Output> outputs);
// `outputs` is empty except on the root.
CollectiveCall gather_call(
    DType dtype, Input input, std::vector<Output> outputs, int root, int rank, int num_ranks);
// `inputs` is empty except on the root.
CollectiveCall scatter_call(
    DType dtype, std::vector<Input> inputs, Output output, int root, int rank, int num_ranks);
// inputs[r] is sent to rank r, outputs[r] is received from it.
CollectiveCall all_to_all_call(DType dtype, std::vector<Input> inputs, std::vector<Output> outputs);
// Gathers the stored entries of each rank's sparse tensor, as bytes, for a sum: the caller adds
// them up. `num_entries` and the size of the input may differ between ranks. REQUIRES: a size that
// depends on the number of entries only.
CollectiveCall sparse_all_reduce_call(const TensorFacts& facts,
                                      int num_sparse_dims,
                                      int64_t num_entries,
                                      Input entries,
                                      MakeOutputs make_outputs);

}  // namespace weft::collectives
