#pragma once

// Which ranks of a group run on which host.

#include <string>
#include <vector>

namespace weft::collectives {

struct HostLayout {
  // `identities`: the host identity of each rank.
  HostLayout(const std::vector<std::string>& identities, int own_rank_);

  int num_ranks() const { return static_cast<int>(host_by_rank.size()); }
  int num_hosts() const { return static_cast<int>(ranks_by_host.size()); }
  int host_of(int rank) const { return host_by_rank[static_cast<size_t>(rank)]; }
  int own_host() const { return host_of(own_rank); }
  const std::vector<int>& ranks_on(int host) const {
    return ranks_by_host[static_cast<size_t>(host)];
  }
  const std::vector<int>& own_ranks() const { return ranks_on(own_host()); }
  // The leader of a host is its lowest rank.
  int leader_of(int host) const { return ranks_on(host).front(); }
  bool is_leader() const { return leader_of(own_host()) == own_rank; }
  bool is_local(int rank) const { return host_of(rank) == own_host(); }
  // Returns the index of `rank` among the ranks of its host.
  int local_rank_of(int rank) const;

  int own_rank;
  std::vector<std::vector<int>> ranks_by_host;  // hosts in the order of their lowest ranks
  std::vector<int> host_by_rank;
};

}  // namespace weft::collectives
