// Short forms of calls, for the tests of support/.
#pragma once

#include "support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace weft::testing {

using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using std::chrono::milliseconds;

inline at::Tensor filled(double value,
                         at::ScalarType dtype = at::kFloat,
                         at::IntArrayRef shape = {3, 2}) {
  return at::full(shape, value, at::TensorOptions(dtype));
}

inline c10::intrusive_ptr<c10d::Work> all_reduce(RankContext& ctx,
                                                 const at::Tensor& tensor,
                                                 ReduceOp::RedOpType reduce_op = ReduceOp::SUM) {
  Tensors tensors{tensor};
  c10d::AllreduceOptions opts;
  opts.reduceOp = reduce_op;
  return ctx.process_group->allreduce(tensors, opts);
}

// Newer c10d has new names for these two and deprecates the old ones.
template <typename Group>
c10::intrusive_ptr<c10d::Work> all_gather_flat(Group& group,
                                               at::Tensor& output,
                                               at::Tensor& input) {
  if constexpr (requires { group.all_gather_single(output, input); }) {
    return group.all_gather_single(output, input);
  } else {
    return group._allgather_base(output, input);
  }
}

template <typename Group>
c10::intrusive_ptr<c10d::Work> reduce_scatter_flat(Group& group,
                                                   at::Tensor& output,
                                                   at::Tensor& input) {
  if constexpr (requires { group.reduce_scatter_single(output, input); }) {
    return group.reduce_scatter_single(output, input);
  } else {
    return group._reduce_scatter_base(output, input);
  }
}

inline std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

}  // namespace weft::testing
