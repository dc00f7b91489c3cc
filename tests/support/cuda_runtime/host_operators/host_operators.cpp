// Versions for the host of torch's operators on CUDA tensors.
//
// Memory of the device is the host's, so an operator for the CPU can run on it. The version of an
// operator for CUDA allocates the results as torch would, on the current stream, and submits the
// rest as work of that stream: the same operator for the CPU, on tensors that alias the CUDA
// tensors' memory. As with kernels of a device, only the caller keeps that memory alive.
//
// Shapes, dtypes and errors are known before the work runs, from the operator for meta tensors. An
// operator without one, or with a result that depends on values, runs while the host waits.

#include "../runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace weft::cuda_runtime {
namespace {

using torch::jit::Stack;
using Convert = std::function<at::Tensor(const at::Tensor&)>;

// Returns a value with the tensors in it converted.
c10::IValue converted(const c10::IValue& value, const Convert& convert) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(convert(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> result;
    for (const at::Tensor& tensor : value.toTensorVector()) result.push_back(convert(tensor));
    return result;
  }
  if (value.isList()) {
    const c10::List<c10::IValue> list = value.toList();
    c10::impl::GenericList result(list.elementType());
    for (const c10::IValue& element : list) result.push_back(converted(element, convert));
    return result;
  }
  return value;
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  std::vector<at::Tensor> result;
  converted(value, [&](const at::Tensor& tensor) {
    result.push_back(tensor);
    return tensor;
  });
  return result;
}

at::Tensor alias_on_host(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "views of conjugates have no version here");
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// Scalars in CPU memory are arguments of a kernel, which are read at its launch: they are copied.
at::Tensor for_work(const at::Tensor& tensor) {
  if (tensor.is_cuda()) return alias_on_host(tensor);
  at::Tensor copied = tensor.clone();
  copied.unsafeGetTensorImpl()->set_wrapped_number(
      tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copied;
}

at::Tensor for_shapes(const at::Tensor& tensor) {
  if (!tensor.is_cuda() && tensor.dim() == 0) return tensor;
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

// The statistics that norms save are float32 on CUDA, and of the input's dtype on the CPU, which
// does not support two dtypes in one call.
bool reads_statistics(const c10::OperatorHandle& op) {
  static const std::set<std::string> names{"aten::native_layer_norm_backward",
                                           "aten::native_group_norm_backward",
                                           "aten::native_batch_norm_backward"};
  return names.contains(op.operator_name().name);
}

at::Tensor in_float32(const at::Tensor& tensor) {
  const bool is_half = tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;
  return is_half ? tensor.to(at::kFloat) : tensor;
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), num_args_(op.schema().arguments().size()) {
    count("operator " + op.operator_name().name);
    args_.assign(stack.end() - static_cast<std::ptrdiff_t>(num_args_), stack.end());
    torch::jit::drop(stack, num_args_);
    for (const c10::IValue& arg : args_) {
      for (const at::Tensor& tensor : tensors_of(arg)) {
        if (tensor.is_cuda() && !device_) device_ = tensor.device();
      }
    }
    TORCH_INTERNAL_ASSERT(device_, op.operator_name());
    guard_.set_device(*device_);
    stream_ = c10::cuda::getCurrentCUDAStream(device_->index());
  }

  void run(Stack& stack) {
    replace_generator();
    if (depends_on_values() || !infer_shapes()) {
      run_while_host_waits();
    } else {
      submit_work();
    }
    push_results(stack);
  }

 private:
  bool has_tag(at::Tag tag) const { return op_.hasTag(tag); }

  bool depends_on_values() const {
    if (has_tag(at::Tag::dynamic_output_shape) || has_tag(at::Tag::data_dependent_output))
      return true;
    for (const c10::Argument& result : op_.schema().returns()) {
      const auto& type = *result.type();
      if (!type.isSubtypeOf(*c10::TensorType::get()) &&
          !type.isSubtypeOf(*c10::ListType::ofTensors())) {
        return true;
      }
    }
    return false;
  }

  // Random numbers come from a generator of the CPU whose seed is the state of the CUDA generator,
  // which advances as for a kernel: see elements_per_turn().
  void replace_generator() {
    if (!has_tag(at::Tag::nondeterministic_seeded)) return;
    const auto& arguments = op_.schema().arguments();
    for (std::size_t i = 0; i < num_args_; ++i) {
      if (arguments[i].name() != "generator") continue;
      at::Generator generator = args_[i].isNone()
                                    ? at::cuda::detail::getDefaultCUDAGenerator(device_->index())
                                    : args_[i].toGenerator();
      if (generator.device().is_cpu()) return;
      const std::lock_guard lock(generator.mutex());
      turn_size_ = elements_per_turn();
      const uint64_t num_turns =
          turn_size_ ? (args_[0].toTensor().numel() + *turn_size_ - 1) / *turn_size_ : 1;
      const auto [seed, offset] =
          generator.get<at::CUDAGeneratorImpl>()->philox_engine_inputs(kTurn * num_turns);
      seed_ = seed * 0x9E3779B97F4A7C15ULL + offset;
      generator_ = i;
      args_[i] = c10::IValue();
      return;
    }
    TORCH_CHECK(false, op_.operator_name(), " draws random numbers without a generator");
  }

  // Returns the number of elements that all threads of a full grid draw at once, in a call that
  // fills a contiguous tensor as ATen/native/cuda/DistributionTemplates.h: turn k draws from the
  // generator's offset plus kTurn * k. Other calls draw all elements from one offset.
  std::optional<int64_t> elements_per_turn() const {
    const auto& arguments = op_.schema().arguments();
    if (!is_written(arguments[0]) || !args_[0].isTensor()) return {};
    for (std::size_t i = 1; i < num_args_; ++i) {
      if (!tensors_of(args_[i]).empty()) return {};
    }
    const at::Tensor& filled = args_[0].toTensor();
    if (!filled.is_contiguous()) return {};
    const auto& properties = *at::cuda::getDeviceProperties(device_->index());
    constexpr int kBlock = 256;
    const int num_blocks =
        properties.multiProcessorCount * (properties.maxThreadsPerMultiProcessor / kBlock);
    return int64_t{num_blocks} * kBlock * (filled.scalar_type() == at::kDouble ? 2 : 4);
  }

  // Fills a tensor turn by turn.
  static void draw(const c10::OperatorHandle& op,
                   const Stack& args,
                   std::size_t generator,
                   uint64_t seed,
                   int64_t turn_size) {
    const at::Tensor filled = args[0].toTensor().view(-1);
    for (int64_t first = 0; first < filled.numel(); first += turn_size, seed += kTurn) {
      Stack stack = args;
      stack[0] = filled.narrow(0, first, std::min(turn_size, filled.numel() - first));
      stack[generator] = at::detail::createCPUGenerator(seed);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    }
  }

  // Returns the call of the operator for the CPU, to be made on a thread of the runtime.
  std::function<Stack()> work() const {
    Stack args;
    for (const c10::IValue& arg : args_) args.push_back(converted(arg, for_work));
    const bool widens = reads_statistics(op_);
    if (turn_size_) {
      return [op = op_,
              args = std::move(args),
              seed = *seed_,
              generator = generator_,
              size = *turn_size_] {
        const at::AutoDispatchBelowAutograd below;
        draw(op, args, generator, seed, size);
        return Stack{args[0]};
      };
    }
    return [op = op_, args = std::move(args), seed = seed_, generator = generator_, widens] {
      const at::AutoDispatchBelowAutograd below;
      Stack stack = args;
      if (widens) {
        for (c10::IValue& arg : stack) arg = converted(arg, in_float32);
      }
      if (seed) stack[generator] = at::detail::createCPUGenerator(*seed);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      return stack;
    };
  }

  bool is_written(const c10::Argument& argument) const {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  }

  // Sets the results to meta tensors. Returns whether the shapes of new results are known before
  // the work has run: there is an operator for meta tensors, or no result is new.
  bool infer_shapes() {
    try {
      results_ = results_for_shapes();
      return true;
    } catch (const c10::NotImplementedError&) {
      results_ = Stack(op_.schema().returns().size());
      for (std::size_t i = 0; i < results_.size(); ++i) {
        if (is_new(i)) return false;
      }
      return true;
    }
  }

  // Runs the operator for meta tensors: errors, shapes of results, and resizes of `out` arguments.
  Stack results_for_shapes() const {
    std::map<const c10::TensorImpl*, at::Tensor> seen;  // arguments may be the same tensor
    const Convert convert = [&](const at::Tensor& tensor) {
      at::Tensor& own = seen[tensor.unsafeGetTensorImpl()];
      if (!own.defined()) own = for_shapes(tensor);
      return own;
    };
    Stack stack;
    for (const c10::IValue& arg : args_) stack.push_back(converted(arg, convert));
    const Stack args = stack;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    for (std::size_t i = 0; i < num_args_; ++i) {
      if (!is_written(op_.schema().arguments()[i])) continue;
      const auto own = tensors_of(args_[i]);
      const auto resized = tensors_of(args[i]);
      for (std::size_t j = 0; j < own.size(); ++j) {
        if (own[j].sizes() != resized[j].sizes()) own[j].resize_(resized[j].sizes());
      }
    }
    return stack;
  }

  bool is_new(std::size_t i) const { return !is_written(op_.schema().returns()[i]); }

  void submit_work() {
    std::vector<std::pair<std::size_t, std::vector<at::Tensor>>> filled;
    for (std::size_t i = 0; i < results_.size(); ++i) {
      if (!is_new(i)) continue;
      std::vector<at::Tensor> aliases;
      results_[i] = converted(results_[i], [&](const at::Tensor& meta) {
        at::Tensor own =
            at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(*device_));
        aliases.push_back(alias_on_host(own));
        return own;
      });
      filled.emplace_back(i, std::move(aliases));
    }
    submit(stream_, [work = work(), filled = std::move(filled)] {
      const at::AutoDispatchBelowAutograd below;
      const Stack results = work();
      for (const auto& [i, aliases] : filled) {
        const auto values = tensors_of(results[i]);
        TORCH_INTERNAL_ASSERT(values.size() == aliases.size());
        for (std::size_t j = 0; j < values.size(); ++j) aliases[j].copy_(values[j]);
      }
    });
  }

  void run_while_host_waits() {
    TORCH_CHECK(!is_captured(stream_), op_.operator_name(), " waits for the device, in a capture");
    std::exception_ptr error;
    submit(stream_, [&, work = work()] {
      try {
        results_ = work();
      } catch (...) {
        error = std::current_exception();
      }
    });
    if (depends_on_values()) {
      C10_CUDA_CHECK(cudaStreamSynchronize(stream_));  // counted
    } else {
      wait_for_stream(stream_);
    }
    if (error) std::rethrow_exception(error);
    for (std::size_t i = 0; i < results_.size(); ++i) {
      if (!is_new(i)) continue;
      results_[i] = converted(results_[i], [&](const at::Tensor& value) {
        if (value.layout() != at::kStrided) return value.to(*device_);
        at::Tensor own =
            at::empty_strided(value.sizes(), value.strides(), value.options().device(*device_));
        alias_on_host(own).copy_(value);
        return own;
      });
    }
  }

  // Results that are arguments are the caller's tensors.
  void push_results(Stack& stack) const {
    const auto& arguments = op_.schema().arguments();
    const auto& returns = op_.schema().returns();
    for (std::size_t i = 0; i < returns.size(); ++i) {
      if (is_new(i)) {
        stack.push_back(results_[i]);
        continue;
      }
      for (std::size_t j = 0; j < num_args_; ++j) {
        if (is_written(arguments[j]) &&
            arguments[j].alias_info()->beforeSets() == returns[i].alias_info()->beforeSets()) {
          stack.push_back(args_[j]);
        }
      }
    }
  }

  const c10::OperatorHandle& op_;
  const std::size_t num_args_;
  Stack args_;
  Stack results_;
  std::optional<c10::Device> device_;
  c10::cuda::OptionalCUDAGuard guard_;
  cudaStream_t stream_ = nullptr;
  static constexpr uint64_t kTurn = 4;  // by which a turn of a kernel advances the generator
  std::optional<uint64_t> seed_;
  std::optional<int64_t> turn_size_;
  std::size_t generator_ = 0;  // index of the argument
};

void run_on_host(const c10::OperatorHandle& op, Stack* stack) { Call(op, *stack).run(*stack); }

// Makes the current stream of one device wait for all work of the current stream of another.
void wait_for_current(c10::Device waiting, c10::Device awaited) {
  at::cuda::CUDAEvent event;
  event.record(c10::cuda::getCurrentCUDAStream(awaited.index()));
  event.block(c10::cuda::getCurrentCUDAStream(waiting.index()));
}

// The runtime makes the copies between a device and the host. A copy for which CUDA may use a
// kernel runs as an operator.
at::Tensor& copy(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  if (self.is_cuda() && from.is_cuda() && self.numel() > 0) {
    // A copy between devices is work of the current streams of both.
    const bool crosses = self.device() != from.device();
    if (crosses) wait_for_current(self.device(), from.device());
    Stack stack{self, from, non_blocking};
    run_on_host(op, &stack);
    if (crosses) wait_for_current(from.device(), self.device());
    return self;
  }
  op.typed<at::Tensor&(at::Tensor&, const at::Tensor&, bool)>().redispatch(
      c10::DispatchKeySet(c10::DispatchKey::CompositeExplicitAutograd), self, from, non_blocking);
  return self;
}

// Operators that only allocate or describe memory, that choose a kernel, and those that are
// registered one by one: copy_ here, others in special_operators.cpp.
const std::set<std::string>& left_to_torch() {
  static const std::set<std::string> names{"aten::resize_",
                                           "aten::record_stream",
                                           "aten::is_set_to",
                                           "aten::native_dropout",
                                           "aten::_fused_sdp_choice",
                                           "aten::copy_"};
  return names;
}

bool returns_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  }
  return false;
}

bool has_tensors(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.type()->isSubtypeOf(*c10::TensorType::get()) ||
        argument.type()->isSubtypeOf(*c10::ListType::ofTensors())) {
      return true;
    }
  }
  return false;
}

bool has_version(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  return name.starts_with("aten::") && !name.starts_with("aten::set_") &&
         !left_to_torch().contains(name) && op.hasSchema() && !returns_view(op.schema()) &&
         has_tensors(op.schema()) && op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
         op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
}

}  // namespace
}  // namespace weft::cuda_runtime

namespace {

// Never destroyed: the registrations hold until the process ends.
torch::Library& registrations() {
  static torch::Library& library =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  return library;
}

const bool kIsRegistered = [] {
  using namespace weft::cuda_runtime;  // NOLINT
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !has_version(*op)) continue;
    const std::string full =
        name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    registrations().impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  registrations().impl("copy_", TORCH_FN(copy));
  return true;
}();

}  // namespace
