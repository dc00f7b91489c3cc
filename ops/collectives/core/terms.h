#pragma once

// What the ranks of a group must agree on before they share memory. Each tells the others, so all
// come to the same verdict before any of them makes something.

#include "layout.h"

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace weft::collectives {

struct Terms {
  std::string version = own_version();  // of weft: what lies where may differ from one to another
  size_t staging_limit_bytes = 0;       // decides what lies where
  bool has_transport = false;

  static std::string own_version();
  // One line of words. What another version wrote parses to that version, and nothing else of it.
  std::string to_string() const;
  static Terms parse(const std::string& text);
};

// A sentence unless the ranks can make group `name` together: one version; one staging limit on
// each host; a transport on each rank where there are several hosts.
std::optional<std::string> misfit(const HostLayout& layout,
                                  const std::vector<Terms>& by_rank,
                                  const std::string& name);

}  // namespace weft::collectives
