#pragma once

// The tensors of a call in the form that core/ uses: pointers to contiguous memory that stays valid
// until the call is done.

#include "call.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace weft::collectives {

// Errors: c10::Error for a dtype that cannot be sent, such as a quantized one.
DType dtype_of(std::string_view op, const at::Tensor& tensor);

// Holds the tensors of one operation. Operations use contiguous memory: before the operation, an
// input that is not contiguous is copied; after it, results are copied to outputs that are not.
class TensorPack {
 public:
  explicit TensorPack(std::string_view op) : op_(op) {}

  // Errors: c10::Error unless `tensor` is a dense CPU tensor of the same dtype as the tensors that
  // the pack already holds.
  Input input(const at::Tensor& tensor);
  Output output(const at::Tensor& tensor);
  // For a tensor that is read and written.
  std::pair<Input, Output> in_place(const at::Tensor& tensor);

  // Return `num_segments` segments of `tensor`, split along its first dim: segment i has counts[i]
  // rows. If `counts` is empty, the segments are equal.
  std::vector<Input> input_segments(const at::Tensor& tensor,
                                    const std::vector<int64_t>& counts,
                                    int num_segments);
  std::vector<Output> output_segments(const at::Tensor& tensor,
                                      const std::vector<int64_t>& counts,
                                      int num_segments);

  // Return `num_segments` equal segments of `tensor`, regardless of its dims. REQUIRES:
  // `num_segments` divides its number of elements.
  std::vector<Input> flat_input_segments(const at::Tensor& tensor, int num_segments);
  std::vector<Output> flat_output_segments(const at::Tensor& tensor, int num_segments);

  // The dtype of the tensors so far. REQUIRES: at least one.
  DType dtype() const { return dtype_.value(); }

  // Copies results back to outputs that are not contiguous. Call it when the operation is done.
  void copy_back();

 private:
  void check(const at::Tensor& tensor);
  at::Tensor keep(at::Tensor tensor);

  std::string op_;
  std::optional<DType> dtype_;
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copy_backs_;  // to, from
};

// Return the inputs, with copies of those that overlap an output: an output may be written while
// other portions of the input are read. Exception: the single tensor may be the same memory as item
// `own_idx` of the list, because a rank overwrites its own segment only after it has read it.
at::Tensor copy_if_overlapping(const std::vector<at::Tensor>& outputs,
                               const at::Tensor& input,
                               int own_idx = -1);
std::vector<at::Tensor> copy_overlapping(const at::Tensor& output,
                                         const std::vector<at::Tensor>& inputs,
                                         int own_idx);
// For calls that run one after another and write outputs[i] from inputs[i]: returns the inputs,
// with copies of the inputs that an earlier call overwrites.
std::vector<at::Tensor> copy_if_written_earlier(const std::vector<at::Tensor>& outputs,
                                                const std::vector<at::Tensor>& inputs);
// Whether the memory of `segment` is the segment of rank `rank` in `full`. False unless both are
// contiguous.
bool is_segment_of(const at::Tensor& full, const at::Tensor& segment, int rank);

// Returns the dtype and shape, which ranks compare.
TensorFacts facts_of(std::string_view op, const at::Tensor& tensor);

}  // namespace weft::collectives
