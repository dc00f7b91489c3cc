#include "weft/strategy/pattern.h"

#include "glob.h"
#include "text.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace weft::strategy {

namespace detail {

std::vector<std::string_view> split_levels(std::string_view text) {
  return text.empty() ? std::vector<std::string_view>{} : split(text, '.');
}

bool matches_level(std::string_view pattern, std::string_view level) {
  // Greedy with one backtracking point: if the pattern after the last `*` does not match, that `*`
  // matches one more character. An earlier `*` need not be revisited.
  size_t p = 0;
  size_t star = std::string_view::npos;  // position of the last `*` reached
  size_t resume = 0;                     // where in `level` the pattern after it is tried next
  for (size_t i = 0; i < level.size();) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = i;
    } else if (p < pattern.size() && pattern[p] == level[i]) {
      ++p;
      ++i;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      i = ++resume;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

bool matches_name(std::span<const std::string_view> pattern,
                  std::span<const std::string_view> name) {
  return std::equal(pattern.begin(), pattern.end(), name.begin(), name.end(), matches_level);
}

}  // namespace detail

void check_pattern(std::string_view pattern) {
  const auto is_control = [](char c) {
    return static_cast<unsigned char>(c) < 0x20 || c == '\x7f';
  };
  if (std::any_of(pattern.begin(), pattern.end(), is_control)) {
    std::string shown(pattern);
    std::replace_if(shown.begin(), shown.end(), is_control, '?');
    throw std::invalid_argument("pattern " + detail::quote(shown) +
                                ": it contains a control character (shown as ?); remove it");
  }
  const auto levels = detail::split_levels(pattern);
  if (std::any_of(levels.begin(), levels.end(), [](auto level) { return level.empty(); })) {
    throw std::invalid_argument("pattern " + detail::quote(pattern) +
                                ": a level between dots is empty; write a name or '*' there");
  }
  if (pattern.find("**") != std::string_view::npos) {
    throw std::invalid_argument("pattern " + detail::quote(pattern) +
                                ": '**' would cross levels, and no pattern does; write one '*' "
                                "for each level");
  }
}

bool matches(std::string_view pattern, std::string_view name) {
  check_pattern(pattern);
  return detail::matches_name(detail::split_levels(pattern), detail::split_levels(name));
}

}  // namespace weft::strategy
