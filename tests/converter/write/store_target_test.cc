// A checkpoint in a bucket that the test plays.
#include "converter/write/store_target.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "distckpt/storage/source_tree.h"
#include "tests/support/expect.h"
#include "tests/support/remote/environment.h"
#include "tests/support/remote/stub_server.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace store_target_test {

namespace fs = std::filesystem;
using support::fails;
using support::stub_answer;
using support::StubRequest;
using Names = std::vector<std::string>;

constexpr const char* kAddress = "s3://runs/out";

class StoreTargetTest : public testing::Test {
 protected:
  std::string answer(const StubRequest& asked) {
    constexpr std::string_view kBucket = "/runs/";
    const auto key = asked.target.substr(kBucket.size());
    log_.push_back(asked.method + " " + key.substr(0, key.find('?')));
    if (asked.method == "GET" && key.starts_with("?")) return stub_answer(200, listing());
    if (asked.method == "HEAD") {
      if (!objects_.contains(key)) return stub_answer(404);
      return stub_answer(200, "", {"x-amz-meta-ferry-run: " + runs_[key]});
    }
    if (asked.method == "DELETE") {
      objects_.erase(key);
      return stub_answer(204);
    }
    if (asked.method != "PUT" || key == refused_) return stub_answer(403);
    if (key == late_) objects_[key] = "theirs";  // a moment ago
    if (asked.header("if-none-match") == "*" && objects_.contains(key)) return stub_answer(412);
    objects_[key] = asked.body;
    runs_[key] = asked.header("x-amz-meta-ferry-run");
    return stub_answer(200, "", {"ETag: \"1\""});
  }
  std::string listing() const {
    std::string xml = "<ListBucketResult>";
    for (const auto& [key, body] : objects_)
      xml += "<Contents><Key>" + key + "</Key><Size>" + std::to_string(body.size()) +
             "</Size></Contents>";
    return xml + "</ListBucketResult>";
  }

  // A target of these files, which lie here.
  StoreTarget target(const Names& names, bool overwrite = false) {
    for (const auto& name : names) distckpt::write_text(dir_ / name, "new " + name);
    return {kAddress, dir_.path(), {names.begin(), names.end()}, overwrite};
  }
  Names keys() const {
    Names found;
    for (const auto& [key, body] : objects_) found.push_back(key);
    return found;
  }
  // The objects that were put, or removed, in their order.
  Names log_of(const std::string& method) const {
    Names found;
    for (const auto& line : log_)
      if (line.starts_with(method + " ")) found.push_back(line.substr(method.size() + 1));
    return found;
  }

  support::TempDir dir_;
  std::map<std::string, std::string> objects_;  // of the bucket, by key
  std::map<std::string, std::string> runs_;     // that have put them
  std::string refused_, late_;
  Names log_;
  support::StubServer server_{[this](const StubRequest& asked) { return answer(asked); }};
  support::Environment nobody_ = support::anonymous_s3(server_.url());
};

TEST_F(StoreTargetTest, WhatMakesItACheckpointIsSentLast) {
  target({"config.json", "model.safetensors.index.json", "tokenizer.json", "a.txt"}).publish();
  EXPECT_EQ(log_of("PUT"), (Names{"out/tokenizer.json", "out/a.txt",
                                  "out/model.safetensors.index.json", "out/config.json"}));
  EXPECT_EQ(objects_.at("out/config.json"), "new config.json");
}

TEST_F(StoreTargetTest, WeightsAreNotSentAgain) {
  auto store = target({"config.json", "model.safetensors"});
  const auto file = store.weights("model.safetensors", 5);
  EXPECT_EQ(file.place.address(), "s3://runs/out/model.safetensors");
  EXPECT_EQ(file.local, dir_ / "model.safetensors");
  EXPECT_EQ(file.size, 5);
  store.publish();
  EXPECT_EQ(log_of("PUT"), Names{"out/config.json"});
}

TEST_F(StoreTargetTest, RefusesAFolderThatHoldsSomething) {
  objects_["out/config.json"] = "dear";
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"s3://runs/out: exists already", "--overwrite"},
                    [&] { target({"config.json"}); }));
  EXPECT_EQ(objects_.at("out/config.json"), "dear");
}

TEST_F(StoreTargetTest, AFolderBesideItIsAnother) {
  objects_["outer/config.json"] = "dear";
  target({"config.json"}).publish();
  EXPECT_EQ(keys(), (Names{"out/config.json", "outer/config.json"}));
}

TEST_F(StoreTargetTest, OverwritesNothingThatItDoesNotWrite) {
  objects_["out/notes.txt"] = "dear";
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"holds notes.txt", "is not overwritten"},
                    [&] { target({"config.json"}, /*overwrite=*/true); }));
}

// A reader finds no checkpoint in between, and not one of old and new files.
TEST_F(StoreTargetTest, WhatMadeTheOldOneACheckpointGoesFirst) {
  objects_ = {{"out/config.json", "old"}, {"out/model.safetensors", "old"}};
  auto store = target({"config.json", "model.safetensors"}, /*overwrite=*/true);
  (void)store.weights("model.safetensors", 5);
  store.unseal();
  EXPECT_EQ(keys(), Names{"out/model.safetensors"});
  store.publish();
  EXPECT_EQ(objects_.at("out/config.json"), "new config.json");
}

TEST_F(StoreTargetTest, RemovesWhatItPutIfOneFileCannotBeSent) {
  refused_ = "out/config.json";
  EXPECT_TRUE(fails(ErrorKind::kIo, {"out/config.json"}, [&] {
    target({"tokenizer.json", "config.json"}).publish();
  }));
  EXPECT_EQ(log_of("PUT").front(), "out/tokenizer.json");
  EXPECT_EQ(keys(), Names());
}

// Two runs began while the folder was empty.
TEST_F(StoreTargetTest, LeavesWhatAnotherRunHasPutMeanwhile) {
  auto store = target({"tokenizer.json", "config.json"});
  store.unseal();
  objects_["out/config.json"] = "theirs";
  runs_["out/config.json"] = "another";
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"s3://runs/out: another run has put config.json"},
                    [&] { store.publish(); }));
  EXPECT_EQ(objects_.at("out/config.json"), "theirs");
}

// ... between the last look and the file that makes it a checkpoint.
TEST_F(StoreTargetTest, RemovesOnlyWhatItHasPutItself) {
  late_ = "out/config.json";
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"s3://runs/out/config.json: another run has put it"}, [&] {
    target({"tokenizer.json", "config.json"}).publish();
  }));
  EXPECT_EQ(keys(), Names{"out/config.json"});
}

TEST_F(StoreTargetTest, RemovesNothingBeforeItHasPutAnything) {
  objects_ = {{"out/config.json", "old"}};
  target({"config.json"}, /*overwrite=*/true);
  EXPECT_EQ(objects_.at("out/config.json"), "old");
}

TEST_F(StoreTargetTest, ReadsSmallFilesAsIfTheyWereThere) {
  auto store = target({"config.json"});
  store.weights_are_there();
  EXPECT_TRUE(distckpt::source_is_folder(kAddress));
  EXPECT_EQ(distckpt::read_text("s3://runs/out/config.json"), "new config.json");
  EXPECT_EQ(log_of("PUT"), Names());
}

TEST_F(StoreTargetTest, PutsATextBesideTheFolder) {
  put_beside("s3://runs/root/iter_0000001", "latest.txt", "1");
  EXPECT_EQ(objects_.at("root/latest.txt"), "1");
}

TEST_F(StoreTargetTest, HasABufferOfItsOwnForEachAddress) {
  EXPECT_EQ(buffer_folder("s3://runs/a"), buffer_folder("s3://runs/a"));
  EXPECT_NE(buffer_folder("s3://runs/a"), buffer_folder("s3://runs/b"));
}

}  // namespace store_target_test
}  // namespace ferry::converter
