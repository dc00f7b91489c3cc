#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft::strategy {

// The samples of each micro-batch, at least one, in proportion to `shares` as nearly as can be; of
// equal shares the first ones are larger.
// Throws std::invalid_argument for fewer samples than shares and for shares that are not above 0.
std::vector<int64_t> deal_samples(int64_t batch_size, std::span<const double> shares);

// Ways to cut a batch into `count` micro-batches that are smaller towards its ends, which fill and
// drain a pipeline sooner: the first ones, the last ones or both, 1, 2 or 4 of them but no more
// than `longest`, grow in even steps from a part of the size of those between. None of them even.
std::vector<std::vector<int64_t>> tapered_sizes(int64_t batch_size, int64_t count, int64_t longest);

}  // namespace weft::strategy
