#pragma once

// Matrix products whose sum over the group is the result: the row half of a layer, and the gradient
// of the input of its column half. They are computed where the group's peers read them, if it has
// such memory.

#include "group.h"

#include <ATen/core/Tensor.h>

#include <string_view>
#include <utility>

namespace weft::ops {

// x weightᵀ, [..., out], summed over `group`.
at::Tensor reduced_linear(std::string_view op,
                          const at::Tensor& x,
                          const at::Tensor& weight,
                          const ProcessGroupPtr& group);

// grad weight [+ second_grad second_weight], [..., in], summed over `group`, in flight: see
// start_sum_of. The second pair may be undefined.
std::pair<at::Tensor, PendingCollective> start_reduced_input_product(
    std::string_view op,
    const ProcessGroupPtr& group,
    const at::Tensor& grad,
    const at::Tensor& weight,
    const at::Tensor& second_grad = {},
    const at::Tensor& second_weight = {});

}  // namespace weft::ops
