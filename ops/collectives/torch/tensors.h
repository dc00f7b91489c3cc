#pragma once

// The tensors of a call in the form that the core takes: pointers to contiguous memory that stays
// valid until the call is done.

#include "call.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace weft::collectives {

// Errors: c10::Error for a dtype that cannot be sent (quantized ones).
DType dtype_of(std::string_view op, const at::Tensor& tensor);

// Holds the tensors of one operation. A tensor that is not contiguous is sent from a copy, and
// received into a copy that is written back when the operation is done.
class TensorPack {
 public:
  explicit TensorPack(std::string_view op) : op_(op) {}

  // Errors: c10::Error unless `tensor` is a dense CPU tensor of the dtype of those before it.
  Input input(const at::Tensor& tensor);
  Output output(const at::Tensor& tensor);
  // For a tensor that is read and written.
  std::pair<Input, Output> in_place(const at::Tensor& tensor);

  // Return `num_parts` segments of `tensor`, split along its first dim into `counts` rows each;
  // empty counts: into equal segments.
  std::vector<Input> input_parts(const at::Tensor& tensor,
                                 const std::vector<int64_t>& counts,
                                 int num_parts);
  std::vector<Output> output_parts(const at::Tensor& tensor,
                                   const std::vector<int64_t>& counts,
                                   int num_parts);

  // Return `num_parts` equal segments of `tensor`, regardless of its dims. REQUIRES: `num_parts`
  // divides its number of elements.
  std::vector<Input> flat_input_parts(const at::Tensor& tensor, int num_parts);
  std::vector<Output> flat_output_parts(const at::Tensor& tensor, int num_parts);

  // The dtype of the tensors so far. REQUIRES: at least one.
  DType dtype() const { return dtype_.value(); }

  // Call it when the operation is done: copies results back to tensors that are not contiguous.
  void copy_back();

 private:
  void check(const at::Tensor& tensor);
  at::Tensor keep(at::Tensor tensor);

  std::string op_;
  std::optional<DType> dtype_;
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copy_backs_;  // to, from
};

// Return copies of the inputs that overlap an output, and the other inputs unchanged: an output may
// be written while other portions of an input are read. The tensor of rank `own` in the list may be
// the single tensor itself.
at::Tensor apart_from(const std::vector<at::Tensor>& outputs,
                      const at::Tensor& input,
                      int own = -1);
std::vector<at::Tensor> all_apart_from(const at::Tensor& output,
                                       const std::vector<at::Tensor>& inputs,
                                       int own);
// Returns the inputs of calls that are made one after another, outputs[i] from inputs[i], with
// copies of the inputs that an earlier call writes.
std::vector<at::Tensor> apart_in_turn(const std::vector<at::Tensor>& outputs,
                                      const std::vector<at::Tensor>& inputs);
// Whether `part` is the segment of rank `rank` in `whole`; both must be contiguous.
bool is_part_of(const at::Tensor& whole, const at::Tensor& part, int rank);

// Returns the dtype and shape, which ranks compare.
TensorFacts facts_of(std::string_view op, const at::Tensor& tensor);

}  // namespace weft::collectives
