#pragma once

// What c10d's calls have in common: checks of their arguments, and tensors as the core takes them.
// Errors: c10::Error, one sentence.

#include "tensors.h"

#include <chrono>
#include <memory>
#include <string_view>
#include <vector>

namespace weft::collectives {

// How c10d says that a call brings no timeout of its own.
constexpr auto kUnset = std::chrono::milliseconds(-1);

const at::Tensor& only_one(std::string_view op, const std::vector<at::Tensor>& tensors);
// The only list of `lists`, with a tensor for each rank.
const std::vector<at::Tensor>& list_for_all(std::string_view op,
                                            const std::vector<std::vector<at::Tensor>>& lists,
                                            int num_ranks);
// A tensor that holds a part for each rank.
void check_flat(std::string_view op, int64_t whole, int64_t part, int num_ranks);
void check_pairs(std::string_view op, size_t num_outputs, size_t num_inputs);

std::shared_ptr<TensorPack> new_pack(std::string_view op);
std::vector<Output> outputs_of(TensorPack& pack, const std::vector<at::Tensor>& tensors);
std::vector<Input> inputs_of(TensorPack& pack, const std::vector<at::Tensor>& tensors);
// For what is read alone and travels as an output all the same.
Output as_output(const Input& input);

}  // namespace weft::collectives
