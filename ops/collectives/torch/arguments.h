#pragma once

// Common code of c10d's calls: checks arguments and converts tensors to the types of the core.
// Errors: c10::Error, one sentence.

#include "tensors.h"

#include <chrono>
#include <memory>
#include <string_view>
#include <vector>

namespace weft::collectives {

// c10d's value for a call without a timeout of its own.
constexpr auto kUnset = std::chrono::milliseconds(-1);

// Returns the tensor of a list that must hold exactly one tensor.
const at::Tensor& single_tensor(std::string_view op, const std::vector<at::Tensor>& tensors);
// Returns the only list of `lists`, which must hold one tensor per rank.
const std::vector<at::Tensor>& list_for_all(std::string_view op,
                                            const std::vector<std::vector<at::Tensor>>& lists,
                                            int num_ranks);
// Checks that a tensor of `full_elements` holds one segment of `segment_elements` for each rank.
void check_flat(std::string_view op,
                int64_t full_elements,
                int64_t segment_elements,
                int num_ranks);
// Checks that `count`, the number of `what` ("outputs") that the call got, is one for each rank.
void check_one_per_rank(std::string_view op, std::string_view what, size_t count, int num_ranks);
void check_pairs(std::string_view op, size_t num_outputs, size_t num_inputs);

std::shared_ptr<TensorPack> new_pack(std::string_view op);
std::vector<Output> outputs_of(TensorPack& pack, const std::vector<at::Tensor>& tensors);
std::vector<Input> inputs_of(TensorPack& pack, const std::vector<at::Tensor>& tensors);
// Returns an input in the type of an output, for parameters that only some ranks write.
Output as_output(const Input& input);

}  // namespace weft::collectives
