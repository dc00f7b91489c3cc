#pragma once

// Memory that the ranks of a host share, with no name in any file system: it is freed when the last
// process that maps it unmaps it or ends, in whatever way. No limit of /dev/shm applies to it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <sys/types.h>

namespace weft::collectives {

// How another process of this host finds a segment.
struct SegmentAddress {
  pid_t pid = 0;
  int descriptor = -1;
  size_t num_bytes = 0;
  uint64_t nonce = 0;  // also in the segment's first eight bytes, to identify the segment

  std::string to_string() const;
  // Errors: std::invalid_argument for a text that is not from to_string().
  static SegmentAddress parse(const std::string& text);
};

// The shared memory of a group on one host, which all its ranks map. Move-only. A forked child does
// not have the mapping, so a data loader worker does not keep the memory alive. Ranks that are
// threads of the creating process share its mapping.
class Segment {
 public:
  // Returns memory of `num_bytes`, zeroed except for the nonce in its first eight bytes; untouched
  // pages are not backed by memory.
  // Errors: std::system_error.
  static Segment create(size_t num_bytes);
  // Maps the segment at `address`. Errors: std::system_error if the process has ended or may not be
  // accessed; std::runtime_error if its descriptor no longer refers to the segment.
  static Segment open(const SegmentAddress& address);

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  std::byte* data() const;
  size_t num_bytes() const;
  // REQUIRES: made with create(), and the descriptor is not closed yet.
  SegmentAddress address() const;
  // Call it once every rank has opened the segment; the mapping stays.
  void close_descriptor();
  // Return the resident bytes (pages of all ranks, counted once) of the full segment, or of the
  // pages that begin in a range of it.
  size_t resident_bytes() const { return resident_bytes(0, num_bytes()); }
  size_t resident_bytes(size_t offset, size_t size) const;

 private:
  class Mapping;

  std::shared_ptr<Mapping> mapping_;
  int descriptor_ = -1;
};

// Returns the identity of this process's host. A host is a set of processes with one identity,
// which can open each other's memory: the identity is the running kernel, the PID and network
// namespaces and the user. The environment variable WEFT_HOST_ID replaces the identity unless it is
// empty. Errors: std::system_error if the identity cannot be read now, for example with too many
// open files.
std::string host_identity();

}  // namespace weft::collectives
