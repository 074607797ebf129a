// The subcommands of ferry-torch as they are called, on tiny models.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/torch/torch_program.h"
#include "distckpt/storage/file_io.h"
#include "tests/cli/outcome.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/safetensors_file.h"
#include "tests/support/temp_dir.h"

namespace ferry::cli {
namespace torch_commands_test {

using nlohmann::json;

Outcome ferry(std::vector<std::string> arguments) {
  return run(std::move(arguments), run_torch_program);
}

// A model without a tokenizer.
class TorchCommands : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new support::TempDir();  // NOLINT(cppcoreguidelines-owning-memory)
    support::write_tiny_model({}, *dir_ / "hf", 1);
    std::filesystem::remove(*dir_ / "hf/tokenizer.json");
  }
  static void TearDownTestSuite() {
    delete dir_;  // NOLINT(cppcoreguidelines-owning-memory)
  }
  static std::string at(const std::string& name) { return (*dir_ / name).string(); }
  static Outcome generate(std::vector<std::string> more) {
    more.insert(more.begin(), {"generate", at("hf"), "--prompt-ids", "1,2,3", "--temperature", "0",
                               "--max-tokens", "4", "--ignore-eos", "--quiet"});
    return ferry(more);
  }
  // A reference whose logits are zeros.
  static void write_reference(std::int64_t vocab) {
    const std::vector<std::int64_t> tokens{1, 2, 3};
    const std::vector<float> logits(static_cast<std::size_t>(3 * vocab));
    support::write_safetensors(at("reference.safetensors"),
                               {support::stored_tensor("tokens.0", {3}, tokens, "I64"),
                                support::stored_tensor("logits.0", {3, vocab}, logits)});
  }

  static support::TempDir* dir_;
};
support::TempDir* TorchCommands::dir_ = nullptr;

TEST_F(TorchCommands, GenerateTellsTheTokensOfAPrompt) {
  const auto outcome = generate({"--json"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto answer = outcome.report();
  EXPECT_EQ(answer.at("prompt_token_ids"), json({1, 2, 3})) << answer;
  EXPECT_EQ(answer.at("outputs").at(0).at("token_ids").size(), 4U) << answer;
  EXPECT_EQ(answer.at("outputs")[0].at("finish_reason"), "length");
  EXPECT_EQ(outcome.err, "");
}

// In bitwise, the default.
TEST_F(TorchCommands, GenerateGivesTheSameOnTwoRanks) {
  const auto alone = generate({"--json"});
  const auto shared = generate({"--json", "--tp", "2"});
  ASSERT_EQ(shared.status, 0) << shared.err;
  EXPECT_EQ(alone.report().at("outputs"), shared.report().at("outputs"));
}

TEST_F(TorchCommands, GenerateRefusesWhatHasNoEffect) {
  EXPECT_TRUE(generate({"--system", "be"}).complains("--chat was not asked for"));
  EXPECT_TRUE(generate({"--logprobs", "2"}).complains("--logprobs: has no effect without --json"));
  EXPECT_TRUE(generate({"--logprobs", "0", "--json"}).complains("--logprobs: 0: is not a number"));
  EXPECT_TRUE(generate({"--json", "--stop-token-ids", "1000000"}).says("1000000 is no token"));
  const auto routed = generate({"--enable-return-routed-experts"});
  EXPECT_EQ(routed.status, 2);
  EXPECT_TRUE(routed.complains("--enable-return-routed-experts: has no effect without --json"));
}

TEST_F(TorchCommands, GenerateAnswersTheOthersBesideAPromptThatItRefuses) {
  const auto outcome = generate({"--json", "--prompt-ids", "4,1000000"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(outcome.says("\"error\"")) << outcome.out;
  EXPECT_TRUE(outcome.says("\"length\"")) << outcome.out;
}

TEST_F(TorchCommands, GenerateNamesACheckpointThatIsNotThere) {
  const auto outcome = ferry({"generate", at("none"), "--prompt-ids", "1"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(outcome.complains("none")) << outcome.err;
}

TEST_F(TorchCommands, VerifyLogitsSaysHowToMakeAReference) {
  const auto outcome = ferry({"verify", "--logits", at("hf")});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(outcome.complains("there is no --reference to compare with")) << outcome.err;
  EXPECT_TRUE(outcome.complains("hf_reference.py " + at("hf"))) << outcome.err;
}

TEST_F(TorchCommands, VerifyLogitsNamesWhatDiffers) {
  write_reference(50);
  const auto outcome = ferry({"verify", "--logits", at("hf"), "--reference",
                              at("reference.safetensors"), "--json", "--html", at("page.html")});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  EXPECT_EQ(outcome.report().at("equal"), false);
  EXPECT_EQ(outcome.report().at("first_difference").at("module"), "logits");
  EXPECT_EQ(outcome.report().at("sequences").at(0).at("logits").at("elements"), 150);
  EXPECT_NE(distckpt::read_text(at("page.html")).find("Not equal"), std::string::npos);
}

TEST_F(TorchCommands, VerifyLogitsRefusesAReferenceOfAnotherVocabulary) {
  write_reference(51);
  const auto outcome =
      ferry({"verify", "--logits", at("hf"), "--reference", at("reference.safetensors")});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(outcome.complains("51")) << outcome.err;
}

TEST_F(TorchCommands, VerifyNumericsCertifiesThisMachine) {
  const auto outcome = ferry({"verify", "--numerics", at("hf"), "--dtype", "fp32", "--json"});
  ASSERT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  EXPECT_EQ(outcome.report().at("passed"), true);
  EXPECT_GT(outcome.report().at("checks").size(), 5U);
}

TEST_F(TorchCommands, BenchCountsWhatItReplays) {
  const auto outcome = ferry({"bench", "rollout", at("hf"), "--num-prompts", "3", "--input-len",
                              "5", "--output-len", "2", "--num-warmups", "0", "--json"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto report = outcome.report();
  EXPECT_EQ(report.at("answers"), 3);
  EXPECT_EQ(report.at("output_tokens"), 6);
  EXPECT_EQ(report.at("prompt_tokens").get<int>() + report.at("cached_tokens").get<int>(), 15);
  EXPECT_EQ(report.at("tp"), 1);
  EXPECT_GT(report.at("roofline").at("bound_seconds"), 0);
  EXPECT_GE(report.at("answer_ms").at("max"), report.at("answer_ms").at("p50"));
}

TEST_F(TorchCommands, BenchRefusesWhatHasNoEffect) {
  const auto refuses = [](std::vector<std::string> more, const std::string& words) {
    more.insert(more.begin(), {"bench", "rollout", at("hf"), "--input-len", "5"});
    const auto outcome = ferry(more);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_TRUE(outcome.complains(words)) << outcome.err;
  };
  refuses({"--prefix-len", "6"}, "--prefix-len 6: is not from 0 to the longest prompt's 5 tokens");
  refuses({"--tokenizer", at("hf")}, "--tokenizer");
}

TEST_F(TorchCommands, BenchTakesLengthsOrAFileOfThem) {
  const auto outcome = ferry({"bench", "rollout", at("hf"), "--lengths", "x", "--input-len", "5"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(outcome.complains("--input-len excludes --lengths")) << outcome.err;
}

TEST_F(TorchCommands, ServeRefusesOptionsBeforeItLoadsAModel) {
  const auto refuses = [](std::vector<std::string> more, const std::string& words) {
    more.insert(more.begin(), {"serve", "/nowhere"});
    const auto outcome = ferry(more);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_TRUE(outcome.complains(words)) << outcome.err;
  };
  refuses({"--max-body", "1 stone"}, "--max-body");
  refuses({"--port", "70000"}, "--port");
  refuses({"--tool-call-parser", "own"}, "hermes");
  refuses({"--max-queued-requests", "-1"}, "--max-queued-requests");
  refuses({"--max-connections", "0"}, "--max-connections: 0: is not a number of 1 or more");
  refuses({"--max-num-seqs", "0"}, "--max-num-seqs: 0: is not a number of 1 or more");
  refuses({"--num-blocks", "-1"}, "--num-blocks: -1: is not a number of 0 or more");
  refuses({"--shutdown-timeout", "-1"}, "--shutdown-timeout: -1: is not a number of 0 or more");
  refuses({"--allowed-local-media-path", "/nope"}, "/nope");
  refuses({}, "/nowhere");
}

TEST_F(TorchCommands, ServeRefusesWhatTheModelLacks) {
  const auto refuses = [](std::vector<std::string> more, const std::string& words) {
    more.insert(more.begin(), {"serve", at("hf"), "--port", "0"});
    const auto outcome = ferry(more);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_TRUE(outcome.complains(words)) << outcome.err;
  };
  refuses({"--max-images", "2", "--allowed-local-media-path", "/tmp"},
          "--max-images, --allowed-local-media-path: has no effect: images of this model");
  refuses({"--tool-call-parser", "hermes"}, "--tool-call-parser: has no effect");
}

TEST_F(TorchCommands, TrainPrintsTheConfigurationThatItWouldRun) {
  const auto outcome =
      ferry({"train", "grpo", "--print-config", "--reward-command", "./score",
             "actor_rollout_ref.model.path=hf", "data.train_files=a.jsonl", "trainer.seed=7"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(outcome.says("seed = 7")) << outcome.out;
  EXPECT_TRUE(outcome.says("adv_estimator = \"grpo\""));
  EXPECT_TRUE(outcome.says("command = \"./score\""));
  EXPECT_TRUE(ferry({"train", "ppo", "--print-config"}).says("adv_estimator = \"gae\""));
  EXPECT_TRUE(ferry({"train", "sft", "--print-config"}).says("[optim]"));
}

TEST_F(TorchCommands, TrainNamesAKeyThatIsNone) {
  for (const auto* const algorithm : {"sft", "grpo", "ppo"}) {
    const auto outcome = ferry({"train", algorithm, "trainer.sed=7"});
    EXPECT_EQ(outcome.status, 2);
    EXPECT_TRUE(outcome.complains("trainer.sed")) << outcome.err;
  }
}

TEST_F(TorchCommands, TrainReplicaNeedsARankThatListens) {
  EXPECT_TRUE(ferry({"train", "replica"}).complains("socket"));
  const auto outcome = ferry({"train", "replica", at("rank0.sock")});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(outcome.complains("rank0.sock")) << outcome.err;
}

}  // namespace torch_commands_test
}  // namespace ferry::cli
