#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft::strategy {

// Returns the number of samples of each micro-batch: at least one, and as nearly proportional to
// `shares` as possible. Among equal shares, the first ones are larger.
// Throws std::invalid_argument without shares, for fewer samples than shares and for shares that
// are not above 0.
std::vector<int64_t> deal_samples(int64_t batch_size, std::span<const double> shares);

// Returns several splits of a batch into `count` micro-batches that are smaller towards the ends of
// the batch, which shortens a pipeline's warm-up and cool-down. Each split is a list of sizes, in
// samples. The n micro-batches at the start of the batch, at its end or at both ends are smaller
// than the others: the outermost has 1/4 to 3/4 of the others' size, and the sizes rise inwards in
// even steps. n is 1, 2 or 4, at most `max_tapered` and at most (count - 1) / 2. The even split is
// not included.
std::vector<std::vector<int64_t>> tapered_sizes(int64_t batch_size,
                                                int64_t count,
                                                int64_t max_tapered);

}  // namespace weft::strategy
