#include "sparse_sum.h"

#include "ledger.h"
#include "tensors.h"

#include <ATen/ATen.h>

#include <functional>
#include <numeric>

namespace weft::collectives {

namespace {

// Returns the dtype in which the values are added.
at::ScalarType sparse_sum_dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
    case at::kBFloat16:
      return at::kFloat;
    case at::kComplexHalf:
      return at::kComplexFloat;
    case at::kBool:  // torch does not add sparse tensors of bool
      return at::kInt;
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return tensor.scalar_type();
    default:
      break;
  }
  TORCH_CHECK(false,
              "weft: all_reduce got a sparse tensor of ",
              tensor.scalar_type(),
              "; pass one of a floating dtype of 16 bits or more, a complex or signed integer "
              "dtype, uint8 or bool");
}

// The shape of the values of `num_entries` entries.
std::vector<int64_t> shape_of_sparse_values(const at::Tensor& tensor, int64_t num_entries) {
  std::vector<int64_t> shape = tensor.sizes().slice(static_cast<size_t>(tensor.sparse_dim())).vec();
  shape.insert(shape.begin(), num_entries);
  return shape;
}

int64_t padded_to_index(int64_t num_bytes) { return (num_bytes + 7) / 8 * 8; }

}  // namespace

SparseSum::SparseSum(const at::Tensor& tensor) : tensor_(tensor) {
  TORCH_CHECK(tensor.device().is_cpu(),
              "weft: all_reduce got a sparse tensor on ",
              tensor.device(),
              "; pass CPU tensors");
  sparse_sum_dtype_of(tensor);
  const auto shape = shape_of_sparse_values(tensor, 1);
  value_bytes_ = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()) *
                 static_cast<int64_t>(tensor.element_size());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const memory::ScopedCategory copies(memory::Category::kCommunication);
  const at::Tensor coalesced = tensor.coalesce();
  own_ = allocate(coalesced._nnz());
  values_of(own_).copy_(coalesced._values());
  indices_of(own_).copy_(coalesced._indices());
}

SparseSum::Entries SparseSum::allocate(int64_t num_entries) const {
  const int64_t index_bytes = tensor_.sparse_dim() * static_cast<int64_t>(sizeof(int64_t));
  return {num_entries,
          at::empty({padded_to_index(num_entries * value_bytes_) + num_entries * index_bytes},
                    at::kByte)};
}

// Views of another dtype need an offset that is a multiple of the element size, from_blob does not.
at::Tensor SparseSum::values_of(const Entries& entries) const {
  return at::from_blob(entries.bytes.mutable_data_ptr(),
                       shape_of_sparse_values(tensor_, entries.num),
                       at::TensorOptions(tensor_.scalar_type()));
}

at::Tensor SparseSum::indices_of(const Entries& entries) const {
  auto* const begin = static_cast<std::byte*>(entries.bytes.mutable_data_ptr()) +
                      padded_to_index(entries.num * value_bytes_);
  return at::from_blob(begin, {tensor_.sparse_dim(), entries.num}, at::TensorOptions(at::kLong));
}

std::vector<Output> SparseSum::allocate_all(const std::vector<int64_t>& num_entries) {
  const memory::ScopedCategory copies(memory::Category::kCommunication);
  std::vector<Output> outputs;
  for (const int64_t num : num_entries) {
    const Entries& entries = of_ranks_.emplace_back(allocate(num));
    outputs.push_back(
        {static_cast<std::byte*>(entries.bytes.mutable_data_ptr()), entries.bytes.numel()});
  }
  return outputs;
}

CollectiveCall SparseSum::call(const std::shared_ptr<SparseSum>& sum) {
  const at::Tensor& tensor = sum->tensor_;
  const at::Tensor& bytes = sum->own_.bytes;
  return sparse_all_reduce_call(
      facts_of("all_reduce", tensor),
      static_cast<int>(tensor.sparse_dim()),
      sum->own_.num,
      {static_cast<const std::byte*>(bytes.const_data_ptr()), bytes.numel()},
      [sum](const std::vector<int64_t>& num_entries) { return sum->allocate_all(num_entries); });
}

void SparseSum::write_result() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::ScalarType sum_dtype = sparse_sum_dtype_of(tensor_);
  const auto as_sparse = [&](const at::Tensor& indices, const at::Tensor& values) {
    return at::_sparse_coo_tensor_unsafe(indices,
                                         values,
                                         tensor_.sizes(),
                                         tensor_.options().dtype(values.scalar_type()),
                                         /*is_coalesced=*/true);
  };
  at::Tensor sum;
  {
    const memory::ScopedCategory sums(memory::Category::kCommunication);
    for (const Entries& entries : of_ranks_) {
      const at::Tensor part = as_sparse(indices_of(entries), values_of(entries).to(sum_dtype));
      sum = sum.defined() ? at::add(sum, part) : part;
    }
  }
  tensor_.copy_(as_sparse(sum._indices(), sum._values().to(tensor_.scalar_type())));
  of_ranks_.clear();
}

}  // namespace weft::collectives
