// The subcommands as they are called: what they say, what they return, what they leave behind.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/program.h"
#include "distckpt/storage/file_io.h"
#include "tests/cli/outcome.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"
#include "tests/support/trees.h"

namespace ferry::cli {
namespace commands_test {

namespace fs = std::filesystem;
using nlohmann::json;
using support::same_tree;

Outcome ferry(std::vector<std::string> arguments) {
  return run(std::move(arguments),
             [](int argc, char** argv) { return run_program(argc, argv, add_file_commands); });
}

TEST(Program, WithoutASubcommandIsTrouble) {
  const auto outcome = ferry({});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(outcome.complains("subcommand")) << outcome.err;
}

TEST(Program, SuggestsTheSubcommandThatWasMeant) {
  const auto outcome = ferry({"convrt", "a", "b"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(outcome.complains("convrt: is no subcommand of ferry")) << outcome.err;
  EXPECT_TRUE(outcome.complains("did you mean convert? see ferry --help")) << outcome.err;
}

TEST(Program, SuggestsTheOptionThatWasMeant) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"convert", "a", "b", "--dry_run"},
        {"convert", "--dry_run=read"}}) {
    const auto outcome = ferry(arguments);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_TRUE(outcome.complains("--dry_run: is no option of ferry convert")) << outcome.err;
    EXPECT_TRUE(outcome.complains("did you mean --dry-run? see ferry convert --help"));
  }
  EXPECT_TRUE(ferry({"convert", "a", "b", "--", "--dry_run"}).complains("were not expected") ||
              ferry({"convert", "a", "b", "--", "--dry_run"}).complains("was not expected"));
}

TEST(Program, PointsToTheHelpOfTheSubcommand) {
  const auto outcome = ferry({"delta", "make", "a"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(outcome.complains("see ferry delta make --help")) << outcome.err;
}

TEST(Program, SaysItsVersionAndItsHelp) {
  EXPECT_EQ(ferry({"--version"}).status, 0);
  EXPECT_TRUE(ferry({"--version"}).says("ferry "));
  EXPECT_TRUE(ferry({"verify", "--help"}).says("Exit status: 0 identical, 1 something differs"));
}

TEST(Program, TellsTroubleAsJsonWhereAskedTo) {
  const auto outcome = ferry({"inspect", "/nowhere/at/all", "--json"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.report().at("error").at("kind"), "not_found") << outcome.out;
  EXPECT_TRUE(outcome.complains("/nowhere/at/all")) << outcome.err;
}

// Two checkpoints of one model, "hf" and "other".
class Commands : public testing::Test {
 protected:
  Commands() {
    support::write_tiny_model({}, dir_ / "hf", 1);
    support::write_tiny_model({}, dir_ / "other", 2);
  }
  std::string at(const std::string& name) const { return (dir_ / name).string(); }

  support::TempDir dir_;
};

TEST_F(Commands, ConvertThereAndBackProvesTheSameFolder) {
  const auto there = ferry({"convert", at("hf"), at("megatron"), "--tp", "2", "--json"});
  ASSERT_EQ(there.status, 0) << there.err;
  EXPECT_EQ(there.report().at("proved"), true);
  const auto back = ferry({"convert", at("megatron"), at("back")});
  ASSERT_EQ(back.status, 0) << back.err;
  EXPECT_TRUE(back.says("proved")) << back.out;
  EXPECT_TRUE(same_tree(dir_ / "hf", dir_ / "back"));
}

TEST_F(Commands, ConvertSaysNothingIfItIsToBeQuiet) {
  const auto outcome = ferry({"convert", at("hf"), at("out"), "--to", "hf", "--quiet"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.out + outcome.err, "");
}

TEST_F(Commands, ConvertWritesNothingInADryRun) {
  for (const auto* how : {"--dry-run", "--dry-run=read"}) {
    const auto outcome = ferry({"convert", at("hf"), at("out"), how});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_FALSE(outcome.out.empty());
    EXPECT_FALSE(fs::exists(dir_ / "out"));
  }
  EXPECT_TRUE(ferry({"convert", at("hf"), at("out"), "--dry-run=think"}).complains("neither plan"));
}

TEST_F(Commands, ConvertNamesTheOptionThatItDoesNotTake) {
  const std::vector<std::vector<std::string>> wrong{
      {"--to", "onnx"},         {"--dtype", "int8"},          {"--tp", "two"},
      {"--max-memory", "lots"}, {"--iteration", "last"},      {"--max-shard-size", "5 parrots"},
      {"--mtp", "maybe"},       {"--quantize", "everything"}, {"--lora-alpha", "16"}};
  for (const auto& options : wrong) {
    std::vector<std::string> arguments{"convert", at("hf"), at("out")};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const auto outcome = ferry(arguments);
    EXPECT_EQ(outcome.status, 2) << options[0];
    EXPECT_TRUE(outcome.complains(options[0])) << outcome.err;
    EXPECT_FALSE(fs::exists(dir_ / "out")) << options[0];
  }
}

TEST_F(Commands, ConvertTakesTheNamesThatTorchHasForDtypes) {
  EXPECT_EQ(ferry({"convert", at("hf"), at("short"), "--to", "hf", "--dtype", "fp32"}).status, 0);
  for (const auto* name : {"float32", "F32", "float"}) {
    const auto to = at(name);
    EXPECT_EQ(ferry({"convert", at("hf"), to, "--to", "hf", "--dtype", name}).status, 0) << name;
    EXPECT_EQ(ferry({"verify", at("short"), to}).status, 0) << name;
  }
}

TEST_F(Commands, ConvertOfAnAdapterTakesNoOptionsOfAModel) {
  const auto outcome =
      ferry({"convert", at("other"), at("out"), "--base", at("hf"), "--to", "peft", "--resume"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(outcome.complains("of an adapter all is converted as it is")) << outcome.err;
  EXPECT_TRUE(ferry({"convert", at("other"), at("out"), "--base", at("hf")})
                  .complains("an adapter's target is peft, megatron, verl, "));
}

TEST_F(Commands, InspectListsTheTensorsThatTheFilterTakes) {
  const auto all = ferry({"inspect", at("hf"), "--json"}).report();
  const auto some = ferry({"inspect", at("hf"), "--json", "--filter", "*.q_proj.weight"}).report();
  EXPECT_GT(all.at("tensors").size(), some.at("tensors").size());
  ASSERT_EQ(some.at("tensors").size(), 2U);
  EXPECT_TRUE(ferry({"inspect", at("hf")}).says("llama"));
}

TEST_F(Commands, VerifyAnswersByItsStatus) {
  const auto same = ferry({"verify", at("hf"), at("hf")});
  EXPECT_EQ(same.status, 0) << same.err;
  const auto differs = ferry({"verify", at("hf"), at("other"), "--json"});
  EXPECT_EQ(differs.status, 1);
  EXPECT_EQ(differs.report().at("identical"), false);
  EXPECT_EQ(ferry({"verify", at("hf"), at("nowhere")}).status, 2);
}

TEST_F(Commands, DiffReplacesAPageOfItsOwn) {
  ASSERT_EQ(ferry({"diff", at("hf"), at("other"), "--html", at("page.html")}).status, 1);
  const auto page = distckpt::read_text(dir_ / "page.html");
  EXPECT_NE(page.find("</html>"), std::string::npos);
  ASSERT_EQ(ferry({"diff", at("hf"), at("hf"), "--html", at("page.html")}).status, 0);
  EXPECT_FALSE(distckpt::read_text(dir_ / "page.html") == page);
}

TEST_F(Commands, DiffReplacesAnotherFileOnlyIfAsked) {
  distckpt::write_text(dir_ / "letter", "dear");
  const std::vector<std::string> diff{"diff", at("hf"), at("hf"), "--html", at("letter")};
  const auto refused = ferry(diff);
  EXPECT_EQ(refused.status, 2);
  EXPECT_TRUE(refused.complains("--overwrite")) << refused.err;
  EXPECT_EQ(distckpt::read_text(dir_ / "letter"), "dear");
  auto asked = diff;
  asked.emplace_back("--overwrite");
  EXPECT_EQ(ferry(asked).status, 0);
  EXPECT_FALSE(distckpt::read_text(dir_ / "letter") == "dear");
}

TEST_F(Commands, DigestChecksWhatItWrote) {
  ASSERT_EQ(ferry({"digest", at("hf"), "--output", at("manifest.json"), "-q"}).status, 0);
  EXPECT_TRUE(ferry({"digest", at("hf"), "--check", at("manifest.json")}).says("matches"));
  const auto other = ferry({"digest", at("other"), "--check", at("manifest.json"), "--json"});
  EXPECT_EQ(other.status, 1);
  EXPECT_FALSE(other.report().at("differences").empty());
}

TEST_F(Commands, ReportsAreNotReadByMoreUsersThanTheirSource) {
  fs::permissions(dir_ / "hf/model.safetensors", fs::perms(0600));
  const auto mode = [&](const char* name) { return fs::status(dir_ / name).permissions(); };
  ASSERT_EQ(ferry({"digest", at("hf"), "--output", at("manifest.json"), "-q"}).status, 0);
  EXPECT_EQ(mode("manifest.json"), fs::perms(0600));
  ASSERT_EQ(ferry({"diff", at("other"), at("hf"), "--html", at("page.html")}).status, 1);
  EXPECT_EQ(mode("page.html"), fs::perms(0600));
}

TEST_F(Commands, AnAppliedDeltaIsNotReadByMoreUsersThanTheDelta) {
  ASSERT_EQ(ferry({"delta", "make", at("hf"), at("other"), at("delta"), "-q"}).status, 0);
  for (const auto& file : fs::directory_iterator(dir_ / "delta"))
    fs::permissions(file.path(), fs::perms(0640));
  ASSERT_EQ(ferry({"delta", "apply", at("hf"), at("delta"), at("back"), "-q"}).status, 0);
  for (const auto& file : fs::directory_iterator(dir_ / "back"))
    EXPECT_EQ(file.status().permissions(), fs::perms(0640)) << file.path();
}

TEST_F(Commands, RefuseOptionsOfALayoutWhateverTheySay) {
  const auto to_hf = ferry({"convert", at("hf"), at("out"), "--to", "hf", "--tp", "1"});
  EXPECT_EQ(to_hf.status, 2);
  EXPECT_TRUE(to_hf.complains("--tp: has no effect: the target is a Hugging Face checkpoint"))
      << to_hf.err;
  EXPECT_EQ(ferry({"convert", at("hf"), at("out"), "--tp", "1", "-q"}).status, 0);
}

TEST_F(Commands, RefuseOptionsWithoutEffect) {
  // Each row: a command, and the option of it that changes nothing.
  const std::vector<std::pair<std::vector<std::string>, std::string>> rows{
      {{"convert", at("hf"), at("o"), "--to", "h5", "--ep", "1"}, "--ep"},
      {{"convert", at("hf"), at("o"), "--base", at("hf"), "--to", "peft", "--iteration", "3"},
       "--iteration"},
      {{"convert", at("hf"), at("o"), "--base", at("hf"), "--to", "peft", "--mtp", "keep"},
       "--mtp"},
      {{"convert", at("hf"), at("o"), "--base", at("hf"), "--to", "peft", "--pp", "1"}, "--pp"},
      {{"split", at("hf"), at("other"), at("o"), "--rank", "1", "--tp", "1"}, "--tp"},
      {{"split", at("hf"), at("other"), at("o"), "--rank", "1", "--tensors", "--json"},
       "--tensors"},
      {{"merge", at("hf"), at("other"), at("o"), "--allow-vanished"}, "--allow-vanished"},
      {{"delta", "make", at("hf"), at("other"), at("o"), "--version", "3"}, "--version"},
      {{"digest", at("hf"), "--keep-quantized"}, "--keep-quantized"},
      {{"watch", at("hf"), "--once", "--interval", "3"}, "--interval"},
      {{"watch", at("hf"), "--interval", "3"}, "--interval"},
      {{"plan", "model.path=hf", "data.train_files=a", "--ranks-per-host", "2"},
       "--ranks-per-host"},
      {{"score", "--rules", "--seconds", "3"}, "--seconds"},
  };
  for (const auto& [command, option] : rows) {
    const auto outcome = ferry(command);
    EXPECT_EQ(outcome.status, 2) << option;
    EXPECT_TRUE(outcome.complains(option + ": has no effect")) << outcome.err;
  }
  EXPECT_TRUE(ferry({"digest", at("hf"), "--hf-config", at("other")}).complains("--hf-config"));
}

TEST_F(Commands, DeltaTurnsOneCheckpointIntoTheOther) {
  ASSERT_EQ(ferry({"delta", "make", at("hf"), at("other"), at("delta"), "-q"}).status, 0);
  const auto fits = ferry({"delta", "verify", at("hf"), at("delta"), "--json"});
  EXPECT_EQ(fits.status, 0) << fits.err;
  EXPECT_EQ(fits.report().at("fits"), true);
  EXPECT_EQ(ferry({"delta", "verify", at("other"), at("delta")}).status, 2);
  EXPECT_EQ(ferry({"delta", "inspect", at("delta"), "--json"}).report().size(), 1U);
  ASSERT_EQ(ferry({"delta", "apply", at("hf"), at("delta"), at("back"), "-q"}).status, 0);
  EXPECT_EQ(ferry({"verify", at("other"), at("back"), "-q"}).status, 0);
}

TEST_F(Commands, SplitMakesAnAdapterThatMergeTakes) {
  const auto split = ferry({"split", at("hf"), at("other"), at("lora"), "--rank", "2", "--include",
                            "*.mlp.*", "--json"});
  ASSERT_EQ(split.status, 0) << split.err;
  EXPECT_EQ(split.report().at("rank"), 2);
  EXPECT_EQ(split.report().at("tensors").size(), 6U);
  const auto merged = ferry({"merge", at("hf"), at("lora"), at("merged"), "--json"});
  ASSERT_EQ(merged.status, 0) << merged.err;
  EXPECT_EQ(merged.report().at("adapter").at("tensors"), 6);
  EXPECT_EQ(ferry({"verify", at("hf"), at("merged"), "-q"}).status, 1);
}

TEST_F(Commands, SplitNeedsARank) {
  EXPECT_TRUE(ferry({"split", at("hf"), at("other"), at("lora")}).complains("--rank"));
  EXPECT_TRUE(
      ferry({"split", at("hf"), at("other"), at("lora"), "--rank", "0"}).complains("--rank"));
}

TEST_F(Commands, PlanSaysWhetherARunFits) {
  const std::vector<std::string> run{"plan", "model.path=" + at("hf"), "data.train_files=a.jsonl",
                                     "--json"};
  const auto fits = ferry(run);
  EXPECT_EQ(fits.status, 0) << fits.err;
  EXPECT_TRUE(fits.report().is_object());
  auto small = run;
  small.insert(small.end(), {"--memory", "1MiB"});
  const auto misfits = ferry(small);
  EXPECT_EQ(misfits.status, 2);
  EXPECT_TRUE(misfits.complains("the run does not fit")) << misfits.err;
  auto unknown = run;
  unknown.insert(unknown.end(), {"--device", "abacus"});
  EXPECT_TRUE(ferry(unknown).complains("--device abacus: is none of"));
  unknown.emplace_back("trainer.device=cpu");
  EXPECT_TRUE(ferry(unknown).complains("--device abacus: has no effect"));
}

TEST_F(Commands, PlanComparesMeshes) {
  const std::vector<std::string> run{"plan",
                                     "actor_rollout_ref.model.path=" + at("hf"),
                                     "data.train_files=a.jsonl",
                                     "trainer.device=cuda",
                                     "--ranks",
                                     "2",
                                     "--meshes",
                                     "3"};
  auto as_json = run;
  as_json.emplace_back("--json");
  const auto found = ferry(as_json);
  ASSERT_EQ(found.status, 0) << found.err;
  const auto report = found.report();
  ASSERT_FALSE(report["meshes"].empty());
  const auto seconds = [&](std::size_t i) {
    return report["meshes"][i]["step_seconds"].get<double>();
  };
  for (std::size_t i = 1; i < report["meshes"].size(); ++i) EXPECT_LE(seconds(i - 1), seconds(i));
  // Its settings make that plan.
  std::vector<std::string> again{run.begin(), run.end() - 2};
  for (const auto& setting : report["meshes"][0]["settings"]) again.push_back(setting);
  again.emplace_back("--json");
  EXPECT_EQ(ferry(again).report()["step_seconds"], seconds(0));
  EXPECT_TRUE(ferry(run).says("settings   actor_rollout_ref.actor.megatron."));
}

TEST_F(Commands, PlanComparesMeshesOfSoManyGpus) {
  const std::string model = "actor_rollout_ref.model.path=" + at("hf");
  const auto plan = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"plan", model, "data.train_files=a.jsonl", "--meshes", "3"});
    return ferry(more);
  };
  EXPECT_TRUE(plan({"trainer.device=cpu", "--ranks", "2"}).complains("trainer.device=cuda"));
  EXPECT_TRUE(plan({}).complains("--ranks"));
}

// A run of three steps.
class RunCommands : public testing::Test {
 protected:
  RunCommands() {
    std::string lines;
    for (int step = 1; step <= 3; ++step) {
      lines +=
          json{{"step", step}, {"time", 100 + step}, {"data", {{"train/loss", 4 - step}}}}.dump() +
          "\n";
    }
    fs::create_directory(dir_ / "run");
    distckpt::write_text(dir_ / "run/metrics.jsonl", lines);
  }
  std::string at(const std::string& name) const { return (dir_ / name).string(); }

  support::TempDir dir_;
};

TEST_F(RunCommands, ReportSumsUpARun) {
  const auto outcome = ferry({"report", at("run"), "--json", "--output", at("page.html")});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("train/loss"), std::string::npos);
  EXPECT_NE(distckpt::read_text(dir_ / "page.html").find("train/loss"), std::string::npos);
}

TEST_F(RunCommands, ReportDrawsACurve) {
  const auto outcome =
      ferry({"report", at("run"), "--curve", "train/loss", "--svg", at("loss.svg")});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(distckpt::read_text(dir_ / "loss.svg").find("<svg"), std::string::npos);
}

TEST_F(RunCommands, ReportNamesAMetricThatTheRunLacks) {
  const auto outcome =
      ferry({"report", at("run"), "--curve", "train/lost", "--svg", at("loss.svg")});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(outcome.complains("has no value of train/lost")) << outcome.err;
  EXPECT_FALSE(fs::exists(dir_ / "loss.svg"));
}

TEST_F(RunCommands, WatchPrintsThePageOnce) {
  const auto outcome = ferry({"watch", at("run"), "--once"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(outcome.says("step 3")) << outcome.out;
  EXPECT_TRUE(ferry({"watch", at("none")}).complains("is not there"));
}

// The answers of `ferry score` to these lines.
std::vector<json> scores_of(const std::string& questions) {
  std::istringstream in(questions);
  auto* const before = std::cin.rdbuf(in.rdbuf());
  const auto outcome = ferry({"score", "--rules"});
  std::cin.rdbuf(before);
  std::cin.clear();
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  std::vector<json> answers;
  std::istringstream lines(outcome.out);
  for (std::string line; std::getline(lines, line);) answers.push_back(json::parse(line));
  return answers;
}

TEST(ScoreCommand, AnswersEachLineInItsOrder) {
  const auto answers = scores_of(
      R"({"id": 1, "data_source": "openai/gsm8k", "solution_str": "#### 4", "ground_truth": "4"})"
      "\n"
      R"({"id": "b", "data_source": "openai/gsm8k", "solution_str": "#### 5", "ground_truth": 4})"
      "\n");
  ASSERT_EQ(answers.size(), 2U);
  EXPECT_EQ(answers[0].at("id"), 1);
  EXPECT_EQ(answers[0].at("score"), 1);
  EXPECT_EQ(answers[1].at("id"), "b");
  EXPECT_EQ(answers[1].at("score"), 0);
}

TEST(ScoreCommand, SaysOfAQuestionWhatItLacks) {
  const auto answers = scores_of("{\"id\": 7, \"data_source\": \"openai/gsm8k\"}\n");
  ASSERT_EQ(answers.size(), 1U);
  EXPECT_EQ(answers[0].at("id"), 7);
  EXPECT_NE(answers[0].at("error").get<std::string>().find("solution_str"), std::string::npos);
}

TEST(SandboxCommand, NamesTheOptionThatItDoesNotTake) {
  for (const auto& option : std::vector<std::vector<std::string>>{
           {"--writable", "/nowhere/at/all"}, {"--memory", "lots"}, {"--processes", "0"}}) {
    const auto outcome = ferry({"sandbox", option[0], option[1], "--", "/bin/true"});
    EXPECT_EQ(outcome.status, 2) << option[0];
    EXPECT_TRUE(outcome.complains(option[0])) << outcome.err;
  }
}

}  // namespace commands_test
}  // namespace ferry::cli
