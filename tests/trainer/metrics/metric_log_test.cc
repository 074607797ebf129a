#include "trainer/metrics/metric_log.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"
#include "trainer/metrics/run_log.h"

namespace ferry::trainer {
namespace metric_log_test {

using support::fails;

std::string text_of(const std::filesystem::path& path) {
  return distckpt::read_text(path);
}

TEST(JsonlLog, HasALineForEachStep) {
  const support::TempDir dir;
  const auto log = open_jsonl_log(dir / "run/metrics.jsonl", 1);
  log->write({.step = 1, .time = 12.5, .values = {{"train/loss", 2}, {"a", 0.1}}});
  log->write({.step = 2, .time = 13, .values = {{"train/loss", INFINITY}}});
  EXPECT_EQ(text_of(dir / "run/metrics.jsonl"),
            "{\"step\":1,\"time\":12.5,\"data\":{\"a\":0.1,\"train/loss\":2.0}}\n"
            "{\"step\":2,\"time\":13.0,\"data\":{\"train/loss\":null}}\n");
}

TEST(JsonlLog, ForgetsWhatARunThatGoesOnDoesAgain) {
  const support::TempDir dir;
  const auto path = dir / "metrics.jsonl";
  {
    const auto log = open_jsonl_log(path, 1);
    for (int step = 1; step <= 5; ++step)
      log->write({.step = step, .time = 1, .values = {{"train/loss", step}}});
  }
  support::append(path, "{\"step\":6,\"ti");  // it was killed
  open_jsonl_log(path, 4)->write({.step = 4, .time = 2, .values = {{"train/loss", 40}}});
  const auto history = read_metrics(path);
  EXPECT_EQ(history.num_unreadable, 0);
  ASSERT_EQ(history.steps.size(), 4U);
  EXPECT_EQ(history.steps[2].values.at("train/loss"), 3);
  EXPECT_EQ(history.steps[3].values.at("train/loss"), 40);
}

TEST(MetricHistory, ReadsTheFileLoggerOfVerlAndWhatAKilledRunLeft) {
  const support::TempDir dir;
  distckpt::write_text(
      dir / "metrics.jsonl",
      "{\"step\": 2, \"data\": {\"train/loss\": 1.5, \"train/lr\": 2, \"text\": \"x\"}}\n"
      "{\"step\": 1, \"data\": {\"train/loss\": null}}\n\n"
      "[]\n{\"data\": {}}\n{\"step\": 2, \"data\": {\"train/loss\": 1.25, \"val/loss\": 3}}\n"
      "{\"step\": 3, \"data\": {\"tr");
  const auto history = read_metrics(dir / "metrics.jsonl");
  EXPECT_EQ(history.num_unreadable, 3);
  ASSERT_EQ(history.steps.size(), 2U);
  EXPECT_EQ(history.steps[0].step, 1);
  EXPECT_TRUE(std::isnan(history.steps[0].values.at("train/loss")));
  EXPECT_EQ(history.steps[1].values,
            (Metrics{{"train/loss", 1.25}, {"train/lr", 2}, {"val/loss", 3}}));
}

TEST(RunLog, IsAFolderOrItsFile) {
  const support::TempDir dir;
  distckpt::write_text(dir / "metrics.jsonl", "{\"step\": 1, \"data\": {}}\n");
  const Timeline timeline(dir / kTimelineFolder, 0, 1);
  for (const auto& run : {dir.path(), dir / "metrics.jsonl"}) {
    const auto log = read_run(run);
    EXPECT_EQ(log.metrics.steps.size(), 1U);
    EXPECT_EQ(log.timeline_paths.size(), 1U);
  }
  std::filesystem::remove(dir / "metrics.jsonl");
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"metrics.jsonl"}, [&] { read_run(dir.path()); }));
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"none"}, [&] { read_run(dir / "none"); }));
}

// The first record of every event file: its length 24, and the CRCs that TensorFlow computes
// (masked CRC-32C; the time, of eight bytes, is put to zero by
// tests/interop/train/test_metric_logs.py's reader).
TEST(RunLog, HasTheStepsThatTheRunIsToHave) {
  const support::TempDir dir;
  open_jsonl_log(dir / "metrics.jsonl", 1)->write({.step = 1, .time = 1, .values = {{"a", 1}}});
  EXPECT_EQ(read_run(dir.path()).total_steps, std::nullopt);
  write_total_steps(dir.path(), 50);
  write_total_steps(dir.path(), 100);
  EXPECT_EQ(read_run(dir.path()).total_steps, 100);
  for (const auto* text : {"", "[1]", "{\"total_steps\": \"x\"}", "{\"total_steps\": -1}"}) {
    distckpt::replace_text(dir / kProgressFile, text);
    EXPECT_EQ(read_run(dir.path()).total_steps, std::nullopt) << text;
  }
}

TEST(EventLog, BeginsWithItsVersion) {
  const support::TempDir dir;
  open_event_log(dir / "tb", 1);
  std::filesystem::path file;
  for (const auto& entry : std::filesystem::directory_iterator(dir / "tb")) file = entry.path();
  EXPECT_TRUE(file.filename().string().starts_with("events.out.tfevents.")) << file;
  const auto bytes = text_of(file);
  ASSERT_EQ(bytes.size(), 8U + 4 + 26 + 4);
  EXPECT_EQ(bytes.substr(0, 8), std::string("\x1a\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(bytes.substr(21, 4), std::string("\x10\0\x1a\x0d", 4));
  EXPECT_EQ(bytes.substr(25, 13), "brain.Event:2");
}

}  // namespace metric_log_test
}  // namespace ferry::trainer
