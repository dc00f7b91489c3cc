#pragma once

// How rows move to the experts that are chosen for them, and back.
//
// A *pair* is a token and one of the k experts that are chosen for it; pair t * k + c is choice c
// of token t. A rank has its tokens' pairs, sorted by expert and then by pair. The experts are
// sharded over the group as in shard_shape.h, so the pairs of a rank's experts are contiguous: an
// all-to-all sends them. A rank receives pairs that are sorted by source rank and then by expert;
// its *expert rows* are sorted by expert and then by source rank.

#include "group.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace weft::ops {

// The pairs of one call.
struct ExpertRoutes {
  at::Tensor order;     // [pairs] int64: the pairs of this rank's tokens, sorted by expert
  at::Tensor sent;      // [ranks] int64 on the CPU: the number of these pairs for each rank
  at::Tensor received;  // [ranks, own experts] int64 on the CPU: the pairs from each rank
};

struct CountedRoutes {
  ExpertRoutes routes;
  at::Tensor counts;  // [own experts] int64: the number of rows of each of this rank's experts
};

// Returns the routes of each chunk of this rank's tokens, with the ids [tokens of the chunk, k];
// all ranks have as many chunks. One all-to-all of counts; CUDA: waits for the device. In a dry
// run, all experts are chosen equally often. Errors: IndexError on all ranks if an id of a rank is
// not from 0 to num_experts - 1.
std::vector<CountedRoutes> exchange_counts(std::string_view op,
                                           const std::vector<at::Tensor>& expert_ids,
                                           std::int64_t num_experts,
                                           const ProcessGroupPtr& group);

// Rows in flight, to the experts or back. Move-only.
class PendingExpertRows {
 public:
  // Rows that are complete.
  explicit PendingExpertRows(at::Tensor rows) : rows_(std::move(rows)) {}
  PendingExpertRows(at::Tensor rows, PendingCollective work, at::Tensor received = {})
      : rows_(std::move(rows)), work_(std::move(work)), received_(std::move(received)) {}

  // Waits (CUDA: makes the current stream wait) and returns the rows. Call it once.
  at::Tensor get();

 private:
  at::Tensor rows_;
  PendingCollective work_;
  at::Tensor received_;  // defined: the rows are sorted by the rows and columns of these counts
};

// Starts to send `rows` [pairs, features], in the order of `routes`, to their experts; the result
// are the rows of this rank's experts. One all-to-all, after which `rows` are released. For a null
// group, the result are `rows`. `overlaps`: see PendingCollective.
PendingExpertRows start_to_experts(std::string_view op,
                                   at::Tensor rows,
                                   const ExpertRoutes& routes,
                                   const ProcessGroupPtr& group,
                                   bool overlaps);

// The inverse of start_to_experts.
PendingExpertRows start_from_experts(std::string_view op,
                                     const at::Tensor& rows,
                                     const ExpertRoutes& routes,
                                     const ProcessGroupPtr& group,
                                     bool overlaps);

// Like start_to_experts and start_from_experts, and waits.
at::Tensor send_to_experts(std::string_view op,
                           at::Tensor rows,
                           const ExpertRoutes& routes,
                           const ProcessGroupPtr& group);
at::Tensor return_from_experts(std::string_view op,
                               const at::Tensor& rows,
                               const ExpertRoutes& routes,
                               const ProcessGroupPtr& group);

// Returns for each of the sorted pairs, [pairs], the index of its token.
at::Tensor tokens_of_pairs(const at::Tensor& order, std::int64_t num_tokens);

// Returns the sum over the choices of each token of the `rows` [pairs, features] of its pairs, each
// times the pair's weight if `weights` [tokens, k] is defined: [tokens, features], summed in
// float32 for half precision. `rows` have the order `order`.
at::Tensor sum_over_choices(const at::Tensor& rows,
                            const at::Tensor& order,
                            std::int64_t num_tokens,
                            const at::Tensor& weights);

// Returns the gradient of `weights` [tokens, k] in sum_over_choices, in their dtype.
at::Tensor choice_weight_grad(const at::Tensor& grad_y,
                              const at::Tensor& rows,
                              const at::Tensor& order,
                              const at::Tensor& weights);

// Returns the values of `counts`, int64; CUDA: waits for the device. If they have no values, as in
// a dry run, returns numbers that differ by at most 1 and have the sum `total`.
std::vector<std::int64_t> host_counts(const at::Tensor& counts, std::int64_t total);

}  // namespace weft::ops
