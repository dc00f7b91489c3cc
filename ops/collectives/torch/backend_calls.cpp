// start(), which all c10d calls use, and the calls for messages and barriers.
#include "arguments.h"
#include "backend.h"
#include "raise.h"
#include "slow_network.h"
#include "work.h"

#include <algorithm>
#include <utility>

namespace weft::collectives {

using c10d::OpType;

int WeftBackend::checked_root(std::string_view op, int64_t root) const {
  TORCH_CHECK(root >= 0 && root < getSize(),
              "weft: ",
              op,
              " got root ",
              root,
              " in a group of ",
              getSize(),
              "; pass a rank of the group");
  return static_cast<int>(root);
}

void WeftBackend::check_peer(std::string_view op, int peer) const {
  TORCH_CHECK(peer >= 0 && peer < getSize() && peer != getRank(),
              "weft: ",
              op,
              " got peer ",
              peer,
              " on rank ",
              getRank(),
              " of ",
              getSize(),
              "; pass another rank of the group");
}

WeftBackend::Tensors WeftBackend::list_on_root(std::string_view op,
                                               const std::vector<Tensors>& lists,
                                               int root) const {
  if (root == getRank()) return list_for_all(op, lists, getSize());
  TORCH_CHECK(lists.empty(),
              "weft: ",
              op,
              " got a list of tensors on rank ",
              getRank(),
              ", which is not the root ",
              root,
              "; pass none on this rank");
  return {};
}

WeftBackend::WorkPtr WeftBackend::start(const Call& call,
                                        const std::vector<Step>& steps,
                                        const Tensors& inputs,
                                        Tensors outputs) {
  // torch may compare getSequenceNumberForGroup() between ranks: count only the calls that all
  // ranks make.
  const bool is_message = call.op_type == OpType::SEND || call.op_type == OpType::RECV ||
                          call.op_type == OpType::RECVANYSOURCE;
  const uint64_t sequence = is_message ? 0 : ++num_collectives_;
  const uint64_t log_id = FlightLog::instance().begin(logged_call(steps, sequence));
  const auto delay = options_->slow_network ? time_on_slow_network(call, steps, inputs, outputs)
                                            : std::chrono::nanoseconds::zero();
  auto work = c10::make_intrusive<CollectiveWork>(group_,
                                                  getRank(),
                                                  call.op_type,
                                                  call.title,
                                                  inputs,
                                                  std::move(outputs),
                                                  completion_hooks_,
                                                  log_id);
  work->delay(delay);
  // A timeout of zero passes at once, but an operation without a timeout gets the group's.
  const auto timeout = call.timeout == kUnset
                           ? options_->timeout
                           : std::max(call.timeout, std::chrono::milliseconds(1));
  for (const Step& step : steps) {
    step.operation->on_done = [pack = step.pack,
                               sum = step.sparse_sum](const std::exception_ptr& error) {
      if (error != nullptr) return;
      if (pack) pack->copy_back();
      if (sum) sum->write_result();
    };
    step.operation->timeout = timeout;
    work->add(step.operation);
  }
  try {
    for (const Step& step : steps) {
      if (call.is_in_scratch) {
        group_->submit_scratch(step.operation);
      } else {
        group_->submit(step.operation, call.in_background);
      }
    }
  } catch (const CollectiveError&) {
    FlightLog::instance().end(log_id, FlightLog::State::kFailed);
    raise(std::current_exception());
  } catch (...) {
    FlightLog::instance().end(log_id, FlightLog::State::kFailed);
    throw;
  }
  if (steps.empty()) FlightLog::instance().end(log_id, FlightLog::State::kDone);
  return work;
}

std::chrono::nanoseconds WeftBackend::time_on_slow_network(const Call& call,
                                                           const std::vector<Step>& steps,
                                                           const Tensors& inputs,
                                                           const Tensors& outputs) const {
  const auto bytes_of = [&](const Tensors& tensors) {
    int64_t num_bytes = 0;
    for (const at::Tensor& each : tensors) {
      // The entries of all ranks are gathered, assumed to be as many as those of this rank.
      num_bytes += each.is_sparse() ? getSize() * steps.front().sparse_sum->num_bytes()
                                    : static_cast<int64_t>(each.nbytes());
    }
    return num_bytes;
  };
  const auto* const message =
      steps.empty() ? nullptr : dynamic_cast<const Message*>(steps.front().operation.get());
  return network_time(*options_->slow_network,
                      options_->global_ranks_in_group,
                      getRank(),
                      getSize(),
                      call.op_type,
                      std::max(bytes_of(inputs), bytes_of(outputs)),
                      message == nullptr ? -1 : message->peer);
}

FlightLog::Call WeftBackend::logged_call(const std::vector<Step>& steps, uint64_t sequence) const {
  FlightLog::Call logged;
  logged.group = group_facts_;
  logged.sequence = sequence;
  if (sequence > 0) {
    if (!steps.empty()) logged.header = steps.front().header;
    for (const Step& each : steps) {
      logged.num_bytes += each.sparse_sum ? static_cast<uint64_t>(each.sparse_sum->num_bytes())
                                          : static_cast<uint64_t>(each.header.num_elements) *
                                                size_of(each.header.dtype);
    }
    return logged;
  }
  const auto& message = static_cast<const Message&>(*steps.front().operation);
  logged.direction = message.direction;
  logged.peer = message.peer;
  logged.tag = message.tag;
  logged.num_bytes = message.num_bytes();
  return logged;
}

WeftBackend::WorkPtr WeftBackend::barrier(const c10d::BarrierOptions& opts) {
  return start({OpType::BARRIER, "weft:barrier", opts.timeout, opts.asyncOp},
               {step(barrier_call(), nullptr)},
               {},
               {});
}

// When a barrier times out, the error on every rank names the late ranks: a monitored barrier needs
// nothing more.
void WeftBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  barrier(opts)->wait();
}

WeftBackend::WorkPtr WeftBackend::message(Message::Direction direction,
                                          Tensors& tensors,
                                          int peer,
                                          int tag) {
  const bool sends = direction == Message::Direction::kSend;
  const char* const op = sends ? "send" : "recv";
  const at::Tensor& tensor = single_tensor(op, tensors);
  if (peer != kAnySource) check_peer(op, peer);
  const auto pack = new_pack(op);
  std::byte* const data = (sends ? as_output(pack->input(tensor)) : pack->output(tensor)).data;
  const auto message =
      std::make_shared<Message>(direction, peer, tag, pack->dtype(), tensor.numel(), data);
  const Call call = sends ? Call{OpType::SEND, "weft:send", kUnset, true}
                    : peer == kAnySource
                        ? Call{OpType::RECVANYSOURCE, "weft:recvAnySource", kUnset, true}
                        : Call{OpType::RECV, "weft:recv", kUnset, true};
  return start(call, {{message, pack}}, tensors, tensors);
}

WeftBackend::WorkPtr WeftBackend::send(Tensors& tensors, int peer, int tag) {
  return message(Message::Direction::kSend, tensors, peer, tag);
}

WeftBackend::WorkPtr WeftBackend::recv(Tensors& tensors, int peer, int tag) {
  return message(Message::Direction::kReceive, tensors, peer, tag);
}

WeftBackend::WorkPtr WeftBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(Message::Direction::kReceive, tensors, kAnySource, tag);
}

}  // namespace weft::collectives
