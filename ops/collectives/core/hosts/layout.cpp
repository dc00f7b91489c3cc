#include "layout.h"

#include <algorithm>
#include <map>

namespace weft::collectives {

HostLayout::HostLayout(const std::vector<std::string>& identities, int own_rank) : rank(own_rank) {
  std::map<std::string, int> hosts;
  for (const std::string& identity : identities) {
    const auto [host, is_new] = hosts.emplace(identity, num_hosts());
    if (is_new) ranks.emplace_back();
    ranks[static_cast<size_t>(host->second)].push_back(num_ranks());
    host_of.push_back(host->second);
  }
}

int HostLayout::local_rank_of(int other) const {
  const std::vector<int>& local_ranks = ranks_on(host_with(other));
  return static_cast<int>(std::ranges::find(local_ranks, other) - local_ranks.begin());
}

}  // namespace weft::collectives
