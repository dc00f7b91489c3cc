#include "weft/strategy/plan.h"

#include "hash.h"
#include "text.h"

#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace weft::strategy {

Plan::Plan(std::vector<Rule> rules) {
  std::unordered_map<std::string, size_t> seen;  // pattern -> index in rules_
  for (Rule& rule : rules) {
    check_rule(rule);
    const auto [entry, is_new] = seen.try_emplace(rule.pattern, rules_.size());
    if (is_new) {
      rules_.push_back(std::move(rule));
    } else if (const Rule& first = rules_[entry->second]; first != rule) {
      throw std::invalid_argument("plan: pattern " + detail::quote(rule.pattern) +
                                  " is given both " + describe(first) + " and " + describe(rule) +
                                  "; keep one of the two rules");
    }
  }
}

}  // namespace weft::strategy

size_t std::hash<weft::strategy::Plan>::operator()(
    const weft::strategy::Plan& plan) const noexcept {
  size_t seed = plan.rules().size();
  for (const auto& rule : plan.rules()) {
    weft::strategy::detail::hash_combine(seed, rule);
  }
  return seed;
}
