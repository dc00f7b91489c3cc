#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

// Runs CUDA kernels on the CPU, to test them where there is no GPU.
//
// A launch runs at once, or on a stream of `Settings::streams`; its blocks run one after another.
// The threads of a block are fibres of the calling thread: a fibre runs until it ends or waits for
// others, at a barrier or at a shuffle. A warp runs until all of its threads wait at the block's
// barrier or have ended; then another warp runs. So between two barriers one warp sees nothing, or
// everything, that another warp does. A missing barrier permits both; the order of warps and of
// lanes decides which of them happens. Shared memory is filled with bytes of 0xFF, NaN in every
// floating type, before each block.
//
// The emulator does not model: caches and memory ordering, several blocks at a time, registers and
// occupancy, rounding of CUDA's own exp and erf. Compile the kernels with
// the address and undefined-behaviour sanitizers, which find out-of-bounds and misaligned accesses.
//
// One thread of the process may use the emulator at a time.
namespace weft::cuda_emulator {

struct Dims {
  constexpr Dims(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1)
      : x(x_size), y(y_size), z(z_size) {}
  unsigned x;
  unsigned y;
  unsigned z;
};

// The limits of a device, from the table of compute capabilities in the CUDA programming guide.
struct Device {
  const char* name;
  int num_multiprocessors;
  int shared_bytes_per_block;  // at most, with cudaFuncAttributeMaxDynamicSharedMemorySize
  int shared_bytes_per_multiprocessor;
};

// Few multiprocessors, so that loops over the grid run more than once.
inline constexpr Device kSm80{"sm_80", 3, 163 * 1024, 164 * 1024};
inline constexpr Device kSm90{"sm_90", 3, 227 * 1024, 228 * 1024};
inline constexpr Device kSm100{"sm_100", 3, 227 * 1024, 228 * 1024};

// Where launches run. Without an object of this class, each runs at once, and there is one device
// with one stream, a null pointer.
class Streams {
 public:
  virtual ~Streams() = default;
  // Makes a device current and returns the previous one. A null stream belongs to the current
  // device.
  virtual int set_device(int device) = 0;
  virtual void* current(int device) = 0;
  virtual bool is_captured(void* stream) = 0;
  // Runs the launch after all earlier work of the stream. Launches of several streams run one at a
  // time.
  virtual void submit(void* stream, std::function<void()> launch) = 0;
};

struct Launch {
  const void* kernel;
  Dims grid_size;
  Dims block_size;
  std::size_t shared_bytes;  // dynamic
};

enum class Order { kForward, kReverse, kRandom };  // of a block's warps and of a warp's lanes

struct Settings {
  Device device = kSm90;
  Order order = Order::kForward;
  uint64_t seed = 0;  // of kRandom
  // Runs only the first and the last block along each dim of the grid, if the grid is too large.
  bool only_outer_blocks = false;
  bool is_capturing = false;  // whether the one stream reports the capture of a CUDA graph
  Streams* streams = nullptr;
  std::vector<Launch>* launches = nullptr;  // receives every launch
};

// The settings of later launches.
Settings& settings();

// A launch beyond the limits of the device, or a barrier or shuffle that not all threads reach.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Runs `thread` once for each thread of the grid. If it throws Error, results are undefined.
void launch(const Launch& launch, const std::function<void()>& thread);

// Allows the launches of `kernel` up to `num_bytes` of dynamic shared memory, instead of 48 KiB.
// Throws Error if the device has less.
void allow_shared_bytes(const void* kernel, int num_bytes);

// ---- for kernels -----------------------------------------------------------------------------

struct Indices {
  Dims thread;
  Dims block;
  Dims block_size;
  Dims grid_size;
};

// The indices of the thread that runs.
const Indices& current();

void sync_block();

// Writes to `result` the value of the thread whose lane is this thread's lane XOR `lane_mask`. All
// lanes of the warp must call it, with a full `mask`.
void shuffle_xor(
    unsigned mask, const void* value, void* result, std::size_t num_bytes, int lane_mask);

void* dynamic_shared_memory();

}  // namespace weft::cuda_emulator
