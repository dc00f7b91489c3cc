#pragma once

#include "weft/strategy/pattern.h"
#include "weft/strategy/rule.h"

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::strategy {

// One module of a model and the rule it got.
struct Assignment {
  std::string module;
  Rule rule;

  bool operator==(const Assignment&) const = default;
};

// Rules from name patterns to styles, in the order they were given. An immutable value: comparable
// (the order counts), hashable, safe to read from any thread.
class Plan {
 public:
  Plan() = default;

  // A rule that repeats an earlier one exactly is kept once. Throws std::invalid_argument for a
  // rule that check_rule refuses and for one pattern with two different values.
  explicit Plan(std::vector<Rule> rules);

  // Reads what to_string() prints: one rule a line, `pattern: style` or
  // `pattern: {style: column, heads: n_heads}` or `pattern: {style: attention, recompute: true,
  // offload: true, precision: bfloat16}`; empty lines and # comments are allowed. What it reads is
  // YAML, but YAML's other ways of writing the same thing are refused, naming the line.
  static Plan parse(std::string_view text);

  // Also a YAML mapping; patterns that YAML would not read as a string are in double quotes. A plan
  // without rules prints as "{}".
  [[nodiscard]] std::string to_string() const;

  // A JSON object without blanks: {"layers.*.wq":"column","wo":{"style":"row","heads":"n_heads"}}.
  [[nodiscard]] std::string to_json() const;

  [[nodiscard]] const std::vector<Rule>& rules() const { return rules_; }

  // Which rule each module gets: those that got one, in the order of `module_names`, where "" is
  // the model itself.
  //
  // Rules that give one module the same style count as one with the options of all, under the
  // pattern of the first that has any, else of the first. No pattern wins over another by being
  // more specific. A module whose style owns everything below it (see owns_modules_below) has
  // modules below with the same style left out of the result.
  //
  // Throws std::invalid_argument, naming those involved, for a pattern that matches no module and
  // for rules that disagree: on the style, `heads` or `precision` of one module, or with the owner
  // above it.
  [[nodiscard]] std::vector<Assignment> resolve(std::span<const std::string> module_names) const;

  bool operator==(const Plan&) const = default;

 private:
  std::vector<Rule> rules_;
};

}  // namespace weft::strategy

template <>
struct std::hash<weft::strategy::Plan> {
  size_t operator()(const weft::strategy::Plan& plan) const noexcept;
};
