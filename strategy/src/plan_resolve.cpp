#include "glob.h"
#include "nearest_modules.h"
#include "text.h"
#include "weft/strategy/plan.h"

#include <algorithm>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace weft::strategy {

namespace {

using detail::quote;
using detail::quote_module;

// A module and the rules whose patterns match it, at least one, in the plan's order.
struct Match {
  const std::string* module;
  std::vector<const Rule*> rules;
};

struct PatternLevels {
  std::vector<std::string_view> levels;
  const Rule* rule;
  bool is_used = false;
};

[[noreturn]] void throw_unmatched(const Rule& rule, std::span<const std::string> module_names) {
  std::string text = "plan: pattern " + quote(rule.pattern) + " matches no module; ";
  std::vector<std::string> near;
  for (const std::string_view name : detail::nearest_modules(rule.pattern, module_names)) {
    near.push_back(quote_module(name));
  }
  text += near.empty() ? "the model has no modules" : "nearest: " + detail::join(near, ", ");
  throw std::invalid_argument(text + "; correct the pattern or remove the rule");
}

std::vector<Match> find_matches(const std::vector<Rule>& rules,
                                std::span<const std::string> module_names) {
  // A pattern matches only names with its number of levels, so patterns are grouped by this number.
  std::vector<PatternLevels> patterns;
  std::vector<std::vector<size_t>> by_num_levels;
  for (const Rule& rule : rules) {
    patterns.push_back({.levels = detail::split_levels(rule.pattern), .rule = &rule});
    const size_t num_levels = patterns.back().levels.size();
    by_num_levels.resize(std::max(by_num_levels.size(), num_levels + 1));
    by_num_levels[num_levels].push_back(patterns.size() - 1);
  }

  std::vector<Match> matches;
  for (const std::string& name : module_names) {
    const auto levels = detail::split_levels(name);
    if (levels.size() >= by_num_levels.size()) {
      continue;
    }
    Match match{.module = &name, .rules = {}};
    for (const size_t idx : by_num_levels[levels.size()]) {
      if (detail::matches_name(patterns[idx].levels, levels)) {
        patterns[idx].is_used = true;
        match.rules.push_back(patterns[idx].rule);
      }
    }
    if (!match.rules.empty()) {
      matches.push_back(std::move(match));
    }
  }
  for (const PatternLevels& pattern : patterns) {
    if (!pattern.is_used) {
      throw_unmatched(*pattern.rule, module_names);
    }
  }
  return matches;
}

[[noreturn]] void throw_conflict(const Match& match,
                                 const Rule& first,
                                 const std::string& first_value,
                                 const Rule& other,
                                 const std::string& other_value) {
  throw std::invalid_argument("plan: module " + quote_module(*match.module) + " gets " +
                              first_value + " from pattern " + quote(first.pattern) + " and " +
                              other_value + " from pattern " + quote(other.pattern) +
                              "; change the patterns so that the rules agree");
}

// Throws unless the rules of a match agree on a value. `value_of` returns a rule's value as text,
// empty if the rule has none.
template <typename ValueOf>
void check_agreement(const Match& match, ValueOf value_of) {
  const Rule* first = nullptr;
  for (const Rule* rule : match.rules) {
    const std::string value = value_of(*rule);
    if (value.empty()) {
      continue;
    }
    first = first == nullptr ? rule : first;
    if (const std::string other = value_of(*first); other != value) {
      throw_conflict(match, *first, other, *rule, value);
    }
  }
}

// Merges the rules of a match, which must agree, into one.
Rule merge(const Match& match) {
  check_agreement(match, [](const Rule& r) { return "style " + quote(to_string(r.style)); });
  check_agreement(
      match, [](const Rule& r) { return r.heads ? "heads " + quote(*r.heads) : std::string(); });
  check_agreement(match, [](const Rule& r) {
    return r.precision ? "precision " + quote(to_string(*r.precision)) : std::string();
  });
  const auto first = std::find_if(
      match.rules.begin(), match.rules.end(), [](const Rule* r) { return has_options(*r); });
  Rule merged = first == match.rules.end() ? *match.rules.front() : **first;
  for (const Rule* rule : match.rules) {
    merged.heads = merged.heads ? merged.heads : rule->heads;
    merged.recompute = merged.recompute || rule->recompute;
    merged.offload = merged.offload || rule->offload;
    merged.precision = merged.precision ? merged.precision : rule->precision;
  }
  return merged;
}

bool is_same_except_pattern(const Rule& rule, const Rule& other) {
  Rule same = rule;
  same.pattern = other.pattern;
  return same == other;
}

// The modules that own the modules below them, each with its rule; see owns_modules_below.
using Owners = std::unordered_map<std::string_view, const Rule*>;

// Returns the nearest owner above `module`, if any.
std::optional<Owners::value_type> find_owner(std::string_view module, const Owners& owners) {
  while (!module.empty()) {
    const size_t dot = module.rfind('.');
    module = dot == std::string_view::npos ? std::string_view{} : module.substr(0, dot);
    if (const auto found = owners.find(module); found != owners.end()) {
      return *found;
    }
  }
  return std::nullopt;
}

[[noreturn]] void throw_below_owner(std::string_view module,
                                    const Rule& rule,
                                    const Owners::value_type& owner) {
  const auto& [owner_module, owner_rule] = owner;
  throw std::invalid_argument("plan: module " + quote_module(module) + " gets " + describe(rule) +
                              " from pattern " + quote(rule.pattern) + " but lies inside " +
                              quote_module(owner_module) + ", to which pattern " +
                              quote(owner_rule->pattern) + " gives " + describe(*owner_rule) +
                              " as a whole; remove one of the two rules");
}

}  // namespace

std::vector<Assignment> Plan::resolve(std::span<const std::string> module_names) const {
  std::vector<Assignment> merged;
  for (const Match& match : find_matches(rules_, module_names)) {
    merged.push_back({.module = *match.module, .rule = merge(match)});
  }
  Owners owners;
  for (const Assignment& assignment : merged) {
    if (owns_modules_below(assignment.rule.style)) {
      owners.emplace(assignment.module, &assignment.rule);
    }
  }

  std::vector<Assignment> result;
  for (const Assignment& assignment : merged) {
    const auto owner = owners.empty() ? std::nullopt : find_owner(assignment.module, owners);
    if (!owner) {
      result.push_back(assignment);
    } else if (const Rule& above = *owner->second;
               assignment.rule.style != above.style ||
               (has_options(assignment.rule) && !is_same_except_pattern(assignment.rule, above))) {
      throw_below_owner(assignment.module, assignment.rule, *owner);
    }
  }
  return result;
}

}  // namespace weft::strategy
