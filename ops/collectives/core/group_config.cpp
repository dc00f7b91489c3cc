#include "group_config.h"

#include "ring.h"
#include "shared_state.h"

#include <functional>
#include <map>
#include <sstream>

namespace weft::collectives {

namespace {

// Increment it when the layout or content of shared memory changes, or a size at which ranks switch
// between algorithms.
constexpr int kProtocolVersion = 1;

// Returns "rank 1 has 4096; ranks 0, 2 have 16384", or nullopt if `ranks` all have the same value.
std::optional<std::string> differences(const std::vector<int>& ranks,
                                       const std::function<std::string(int)>& value_of) {
  std::map<std::string, std::string> ranks_of;
  for (const int rank : ranks) {
    std::string& list = ranks_of[value_of(rank)];
    list += (list.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (ranks_of.size() < 2) return std::nullopt;
  std::string text;
  for (const auto& [value, list] : ranks_of) {
    const bool is_one = list.find(',') == std::string::npos;
    text += text.empty() ? "" : "; ";
    text += is_one ? "rank " : "ranks ";
    text += list;
    text += is_one ? " has " : " have ";
    text += value;
  }
  return text;
}

}  // namespace

std::string GroupConfig::own_version() {
  constexpr size_t kSizes = sizeof(Control) + sizeof(RankBlock) + sizeof(SignatureHeader) +
                            sizeof(RingHeader) + sizeof(FrameHeader);
  return std::string(WEFT_VERSION) + "+" + std::to_string(kProtocolVersion) + "." +
         std::to_string(kSizes);
}

std::string GroupConfig::to_string() const {
  std::ostringstream text;
  text << version << ' ' << staging_limit_bytes << ' ' << (has_transport ? 1 : 0);
  return text.str();
}

GroupConfig GroupConfig::parse(const std::string& text) {
  std::istringstream words(text);
  GroupConfig config;
  words >> config.version;
  if (config.version == own_version()) words >> config.staging_limit_bytes >> config.has_transport;
  return config;
}

std::optional<std::string> config_mismatch(const HostLayout& layout,
                                           const std::vector<GroupConfig>& by_rank,
                                           const std::string& name) {
  const auto of = [&](int rank) -> const GroupConfig& {
    return by_rank[static_cast<size_t>(rank)];
  };
  std::vector<int> all;
  std::string without_transport;
  for (int rank = 0; rank < layout.num_ranks(); ++rank) {
    all.push_back(rank);
    if (!of(rank).has_transport) {
      without_transport += (without_transport.empty() ? "" : ", ") + std::to_string(rank);
    }
  }
  const auto version = [&](int rank) { return "weft " + of(rank).version; };
  if (const auto text = differences(all, version)) {
    return "weft: the ranks of group '" + name + "' run different versions: " + *text +
           "; install one version on all hosts";
  }
  const auto limit = [&](int rank) { return std::to_string(of(rank).staging_limit_bytes); };
  for (int host = 0; host < layout.num_hosts(); ++host) {
    if (const auto text = differences(layout.ranks_on(host), limit)) {
      return "weft: the ranks of group '" + name +
             "' on one host have different staging_limit_bytes: " + *text +
             "; pass the same value on every rank of a host";
    }
  }
  if (layout.num_hosts() > 1 && !without_transport.empty()) {
    return "weft: the ranks of group '" + name + "' run on " + std::to_string(layout.num_hosts()) +
           " hosts, and these ranks have no transport: " + without_transport +
           "; pass BackendOptions::make_transport on every rank, or keep the ranks on one host";
  }
  return std::nullopt;
}

}  // namespace weft::collectives
