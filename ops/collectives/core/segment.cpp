#include "segment.h"

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

namespace weft::collectives {

namespace {

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::string read_link(const char* path) {
  std::array<char, 128> text{};
  const ssize_t length = readlink(path, text.data(), text.size());
  return length < 0 ? std::string() : std::string(text.data(), static_cast<size_t>(length));
}

}  // namespace

std::string SegmentAddress::to_string() const {
  std::ostringstream text;
  text << pid << ' ' << descriptor << ' ' << num_bytes << ' ' << nonce;
  return text.str();
}

SegmentAddress SegmentAddress::parse(const std::string& text) {
  std::istringstream fields(text);
  SegmentAddress address;
  if (!(fields >> address.pid >> address.descriptor >> address.num_bytes >> address.nonce)) {
    throw std::invalid_argument("'" + text + "' is not the address of a segment");
  }
  return address;
}

// A mapping into this process. Only the process that made it unmaps it.
class Segment::Mapping {
 public:
  Mapping(int descriptor, size_t num_bytes) : num_bytes_(num_bytes), owner_(getpid()) {
    void* data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (data == MAP_FAILED) throw_errno("cannot map shared memory");
    data_ = static_cast<std::byte*>(data);
    if (madvise(data, num_bytes, MADV_DONTFORK) != 0)
      throw_errno("cannot exclude shared memory from forked children");
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    // In a forked child, another mapping may be at this address.
    if (owner_ == getpid()) munmap(data_, num_bytes_);
  }

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t num_bytes() const { return num_bytes_; }
  [[nodiscard]] uint64_t nonce() const {
    uint64_t nonce = 0;
    std::memcpy(&nonce, data_, sizeof nonce);
    return nonce;
  }

  // The mappings of segments that this process created.
  struct Created {
    std::mutex mutex;
    std::map<uint64_t, std::weak_ptr<Mapping>> by_nonce;
  };
  static Created& created() {
    static Created all;
    return all;
  }

 private:
  std::byte* data_ = nullptr;
  size_t num_bytes_;
  pid_t owner_;
};

Segment Segment::create(size_t num_bytes) {
  Segment segment;
  // Sealed against shrinking: reading a page beyond the end would kill a rank.
  segment.descriptor_ = memfd_create("weft", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (segment.descriptor_ < 0) throw_errno("cannot create shared memory");
  if (ftruncate(segment.descriptor_, static_cast<off_t>(num_bytes)) != 0) {
    throw_errno("cannot size shared memory");
  }
  if (fcntl(segment.descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    throw_errno("cannot seal shared memory");
  }
  segment.mapping_ = std::make_shared<Mapping>(segment.descriptor_, num_bytes);
  std::random_device random;
  const uint64_t nonce = (static_cast<uint64_t>(random()) << 32) | random();
  std::memcpy(segment.data(), &nonce, sizeof nonce);
  auto& created = Mapping::created();
  const std::lock_guard lock(created.mutex);
  std::erase_if(created.by_nonce, [](const auto& entry) { return entry.second.expired(); });
  created.by_nonce[nonce] = segment.mapping_;
  return segment;
}

Segment Segment::open(const SegmentAddress& address) {
  Segment segment;
  if (address.pid == getpid()) {
    auto& created = Mapping::created();
    const std::lock_guard lock(created.mutex);
    const auto found = created.by_nonce.find(address.nonce);
    if (found != created.by_nonce.end()) segment.mapping_ = found->second.lock();
    if (segment.mapping_) return segment;
  }
  const std::string path =
      "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.descriptor);
  segment.descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (segment.descriptor_ < 0) {
    throw_errno("cannot open the shared memory of process " + std::to_string(address.pid) + " at " +
                path);
  }
  struct stat status {};
  const bool fits =
      fstat(segment.descriptor_, &status) == 0 && std::cmp_equal(status.st_size, address.num_bytes);
  if (fits) segment.mapping_ = std::make_shared<Mapping>(segment.descriptor_, address.num_bytes);
  segment.close_descriptor();
  if (!fits || segment.mapping_->nonce() != address.nonce) {
    throw std::runtime_error(path + " is not the shared memory that process " +
                             std::to_string(address.pid) + " announced");
  }
  return segment;
}

Segment::Segment(Segment&& other) noexcept
    : mapping_(std::move(other.mapping_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

Segment::~Segment() { close_descriptor(); }

std::byte* Segment::data() const { return mapping_->data(); }
size_t Segment::num_bytes() const { return mapping_->num_bytes(); }

SegmentAddress Segment::address() const {
  return {getpid(), descriptor_, num_bytes(), mapping_->nonce()};
}

void Segment::close_descriptor() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

size_t Segment::resident_bytes(size_t offset, size_t size) const {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t first = (offset + page - 1) / page;
  const size_t end = (offset + size + page - 1) / page;
  std::vector<unsigned char> resident(end - first);
  if (resident.empty() ||
      mincore(data() + first * page, resident.size() * page, resident.data()) != 0) {
    return 0;
  }
  size_t num_pages = 0;
  for (const unsigned char flag : resident) num_pages += flag & 1U;
  return num_pages * page;
}

std::string host_identity() {
  const char* const given = std::getenv("WEFT_HOST_ID");
  if (given != nullptr && *given != 0) return given;
  std::string boot_id;
  errno = 0;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  // A sandbox may have no boot id. Throw on other errors, such as too many open files: without
  // its boot id, this rank would count as one on another host.
  if (boot_id.empty() && errno != ENOENT && errno != 0)
    throw_errno("cannot read the identity of the host");
  // Ranks in different PID namespaces, or of different users, can neither open each other's memory
  // nor detect each other's end, so they count as on different hosts. Ranks in different network
  // namespaces, as containers usually are, count as on different hosts, too.
  return boot_id + ' ' + read_link("/proc/self/ns/pid") + ' ' + read_link("/proc/self/ns/net") +
         " uid:" + std::to_string(getuid());
}

}  // namespace weft::collectives
