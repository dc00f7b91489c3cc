#pragma once

// The group configuration, on which the ranks of a group must agree before they share memory. Each
// rank publishes its configuration and compares those of all ranks, so all ranks detect the same
// mismatch before any rank creates shared memory.

#include "layout.h"

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace weft::collectives {

struct GroupConfig {
  std::string version = own_version();  // of weft; determines the layout of shared memory
  size_t staging_limit_bytes = 0;       // determines the sizes of staging buffers and rings
  bool has_transport = false;           // whether this rank can create a transport to other hosts

  static std::string own_version();
  // to_string() returns one line of words, which parse() reads; from a line that another version
  // wrote, parse() reads only the version.
  std::string to_string() const;
  static GroupConfig parse(const std::string& text);
};

// Returns nullopt if the ranks can form group `name`, otherwise an error text. The ranks need one
// version, one staging limit on each host, and in a multi-host group a transport on each rank.
std::optional<std::string> config_mismatch(const HostLayout& layout,
                                           const std::vector<GroupConfig>& by_rank,
                                           const std::string& name);

}  // namespace weft::collectives
