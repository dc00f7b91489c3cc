#pragma once

// The blocks of rows in which the weights of fused MLPs are stepped inside the backward
// (optimizer_in_backward="rows"). The optimizer and the memory model use the same sizes.

#include <cstdint>

namespace weft::strategy {

enum class DeviceKind { kCpu, kCuda };

// Returns the number of rows of a block, from 1 to num_rows (1 if there are none), for a weight of
// `num_rows` rows of `row_bytes` each on a rank. The last block may have fewer.
//
// CPU: a block is 1 MiB of the gradient, which stays in the caches until the optimizer reads it.
//
// CUDA: a block that keeps the device busy does not fit into a cache. A block is a quarter of the
// weight or, if that is larger, 64 MiB, rounded up to 128 rows, the tiles of its matrix product;
// but at least 1 MiB. For each block, the host launches one product and one optimizer step, which
// takes about 0.2 ms in Python. With 4096 tokens and a block of 16 Mi elements, 64 MiB in float32,
// whose product is in bfloat16 (mixed precision), an H100 computes for longer (0.2 ms for the
// product at 700 TFLOP/s, 0.15 ms for AdamW at 3 TB/s), and tiles of 128 x 256 make four waves on
// its 132 multiprocessors. Smaller weights are divided into quarters to keep the memory of their
// gradients small, too.
int64_t rows_per_block(DeviceKind device, int64_t num_rows, int64_t row_bytes);

}  // namespace weft::strategy
