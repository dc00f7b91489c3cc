#pragma once

// The group configuration, on which the ranks of a group must agree before they share memory. Each
// rank publishes its own and compares all, so all ranks detect the same mismatch before any of them
// makes anything.

#include "layout.h"

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace weft::collectives {

struct GroupConfig {
  std::string version = own_version();  // of weft: the layout of shared memory may depend on it
  size_t staging_limit_bytes = 0;       // determines the layout
  bool has_transport = false;

  static std::string own_version();
  // One line of words. From a line of another version, parse() takes the version alone.
  std::string to_string() const;
  static GroupConfig parse(const std::string& text);
};

// Returns nothing if the ranks can make group `name` together, otherwise a sentence. They need one
// version, one staging limit on each host, and in a multi-host group a transport on each rank.
std::optional<std::string> config_mismatch(const HostLayout& layout,
                                           const std::vector<GroupConfig>& by_rank,
                                           const std::string& name);

}  // namespace weft::collectives
