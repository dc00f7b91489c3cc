#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::strategy::detail {

// Up to three names that a pattern matching none of them may have meant, the nearest first. Names
// that differ in numbers only ("layers.0.wq", "layers.1.wq") count as one, the first. The views
// borrow from `module_names`.
std::vector<std::string_view> nearest_modules(std::string_view pattern,
                                              std::span<const std::string> module_names);

}  // namespace weft::strategy::detail
