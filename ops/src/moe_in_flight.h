#pragma once

// Rows that move to their experts or back while Python computes: see moe_in_flight.cpp.

#include "expert_rows.h"

#include <torch/custom_class.h>

#include <optional>
#include <utility>

namespace weft::ops {

// PendingExpertRows as a class of TorchScript, `torch.classes.weft.ExpertRowsInFlight`.
class ExpertRowsInFlight : public torch::CustomClassHolder {
 public:
  explicit ExpertRowsInFlight(PendingExpertRows pending) : pending_(std::move(pending)) {}

  // Waits at the first call (CUDA: makes the current stream wait); returns the rows at each call:
  // a selective activation checkpoint saves this object and waits again.
  at::Tensor wait() {
    if (pending_.has_value()) {
      rows_ = pending_->get();
      pending_.reset();
    }
    return rows_;
  }

 private:
  std::optional<PendingExpertRows> pending_;
  at::Tensor rows_;
};

}  // namespace weft::ops
