#include "weft/strategy/tuning/cluster.h"

#include "../error_of.h"

#include <gtest/gtest.h>

namespace weft::strategy {
namespace {

Cluster two_hosts() {
  return {.name = "test",
          .device = {},
          .devices_per_host = 4,
          .device_bytes = 0,
          .within_host = {.seconds_per_message = 1, .bytes_per_second = 100},
          .across_hosts = {.seconds_per_message = 10, .bytes_per_second = 20}};
}

TEST(Cluster, GroupsOnOneHostUseItsLinks) {
  const Group group = group_of(two_hosts(), 4, 1);
  EXPECT_EQ(group.link.bytes_per_second, 100);
  EXPECT_EQ(group.link.seconds_per_message, 1);
  EXPECT_EQ(group_of(two_hosts(), 2, 2).link.bytes_per_second, 100);
}

TEST(Cluster, GroupsAcrossHostsShareTheLinksOfTheirMembers) {
  // One member on each host, two, and four, which the links within the host do not limit.
  EXPECT_EQ(group_of(two_hosts(), 2, 4).link.bytes_per_second, 20);
  EXPECT_EQ(group_of(two_hosts(), 4, 2).link.bytes_per_second, 40);
  EXPECT_EQ(group_of(two_hosts(), 8, 1).link.bytes_per_second, 80);
  EXPECT_EQ(group_of(two_hosts(), 8, 1).link.seconds_per_message, 10);
}

TEST(Cluster, LinksWithinAHostLimitWideGroups) {
  Cluster cluster = two_hosts();
  cluster.within_host.bytes_per_second = 50;
  EXPECT_EQ(group_of(cluster, 8, 1).link.bytes_per_second, 50);
}

TEST(Cluster, RingsSendAllChunksButOne) {
  const Group group = group_of(two_hosts(), 4, 1);
  EXPECT_DOUBLE_EQ(all_gather_seconds(group, 400), 3 * (1 + 1));
  EXPECT_DOUBLE_EQ(reduce_scatter_seconds(group, 400), 3 * (1 + 1));
  EXPECT_DOUBLE_EQ(all_reduce_seconds(group, 400), 6 * (1 + 1));
  EXPECT_EQ(all_reduce_seconds({.num_ranks = 1, .link = {}}, 400), 0);
}

TEST(Cluster, EachCollectiveWaitsOnceForTheLastRank) {
  Cluster cluster = two_hosts();
  cluster.seconds_per_wait = 0.5;
  const Group group = group_of(cluster, 4, 1);
  EXPECT_DOUBLE_EQ(all_gather_seconds(group, 400), 0.5 + 3 * (1 + 1));
  EXPECT_DOUBLE_EQ(reduce_scatter_seconds(group, 400), 0.5 + 3 * (1 + 1));
  EXPECT_DOUBLE_EQ(all_reduce_seconds(group, 400), 0.5 + 6 * (1 + 1));
  EXPECT_DOUBLE_EQ(all_gather_seconds(group_of(cluster, 2, 4), 400), 0.5 + 10 + 10);
  EXPECT_EQ(all_reduce_seconds(group_of(cluster, 1, 1), 400), 0);
}

TEST(Cluster, NamesHaveClusters) {
  for (const std::string& name : cluster_names()) {
    const Cluster cluster = named_cluster(name);
    EXPECT_EQ(cluster.name, name);
    EXPECT_GT(cluster.device.half_flops, 0) << name;
    EXPECT_GT(cluster.device.bytes_per_second, 0) << name;
    EXPECT_GE(cluster.within_host.bytes_per_second, cluster.across_hosts.bytes_per_second) << name;
    EXPECT_GT(cluster.device_bytes, 0) << name;
    const bool has_cpu_memory = error_of([&] { return (check_hosts(cluster), 0); }) == "accepted";
    EXPECT_EQ(has_cpu_memory, name != "cpu") << name;
  }
  EXPECT_EQ(error_of([] { named_cluster("tpu"); }),
            "tune: got the cluster 'tpu'; use one of 'a100', 'h100', 'h200', 'b200', 'cpu'");
}

}  // namespace
}  // namespace weft::strategy
