#pragma once

#include <cstddef>

namespace weft::collectives {

// Uninitialized memory for a step of a collective. Large blocks are allocated with mmap(): malloc
// would keep freed memory in one arena per thread, and many groups have many threads.
class Scratch {
 public:
  Scratch() = default;
  // Errors: std::bad_alloc.
  explicit Scratch(size_t num_bytes);
  Scratch(Scratch&& other) noexcept;
  Scratch& operator=(Scratch&& other) noexcept;
  ~Scratch();

  std::byte* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  bool is_mapped() const;

  std::byte* data_ = nullptr;
  size_t num_bytes_ = 0;
};

}  // namespace weft::collectives
