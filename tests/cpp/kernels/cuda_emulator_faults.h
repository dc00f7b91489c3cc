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

// Fault: one lane leaves a shuffle out.
void shuffle_without_lane(bool has_fault);

// Fault: the mask of a shuffle lacks lanes.
void shuffle_with_partial_mask(bool has_fault);

// Adds shared memory to numbers; fault: it is not set before.
void read_unset_shared(float* numbers, bool has_fault);

// Doubles `size` numbers; fault: one more.
void step_out_of_bounds(float* numbers, int size, bool has_fault);

// Writes dynamic shared memory; fault: one element beyond it.
void step_out_of_shared(float* number, bool has_fault);

// Copies packs of 16 bytes; fault: from an address that is not a multiple.
void load_misaligned(const float* numbers, float* copies, bool has_fault);

// Fault: 1025 threads.
void launch_too_many_threads(bool has_fault);

// Fault: more dynamic shared memory than a kernel gets without asking.
void launch_with_too_much_shared(bool has_fault);

// Asks for all dynamic shared memory of the device; fault: one byte more.
void ask_for_too_much_shared(bool has_fault);

}  // namespace weft::cuda_emulator::testing
