#pragma once

// Matrix products that are summed over the group: the output of a row-parallel layer, and the
// input gradient of a column-parallel one. If the backend has a staging buffer that the peers read,
// the product is written there directly: see all_reduce_from_writer.

#include "group.h"

#include <ATen/core/Tensor.h>

#include <string_view>
#include <utility>

namespace weft::ops {

// Returns x @ weightᵀ, [..., out], summed over `group`.
at::Tensor reduced_linear(std::string_view op,
                          const at::Tensor& x,
                          const at::Tensor& weight,
                          const ProcessGroupPtr& group);

// Starts the all-reduce over `group` of the product grad @ weight [+ second_grad @ second_weight],
// [..., in], the gradient of a layer's input: see start_all_reduce_from_writer. `overlaps`: see
// PendingCollective. The second pair may be undefined.
std::pair<at::Tensor, PendingCollective> start_reduced_input_product(
    std::string_view op,
    const ProcessGroupPtr& group,
    bool overlaps,
    const at::Tensor& grad,
    const at::Tensor& weight,
    const at::Tensor& second_grad = {},
    const at::Tensor& second_weight = {});

}  // namespace weft::ops
