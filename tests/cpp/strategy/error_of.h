#pragma once

#include <stdexcept>
#include <string>

namespace weft::strategy {

// Returns the text of the std::invalid_argument that `function` throws; "accepted" if it throws
// none.
template <typename Function>
std::string error_of(const Function& function) {
  try {
    static_cast<void>(function());
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace weft::strategy
