#pragma once

// Which ranks of a group run on which host.

#include <string>
#include <vector>

namespace weft::collectives {

struct HostLayout {
  // `identities`: the host identity of each rank.
  HostLayout(const std::vector<std::string>& identities, int own_rank);

  int num_ranks() const { return static_cast<int>(host_of.size()); }
  int num_hosts() const { return static_cast<int>(ranks.size()); }
  int host_with(int other) const { return host_of[static_cast<size_t>(other)]; }
  int own_host() const { return host_with(rank); }
  const std::vector<int>& ranks_on(int host) const { return ranks[static_cast<size_t>(host)]; }
  const std::vector<int>& own_ranks() const { return ranks_on(own_host()); }
  // The leader of a host is its lowest rank.
  int leader_of(int host) const { return ranks_on(host).front(); }
  bool is_leader() const { return leader_of(own_host()) == rank; }
  bool is_local(int other) const { return host_with(other) == own_host(); }
  // Returns the index of `other` among the ranks of its host.
  int local_rank_of(int other) const;

  int rank;                             // this one
  std::vector<std::vector<int>> ranks;  // by host; hosts in the order of their lowest ranks
  std::vector<int> host_of;             // by rank
};

}  // namespace weft::collectives
