#pragma once

// The rates of the devices and links that a training runs on, from which step times are predicted.

#include "weft/strategy/tuning/layer_times.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft::strategy {

// Rates are those that large matrix products and copies attain.
struct DeviceRates {
  double float32_flops = 0;       // operations per second of float32 matrix products
  double half_flops = 0;          // the same in bfloat16 or float16
  double bytes_per_second = 0;    // of the device's memory, reads and writes together
  double seconds_per_kernel = 0;  // the time of a kernel without work
  // Whether collectives of data-parallel ranks run while the device computes.
  bool overlaps = false;
};

struct LinkRates {
  double seconds_per_message = 0;
  double bytes_per_second = 0;  // that a device sends, while it receives as many
};

// Hosts with the same number of devices. Consecutive ranks are on one host.
struct Cluster {
  std::string name;
  DeviceRates device;
  int64_t devices_per_host = 1;
  // The cores that the devices of a host share, if they are processes of a CPU: how many operators
  // run at once as fast as one alone; 0: devices compute independently of each other.
  double cores_per_host = 0;
  int64_t device_bytes = 0;  // the memory of a device
  LinkRates within_host;
  LinkRates across_hosts;  // of one device; the devices of a host have links of their own
  // The time of a collective until the last rank calls it, beside the messages: processes that take
  // turns on a core do not arrive at once. An all-gather waits for it as long as an all-reduce.
  double seconds_per_wait = 0;
  // For optimizer states in CPU memory. All 0: the devices are CPU ranks, whose states are there.
  double copy_bytes_per_second = 0;  // between a device and CPU memory, in each direction at once
  double host_bytes_per_second = 0;  // of a host's CPU memory, reads and writes of all its devices
  int64_t host_bytes = 0;            // the CPU memory of a host
  // Measured on a device that computes alone; nullopt: layer times follow from the rates.
  std::optional<LayerTimes> layer_times = {};
};

// Returns the names of named_cluster(): "a100", "h100", "h200", "b200" and "cpu".
std::vector<std::string> cluster_names();

// Returns hosts of eight GPUs with NVLink, and one InfiniBand adapter for each GPU; or, for "cpu",
// ranks with one core each on one host. Throws std::invalid_argument for another name.
//
// Source: the data sheets of NVIDIA's A100 80 GB, H100, H200 and B200 (SXM, products without
// sparsity; float32 products without TF32), of which kernels attain the fractions in cluster.cpp.
// CPU memory is that of NVIDIA's DGX systems, with 2 TB and two processors of 8 channels each: AMD
// EPYC 7742 (DDR4-3200), Intel Xeon 8480C (DDR5-4800; H100 and H200) and 8570 (DDR5-5600).
Cluster named_cluster(std::string_view name);

// Throws std::invalid_argument for a cluster without the rates and the memory of hosts that
// offloaded optimizer states need.
void check_hosts(const Cluster& cluster);

// Returns how many of `num_devices` devices share a host.
int64_t num_on_host(const Cluster& cluster, int64_t num_devices);

// Returns how many times longer an operator takes than alone, when `num_devices` devices compute:
// more processes than cores take turns.
double slowdown(const Cluster& cluster, int64_t num_devices);

// The time of a collective on `num_bytes` of one group: of the gathered tensor of an all-gather, of
// the input of a reduce-scatter, of the tensor of an all-reduce.
struct Group {
  int64_t num_ranks = 1;
  LinkRates link;               // between neighbours of a ring
  double seconds_per_wait = 0;  // as of Cluster
};

// Returns the group of `num_ranks` ranks with the distance `stride` between neighbours. A group
// that spans hosts is limited by the links of its members on one host, or by the links within
// hosts.
Group group_of(const Cluster& cluster, int64_t num_ranks, int64_t stride);

// The seconds of ring algorithms (Patarasuk and Yuan 2009): each rank sends (n - 1) / n of the
// bytes in n - 1 messages; an all-reduce is a reduce-scatter and an all-gather. Each of the three
// waits once for the last rank.
double all_gather_seconds(const Group& group, double num_bytes);
double reduce_scatter_seconds(const Group& group, double num_bytes);
double all_reduce_seconds(const Group& group, double num_bytes);

}  // namespace weft::strategy
