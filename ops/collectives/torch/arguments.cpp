#include "arguments.h"

namespace weft::collectives {

const at::Tensor& single_tensor(std::string_view op, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == 1, "weft: ", op, " got ", tensors.size(), " tensors; pass one");
  return tensors.front();
}

const std::vector<at::Tensor>& list_for_all(std::string_view op,
                                            const std::vector<std::vector<at::Tensor>>& lists,
                                            int num_ranks) {
  const size_t got = lists.size() == 1 ? lists.front().size() : 0;
  TORCH_CHECK(got == static_cast<size_t>(num_ranks),
              "weft: ",
              op,
              " got a list of ",
              got,
              " tensors in a group of ",
              num_ranks,
              "; pass one for each rank");
  return lists.front();
}

void check_flat(std::string_view op,
                int64_t full_elements,
                int64_t segment_elements,
                int num_ranks) {
  TORCH_CHECK(full_elements == segment_elements * num_ranks,
              "weft: ",
              op,
              " got a tensor of ",
              full_elements,
              " elements for segments of ",
              segment_elements,
              " elements in a group of ",
              num_ranks,
              "; pass a tensor with one segment for each rank");
}

void check_one_per_rank(std::string_view op, std::string_view what, size_t count, int num_ranks) {
  TORCH_CHECK(count == static_cast<size_t>(num_ranks),
              "weft: ",
              op,
              " got ",
              count,
              ' ',
              what,
              " in a group of ",
              num_ranks,
              "; pass one for each rank");
}

void check_pairs(std::string_view op, size_t num_outputs, size_t num_inputs) {
  TORCH_CHECK(num_outputs == num_inputs,
              "weft: ",
              op,
              " got ",
              num_outputs,
              " outputs for ",
              num_inputs,
              " inputs; pass one output for each input");
}

std::shared_ptr<TensorPack> new_pack(std::string_view op) {
  return std::make_shared<TensorPack>(op);
}

std::vector<Output> outputs_of(TensorPack& pack, const std::vector<at::Tensor>& tensors) {
  std::vector<Output> outputs;
  for (const at::Tensor& tensor : tensors) outputs.push_back(pack.output(tensor));
  return outputs;
}

std::vector<Input> inputs_of(TensorPack& pack, const std::vector<at::Tensor>& tensors) {
  std::vector<Input> inputs;
  for (const at::Tensor& tensor : tensors) inputs.push_back(pack.input(tensor));
  return inputs;
}

Output as_output(const Input& input) {
  return {const_cast<std::byte*>(input.data), input.num_elements};
}

}  // namespace weft::collectives
