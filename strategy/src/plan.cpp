#include "weft/strategy/plan.h"

#include "hash.h"
#include "text.h"

#include <algorithm>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace weft::strategy {

namespace {

using detail::quote;

// Python's attribute names, letters beyond ASCII taken on trust.
bool is_attribute_name(std::string_view text) {
  const auto is_letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           static_cast<unsigned char>(c) >= 0x80;
  };
  return !text.empty() && is_letter(text.front()) &&
         std::all_of(text.begin(), text.end(), [&](char c) {
           return is_letter(c) || (c >= '0' && c <= '9');
         });
}

void check_recompute(const Rule& rule) {
  if (rule.recompute && rule.style != Style::kColumnRowMlp) {
    throw std::invalid_argument(
        "plan: pattern " + quote(rule.pattern) + ": recompute means nothing to style " +
        quote(to_string(rule.style)) + "; remove recompute or use style 'column_row_mlp'");
  }
}

void check_heads_attribute(const Rule& rule) {
  if (!rule.heads) {
    return;
  }
  if (rule.style != Style::kColumn && rule.style != Style::kRow) {
    throw std::invalid_argument("plan: pattern " + quote(rule.pattern) +
                                ": heads = " + quote(*rule.heads) + " means nothing to style " +
                                quote(to_string(rule.style)) +
                                "; remove heads or use style 'column' or 'row'");
  }
  if (!is_attribute_name(*rule.heads)) {
    throw std::invalid_argument("plan: pattern " + quote(rule.pattern) +
                                ": heads = " + quote(*rule.heads) +
                                " is no attribute name; name the parent module's attribute that "
                                "counts the heads, such as 'n_heads'");
  }
}

std::string describe(const Rule& rule) {
  std::string text = "style " + quote(to_string(rule.style));
  text += rule.heads ? " with heads " + quote(*rule.heads) : "";
  return text + (rule.recompute ? " with recompute" : "");
}

}  // namespace

Plan::Plan(std::vector<Rule> rules) {
  std::unordered_map<std::string, size_t> seen;  // pattern -> index in rules_
  for (Rule& rule : rules) {
    check_pattern(rule.pattern);
    check_heads_attribute(rule);
    check_recompute(rule);
    const auto [entry, is_new] = seen.try_emplace(rule.pattern, rules_.size());
    if (is_new) {
      rules_.push_back(std::move(rule));
    } else if (const Rule& first = rules_[entry->second]; first != rule) {
      throw std::invalid_argument("plan: pattern " + quote(rule.pattern) + " is given both " +
                                  describe(first) + " and " + describe(rule) +
                                  "; keep one of the two rules");
    }
  }
}

}  // namespace weft::strategy

size_t std::hash<weft::strategy::Rule>::operator()(
    const weft::strategy::Rule& rule) const noexcept {
  size_t seed = 0;
  weft::strategy::detail::hash_combine(seed, rule.pattern);
  weft::strategy::detail::hash_combine(seed, static_cast<int>(rule.style));
  weft::strategy::detail::hash_combine(seed, rule.heads);
  weft::strategy::detail::hash_combine(seed, rule.recompute);
  return seed;
}

size_t std::hash<weft::strategy::Plan>::operator()(
    const weft::strategy::Plan& plan) const noexcept {
  size_t seed = plan.rules().size();
  for (const auto& rule : plan.rules()) {
    weft::strategy::detail::hash_combine(seed, rule);
  }
  return seed;
}
