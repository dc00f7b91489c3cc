#include "weft/strategy/tuning/cluster.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace weft::strategy {

namespace {

// The fractions of a data sheet's rates that large operations attain.
constexpr double kProducts = 0.7;
constexpr double kMemory = 0.85;
constexpr double kLinks = 0.8;

struct Gpu {
  std::string_view name;
  double float32_teraflops;
  double half_teraflops;
  double terabytes_per_second;
  int64_t gigabytes;
  double nvlink_gigabytes;   // per second and direction
  double adapter_gigabytes;  // the same
  double pcie_gigabytes;     // the same, of 16 lanes
  double host_gigabytes;     // per second, of the memory of both processors
};

constexpr std::array<Gpu, 4> kGpus = {{{"a100", 19.5, 312, 2.039, 80, 300, 25, 32, 409.6},
                                       {"h100", 67, 989, 3.35, 80, 450, 50, 64, 614.4},
                                       {"h200", 67, 989, 4.8, 141, 450, 50, 64, 614.4},
                                       {"b200", 75, 2250, 7.7, 180, 900, 50, 64, 716.8}}};

Cluster cluster_of(const Gpu& gpu) {
  return {.name = std::string(gpu.name),
          .device = {.float32_flops = gpu.float32_teraflops * 1e12 * kProducts,
                     .half_flops = gpu.half_teraflops * 1e12 * kProducts,
                     .bytes_per_second = gpu.terabytes_per_second * 1e12 * kMemory,
                     .seconds_per_kernel = 4e-6,
                     .overlaps = true},
          .devices_per_host = 8,
          .device_bytes = gpu.gigabytes * 1'000'000'000,
          .within_host = {.seconds_per_message = 3e-6,
                          .bytes_per_second = gpu.nvlink_gigabytes * 1e9 * kLinks},
          .across_hosts = {.seconds_per_message = 1e-5,
                           .bytes_per_second = gpu.adapter_gigabytes * 1e9 * kLinks},
          .copy_bytes_per_second = gpu.pcie_gigabytes * 1e9 * kLinks,
          .host_bytes_per_second = gpu.host_gigabytes * 1e9 * kMemory,
          .host_bytes = 2'000'000'000'000};
}

// One core with AVX2 and fused multiply-add, and copies through shared memory.
Cluster cpu_cluster() {
  return {.name = "cpu",
          .device = {.float32_flops = 5e10,
                     .half_flops = 5e10,
                     .bytes_per_second = 8e9,
                     .seconds_per_kernel = 3e-6,
                     .overlaps = false},
          .devices_per_host = 1 << 20,
          .device_bytes = 4'000'000'000,
          .within_host = {.seconds_per_message = 5e-6, .bytes_per_second = 3e9},
          .across_hosts = {.seconds_per_message = 3e-5, .bytes_per_second = 1.25e9}};
}

// Returns the seconds of `num_rings` times n - 1 messages of an n-th of the bytes.
double ring_seconds(const Group& group, double num_bytes, double num_rings) {
  if (group.num_ranks == 1) {
    return 0;
  }
  const auto num_messages = num_rings * static_cast<double>(group.num_ranks - 1);
  const double message_bytes = num_bytes / static_cast<double>(group.num_ranks);
  return group.seconds_per_wait + num_messages * (group.link.seconds_per_message +
                                                  message_bytes / group.link.bytes_per_second);
}

}  // namespace

std::vector<std::string> cluster_names() {
  std::vector<std::string> names;
  names.reserve(kGpus.size() + 1);
  for (const Gpu& gpu : kGpus) {
    names.emplace_back(gpu.name);
  }
  names.emplace_back("cpu");
  return names;
}

Cluster named_cluster(std::string_view name) {
  if (name == "cpu") {
    return cpu_cluster();
  }
  const auto* const found =
      std::find_if(kGpus.begin(), kGpus.end(), [&](const Gpu& gpu) { return gpu.name == name; });
  if (found == kGpus.end()) {
    std::string valid;
    for (const std::string& each : cluster_names()) {
      valid += (valid.empty() ? "'" : ", '") + each + "'";
    }
    throw std::invalid_argument("tune: got the cluster '" + std::string(name) + "'; use one of " +
                                valid);
  }
  return cluster_of(*found);
}

void check_hosts(const Cluster& cluster) {
  if (cluster.copy_bytes_per_second <= 0 || cluster.host_bytes_per_second <= 0 ||
      cluster.host_bytes <= 0) {
    throw std::invalid_argument(
        "tune: got offloaded optimizer states, and the cluster '" + cluster.name +
        "' has no CPU memory for them; give copy_bytes_per_second, host_bytes_per_second and "
        "host_bytes above 0, or leave offload out");
  }
}

int64_t num_on_host(const Cluster& cluster, int64_t num_devices) {
  return std::min(num_devices, cluster.devices_per_host);
}

double slowdown(const Cluster& cluster, int64_t num_devices) {
  if (cluster.cores_per_host == 0) {
    return 1;
  }
  const auto num_sharing = static_cast<double>(num_on_host(cluster, num_devices));
  return std::max(1.0, num_sharing / cluster.cores_per_host);
}

Group group_of(const Cluster& cluster, int64_t num_ranks, int64_t stride) {
  const int64_t num_per_host = std::max<int64_t>(1, cluster.devices_per_host / stride);
  if (num_ranks <= num_per_host) {
    return {.num_ranks = num_ranks,
            .link = cluster.within_host,
            .seconds_per_wait = cluster.seconds_per_wait};
  }
  const double own_links =
      static_cast<double>(num_per_host) * cluster.across_hosts.bytes_per_second;
  const double bytes_per_second =
      num_per_host == 1 ? own_links : std::min(own_links, cluster.within_host.bytes_per_second);
  return {.num_ranks = num_ranks,
          .link = {.seconds_per_message = cluster.across_hosts.seconds_per_message,
                   .bytes_per_second = bytes_per_second},
          .seconds_per_wait = cluster.seconds_per_wait};
}

double all_gather_seconds(const Group& group, double num_bytes) {
  return ring_seconds(group, num_bytes, 1);
}

double reduce_scatter_seconds(const Group& group, double num_bytes) {
  return ring_seconds(group, num_bytes, 1);
}

double all_reduce_seconds(const Group& group, double num_bytes) {
  return ring_seconds(group, num_bytes, 2);
}

}  // namespace weft::strategy
