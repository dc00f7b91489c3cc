// c10d's calls that do not reduce.
#include "arguments.h"
#include "backend.h"

namespace weft::collectives {

using c10d::OpType;

WeftBackend::WorkPtr WeftBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = single_tensor("broadcast", tensors);
  const int root = checked_root("broadcast", opts.rootRank);
  const auto pack = new_pack("broadcast");
  const Output data = root == getRank() ? as_output(pack->input(tensor)) : pack->output(tensor);
  return start({OpType::BROADCAST, "weft:broadcast", opts.timeout, opts.asyncOp},
               {step(broadcast_call(facts_of("broadcast", tensor), data, root, getRank()), pack)},
               tensors,
               tensors);
}

WeftBackend::Step WeftBackend::all_gather_step(const at::Tensor& input,
                                               const Tensors& outputs,
                                               CoalescedPosition position) const {
  const auto pack = new_pack("all_gather");
  const Input data = pack->input(copy_if_overlapping(outputs, input, getRank()));
  auto targets = outputs_of(*pack, outputs);
  return step(all_gather_call(pack->dtype(), data, std::move(targets)), pack, position);
}

WeftBackend::Step WeftBackend::all_gather_step(const at::Tensor& input,
                                               const at::Tensor& output,
                                               CoalescedPosition position) const {
  check_flat("all_gather_into_tensor", output.numel(), input.numel(), getSize());
  const auto pack = new_pack("all_gather_into_tensor");
  const Input data = pack->input(
      is_segment_of(output, input, getRank()) ? input : copy_if_overlapping({output}, input));
  auto targets = pack->flat_output_segments(output, getSize());
  return step(all_gather_call(pack->dtype(), data, std::move(targets)), pack, position);
}

WeftBackend::WorkPtr WeftBackend::allgather(std::vector<Tensors>& outputs,
                                            Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = single_tensor("all_gather", inputs);
  const Tensors& list = list_for_all("all_gather", outputs, getSize());
  return start({OpType::ALLGATHER, "weft:all_gather", opts.timeout, opts.asyncOp},
               {all_gather_step(input, list)},
               inputs,
               list);
}

WeftBackend::WorkPtr WeftBackend::_allgather_base(at::Tensor& output,
                                                  at::Tensor& input,
                                                  const c10d::AllgatherOptions& opts) {
  return start({OpType::_ALLGATHER_BASE, "weft:all_gather_into_tensor", opts.timeout, opts.asyncOp},
               {all_gather_step(input, output)},
               {input},
               {output});
}

WeftBackend::WorkPtr WeftBackend::allgather_coalesced(std::vector<Tensors>& outputs,
                                                      Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  check_one_per_rank("all_gather_coalesced", "lists of outputs", outputs.size(), getSize());
  std::vector<Step> steps;
  Tensors all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_all_ranks;
    for (const Tensors& of_rank : outputs) {
      check_pairs("all_gather_coalesced", of_rank.size(), inputs.size());
      of_all_ranks.push_back(of_rank[i]);
      all.push_back(of_rank[i]);
    }
    steps.push_back(all_gather_step(inputs[i], of_all_ranks, {i, inputs.size()}));
  }
  return start(
      {OpType::ALLGATHER_COALESCED, "weft:all_gather_coalesced", opts.timeout, opts.asyncOp},
      steps,
      inputs,
      std::move(all));
}

WeftBackend::WorkPtr WeftBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  check_pairs("all_gather_into_tensor_coalesced", outputs.size(), inputs.size());
  const Tensors sources = copy_if_written_earlier(outputs, inputs);
  std::vector<Step> steps;
  for (size_t i = 0; i < inputs.size(); ++i) {
    steps.push_back(all_gather_step(sources[i], outputs[i], {i, inputs.size()}));
  }
  return start({OpType::ALLGATHER_COALESCED,
                "weft:all_gather_into_tensor_coalesced",
                opts.timeout,
                opts.asyncOp},
               steps,
               inputs,
               outputs);
}

WeftBackend::WorkPtr WeftBackend::gather(std::vector<Tensors>& outputs,
                                         Tensors& inputs,
                                         const c10d::GatherOptions& opts) {
  const at::Tensor& input = single_tensor("gather", inputs);
  const int root = checked_root("gather", opts.rootRank);
  const auto pack = new_pack("gather");
  const Tensors list = list_on_root("gather", outputs, root);
  const Input data = pack->input(copy_if_overlapping(list, input, getRank()));
  auto targets = outputs_of(*pack, list);
  return start(
      {OpType::GATHER, "weft:gather", opts.timeout, opts.asyncOp},
      {step(gather_call(pack->dtype(), data, std::move(targets), root, getRank(), getSize()),
            pack)},
      inputs,
      list);
}

WeftBackend::WorkPtr WeftBackend::scatter(Tensors& outputs,
                                          std::vector<Tensors>& inputs,
                                          const c10d::ScatterOptions& opts) {
  const at::Tensor& output = single_tensor("scatter", outputs);
  const int root = checked_root("scatter", opts.rootRank);
  const auto pack = new_pack("scatter");
  const Output target = pack->output(output);
  const Tensors list = list_on_root("scatter", inputs, root);
  auto data = inputs_of(*pack, copy_overlapping(output, list, root));
  return start(
      {OpType::SCATTER, "weft:scatter", opts.timeout, opts.asyncOp},
      {step(scatter_call(pack->dtype(), std::move(data), target, root, getRank(), getSize()),
            pack)},
      list,
      outputs);
}

WeftBackend::WorkPtr WeftBackend::alltoall_base(at::Tensor& output,
                                                at::Tensor& input,
                                                std::vector<int64_t>& output_splits,
                                                std::vector<int64_t>& input_splits,
                                                const c10d::AllToAllOptions& opts) {
  const auto pack = new_pack("all_to_all_single");
  auto segments =
      pack->input_segments(copy_if_overlapping({output}, input), input_splits, getSize());
  auto targets = pack->output_segments(output, output_splits, getSize());
  return start(
      {OpType::ALLTOALL_BASE, "weft:all_to_all_single", opts.timeout, opts.asyncOp},
      {step(all_to_all_call(pack->dtype(), std::move(segments), std::move(targets)), pack)},
      {input},
      {output});
}

WeftBackend::WorkPtr WeftBackend::alltoall(Tensors& outputs,
                                           Tensors& inputs,
                                           const c10d::AllToAllOptions& opts) {
  check_one_per_rank("all_to_all", "outputs", outputs.size(), getSize());
  check_one_per_rank("all_to_all", "inputs", inputs.size(), getSize());
  const auto pack = new_pack("all_to_all");
  Tensors sources;
  for (const at::Tensor& input : inputs) sources.push_back(copy_if_overlapping(outputs, input));
  auto segments = inputs_of(*pack, sources);
  auto targets = outputs_of(*pack, outputs);
  return start(
      {OpType::ALLTOALL, "weft:all_to_all", opts.timeout, opts.asyncOp},
      {step(all_to_all_call(pack->dtype(), std::move(segments), std::move(targets)), pack)},
      inputs,
      outputs);
}

}  // namespace weft::collectives
