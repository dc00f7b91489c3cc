#include "tensors.h"

#include "ledger.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <numeric>
#include <span>

namespace weft::collectives {

namespace {

std::vector<int64_t> equal_sizes(int64_t num_elements, int num_segments) {
  return std::vector<int64_t>(static_cast<size_t>(num_segments), num_elements / num_segments);
}

std::vector<int64_t> segment_sizes(std::string_view op,
                                   const at::Tensor& tensor,
                                   const std::vector<int64_t>& counts,
                                   int num_segments) {
  const auto num_ranks = static_cast<size_t>(num_segments);
  TORCH_CHECK(counts.empty() || counts.size() == num_ranks,
              "weft: ",
              op,
              " got ",
              counts.size(),
              " split sizes in a group of ",
              num_segments,
              "; pass one for each rank, or none");
  const int64_t num_rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  const int64_t row_size = num_rows == 0 ? 0 : tensor.numel() / num_rows;
  if (counts.empty()) {
    TORCH_CHECK(num_rows % num_segments == 0,
                "weft: ",
                op,
                " got a first dim of ",
                num_rows,
                ", which is not a multiple of the number of ranks, ",
                num_segments,
                "; pass split sizes");
    return equal_sizes(tensor.numel(), num_segments);
  }
  std::vector<int64_t> sizes;
  for (const int64_t count : counts) {
    TORCH_CHECK(count >= 0, "weft: ", op, " got the split size ", count, "; pass 0 or more");
    sizes.push_back(count * row_size);
  }
  const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  TORCH_CHECK(sum == num_rows,
              "weft: ",
              op,
              " got split sizes that add up to ",
              sum,
              " for a first dim of ",
              num_rows,
              "; pass split sizes whose sum is the first dim");
  return sizes;
}

template <typename InputOrOutput, typename Byte>
std::vector<InputOrOutput> segments_of(Byte* data, DType dtype, const std::vector<int64_t>& sizes) {
  std::vector<InputOrOutput> segments;
  for (const int64_t size : sizes) {
    segments.push_back({data, size});
    data += static_cast<size_t>(size) * size_of(dtype);
  }
  return segments;
}

// Whether an output and an input overlap in memory. False for tensors that are not contiguous:
// TensorPack copies them. `may_be_same`: false, too, if the two are exactly the same memory.
bool overlaps(const at::Tensor& output, const at::Tensor& input, bool may_be_same) {
  if (!output.defined() || !input.defined()) return false;  // rejected later, see TensorPack::check
  if (output.layout() != at::kStrided || input.layout() != at::kStrided) return false;
  if (!output.is_contiguous() || !input.is_contiguous()) return false;
  const auto overlap = at::get_overlap_status(output, input);
  if (overlap == at::MemOverlapStatus::Full && may_be_same) return false;
  return overlap != at::MemOverlapStatus::No;
}

at::Tensor copy_of(const at::Tensor& tensor) {
  const memory::ScopedCategory copies(memory::Category::kCommunication);
  return tensor.clone();
}

}  // namespace

DType dtype_of(std::string_view op, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBool:
      return DType::kBool;
    case at::kByte:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kUInt16:
      return DType::kUInt16;
    case at::kShort:
      return DType::kInt16;
    case at::kUInt32:
      return DType::kUInt32;
    case at::kInt:
      return DType::kInt32;
    case at::kUInt64:
      return DType::kUInt64;
    case at::kLong:
      return DType::kInt64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kComplexHalf:
      return DType::kComplex32;
    case at::kComplexFloat:
      return DType::kComplex64;
    case at::kComplexDouble:
      return DType::kComplex128;
    case at::kFloat8_e5m2:
      return DType::kFloat8E5M2;
    case at::kFloat8_e5m2fnuz:
      return DType::kFloat8E5M2FNUZ;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4M3FN;
    case at::kFloat8_e4m3fnuz:
      return DType::kFloat8E4M3FNUZ;
    case at::kFloat8_e8m0fnu:
      return DType::kFloat8E8M0FNU;
    default:
      break;
  }
  TORCH_CHECK(false,
              "weft: ",
              op,
              " got a tensor of ",
              tensor.scalar_type(),
              "; pass one of a floating, complex, integer or bool dtype");
}

TensorFacts facts_of(std::string_view op, const at::Tensor& tensor) {
  return {dtype_of(op, tensor), tensor.sizes().vec()};
}

at::Tensor copy_if_overlapping(const std::vector<at::Tensor>& outputs,
                               const at::Tensor& input,
                               int own_idx) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (overlaps(outputs[i], input, static_cast<int>(i) == own_idx)) return copy_of(input);
  }
  return input;
}

std::vector<at::Tensor> copy_overlapping(const at::Tensor& output,
                                         const std::vector<at::Tensor>& inputs,
                                         int own_idx) {
  std::vector<at::Tensor> sources = inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (overlaps(output, inputs[i], static_cast<int>(i) == own_idx))
      sources[i] = copy_of(inputs[i]);
  }
  return sources;
}

std::vector<at::Tensor> copy_if_written_earlier(const std::vector<at::Tensor>& outputs,
                                                const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> sources = inputs;
  for (size_t i = 1; i < inputs.size(); ++i) {
    const auto before = std::span(outputs).first(std::min(i, outputs.size()));
    const auto is_written = [&](const at::Tensor& each) {
      return overlaps(each, inputs[i], false);
    };
    if (std::ranges::any_of(before, is_written)) sources[i] = copy_of(inputs[i]);
  }
  return sources;
}

bool is_segment_of(const at::Tensor& full, const at::Tensor& segment, int rank) {
  const auto is_dense = [](const at::Tensor& each) {
    return each.defined() && each.layout() == at::kStrided && each.is_contiguous();
  };
  if (!is_dense(full) || !is_dense(segment)) return false;
  const auto* const begin = static_cast<const std::byte*>(full.const_data_ptr()) +
                            segment.nbytes() * static_cast<size_t>(rank);
  return segment.const_data_ptr() == begin;
}

void TensorPack::check(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided,
              "weft: ",
              op_,
              " got ",
              tensor.defined() ? c10::str("a tensor on ", tensor.device(), ", ", tensor.layout())
                               : std::string("an undefined tensor"),
              "; pass dense CPU tensors");
  const DType dtype = dtype_of(op_, tensor);
  TORCH_CHECK(!dtype_ || *dtype_ == dtype,
              "weft: ",
              op_,
              " got tensors of ",
              name_of(dtype_.value_or(dtype)),
              " and ",
              name_of(dtype),
              "; pass tensors of one dtype");
  dtype_ = dtype;
}

at::Tensor TensorPack::keep(at::Tensor tensor) {
  kept_.push_back(tensor);
  return tensor;
}

Input TensorPack::input(const at::Tensor& tensor) {
  check(tensor);
  const memory::ScopedCategory copies(memory::Category::kCommunication);
  const at::Tensor kept = keep(tensor.resolve_conj().resolve_neg().contiguous());
  return {static_cast<const std::byte*>(kept.const_data_ptr()), kept.numel()};
}

Output TensorPack::output(const at::Tensor& tensor) {
  check(tensor);
  const memory::ScopedCategory copies(memory::Category::kCommunication);
  at::Tensor target = tensor;
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    at::assert_no_internal_overlap(tensor);
    target = at::empty(tensor.sizes(), tensor.options());
    copy_backs_.emplace_back(tensor, target);
  }
  keep(target);
  return {static_cast<std::byte*>(target.mutable_data_ptr()), target.numel()};
}

std::pair<Input, Output> TensorPack::in_place(const at::Tensor& tensor) {
  const Output to = output(tensor);
  return {input(tensor), to};
}

std::vector<Input> TensorPack::input_segments(const at::Tensor& tensor,
                                              const std::vector<int64_t>& counts,
                                              int num_segments) {
  const Input full = input(tensor);
  return segments_of<Input>(full.data, dtype(), segment_sizes(op_, tensor, counts, num_segments));
}

std::vector<Output> TensorPack::output_segments(const at::Tensor& tensor,
                                                const std::vector<int64_t>& counts,
                                                int num_segments) {
  const Output full = output(tensor);
  return segments_of<Output>(full.data, dtype(), segment_sizes(op_, tensor, counts, num_segments));
}

std::vector<Input> TensorPack::flat_input_segments(const at::Tensor& tensor, int num_segments) {
  const Input full = input(tensor);
  return segments_of<Input>(full.data, dtype(), equal_sizes(full.num_elements, num_segments));
}

std::vector<Output> TensorPack::flat_output_segments(const at::Tensor& tensor, int num_segments) {
  const Output full = output(tensor);
  return segments_of<Output>(full.data, dtype(), equal_sizes(full.num_elements, num_segments));
}

void TensorPack::copy_back() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& [to, from] : copy_backs_) to.copy_(from);
}

}  // namespace weft::collectives
