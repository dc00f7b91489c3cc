#include "layout.h"

#include <algorithm>
#include <map>

namespace weft::collectives {

HostLayout::HostLayout(const std::vector<std::string>& identities, int own_rank_)
    : own_rank(own_rank_) {
  std::map<std::string, int> hosts;
  for (const std::string& identity : identities) {
    const auto [host, is_new] = hosts.emplace(identity, num_hosts());
    if (is_new) ranks_by_host.emplace_back();
    ranks_by_host[static_cast<size_t>(host->second)].push_back(num_ranks());
    host_by_rank.push_back(host->second);
  }
}

int HostLayout::local_rank_of(int rank) const {
  const std::vector<int>& local_ranks = ranks_on(host_of(rank));
  return static_cast<int>(std::ranges::find(local_ranks, rank) - local_ranks.begin());
}

}  // namespace weft::collectives
