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

// A module of a model and the rule that applies to it.
struct Assignment {
  std::string module;
  Rule rule;

  bool operator==(const Assignment&) const = default;
};

// Rules that map name patterns to styles, in the order they were given. An immutable value:
// comparable (the order matters), hashable, safe to read from any thread.
class Plan {
 public:
  Plan() = default;

  // Equal rules are stored once. Throws std::invalid_argument for a rule that check_rule rejects
  // and for two different rules with the same pattern.
  explicit Plan(std::vector<Rule> rules);

  // The inverse of to_string(). Reads one rule per line, `pattern: style` or
  // `pattern: {style: column, heads: n_heads}` or `pattern: {style: attention, recompute: true,
  // offload: true, precision: bfloat16}`; empty lines and # comments are allowed. This is a subset
  // of YAML; other YAML notations of the same content raise an error that names the line.
  static Plan parse(std::string_view text);

  // Prints a YAML mapping; patterns that YAML would not read as a string are in double quotes. A
  // plan without rules prints as "{}".
  [[nodiscard]] std::string to_string() const;

  // Prints a JSON object without blanks:
  // {"layers.*.wq":"column","wo":{"style":"row","heads":"n_heads"}}.
  [[nodiscard]] std::string to_json() const;

  [[nodiscard]] const std::vector<Rule>& rules() const { return rules_; }

  // Returns the modules to which a rule applies, with their rules, in the order of `module_names`;
  // "" names the model itself.
  //
  // Rules that give a module the same style are merged into one rule, which has the options of all
  // of them, and the pattern of the first rule with options or, without options, of the first rule.
  // A more specific pattern does not take precedence. If a module's style owns the modules below it
  // (see owns_modules_below), modules below with the same style are left out of the result.
  //
  // Throws std::invalid_argument, naming the patterns and modules, for a pattern that matches no
  // module, for rules that give one module different styles, `heads` or `precision`, and, for a
  // module below an owner, for a rule with another style, or with options other than the owner's.
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
