#pragma once

// Parts of a dim on their way between the ranks of a group: see shard_shape.h for how it is cut.
// Everything here waits, works below autograd, and returns memory of its own, contiguous. A null
// group is one rank. Nothing is sent where no rank has an element.

#include "group.h"
#include "shard_shape.h"

namespace weft::ops {

GroupPlace place_in(const ProcessGroupPtr& group);

// All parts of `dim`, `dim_size` long together, of which x is this rank's.
at::Tensor all_gather(std::string_view op,
                      const at::Tensor& x,
                      std::int64_t dim,
                      std::int64_t dim_size,
                      const ProcessGroupPtr& group);

// This rank's part along `dim` of the sum of x over the group.
at::Tensor reduce_scatter(std::string_view op,
                          const at::Tensor& x,
                          std::int64_t dim,
                          const ProcessGroupPtr& group);

// Part r of x along `split_dim` goes to rank r; what comes from the ranks is put together along
// `cat_dim`, `cat_size` long.
at::Tensor all_to_all(std::string_view op,
                      const at::Tensor& x,
                      std::int64_t split_dim,
                      std::int64_t cat_dim,
                      std::int64_t cat_size,
                      const ProcessGroupPtr& group);

}  // namespace weft::ops
