#include "error_of.h"
#include "weft/strategy/plan.h"

#include <gtest/gtest.h>

#include <chrono>

namespace weft::strategy {
namespace {

using Names = std::vector<std::string>;

// Returns names in the order of torch's named_modules(): the model itself first, parents before
// their children.
Names llama_modules(int num_layers) {
  Names names = {"", "tok_embeddings", "layers"};
  for (int i = 0; i < num_layers; ++i) {
    const std::string layer = "layers." + std::to_string(i);
    for (const char* part : {"",
                             ".attention",
                             ".attention.wq",
                             ".attention.wk",
                             ".attention.wv",
                             ".attention.wo",
                             ".feed_forward",
                             ".feed_forward.w1",
                             ".feed_forward.w2",
                             ".feed_forward.w3"}) {
      names.push_back(layer + part);
    }
  }
  names.emplace_back("output");
  return names;
}

std::string resolve_error(const Plan& plan, const Names& names) {
  return error_of([&] { return plan.resolve(names); });
}

TEST(Resolve, RulesThatAgreeGiveTheRuleWithAnOption) {
  const Plan plan({{"*", Style::kColumnRowMlp, {}}, {"a", Style::kColumnRowMlp, {}, true}});
  const std::vector<std::string> names = {"a", "b"};
  EXPECT_EQ(plan.resolve(names),
            (std::vector<Assignment>{{"a", {"a", Style::kColumnRowMlp, {}, true}},
                                     {"b", {"*", Style::kColumnRowMlp, {}}}}));
}

TEST(Resolve, GivesEveryMatchedModuleItsRuleInModuleOrder) {
  const Rule output = {"output", Style::kColumn, {}};
  const Rule wq = {"layers.*.attention.wq", Style::kColumn, "n_heads"};
  const Rule mlp = {"*.*.feed_forward", Style::kColumnRowMlp, {}};
  const Rule embedding = {"tok_*", Style::kVocabEmbedding, {}};
  EXPECT_EQ(Plan({output, wq, mlp, embedding}).resolve(llama_modules(2)),
            (std::vector<Assignment>{{"tok_embeddings", embedding},
                                     {"layers.0.attention.wq", wq},
                                     {"layers.0.feed_forward", mlp},
                                     {"layers.1.attention.wq", wq},
                                     {"layers.1.feed_forward", mlp},
                                     {"output", output}}));
}

TEST(Resolve, TheEmptyPatternMatchesTheModelItself) {
  const Rule rule = {"", Style::kColumnRowMlp, {}};
  EXPECT_EQ(Plan({rule}).resolve(Names{"", "w1", "w2"}), (std::vector<Assignment>{{"", rule}}));
  EXPECT_EQ(
      Plan({{"", Style::kRow, {}}, {"w1", Style::kColumn, {}}}).resolve(Names{"", "w1"}).size(),
      2U);
}

TEST(Resolve, NoRulesGiveNothing) {
  EXPECT_TRUE(Plan().resolve(llama_modules(1)).empty());
  EXPECT_TRUE(Plan().resolve(Names{}).empty());
}

TEST(Resolve, RulesOfOneStyleAgreeAndTheRuleWithHeadsWins) {
  const Rule all = {"layers.*.attention.w*", Style::kColumn, {}};
  const Rule wq = {"layers.1.attention.wq", Style::kColumn, "n_heads"};
  for (const Plan& plan : {Plan({all, wq}), Plan({wq, all})}) {
    for (const Assignment& assignment : plan.resolve(llama_modules(2))) {
      EXPECT_EQ(assignment.rule, assignment.module == "layers.1.attention.wq" ? wq : all);
    }
  }
  const Rule again = {"layers.1.*.wq", Style::kColumn, "n_heads"};
  EXPECT_EQ(Plan({wq, again}).resolve(llama_modules(2)),
            (std::vector<Assignment>{{"layers.1.attention.wq", wq}}));
}

TEST(Resolve, AnMlpBelowAnMlpBelongsToTheUpperOne) {
  const Rule upper = {"layers.0.feed_forward", Style::kColumnRowMlp, {}};
  const Rule lower = {"layers.0.feed_forward.w1", Style::kColumnRowMlp, {}};
  EXPECT_EQ(Plan({lower, upper}).resolve(llama_modules(1)),
            (std::vector<Assignment>{{"layers.0.feed_forward", upper}}));
}

TEST(Resolve, OwnersDoNotOwnModulesWhoseNamesOnlyBeginAlike) {
  const Plan plan({{"mlp", Style::kColumnRowMlp, {}}, {"mlp2.w1", Style::kRow, {}}});
  EXPECT_EQ(plan.resolve(Names{"", "mlp", "mlp.w1", "mlp2", "mlp2.w1"}).size(), 2U);
}

TEST(ResolveErrors, PatternThatMatchesNothing) {
  EXPECT_EQ(resolve_error(Plan({{"layers.*.attn.wq", Style::kColumn, {}}}), llama_modules(3)),
            "plan: pattern 'layers.*.attn.wq' matches no module; nearest: "
            "'layers.0.attention.wq', 'layers.0', 'layers.0.attention.wk'; correct the pattern or "
            "remove the rule");
  EXPECT_EQ(resolve_error(Plan({{"layers.2.attention.wd", Style::kColumn, {}}}), llama_modules(3)),
            "plan: pattern 'layers.2.attention.wd' matches no module; nearest: "
            "'layers.2.attention.wq', 'layers.2.attention.wk', 'layers.2.attention.wv'; correct "
            "the pattern or remove the rule");
  EXPECT_EQ(resolve_error(Plan({{"a", Style::kColumn, {}}}), {""}),
            "plan: pattern 'a' matches no module; nearest: '' (the model itself); correct "
            "the pattern or remove the rule");
  EXPECT_EQ(resolve_error(Plan({{"a", Style::kColumn, {}}}), {}),
            "plan: pattern 'a' matches no module; the model has no modules; correct the pattern or "
            "remove the rule");
}

TEST(ResolveErrors, OneOfSeveralPatternsMatchesNothing) {
  EXPECT_EQ(
      resolve_error(
          Plan({{"wq", Style::kColumn, {}}, {"wk", Style::kColumn, {}}, {"wo", Style::kRow, {}}}),
          {"", "wq", "wo"}),
      "plan: pattern 'wk' matches no module; nearest: 'wq', 'wo', '' (the model itself); correct "
      "the pattern or remove the rule");
}

TEST(ResolveErrors, TwoStylesForOneModuleWhicheverIsMoreSpecific) {
  const Rule all = {"layers.*.attention.w*", Style::kColumn, {}};
  const Rule exact = {"layers.1.attention.wo", Style::kRow, {}};
  EXPECT_EQ(resolve_error(Plan({all, exact}), llama_modules(2)),
            "plan: module 'layers.1.attention.wo' gets style 'column' from pattern "
            "'layers.*.attention.w*' and style 'row' from pattern 'layers.1.attention.wo'; change "
            "the patterns so that the rules agree");
  EXPECT_EQ(resolve_error(Plan({exact, all}), llama_modules(2)),
            "plan: module 'layers.1.attention.wo' gets style 'row' from pattern "
            "'layers.1.attention.wo' and style 'column' from pattern 'layers.*.attention.w*'; "
            "change the patterns so that the rules agree");
}

TEST(ResolveErrors, TwoHeadCountsForOneModule) {
  EXPECT_EQ(resolve_error(Plan({{"*.0.*.wk", Style::kColumn, {}},
                                {"*.*.*.wk", Style::kColumn, "n_heads"},
                                {"layers.0.attention.wk", Style::kColumn, "n_kv_heads"}}),
                          llama_modules(1)),
            "plan: module 'layers.0.attention.wk' gets heads 'n_heads' from pattern '*.*.*.wk' and "
            "heads 'n_kv_heads' from pattern 'layers.0.attention.wk'; change the patterns so that "
            "the rules agree");
}

TEST(Resolve, OptionsOfSeveralRulesAddUp) {
  const Plan plan({{"*", Style::kReplicate, {}},
                   {"a*", Style::kReplicate, {}, false, true},
                   {"ab", Style::kReplicate, {}, true, false, ComputeDtype::kFloat16}});
  const std::vector<std::string> names = {"b", "a", "ab"};
  EXPECT_EQ(plan.resolve(names),
            (std::vector<Assignment>{
                {"b", {"*", Style::kReplicate, {}}},
                {"a", {"a*", Style::kReplicate, {}, false, true}},
                {"ab", {"a*", Style::kReplicate, {}, true, true, ComputeDtype::kFloat16}}}));
}

TEST(ResolveErrors, OptionsBelowAnOwnerThatHasOthers) {
  const std::vector<std::string> names = {"a", "a.b"};
  const Rule owner{"a", Style::kAttention, {}, false, true};
  const Plan plan({owner, {"a.*", Style::kAttention, {}, false, true, ComputeDtype::kFloat32}});
  EXPECT_EQ(error_of([&] { return plan.resolve(names); }),
            "plan: module 'a.b' gets style 'attention' with offload, precision 'float32' from "
            "pattern 'a.*' but lies inside 'a', to which pattern 'a' gives style 'attention' with "
            "offload as a whole; remove one of the two rules");
  const Plan alike({owner, {"a.*", Style::kAttention, {}, false, true}});
  EXPECT_EQ(alike.resolve(names), (std::vector<Assignment>{{"a", owner}}));
}

TEST(ResolveErrors, TwoPrecisionsForOneModule) {
  const Plan plan({{"*", Style::kRow, {}, false, false, ComputeDtype::kFloat16},
                   {"a", Style::kRow, {}, false, true},
                   {"a*", Style::kRow, {}, false, false, ComputeDtype::kFloat32}});
  const std::vector<std::string> names = {"a"};
  EXPECT_EQ(error_of([&] { return plan.resolve(names); }),
            "plan: module 'a' gets precision 'float16' from pattern '*' and precision 'float32' "
            "from pattern 'a*'; change the patterns so that the rules agree");
}

TEST(ResolveErrors, AnotherStyleBelowAnMlp) {
  EXPECT_EQ(resolve_error(Plan({{"layers.1.feed_forward.w1", Style::kColumn, {}},
                                {"layers.*.feed_forward", Style::kColumnRowMlp, {}}}),
                          llama_modules(2)),
            "plan: module 'layers.1.feed_forward.w1' gets style 'column' from pattern "
            "'layers.1.feed_forward.w1' but lies inside 'layers.1.feed_forward', to which pattern "
            "'layers.*.feed_forward' gives style 'column_row_mlp' as a whole; remove one of the "
            "two rules");
  EXPECT_EQ(resolve_error(Plan({{"", Style::kColumnRowMlp, {}}, {"a.b", Style::kReplicate, {}}}),
                          {"", "a", "a.b"}),
            "plan: module 'a.b' gets style 'replicate' from pattern 'a.b' but lies inside '' (the "
            "model itself), to which pattern '' gives style 'column_row_mlp' as a whole; remove "
            "one of the two rules");
}

TEST(Resolve, AttentionAndIgnoreOwnTheModulesBelow) {
  const Names names = {"", "a", "a.b", "a.b.c"};
  for (const Style style : {Style::kAttention, Style::kIgnore}) {
    const auto resolved = Plan({{"a", style, {}}, {"a.*.c", style, {}}}).resolve(names);
    ASSERT_EQ(resolved.size(), 1U);
    EXPECT_EQ(resolved[0].module, "a");
    EXPECT_EQ(resolve_error(Plan({{"a", style, {}}, {"a.b", Style::kColumnRowMlp, {}}}), names),
              "plan: module 'a.b' gets style 'column_row_mlp' from pattern 'a.b' but lies inside "
              "'a', to which pattern 'a' gives style '" +
                  std::string(to_string(style)) + "' as a whole; remove one of the two rules");
  }
}

TEST(ResolveProperties, AgreesWithMatchingEveryPairOfRuleAndModule) {
  const Names names = llama_modules(12);
  const std::vector<Rule> rules = {{"layers.1*.attention.w*", Style::kColumn, {}},
                                   {"layers.*.attention.wq", Style::kColumn, {}},
                                   {"*.*.*.*1", Style::kRow, {}},
                                   {"*", Style::kReplicate, {}}};
  std::vector<Assignment> expected;
  for (const std::string& name : names) {
    for (const Rule& rule : rules) {
      if (matches(rule.pattern, name)) {
        expected.push_back({name, rule});
        break;
      }
    }
  }
  EXPECT_EQ(Plan(rules).resolve(names), expected);
  EXPECT_GT(expected.size(), 20U);
}

// The limit is far above the usual 10 to 20 ms, and far below the time of a quadratic algorithm or
// of matching by backtracking.
TEST(ResolveSpeed, TenThousandModulesAndFiftyRulesNeedLessThanASecond) {
  const Names names = llama_modules(1000);
  std::vector<Rule> rules;
  for (int i = 0; i < 10; ++i) {
    for (const char* module :
         {"attention.wq", "attention.*k", "*.wv", "feed_forward.w1", "feed_forward.w*"}) {
      rules.push_back({"layers.*" + std::to_string(i) + "." + module, Style::kColumn, {}});
    }
  }
  const Plan plan(rules);
  ASSERT_EQ(plan.rules().size(), 50U);
  ASSERT_GT(names.size(), 10'000U);
  const auto start = std::chrono::steady_clock::now();
  const auto assignments = plan.resolve(names);
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  RecordProperty("milliseconds", std::to_string(elapsed.count()));
  EXPECT_EQ(assignments.size(), 6000U);
  EXPECT_LT(elapsed.count(), 1000);
}

}  // namespace
}  // namespace weft::strategy
