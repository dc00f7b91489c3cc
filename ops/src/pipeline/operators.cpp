// pipeline_send, pipeline_recv, pipeline_wait and pipeline_flush: messages between the stages of a
// pipeline; and join, which connects sent tensors to the loss. Gradients are sent in the opposite
// direction:
//
//   sender:    token = pipeline_send(y)      backward of token: receives the gradient of y
//   receiver:  x = pipeline_wait(token)      backward of x: sends its gradient
//
// A token is a tensor without elements whose storage holds the message.

#include "../autograd_support.h"
#include "../dispatch.h"
#include "message.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace weft::ops {

namespace {

constexpr std::string_view kSend = "weft::pipeline_send";
constexpr std::string_view kRecv = "weft::pipeline_recv";
constexpr std::string_view kWait = "weft::pipeline_wait";
constexpr std::string_view kFlush = "weft::pipeline_flush";
constexpr std::string_view kJoin = "weft::join";

using Side = PipelineMessage::Side;
using MessagePtr = c10::intrusive_ptr<PipelineMessage>;

void release_message(void* context) { delete static_cast<MessagePtr*>(context); }

at::Tensor token_of(MessagePtr message) {
  auto context = std::make_unique<MessagePtr>(std::move(message));
  c10::DataPtr data(nullptr, context.get(), &release_message, at::kCPU);
  context.release();  // NOLINT(bugprone-unused-return-value): the storage has it
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, std::move(data), nullptr, false);
  auto token = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                        c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                        caffe2::TypeMeta::Make<float>());
  token.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  return token;
}

MessagePtr message_of(std::string_view op, const at::Tensor& token) {
  const auto* data = token.has_storage() ? &token.storage().data_ptr() : nullptr;
  TORCH_CHECK_VALUE(data != nullptr && data->get_deleter() == &release_message,
                    op,
                    ": got a tensor of shape ",
                    token.sizes(),
                    " that is no token; pass a result of pipeline_send or pipeline_recv.");
  return *static_cast<MessagePtr*>(data->get_context());
}

// Checks the arguments; returns the group, peer and channel.
PipelineAddress checked_address(std::string_view op,
                                const at::TensorList& tensors,
                                std::int64_t peer,
                                std::int64_t channel,
                                std::string_view group_name) {
  TORCH_CHECK_VALUE(!tensors.empty(), op, ": got no tensors; pass at least one.");
  for (const auto& tensor : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_traced(tensor),
        op,
        ": got a tensor that torch.compile, torch.export or another mode traces, but messages "
        "between stages are not part of a graph; trace the stages and call this between them.");
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && !tensor.is_quantized(),
                      op,
                      ": got a tensor of layout ",
                      tensor.layout(),
                      " and dtype ",
                      tensor.scalar_type(),
                      "; pass strided tensors that are not quantized.");
  }
  TORCH_CHECK_VALUE(channel >= 0 && channel <= kMaxChannel,
                    op,
                    ": got channel ",
                    channel,
                    "; pass a number from 0 to ",
                    kMaxChannel,
                    ".");
  const auto group = resolve_group(op, std::string(group_name));
  TORCH_CHECK_VALUE(group, op, ": got a group of one rank; pass a group of at least two.");
  check_peer(op, group, peer);
  return {group, static_cast<int>(peer), channel};
}

std::vector<bool> differentiability_of(const at::TensorList& tensors) {
  std::vector<bool> differentiable;
  for (const auto& tensor : tensors) {
    differentiable.push_back(at::GradMode::is_enabled() && tensor.requires_grad());
  }
  return differentiable;
}

MessagePtr post(std::string_view op,
                Side side,
                const at::TensorList& tensors,
                std::int64_t peer,
                std::int64_t channel,
                std::string_view group_name,
                const std::vector<bool>& differentiable) {
  auto address = checked_address(op, tensors, peer, channel, group_name);
  return PipelineMessage::post(side, std::move(address), tensors.vec(), differentiable);
}

// Below autograd, no tensor is differentiable.
at::Tensor pipeline_send(at::TensorList tensors,
                         std::int64_t peer,
                         std::int64_t channel,
                         std::string_view group_name) {
  const std::vector<bool> none(tensors.size(), false);
  return token_of(post(kSend, Side::kSender, tensors, peer, channel, group_name, none));
}

at::Tensor pipeline_recv(at::TensorList like,
                         std::int64_t peer,
                         std::int64_t channel,
                         std::string_view group_name) {
  const std::vector<bool> none(like.size(), false);
  return token_of(post(kRecv, Side::kReceiver, like, peer, channel, group_name, none));
}

std::vector<at::Tensor> pipeline_wait(const at::Tensor& token) {
  return message_of(kWait, token)->wait();
}

void pipeline_flush(std::string_view group_name) {
  if (const auto group = resolve_group(kFlush, std::string(group_name))) {
    PipelineMessage::flush(group);
  }
}

at::Tensor join(const at::Tensor& x, at::TensorList tokens) {
  for (const auto& token : tokens) {
    TORCH_CHECK_VALUE(token.sym_numel() == 0,
                      kJoin,
                      ": got a tensor of shape ",
                      token.sym_sizes(),
                      " among the tokens; pass results of pipeline_send.");
  }
  return x.clone();
}

class Send : public torch::autograd::Function<Send> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            at::TensorList tensors,
                            std::int64_t peer,
                            std::int64_t channel,
                            std::string_view group_name,
                            const std::vector<bool>& differentiable) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto message = post(kSend, Side::kSender, tensors, peer, channel, group_name, differentiable);
    ctx->saved_data["message"] = c10::IValue::make_capsule(message);
    return token_of(std::move(message));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& /*grads*/) {
    forbid_double_backward(kSend);
    const auto message = c10::static_intrusive_pointer_cast<PipelineMessage>(
        ctx->saved_data.at("message").toCapsule());
    auto gradients = message->receive_gradients();
    variable_list result;
    std::size_t next = 0;
    for (std::size_t i = 0; i < message->num_tensors(); ++i) {
      result.push_back(message->is_differentiable(i) ? gradients.at(next++) : at::Tensor());
    }
    constexpr int kNumOtherArguments = 4;  // peer, channel, group_name, differentiable
    for (int argument = 0; argument < kNumOtherArguments; ++argument) {
      result.emplace_back();
    }
    return result;
  }
};

// `token` is the autograd input for the received tensors: it requires a gradient if any of them
// does.
class Wait : public torch::autograd::Function<Wait> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& token) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto message = message_of(kWait, token);
    auto tensors = message->wait();
    variable_list constants;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!message->is_differentiable(i)) {
        constants.push_back(tensors[i]);
      }
    }
    ctx->mark_non_differentiable(constants);
    ctx->saved_data["message"] = c10::IValue::make_capsule(message);
    return tensors;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kWait);
    const auto message = c10::static_intrusive_pointer_cast<PipelineMessage>(
        ctx->saved_data.at("message").toCapsule());
    variable_list gradients;
    for (std::size_t i = 0; i < grads.size(); ++i) {
      if (message->is_differentiable(i)) {
        gradients.push_back(grads[i]);
      }
    }
    message->send_gradients(gradients);
    return {at::Tensor()};
  }
};

class Join : public torch::autograd::Function<Join> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, at::TensorList tokens) {
    c10::List<c10::Device> devices;  // saved tokens would keep their messages
    for (const at::Tensor& token : tokens) devices.push_back(token.device());
    ctx->saved_data["devices"] = devices;
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::join(x, tokens);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result{grads[0]};
    for (const c10::Device device : ctx->saved_data.at("devices").to<c10::List<c10::Device>>()) {
      result.push_back(at::empty({0}, at::TensorOptions(at::kFloat).device(device)));
    }
    return result;
  }
};

at::Tensor pipeline_send_autograd(at::TensorList tensors,
                                  std::int64_t peer,
                                  std::int64_t channel,
                                  std::string_view group_name) {
  return Send::apply(tensors, peer, channel, group_name, differentiability_of(tensors));
}

at::Tensor pipeline_recv_autograd(at::TensorList like,
                                  std::int64_t peer,
                                  std::int64_t channel,
                                  std::string_view group_name) {
  const auto differentiable = differentiability_of(like);
  const at::AutoDispatchBelowADInplaceOrView below;
  auto message = post(kRecv, Side::kReceiver, like, peer, channel, group_name, differentiable);
  const bool is_differentiable = message->is_differentiable();
  auto token = token_of(std::move(message));
  return token.set_requires_grad(is_differentiable);
}

std::vector<at::Tensor> pipeline_wait_autograd(const at::Tensor& token) {
  const auto message = message_of(kWait, token);
  if (message->side() == Side::kSender) {
    return pipeline_wait(token);
  }
  TORCH_CHECK_VALUE(at::GradMode::is_enabled() || !message->is_differentiable(),
                    kWait,
                    ": got a token whose tensors need gradients under torch.no_grad, so the sender "
                    "would wait until its timeout; pass a `like` that requires no gradients.");
  return Wait::apply(token);
}

at::Tensor join_autograd(const at::Tensor& x, at::TensorList tokens) {
  return Join::apply(x, tokens);
}

at::Tensor join_meta(const at::Tensor& x, at::TensorList /*tokens*/) { return at::empty_like(x); }

}  // namespace

// Registered for all devices, so that tensors of any device, and empty lists, reach the kernels,
// which check them.
TORCH_LIBRARY_IMPL(weft, CompositeExplicitAutograd, m) {
  m.impl("pipeline_send", TORCH_FN(pipeline_send));
  m.impl("pipeline_recv", TORCH_FN(pipeline_recv));
  m.impl("pipeline_wait", TORCH_FN(pipeline_wait));
  m.impl("pipeline_flush", TORCH_FN(pipeline_flush));
}
TORCH_LIBRARY_IMPL(weft, CPU, m) { m.impl("join", TORCH_FN(join)); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { m.impl("join", TORCH_FN(join)); }
TORCH_LIBRARY_IMPL(weft, Meta, m) { m.impl("join", TORCH_FN(join_meta)); }
TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("pipeline_send", TORCH_FN(pipeline_send_autograd));
  m.impl("pipeline_recv", TORCH_FN(pipeline_recv_autograd));
  m.impl("pipeline_wait", TORCH_FN(pipeline_wait_autograd));
  m.impl("join", TORCH_FN(join_autograd));
}

}  // namespace weft::ops
