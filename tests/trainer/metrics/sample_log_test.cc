#include "trainer/metrics/sample_log.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace sample_log_test {

using support::fails;

TEST(SampleLog, HasALineForEachAnswer) {
  const support::TempDir dir;
  const SampleLog log(dir / "rollouts", 1);
  log.write(12,
            std::vector<LoggedSample>{
                {.input = "2+2=", .output = "4\n", .gts = "4", .score = 1, .extra = {{"acc", 1.0}}},
                {.input = "grüß", .output = "\xff", .score = NAN, .extra = {{"pred", nullptr}}}});
  EXPECT_EQ(distckpt::read_text(dir / "rollouts/12.jsonl"),
            "{\"input\":\"2+2=\",\"output\":\"4\\n\",\"gts\":\"4\",\"score\":1.0,\"step\":12,"
            "\"acc\":1.0}\n"
            "{\"input\":\"grüß\",\"output\":\"\uFFFD\",\"gts\":null,\"score\":null,\"step\":12,"
            "\"pred\":null}\n");
}

TEST(SampleLog, IsReadBack) {
  const support::TempDir dir;
  SampleLog(dir.path(), 1)
      .write(3, std::vector<LoggedSample>{{.input = "a",
                                           .output = "b",
                                           .gts = {"x", "y"},
                                           .score = 0.5,
                                           .extra = {{"acc", 1.0}}},
                                          {.input = "c", .output = "", .score = -INFINITY}});
  support::append(dir / "3.jsonl", "[]\n{\"input\": 1, \"output\": \"\"}\n{\"inp");
  const auto found = read_samples(sample_files(dir.path()).at(3));
  EXPECT_EQ(found.num_unreadable, 3);
  ASSERT_EQ(found.samples.size(), 2U);
  EXPECT_EQ(found.samples[0].input, "a");
  EXPECT_EQ(found.samples[0].output, "b");
  EXPECT_EQ(found.samples[0].gts, (nlohmann::json{"x", "y"}));
  EXPECT_EQ(found.samples[0].score, 0.5);
  EXPECT_EQ(found.samples[0].extra, (std::map<std::string, nlohmann::json>{{"acc", 1.0}}));
  EXPECT_TRUE(std::isnan(found.samples[1].score));
}

TEST(SampleLog, ForgetsStepsThatARunDoesAgain) {
  const support::TempDir dir;
  const SampleLog log(dir.path(), 1);
  for (const int step : {0, 2, 9, 10, 11})
    log.write(step, std::vector<LoggedSample>{{.input = "first", .output = "run"}});
  distckpt::write_text(dir / "notes.jsonl", "");
  distckpt::write_text(dir / "-12.jsonl", "");
  SampleLog(dir.path(), 10).write(10, std::vector<LoggedSample>{{.input = "second", .output = ""}});
  const auto files = sample_files(dir.path());
  std::vector<std::int64_t> steps;
  for (const auto& [step, path] : files) steps.push_back(step);
  EXPECT_EQ(steps, (std::vector<std::int64_t>{0, 2, 9, 10}));
  EXPECT_EQ(read_samples(files.at(9)).samples.at(0).input, "first");
  EXPECT_EQ(read_samples(files.at(10)).samples.at(0).input, "second");
  EXPECT_TRUE(std::filesystem::exists(dir / "notes.jsonl"));
  EXPECT_TRUE(std::filesystem::exists(dir / "-12.jsonl"));
}

TEST(SampleLog, ForgetsWhatAKilledRunLeftUnfinished) {
  const support::TempDir dir;
  for (const auto* name : {"3.jsonl.15e396a1f1ca42eb.ferry-tmp", "notes.jsonl.1.ferry-tmp"})
    distckpt::write_text(dir / name, "");
  const SampleLog log(dir.path(), 7);
  EXPECT_FALSE(std::filesystem::exists(dir / "3.jsonl.15e396a1f1ca42eb.ferry-tmp"));
  EXPECT_TRUE(std::filesystem::exists(dir / "notes.jsonl.1.ferry-tmp"));
}

TEST(SampleLog, OfNoFolderIsEmpty) {
  const support::TempDir dir;
  EXPECT_TRUE(sample_files(dir / "none").empty());
  distckpt::write_text(dir / "file", "");
  EXPECT_TRUE(fails(ErrorKind::kIo, {"file"}, [&] { SampleLog(dir / "file", 1); }));
}

}  // namespace sample_log_test
}  // namespace ferry::trainer
