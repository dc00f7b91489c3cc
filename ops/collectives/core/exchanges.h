#pragma once

// Collectives that move data as it is. Pointers stay the caller's and must live until the operation
// is done; counts are in elements of `dtype`.

#include "collective.h"

#include <memory>
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

CollectivePtr make_barrier();
// `tensor` is read on the root, written elsewhere.
CollectivePtr make_broadcast(const TensorFacts& facts, Output tensor, int root, int rank);
// outputs[r] takes rank r's input; their sizes may differ.
CollectivePtr make_all_gather(DType dtype, Input input, std::vector<Output> outputs);
// `outputs` is empty but on the root.
CollectivePtr make_gather(
    DType dtype, Input input, std::vector<Output> outputs, int root, int rank, int num_ranks);
// `inputs` is empty but on the root.
CollectivePtr make_scatter(
    DType dtype, std::vector<Input> inputs, Output output, int root, int rank, int num_ranks);
// inputs[r] goes to rank r, outputs[r] comes from it.
CollectivePtr make_all_to_all(DType dtype, std::vector<Input> inputs, std::vector<Output> outputs);

// Fills shape and number of elements of a head.
void set_shape(SignatureHead& head, const TensorFacts& facts);

}  // namespace weft::collectives
