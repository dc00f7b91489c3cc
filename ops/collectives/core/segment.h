#pragma once

// Memory that the ranks of a host share, with no name in any file system: it goes when the last
// process that maps it goes, however that ends, and no limit of /dev/shm applies to it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <sys/types.h>

namespace weft::collectives {

// Where another process of this host finds a segment.
struct SegmentAddress {
  pid_t pid = 0;
  int descriptor = -1;
  size_t num_bytes = 0;
  uint64_t nonce = 0;  // lies in the first eight bytes: proof that this is the segment meant

  std::string to_string() const;
  // Errors: std::invalid_argument for a text that to_string did not make.
  static SegmentAddress parse(const std::string& text);
};

// Move-only. A forked child does not have the mapping: a data worker neither sees nor keeps it.
// Ranks that are threads of one process share one mapping.
class Segment {
 public:
  // Zeroed memory of `num_bytes`, of which a page counts once it is written.
  // Errors: std::system_error.
  static Segment create(size_t num_bytes);
  // Errors: std::system_error where the process is gone or may not be looked into;
  // std::runtime_error where that descriptor is something else by now.
  static Segment open(const SegmentAddress& address);

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  std::byte* data() const;
  size_t num_bytes() const;
  // REQUIRES: made with create, and the descriptor not closed yet.
  SegmentAddress address() const;
  // Once every rank has it open; the memory stays.
  void close_descriptor();
  // Bytes that the system holds for it now (all ranks' pages, counted once), of all of it or of the
  // pages that begin in a part.
  size_t resident_bytes() const { return resident_bytes(0, num_bytes()); }
  size_t resident_bytes(size_t offset, size_t size) const;

 private:
  class Mapping;

  std::shared_ptr<Mapping> mapping_;
  int descriptor_ = -1;
};

// The identity of what shares memory and sees each other's processes: the running kernel, the
// process and network namespaces and the user. The environment variable WEFT_HOST_ID replaces it.
// Errors: std::system_error where it cannot be read now, as no more files can be opened.
std::string host_identity();

}  // namespace weft::collectives
