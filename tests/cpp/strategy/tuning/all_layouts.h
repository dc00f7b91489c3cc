#pragma once

#include "weft/strategy/tuning/search.h"

#include <cstdint>
#include <vector>

namespace weft::strategy {

// Returns the search of layouts of a model of four blocks, on hosts of four CPU ranks.
LayoutSearch small_search(int64_t num_devices, int64_t memory_limit);

// Returns the bytes of the rank with the most.
int64_t peak_bytes(const TrainingSpec& training);

// Returns the seconds of all layouts of a small_search() that fit, by trying all sizes, in
// ascending order.
std::vector<double> all_that_fit(const LayoutSearch& search);

}  // namespace weft::strategy
