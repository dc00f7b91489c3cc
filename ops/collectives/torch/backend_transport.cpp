#include "backend_transport.h"

#include "messages.h"

#include <ATen/ops/from_blob.h>

#include <stdexcept>
#include <utility>

namespace weft::collectives {

namespace {

class WorkTransfer final : public Transfer {
 public:
  explicit WorkTransfer(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  void wait(std::chrono::milliseconds timeout) override {
    if (!work_->wait(timeout)) throw std::runtime_error("given up");
  }
  void give_up() override {
    try {
      work_->abort();
    } catch (const std::exception&) {
      // A backend whose works cannot be aborted: the wait ends with its own timeout.
    }
  }
  int source() const override { return work_->sourceRank(); }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
};

class BackendTransport final : public Transport {
 public:
  explicit BackendTransport(c10::intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)) {}

  std::unique_ptr<Transfer> send(int peer,
                                 int tag,
                                 const std::byte* data,
                                 size_t num_bytes) override {
    auto tensors = as_tensors(const_cast<std::byte*>(data), num_bytes);
    return std::make_unique<WorkTransfer>(backend_->send(tensors, peer, tag));
  }

  std::unique_ptr<Transfer> receive(int peer, int tag, std::byte* data, size_t num_bytes) override {
    auto tensors = as_tensors(data, num_bytes);
    return std::make_unique<WorkTransfer>(peer == kAnySource ? backend_->recvAnysource(tensors, tag)
                                                             : backend_->recv(tensors, peer, tag));
  }

 private:
  static std::vector<at::Tensor> as_tensors(std::byte* data, size_t num_bytes) {
    return {at::from_blob(data, {static_cast<int64_t>(num_bytes)}, at::kByte)};
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace

std::unique_ptr<Transport> transport_over(c10::intrusive_ptr<c10d::Backend> backend) {
  return std::make_unique<BackendTransport>(std::move(backend));
}

}  // namespace weft::collectives
