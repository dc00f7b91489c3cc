#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft::strategy {

// Returns the number of samples of each micro-batch: at least one, and as nearly proportional to
// `shares` as possible. Among equal shares, the first ones are larger.
// Throws std::invalid_argument for fewer samples than shares and for shares that are not above 0.
std::vector<int64_t> deal_samples(int64_t batch_size, std::span<const double> shares);

// Returns ways to split a batch into `count` micro-batches that are smaller towards its ends, which
// shortens a pipeline's warm-up and cool-down. The first ones, the last ones or both grow in even
// steps from a fraction of the size of the others; 1, 2 or 4 of them grow, at most `longest`. The
// even split is not included.
std::vector<std::vector<int64_t>> tapered_sizes(int64_t batch_size, int64_t count, int64_t longest);

}  // namespace weft::strategy
