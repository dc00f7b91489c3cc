// Plans as values and as text; plan_resolve_test.cpp tests how they resolve a model's modules.

#include "weft/strategy/plan.h"

#include "error_of.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <unordered_set>

namespace weft::strategy {
namespace {

TEST(Style, ParseReadsWhatToStringPrints) {
  std::vector<std::string_view> names;
  for (const Style style : all_styles()) {
    names.push_back(to_string(style));
    EXPECT_EQ(parse_style(to_string(style)), style);
  }
  EXPECT_EQ(names,
            (std::vector<std::string_view>{"column",
                                           "column_gather_output",
                                           "row",
                                           "row_split_input",
                                           "column_row_mlp",
                                           "attention",
                                           "vocab_embedding",
                                           "vocab_head",
                                           "experts",
                                           "sequence_parallel",
                                           "replicate",
                                           "replicate_sum_gradients",
                                           "ignore"}));
}

// As listed in error messages.
constexpr std::string_view kStyleNames =
    "column, column_gather_output, row, row_split_input, column_row_mlp, attention, "
    "vocab_embedding, vocab_head, experts, sequence_parallel, replicate, replicate_sum_gradients, "
    "ignore";

TEST(Style, ErrorNamesTheValidOnesAndTheNearest) {
  const auto expected = [](const std::string& text, const std::string& nearest) {
    return "unknown style '" + text + "': use one of " + std::string(kStyleNames) +
           "; the nearest is '" + nearest + "'";
  };
  EXPECT_EQ(error_of([] { return parse_style("colunm"); }), expected("colunm", "column"));
  EXPECT_EQ(error_of([] { return parse_style("colwise"); }), expected("colwise", "column"));
  EXPECT_EQ(error_of([] { return parse_style("rowwise"); }), expected("rowwise", "row"));
  EXPECT_EQ(error_of([] { return parse_style("Replicated"); }),
            expected("Replicated", "replicate"));
  EXPECT_EQ(error_of([] { return parse_style("embedding"); }),
            expected("embedding", "vocab_embedding"));
}

TEST(Plan, PrintsOneRuleALine) {
  const Plan plan({{"layers.*.wq", Style::kColumn, "n_heads"},
                   {"layers.*.mlp", Style::kColumnRowMlp, {}},
                   {"mlp", Style::kColumnRowMlp, {}, true},
                   {"norm", Style::kSequenceParallel, {}, true, true, ComputeDtype::kFloat32},
                   {"", Style::kReplicate, {}},
                   {"*.wo", Style::kRow, {}},
                   {"a\"\\b c", Style::kVocabEmbedding, {}},
                   {"true", Style::kRow, "on"},
                   {"0", Style::kRow, {}}});
  EXPECT_EQ(plan.to_string(),
            "layers.*.wq: {style: column, heads: n_heads}\n"
            "layers.*.mlp: column_row_mlp\n"
            "mlp: {style: column_row_mlp, recompute: true}\n"
            "norm: {style: sequence_parallel, recompute: true, offload: true, precision: float32}\n"
            "\"\": replicate\n"
            "\"*.wo\": row\n"
            "\"a\\\"\\\\b c\": vocab_embedding\n"
            "\"true\": {style: row, heads: \"on\"}\n"
            "\"0\": row\n");
  EXPECT_EQ(plan.to_json(),
            "{\"layers.*.wq\":{\"style\":\"column\",\"heads\":\"n_heads\"},"
            "\"layers.*.mlp\":\"column_row_mlp\","
            "\"mlp\":{\"style\":\"column_row_mlp\",\"recompute\":true},"
            "\"norm\":{\"style\":\"sequence_parallel\",\"recompute\":true,\"offload\":true,"
            "\"precision\":\"float32\"},"
            "\"\":\"replicate\",\"*.wo\":\"row\","
            "\"a\\\"\\\\b c\":\"vocab_embedding\",\"true\":{\"style\":\"row\",\"heads\":\"on\"},"
            "\"0\":\"row\"}");
  EXPECT_EQ(Plan::parse(plan.to_string()), plan);
}

TEST(Plan, WithoutRulesPrintsAndParses) {
  EXPECT_EQ(Plan().to_string(), "{}");
  EXPECT_EQ(Plan().to_json(), "{}");
  EXPECT_EQ(Plan::parse("{}"), Plan());
  EXPECT_EQ(Plan::parse(" \n# nothing\n"), Plan());
}

TEST(Plan, ParseAllowsCommentsEmptyLinesQuotesAndEitherOrderOfKeys) {
  const Plan plan = Plan::parse(
      "# attention\r\n"
      "wq: {heads: n_heads, style: column}  # by head\r\n"
      "\n"
      "  # the rest\n"
      "a: {recompute: true, style: column_row_mlp}\n"
      "b: {style: row, recompute: false}\n"
      "\"wo\":   \"row\" # last");
  EXPECT_EQ(plan,
            Plan({{"wq", Style::kColumn, "n_heads"},
                  {"a", Style::kColumnRowMlp, {}, true},
                  {"b", Style::kRow, {}},
                  {"wo", Style::kRow, {}}}));
}

std::string random_text(std::mt19937& random, std::string_view alphabet, size_t max_length) {
  std::string text(std::uniform_int_distribution<size_t>(1, max_length)(random), ' ');
  for (char& c : text) {
    c = alphabet[std::uniform_int_distribution<size_t>(0, alphabet.size() - 1)(random)];
  }
  return text;
}

Rule random_rule(std::mt19937& random) {
  Rule rule;
  for (int num_levels = std::uniform_int_distribution(0, 4)(random); num_levels > 0; --num_levels) {
    rule.pattern += rule.pattern.empty() ? "" : ".";
    rule.pattern += random_text(random, "aZ_09-:#,{}[]\"'\\ &!|>%@`\xc3", 6);
    rule.pattern += random() % 2 == 0 ? "*" : "";
  }
  rule.style = all_styles()[random() % all_styles().size()];
  if (random() % 2 == 0 && (rule.style == Style::kColumn || rule.style == Style::kRow)) {
    rule.heads = "n" + random_text(random, "aoynul_09", 5);
  }
  const bool has_layers = rule.style == Style::kColumnRowMlp || rule.style == Style::kAttention ||
                          rule.style == Style::kReplicate;
  rule.recompute = has_layers && random() % 2 == 0;
  if (rule.style != Style::kVocabHead && rule.style != Style::kIgnore) {
    rule.offload = random() % 2 == 0;
    const std::array<ComputeDtype, 3> dtypes = {
        ComputeDtype::kFloat32, ComputeDtype::kBFloat16, ComputeDtype::kFloat16};
    if (random() % 2 == 0) {
      rule.precision = dtypes.at(random() % dtypes.size());
    }
  }
  return rule;
}

TEST(PlanProperties, ParseReadsWhatToStringPrints) {
  std::mt19937 random(0);
  std::unordered_set<Plan> distinct;
  for (int round = 0; round < 2000; ++round) {
    std::vector<Rule> rules;
    std::unordered_set<std::string> patterns;
    for (size_t num_rules = random() % 5; num_rules > 0; --num_rules) {
      Rule rule = random_rule(random);
      if (patterns.insert(rule.pattern).second) {
        rules.push_back(std::move(rule));
      }
    }
    const Plan plan(rules);
    ASSERT_EQ(plan.rules(), rules);
    const Plan copy = Plan::parse(plan.to_string());
    ASSERT_EQ(copy, plan) << plan.to_string();
    ASSERT_EQ(std::hash<Plan>{}(copy), std::hash<Plan>{}(plan));
    distinct.insert(plan);
  }
  EXPECT_GT(distinct.size(), 1000U);
}

TEST(Plan, PlansWithAnotherOrderStyleOrOptionDiffer) {
  const Plan plan({{"a", Style::kRow, {}}, {"b", Style::kRow, {}}});
  EXPECT_NE(plan, Plan({{"b", Style::kRow, {}}, {"a", Style::kRow, {}}}));
  EXPECT_NE(plan, Plan({{"a", Style::kRow, {}}, {"b", Style::kColumn, {}}}));
  EXPECT_NE(plan, Plan({{"a", Style::kRow, {}}, {"b", Style::kRow, "h"}}));
  EXPECT_NE(Plan({{"a", Style::kColumnRowMlp, {}}}), Plan({{"a", Style::kColumnRowMlp, {}, true}}));
}

TEST(Plan, RepeatedRuleIsKeptOnce) {
  EXPECT_EQ(Plan({{"a", Style::kRow, "h"}, {"b", Style::kRow, {}}, {"a", Style::kRow, "h"}}),
            Plan({{"a", Style::kRow, "h"}, {"b", Style::kRow, {}}}));
}

TEST(PlanErrors, OnePatternWithTwoValues) {
  EXPECT_EQ(error_of([] {
              return Plan({{"a", Style::kRow, {}}, {"a", Style::kColumn, {}}});
            }),
            "plan: pattern 'a' is given both style 'row' and style 'column'; keep one of the two "
            "rules");
  EXPECT_EQ(error_of([] { return Plan::parse("a: row\na: {style: row, heads: h}"); }),
            "plan: pattern 'a' is given both style 'row' and style 'row' with heads 'h'; keep one "
            "of the two rules");
}

TEST(PlanErrors, HeadsOfAnotherStyleOrWithoutAnAttributeName) {
  EXPECT_EQ(
      error_of([] {
        return Plan({{"a", Style::kReplicate, "h"}});
      }),
      "plan: pattern 'a': heads = 'h' is not supported by style 'replicate'; remove heads or use "
      "style 'column' or 'row'");
  for (const std::string heads : {"", "n heads", "3", "a.b"}) {
    EXPECT_EQ(error_of([&] {
                return Plan({{"a", Style::kRow, heads}});
              }),
              "plan: pattern 'a': heads = '" + heads +
                  "' is no attribute name; name the parent module's attribute that counts the "
                  "heads, such as 'n_heads'");
  }
}

TEST(PlanErrors, RecomputeOfAnotherStyle) {
  EXPECT_EQ(error_of([] {
              return Plan({{"a", Style::kRow, {}, true}});
            }),
            "plan: pattern 'a': recompute is not supported by style 'row'; remove recompute or use "
            "style 'column_row_mlp'");
  EXPECT_EQ(error_of([] {
              return Plan::parse("a: column_row_mlp\na: {style: column_row_mlp, recompute: true}");
            }),
            "plan: pattern 'a' is given both style 'column_row_mlp' and style 'column_row_mlp' "
            "with recompute; keep one of the two rules");
}

TEST(PlanErrors, OptionsThatAStyleDoesNotSupport) {
  const auto check = [](const std::string& value, const std::string& expected) {
    EXPECT_EQ(error_of([&] { return Plan::parse("a: " + value); }), expected);
  };
  check("{style: vocab_head, offload: true}",
        "plan: pattern 'a': offload is not supported by style 'vocab_head'; remove offload or use "
        "another style");
  check("{style: ignore, precision: float32}",
        "plan: pattern 'a': precision = 'float32' is not supported by style 'ignore'; remove "
        "precision or use another style");
  check(
      "{style: vocab_embedding, recompute: true}",
      "plan: pattern 'a': recompute is not supported by style 'vocab_embedding'; remove recompute "
      "or use style 'column_row_mlp'");
  check("{style: row, precision: double}",
        "plan, line 1: unknown precision 'double': use one of float32, bfloat16, float16");
  EXPECT_EQ(error_of([] {
              return Plan::parse(
                  "a: {style: row, offload: true}\n"
                  "a: {style: row, offload: true, precision: bfloat16}");
            }),
            "plan: pattern 'a' is given both style 'row' with offload and style 'row' with "
            "offload, precision 'bfloat16'; keep one of the two rules");
}

TEST(PlanErrors, InvalidPatterns) {
  EXPECT_EQ(error_of([] {
              return Plan({{"a..b", Style::kRow, {}}});
            }),
            "pattern 'a..b': a level between dots is empty; write a name or '*' there");
}

TEST(PlanErrors, TextThatIsNoRule) {
  const auto check = [](const std::string& line, const std::string& problem) {
    EXPECT_EQ(error_of([&] { return Plan::parse("# first\n" + line); }),
              "plan, line 2: " + problem + " in '" + line +
                  "'; write 'pattern: style' or 'pattern: {style: column, heads: n_heads}'");
  };
  check("wq", "no ':' at column 3");
  check("wq:", "no style at column 4");
  check(": row", "no pattern at column 1");
  check("wq:row", "no blank after ':' at column 3");
  check("wq: row column", "text after the rule");
  check("wq: row}", "text after the rule");
  check(R"("wq": "row"#)", "text after the rule");
  check("wq: row#", "'row#' needs double quotes");
  check("*.wq: row", "'*.wq' needs double quotes");
  check("on: row", "'on' needs double quotes");
  check("0: row", "'0' needs double quotes");
  check("\"wq: row", "a quote that does not end");
  check(R"("w\n": row)", R"(an escape other than \" and \\)");
  check("\"w\\", R"(an escape other than \" and \\)");
  check("wq: {heads: h}", "no style");
  check("wq: {style: row, style: row}", "key 'style' is unknown or repeated");
  check("wq: {style: row, heads: h, heads: h}", "key 'heads' is unknown or repeated");
  check("wq: {stile: row}", "key 'stile' is unknown or repeated");
  check("a: {style: column_row_mlp, recompute: yes}", "'yes' is neither true nor false");
  check("a: {recompute: true, recompute: true}", "key 'recompute' is unknown or repeated");
  check("wq: {style: row", "no '}' at column 16");
  check("wq: {style: row,}", "no key at column 17");
  check("wq: {}", "no key at column 6");
  EXPECT_EQ(error_of([] { return Plan::parse("wq:\n  style: row"); }),
            "plan, line 1: no style at column 4 in 'wq:'; write 'pattern: style' or 'pattern: "
            "{style: column, heads: n_heads}'");
  EXPECT_EQ(error_of([] { return Plan::parse("wq: row\n  wk: row"); }),
            "plan, line 2: 'wk: row' is indented; write every rule on one line, without blanks "
            "before it");
  EXPECT_EQ(error_of([] { return Plan::parse("wq: row\nwk: colunm"); }),
            "plan, line 2: unknown style 'colunm': use one of " + std::string(kStyleNames) +
                "; the nearest is 'column'");
}

}  // namespace
}  // namespace weft::strategy
