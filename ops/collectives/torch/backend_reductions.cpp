// c10d's calls that reduce.
#include "arguments.h"
#include "backend.h"
#include "reduce.h"
#include "reductions.h"

#include <ATen/ops/from_blob.h>

namespace weft::collectives {

namespace {

ReduceOp reduce_op_of(std::string_view op, const c10d::ReduceOp& reduce_op, DType dtype) {
  ReduceOp known = ReduceOp::kNone;
  switch (reduce_op) {
    case c10d::ReduceOp::SUM:
      known = ReduceOp::kSum;
      break;
    case c10d::ReduceOp::AVG:
      known = ReduceOp::kAvg;
      break;
    case c10d::ReduceOp::PRODUCT:
      known = ReduceOp::kProduct;
      break;
    case c10d::ReduceOp::MIN:
      known = ReduceOp::kMin;
      break;
    case c10d::ReduceOp::MAX:
      known = ReduceOp::kMax;
      break;
    case c10d::ReduceOp::BAND:
      known = ReduceOp::kBand;
      break;
    case c10d::ReduceOp::BOR:
      known = ReduceOp::kBor;
      break;
    case c10d::ReduceOp::BXOR:
      known = ReduceOp::kBxor;
      break;
    default:
      TORCH_CHECK(false, "weft: ", op, " got PREMUL_SUM; multiply first and use SUM");
  }
  TORCH_CHECK(can_reduce(known, dtype),
              "weft: ",
              op,
              " got ",
              name_of(known),
              " for tensors of ",
              name_of(dtype),
              "; pass integers or bool for bit operations, no bool for avg, only sum and avg for "
              "complex numbers; float8 cannot be reduced");
  return known;
}

}  // namespace

using c10d::OpType;

WeftBackend::Step WeftBackend::all_reduce_step(const at::Tensor& tensor,
                                               const c10d::ReduceOp& op,
                                               CoalescedPosition position) const {
  const auto pack = new_pack("all_reduce");
  const auto [input, output] = pack->in_place(tensor);
  const ReduceOp reduce_op = reduce_op_of("all_reduce", op, pack->dtype());
  return step(
      all_reduce_call(facts_of("all_reduce", tensor), reduce_op, input, output), pack, position);
}

WeftBackend::WorkPtr WeftBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = single_tensor("all_reduce", tensors);
  if (tensor.defined() && tensor.layout() == at::kSparse) return sparse_all_reduce(tensor, opts);
  return start({OpType::ALLREDUCE, "weft:all_reduce", opts.timeout, opts.asyncOp},
               {all_reduce_step(tensor, opts.reduceOp)},
               tensors,
               tensors);
}

WeftBackend::WorkPtr WeftBackend::sparse_all_reduce(const at::Tensor& tensor,
                                                    const c10d::AllreduceOptions& opts) {
  const ReduceOp reduce_op =
      reduce_op_of("all_reduce", opts.reduceOp, dtype_of("all_reduce", tensor));
  TORCH_CHECK(reduce_op == ReduceOp::kSum,
              "weft: all_reduce got ",
              name_of(reduce_op),
              " for a sparse tensor; pass ReduceOp.SUM, or a dense tensor");
  const auto sum = std::make_shared<SparseSum>(tensor);
  Step gather = step(SparseSum::call(sum), nullptr);
  gather.sparse_sum = sum;
  return start({OpType::_ALLREDUCE_SPARSE, "weft:sparse_all_reduce", opts.timeout, opts.asyncOp},
               {gather},
               {tensor},
               {tensor});
}

WeftBackend::WorkPtr WeftBackend::allreduce_from_writer(at::Tensor& result,
                                                        const WriteInput& write_input) {
  // Copying a smaller tensor takes less time than a call of acquire_scratch().
  std::byte* const scratch =
      result.nbytes() > kOneShotBytes ? group_->acquire_scratch(result.nbytes()) : nullptr;
  if (scratch == nullptr) {
    write_input(result);
    Tensors tensors{result};
    return allreduce(tensors, {});
  }
  const auto pack = new_pack("all_reduce");
  Output sum;
  try {
    sum = pack->output(result);
    auto input = at::from_blob(scratch, result.sizes(), result.options());
    write_input(input);
  } catch (...) {
    group_->release_scratch();
    throw;
  }
  auto call = all_reduce_call(
      facts_of("all_reduce", result), ReduceOp::kSum, {scratch, result.numel()}, sum);
  return start({OpType::ALLREDUCE, "weft:all_reduce", kUnset, false, true},
               {step(std::move(call), pack)},
               {result},
               {result});
}

WeftBackend::WorkPtr WeftBackend::allreduce_coalesced(Tensors& tensors,
                                                      const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<Step> steps;
  for (size_t i = 0; i < tensors.size(); ++i) {
    steps.push_back(all_reduce_step(tensors[i], opts.reduceOp, {i, tensors.size()}));
  }
  return start(
      {OpType::ALLREDUCE_COALESCED, "weft:all_reduce_coalesced", opts.timeout, opts.asyncOp},
      steps,
      tensors,
      tensors);
}

WeftBackend::WorkPtr WeftBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = single_tensor("reduce", tensors);
  const int root = checked_root("reduce", opts.rootRank);
  const auto pack = new_pack("reduce");
  const bool is_root = root == getRank();
  const auto [input, output] =
      is_root ? pack->in_place(tensor) : std::pair(pack->input(tensor), Output{});
  const ReduceOp reduce_op = reduce_op_of("reduce", opts.reduceOp, pack->dtype());
  return start(
      {OpType::REDUCE, "weft:reduce", opts.timeout, opts.asyncOp},
      {step(reduce_call(facts_of("reduce", tensor), reduce_op, input, output, root, getRank()),
            pack)},
      tensors,
      tensors);
}

WeftBackend::WorkPtr WeftBackend::reduce_scatter(Tensors& outputs,
                                                 std::vector<Tensors>& inputs,
                                                 const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = single_tensor("reduce_scatter", outputs);
  const Tensors& list = list_for_all("reduce_scatter", inputs, getSize());
  const auto pack = new_pack("reduce_scatter");
  const Output target = pack->output(output);
  auto data = inputs_of(*pack, copy_overlapping(output, list, getRank()));
  const ReduceOp reduce_op = reduce_op_of("reduce_scatter", opts.reduceOp, pack->dtype());
  return start(
      {OpType::REDUCE_SCATTER, "weft:reduce_scatter", opts.timeout, opts.asyncOp},
      {step(reduce_scatter_call(pack->dtype(), reduce_op, std::move(data), target, getRank()),
            pack)},
      list,
      outputs);
}

WeftBackend::Step WeftBackend::reduce_scatter_step(const at::Tensor& output,
                                                   const at::Tensor& input,
                                                   const c10d::ReduceOp& op,
                                                   CoalescedPosition position) const {
  check_flat("reduce_scatter_tensor", input.numel(), output.numel(), getSize());
  const auto pack = new_pack("reduce_scatter_tensor");
  const Output sum = pack->output(output);
  const bool in_place = is_segment_of(input, output, getRank());
  auto segments =
      pack->flat_input_segments(in_place ? input : copy_if_overlapping({output}, input), getSize());
  const ReduceOp reduce_op = reduce_op_of("reduce_scatter_tensor", op, pack->dtype());
  return step(reduce_scatter_call(pack->dtype(), reduce_op, std::move(segments), sum, getRank()),
              pack,
              position);
}

WeftBackend::WorkPtr WeftBackend::_reduce_scatter_base(at::Tensor& output,
                                                       at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& opts) {
  return start(
      {OpType::_REDUCE_SCATTER_BASE, "weft:reduce_scatter_tensor", opts.timeout, opts.asyncOp},
      {reduce_scatter_step(output, input, opts.reduceOp)},
      {input},
      {output});
}

WeftBackend::WorkPtr WeftBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  check_pairs("reduce_scatter_tensor_coalesced", outputs.size(), inputs.size());
  const Tensors sources = copy_if_written_earlier(outputs, inputs);
  std::vector<Step> steps;
  for (size_t i = 0; i < inputs.size(); ++i) {
    steps.push_back(reduce_scatter_step(outputs[i], sources[i], opts.reduceOp, {i, inputs.size()}));
  }
  return start(
      {OpType::REDUCE_SCATTER, "weft:reduce_scatter_tensor_coalesced", opts.timeout, opts.asyncOp},
      steps,
      inputs,
      outputs);
}

c10::intrusive_ptr<c10d::Work> all_reduce_from_writer(c10d::ProcessGroup& group,
                                                      at::Tensor& result,
                                                      const WriteInput& write_input) {
  if (!group.hasBackends()) return nullptr;  // a subclass with collectives of its own
  const auto backend = group.getBackend(at::kCPU);
  auto* const ours = dynamic_cast<WeftBackend*>(backend.get());
  return ours == nullptr ? nullptr : ours->allreduce_from_writer(result, write_input);
}

}  // namespace weft::collectives
