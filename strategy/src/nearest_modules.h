#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::strategy::detail {

// Returns up to three names that are nearest to a pattern that matches no name, the nearest first.
// Among names that differ only in levels that are numbers ("layers.0.wq", "layers.1.wq"), only the
// nearest is returned. The views point into `module_names`.
std::vector<std::string_view> nearest_modules(std::string_view pattern,
                                              std::span<const std::string> module_names);

}  // namespace weft::strategy::detail
