#include "backend_transport.h"

#include "messages.h"

#include <ATen/ops/from_blob.h>

#include <stdexcept>
#include <utility>

namespace weft::collectives {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// When a connection is lost, gloo ends all waits on it, except for a receive of which some bytes
// have arrived: that wait lasts until its timeout. So a transfer of more than kMaxUnsplitBytes is
// followed by a transfer of one byte, which arrives last and for which the receiver waits first.
constexpr size_t kMaxUnsplitBytes = 16 * 1024;

std::vector<at::Tensor> as_tensors(std::byte* data, size_t num_bytes) {
  return {at::from_blob(data, {static_cast<int64_t>(num_bytes)}, at::kByte)};
}

class WorkTransfer final : public Transfer {
 public:
  // `post(tensors)` posts a send or a receive.
  template <typename Post>
  WorkTransfer(std::byte* data, size_t num_bytes, const Post& post) {
    auto tensors = as_tensors(data, num_bytes);
    work_ = post(tensors);
    if (num_bytes <= kMaxUnsplitBytes) return;
    auto last = as_tensors(&last_byte_, 1);
    last_work_ = post(last);
  }

  void wait(std::chrono::milliseconds timeout) override {
    for (const WorkPtr& work : {last_work_, work_}) {
      if (work && !work->wait(timeout)) throw std::runtime_error("the transfer was cancelled");
    }
  }
  void give_up() override {
    for (const WorkPtr& work : {last_work_, work_}) {
      try {
        if (work) work->abort();
      } catch (const std::exception&) {
        // The backend cannot abort its works: the wait ends at its own timeout.
      }
    }
  }
  int source() const override { return work_->sourceRank(); }

 private:
  std::byte last_byte_{};
  WorkPtr work_;
  WorkPtr last_work_;
};

class BackendTransport final : public Transport {
 public:
  explicit BackendTransport(c10::intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)) {}

  std::unique_ptr<Transfer> send(int peer,
                                 int tag,
                                 const std::byte* data,
                                 size_t num_bytes) override {
    return std::make_unique<WorkTransfer>(
        const_cast<std::byte*>(data), num_bytes, [&](std::vector<at::Tensor>& tensors) {
          return backend_->send(tensors, peer, tag);
        });
  }

  std::unique_ptr<Transfer> receive(int peer, int tag, std::byte* data, size_t num_bytes) override {
    if (peer == kAnySource && num_bytes > kMaxUnsplitBytes) {
      throw std::invalid_argument("a receive from any source takes at most 16 KiB");
    }
    return std::make_unique<WorkTransfer>(data, num_bytes, [&](std::vector<at::Tensor>& tensors) {
      return peer == kAnySource ? backend_->recvAnysource(tensors, tag)
                                : backend_->recv(tensors, peer, tag);
    });
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace

std::unique_ptr<Transport> transport_over(c10::intrusive_ptr<c10d::Backend> backend) {
  return std::make_unique<BackendTransport>(std::move(backend));
}

}  // namespace weft::collectives
