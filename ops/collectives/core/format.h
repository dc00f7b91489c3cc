#pragma once

// Formats durations for error messages.

#include <chrono>
#include <sstream>
#include <string>

namespace weft::collectives {

// Returns "0.02" for 20 ms.
inline std::string in_seconds(std::chrono::milliseconds time) {
  std::ostringstream text;
  text << static_cast<double>(time.count()) / 1000.0;
  return text.str();
}

}  // namespace weft::collectives
