#pragma once

#include <cstdint>

// Small CUDA kernels for the tests of the emulator. Each is correct unless `has_fault` plants the
// fault that it is named after.
namespace weft::cuda_emulator::testing {

// Sums 256 numbers in shared memory; fault: no barrier before another warp's results are read.
void sum_without_barrier(const float* numbers, float* sum, bool has_fault);

// Twice rotates 256 numbers in shared memory, the second time plus 1: `rotated` has 512 numbers.
// Fault: no barrier between reading and overwriting.
void overwrite_without_barrier(const float* numbers, float* rotated, bool has_fault);

// Fault: half of the threads return before a barrier.
void return_before_barrier(bool has_fault);

// Fault: one lane returns before a shuffle.
void shuffle_without_lane(bool has_fault);

// Fault: the mask of a shuffle lacks lanes.
void shuffle_with_partial_mask(bool has_fault);

// Adds zeros from shared memory to 256 numbers; fault: the shared memory is not set before.
void read_unset_shared(float* numbers, bool has_fault);

// Doubles `size` numbers, at most 768; fault: one more.
void step_out_of_bounds(float* numbers, int size, bool has_fault);

// Sets `number` to 1 through dynamic shared memory; fault: one element beyond it.
void step_out_of_shared(float* number, bool has_fault);

// Copies 32 packs of 16 bytes; fault: from an address that is not a multiple of 16.
void load_misaligned(const float* numbers, float* copies, bool has_fault);

// Fault: a block of 1025 threads.
void launch_too_many_threads(bool has_fault);

// Fault: more dynamic shared memory than a kernel may use by default.
void launch_with_too_much_shared(bool has_fault);

// Allows a kernel all dynamic shared memory of the device; fault: one byte more.
void allow_too_much_shared(bool has_fault);

}  // namespace weft::cuda_emulator::testing
