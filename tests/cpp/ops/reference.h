// Unsharded references in plain ATen, and a rank's shards of tensors.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

namespace weft::testing {

struct Range {
  int64_t start;
  int64_t length;
};

// Returns this rank's range of a dim as torch.chunk splits it: ceil(dim_size / num_ranks) entries,
// and fewer or none on the last ranks.
inline Range shard_range(int64_t dim_size, int64_t num_ranks, int64_t rank) {
  const int64_t length = (dim_size + num_ranks - 1) / num_ranks;
  const int64_t start = std::min(rank * length, dim_size);
  return {start, std::min(start + length, dim_size) - start};
}

// Returns this rank's shard of `full` along `dim`, as a leaf that requires a gradient.
inline at::Tensor shard(const at::Tensor& full, int64_t dim, int num_ranks, int rank) {
  const auto [start, length] = shard_range(full.size(dim), num_ranks, rank);
  return full.detach().narrow(dim, start, length).clone().requires_grad_();
}

inline at::Tensor apply_activation(const at::Tensor& x, const std::string& name) {
  if (name == "silu") return at::silu(x);
  if (name == "gelu") return at::gelu(x);
  if (name == "gelu_tanh") return at::gelu(x, "tanh");
  return at::relu(x);
}

// max |a - b| <= tolerance * max(1, max |b|)
inline void expect_close(const at::Tensor& a,
                         const at::Tensor& b,
                         double tolerance,
                         const std::string& what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  if (a.numel() == 0) return;
  const auto bound = tolerance * std::max(1.0, b.abs().max().item<double>());
  EXPECT_LE((a - b).abs().max().item<double>(), bound) << what;
}

// Returns the first line of the c10::Error that `call` throws; "" if it throws none.
template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return text.substr(0, text.find('\n'));
  }
  return "";
}

}  // namespace weft::testing
