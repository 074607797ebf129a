#include "rollout/text/eos_token_ids.h"

#include <gtest/gtest.h>

#include <map>

namespace ferry::rollout::text {
namespace eos_token_ids_test {

using Files = std::map<std::string, std::string>;
using Ids = std::vector<std::int64_t>;

Ids ids_of(const Files& files) {
  const ModelFiles model(
      [&](const std::string& name) -> std::optional<std::string> {
        const auto found = files.find(name);
        return found == files.end() ? std::nullopt : std::optional(found->second);
      },
      "model");
  return eos_token_ids(model, nullptr);
}

TEST(EosTokenIds, MayBeOne) {
  EXPECT_EQ(ids_of({{"config.json", R"({"eos_token_id": 7})"}}), Ids{7});
}

TEST(EosTokenIds, MayBeAList) {
  EXPECT_EQ(ids_of({{"config.json", R"({"eos_token_id": [9, 7, 9]})"}}), (Ids{7, 9}));
}

TEST(EosTokenIds, TheGenerationConfigGoesFirst) {
  EXPECT_EQ(ids_of({{"generation_config.json", R"({"eos_token_id": 1})"},
                    {"config.json", R"({"eos_token_id": 2})"}}),
            Ids{1});
}

TEST(EosTokenIds, AGenerationConfigWithoutThemIsPassedOver) {
  EXPECT_EQ(ids_of({{"generation_config.json", R"({"eos_token_id": null})"},
                    {"config.json", R"({"eos_token_id": 2})"}}),
            Ids{2});
}

TEST(EosTokenIds, MayBeNone) {
  EXPECT_EQ(ids_of({}), Ids{});
}

}  // namespace eos_token_ids_test
}  // namespace ferry::rollout::text
