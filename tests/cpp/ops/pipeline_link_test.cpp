// Messages over links whose backends behave like NCCL: no tags, batches are matched in the order of
// sending, and nothing is sent outside of a batch. Ranks are threads.
#include "reference.h"
#include "support/thread_ranks.h"

#include <weft/ops/operators.h>
#include <weft/ops/pipeline.h>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace weft::testing {
namespace {

class BatchWork final : public c10d::Work {
 public:
  void end(std::exception_ptr failure = nullptr) { finish(std::move(failure)); }
};

// One direction between two ranks, shared by both ends.
class Wire {
 public:
  using WorkPtr = c10::intrusive_ptr<BatchWork>;
  using Tensors = std::vector<at::Tensor>;

  WorkPtr submit(bool sends, Tensors tensors) {
    auto work = c10::make_intrusive<BatchWork>();
    const std::lock_guard lock(mutex_);
    (sends ? sent_ : awaited_).emplace_back(std::move(tensors), work);
    num_batches_ += sends ? 1 : 0;
    while (!sent_.empty() && !awaited_.empty()) {
      match(sent_.front(), awaited_.front());
      sent_.pop_front();
      awaited_.pop_front();
    }
    return work;
  }
  // Makes one send or receive fail: the `nth` from now on.
  void break_nth(bool of_sends, int nth) { (of_sends ? breaks_send_ : breaks_recv_) = nth; }
  bool breaks(bool of_sends) {
    auto& left = of_sends ? breaks_send_ : breaks_recv_;
    return left > 0 && --left == 0;
  }
  int num_batches() const {
    const std::lock_guard lock(mutex_);
    return num_batches_;
  }

 private:
  using Batch = std::pair<Tensors, WorkPtr>;

  static void match(const Batch& sent, const Batch& awaited) {
    std::exception_ptr failure;
    try {
      TORCH_CHECK(sent.first.size() == awaited.first.size(),
                  "a batch of receives has another size than the batch of sends");
      for (std::size_t i = 0; i < sent.first.size(); ++i) {
        TORCH_CHECK(sent.first[i].numel() == awaited.first[i].numel(),
                    "a tensor is received at another size");
        awaited.first[i].copy_(sent.first[i]);
      }
    } catch (...) {
      failure = std::current_exception();
    }
    sent.second->end(failure);
    awaited.second->end(failure);
  }

  mutable std::mutex mutex_;
  std::deque<Batch> sent_, awaited_;
  int num_batches_ = 0;
  int breaks_send_ = 0, breaks_recv_ = 0;
};

class FakeNcclBackend final : public c10d::Backend {
 public:
  using Ended = std::function<void(const std::string& how)>;

  FakeNcclBackend(
      int rank, std::shared_ptr<Wire> wire, Ended ended = [](const std::string& /*how*/) {})
      : Backend(rank, 2), wire_(std::move(wire)), ended_(std::move(ended)) {}

  const std::string getBackendName() const override { return "like nccl"; }
  bool supportsCoalescing() const override { return true; }
  bool is_batching() const { return is_batching_; }
  void shutdown() override { ended_("shut down"); }
  void abort() override { ended_("aborted"); }

  void startCoalescing() override {
    TORCH_CHECK(!std::exchange(is_batching_, true), "a batch begins inside a batch");
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    TORCH_CHECK(std::exchange(is_batching_, false), "a batch ends that has not begun");
    if (batch_.empty()) return {};
    return wire_->submit(sends_, std::exchange(batch_, {}));
  }
  c10::intrusive_ptr<c10d::Work> send(Wire::Tensors& tensors, int to, int tag) override {
    return add(true, tensors, to, tag);
  }
  c10::intrusive_ptr<c10d::Work> recv(Wire::Tensors& tensors, int from, int tag) override {
    return add(false, tensors, from, tag);
  }

 private:
  c10::intrusive_ptr<c10d::Work> add(bool sends, const Wire::Tensors& tensors, int other, int tag) {
    TORCH_CHECK(is_batching_ && other == 1 - getRank() && tag == 0 && tensors.size() == 1);
    TORCH_CHECK(!wire_->breaks(sends), "a broken wire");
    sends_ = sends;
    batch_.push_back(tensors.at(0));
    return {};
  }

  const std::shared_ptr<Wire> wire_;
  const Ended ended_;
  bool is_batching_ = false, sends_ = false;
  Wire::Tensors batch_;
};

// The wires between all ranks of a test.
class Wires {
 public:
  std::shared_ptr<Wire> get(int from, int to) {
    const std::lock_guard lock(mutex_);
    auto& wire = wires_[{from, to}];
    if (!wire) wire = std::make_shared<Wire>();
    return wire;
  }

  void link_all(const RankContext& ctx) {
    const auto group = c10d::resolve_process_group(ctx.group_name);
    const int own = ctx.group_rank;
    for (int peer = 0; peer < ctx.group_size; ++peer) {
      if (peer == own) continue;
      ops::link_pipeline(group, peer, at::kCPU, [&](int rank, int towards) {
        const bool is_outgoing = towards != rank;
        auto wire = is_outgoing ? get(own, peer) : get(peer, own);
        const int to = is_outgoing ? peer : own;
        auto backend =
            c10::make_intrusive<FakeNcclBackend>(rank, std::move(wire), [=, this](auto how) {
              const std::lock_guard lock(mutex_);
              ends_[own].push_back("to " + std::to_string(to) + " " + how);
            });
        const std::lock_guard lock(mutex_);
        backends_[{own, to}] = backend;
        return backend;
      });
    }
  }

  // Returns the backend on `rank` for messages to `to`.
  c10::intrusive_ptr<FakeNcclBackend> backend(int rank, int to) {
    const std::lock_guard lock(mutex_);
    return backends_.at({rank, to});
  }
  // Returns how backends ended on a rank, in order.
  std::vector<std::string> ends(int rank) {
    const std::lock_guard lock(mutex_);
    return ends_[rank];
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, int>, std::shared_ptr<Wire>> wires_;
  std::map<std::pair<int, int>, c10::intrusive_ptr<FakeNcclBackend>> backends_;
  std::map<int, std::vector<std::string>> ends_;
};

class PipelineLink : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { at::manual_seed(7); }
};

INSTANTIATE_TEST_SUITE_P(Ranks, PipelineLink, ::testing::Values(2, 3));

TEST_P(PipelineLink, StagesEqualTheFullModel) {
  constexpr int kNumBatches = 3;
  const auto x = at::randn({4, 6}, at::kDouble);
  std::vector<at::Tensor> weights;
  auto y = x, skip = x.sin();
  for (int stage = 0; stage < GetParam(); ++stage) {
    weights.push_back(at::randn({6, 6}, at::kDouble).requires_grad_());
    y = at::linear(y, weights.back()).tanh();
    skip = skip * 2;
  }
  (kNumBatches * (y * skip).sum()).backward();
  Wires wires;
  run_ranks(GetParam(), [&](RankContext& ctx) {
    wires.link_all(ctx);
    const int rank = ctx.group_rank;
    const auto weight =
        weights.at(static_cast<std::size_t>(rank)).detach().clone().requires_grad_();
    const auto like = at::empty({}, at::kDouble).requires_grad_().expand({4, 6});
    std::vector<at::Tensor> losses;
    for (int batch = 0; batch < kNumBatches; ++batch) {
      std::vector<at::Tensor> in{x, x.sin()};
      if (rank > 0) {
        in = ops::pipeline_wait(
            ops::pipeline_recv({like, like.detach()}, rank - 1, 0, ctx.group_name));
      }
      const auto out = at::linear(in.at(0), weight).tanh();
      if (rank + 1 == ctx.group_size) {
        losses.push_back((out * in.at(1) * 2).sum());
      } else {
        const auto token = ops::pipeline_send({out, in.at(1) * 2}, rank + 1, 0, ctx.group_name);
        losses.push_back(ops::join(at::zeros({}, at::kDouble), {token}));
      }
    }
    for (auto& loss : losses) {
      loss.backward();
    }
    ops::pipeline_flush(ctx.group_name);
    expect_close(
        weight.grad(), weights.at(static_cast<std::size_t>(rank)).grad(), 1e-12, "grad weight");
    ops::unlink_pipeline(c10d::resolve_process_group(ctx.group_name));
  });
  // Each message is one batch and its gradient another, in addition to a link's first batch.
  for (int rank = 0; rank + 1 < GetParam(); ++rank) {
    EXPECT_EQ(wires.get(rank, rank + 1)->num_batches(), 1 + kNumBatches);
    EXPECT_EQ(wires.get(rank + 1, rank)->num_batches(), 1 + kNumBatches);
  }
  // Shutdowns wait for the peer, so both ranks must use the same order.
  if (GetParam() == 2) {
    const std::vector<std::string> in_order{"to 0 shut down", "to 1 shut down"};
    EXPECT_EQ(wires.ends(0), in_order);
    EXPECT_EQ(wires.ends(1), in_order);
  }
}

// After a failed receive, later messages fail instead of being mismatched, and no batch stays open.
TEST(PipelineLinks, MessagesFailAfterABrokenReceive) {
  Wires wires;
  run_ranks(2, [&](RankContext& ctx) {
    wires.link_all(ctx);
    const auto group = c10d::resolve_process_group(ctx.group_name);
    const auto like = at::ones({3});
    const auto wire = wires.get(0, 1);
    if (ctx.group_rank == 0) {
      ops::pipeline_send({like}, 1, 0, ctx.group_name);
      ops::pipeline_send({2 * like}, 1, 0, ctx.group_name);
      ops::pipeline_flush(ctx.group_name);
      return;
    }
    const auto receive = [&] {
      return ops::pipeline_wait(ops::pipeline_recv({like}, 0, 0, ctx.group_name)).at(0);
    };
    expect_close(receive(), like, 0, "the first");
    wire->break_nth(/*of_sends=*/false, 1);
    EXPECT_THROW(receive(), c10::Error);
    EXPECT_FALSE(wires.backend(1, 1)->is_batching());
    EXPECT_THROW(receive(), c10::DistBackendError);
    ops::unlink_pipeline(group);
    EXPECT_EQ(wires.ends(1), (std::vector<std::string>{"to 0 aborted", "to 1 aborted"}));
    wire->submit(/*sends=*/false, {at::empty({12}, at::kByte)});  // lets the sender complete
  });
}

TEST(PipelineLinks, MessagesFailAfterABrokenSend) {
  Wires wires;
  run_ranks(2, [&](RankContext& ctx) {
    wires.link_all(ctx);
    if (ctx.group_rank == 1) return;
    const auto x = at::ones({3});
    wires.get(0, 1)->break_nth(/*of_sends=*/true, 2);
    EXPECT_THROW(ops::pipeline_send({x, x}, 1, 0, ctx.group_name), c10::Error);
    EXPECT_FALSE(wires.backend(0, 1)->is_batching());
    try {
      ops::pipeline_send({x}, 1, 0, ctx.group_name);
      ADD_FAILURE() << "sent after a failure";
    } catch (const c10::DistBackendError& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_NE(text.find("a broken wire"), std::string::npos) << text;
      EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    }
  });
}

TEST(PipelineLinks, RejectsBackendsOfOtherRanksAndASecondLink) {
  Wires wires;
  run_ranks(2, [&](RankContext& ctx) {
    const auto group = c10d::resolve_process_group(ctx.group_name);
    const int peer = 1 - ctx.group_rank;
    const auto other_ranks_backend = [&](int rank, int /*towards*/) {
      return c10::make_intrusive<FakeNcclBackend>(1 - rank, std::make_shared<Wire>());
    };
    EXPECT_THROW(ops::link_pipeline(group, peer, at::kCPU, other_ranks_backend), c10::ValueError);
    wires.link_all(ctx);
    EXPECT_THROW(wires.link_all(ctx), c10::ValueError);
    ops::unlink_pipeline(group);
  });
}

}  // namespace
}  // namespace weft::testing
