#pragma once

#include <cstddef>
#include <functional>

namespace weft::strategy::detail {

// Mixes the hash of `value` into `seed`; the order of calls matters.
template <typename T>
void hash_combine(size_t& seed, const T& value) {
  seed ^= std::hash<T>{}(value) + size_t{0x9e3779b9} + (seed << 6) + (seed >> 2);
}

}  // namespace weft::strategy::detail
