#include "scratch.h"

#include <new>
#include <sys/mman.h>
#include <utility>

namespace weft::collectives {

Scratch::Scratch(size_t num_bytes) : num_bytes_(num_bytes) {
  if (!is_mapped()) {
    data_ = new std::byte[num_bytes];
    return;
  }
  void* const mapped =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(mapped);
}

Scratch::Scratch(Scratch&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}

Scratch& Scratch::operator=(Scratch&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  if (is_mapped()) {
    munmap(data_, num_bytes_);
  } else {
    delete[] data_;
  }
}

bool Scratch::is_mapped() const { return num_bytes_ >= size_t{64} * 1024; }

}  // namespace weft::collectives
