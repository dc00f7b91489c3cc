#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::strategy::detail {

// Returns up to three names that are nearest to a pattern that matches none, the nearest first.
// Names that differ only in levels that are numbers ("layers.0.wq", "layers.1.wq") count as one, of
// which the nearest is returned. The views borrow from `module_names`.
std::vector<std::string_view> nearest_modules(std::string_view pattern,
                                              std::span<const std::string> module_names);

}  // namespace weft::strategy::detail
