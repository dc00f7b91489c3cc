#include "nearest_modules.h"

#include "glob.h"
#include "text.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace weft::strategy::detail {

namespace {

constexpr size_t kMaxNames = 3;

using Levels = std::vector<std::string_view>;

// Returns the number of edits that make a level match a level of a pattern.
size_t level_distance(std::string_view pattern, std::string_view level) {
  return matches_level(pattern, level) ? 0 : edit_distance(pattern, level);
}

// Like edit_distance, but over levels; inserting or removing a level costs its length.
size_t distance(const Levels& pattern, const Levels& name) {
  std::vector<size_t> row(name.size() + 1, 0);
  for (size_t j = 0; j < name.size(); ++j) {
    row[j + 1] = row[j] + name[j].size();
  }
  for (const std::string_view expected : pattern) {
    size_t diagonal = row[0];
    row[0] += expected.size();
    for (size_t j = 0; j < name.size(); ++j) {
      const size_t replaced = diagonal + level_distance(expected, name[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + name[j].size(), diagonal + expected.size()});
    }
  }
  return row.back();
}

// Returns the name with every level that is a number replaced by "0".
std::string without_numbers(const Levels& name) {
  std::string result;
  for (const std::string_view level : name) {
    result += parse_integer(level) ? "0" : level;
    result += '.';
  }
  return result;
}

}  // namespace

std::vector<std::string_view> nearest_modules(std::string_view pattern,
                                              std::span<const std::string> module_names) {
  const Levels expected = split_levels(pattern);
  std::vector<std::pair<size_t, std::string_view>> ranked;
  for (const std::string& name : module_names) {
    ranked.emplace_back(distance(expected, split_levels(name)), name);
  }
  std::stable_sort(
      ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first < b.first; });

  std::vector<std::string_view> names;
  std::unordered_set<std::string> seen;
  for (const auto& [cost, name] : ranked) {
    if (names.size() < kMaxNames && seen.insert(without_numbers(split_levels(name))).second) {
      names.push_back(name);
    }
  }
  return names;
}

}  // namespace weft::strategy::detail
