#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/remote_store.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/remote/environment.h"
#include "tests/support/remote/stub_server.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace hub_store_test {

namespace fs = std::filesystem;
using support::Environment;
using support::fails;
using support::stub_answer;
using support::StubRequest;
using support::StubServer;

constexpr std::string_view kCommit = "0123456789abcdef0123456789abcdef01234567";

class HubStoreTest : public testing::Test {
 protected:
  static std::string model(const std::string& siblings, std::string_view commit = kCommit) {
    return fmt::format(R"({{"sha": "{}", "siblings": [{}]}})", commit, siblings);
  }
  // A file in the cache of this machine.
  fs::path cached(const std::string& name) const {
    return home_ / fmt::format("hub/models--org--model/{}", name);
  }
  static void put(const fs::path& path, const std::string& text) {
    fs::create_directories(path.parent_path());
    support::append(path, text);
  }
  std::vector<std::string> list(const std::string& address) {
    std::vector<std::string> found;
    for (const auto& entry : store_->list(address).files) found.push_back(entry.address);
    return found;
  }

  support::TempDir home_;
  std::function<std::string(const StubRequest&)> answer_ = [](const StubRequest&) {
    return stub_answer(200, model(R"({"rfilename": "config.json", "size": 2},
                                     {"rfilename": "onnx/model.onnx"})"));
  };
  StubServer server_{[this](const StubRequest& asked) { return answer_(asked); }};
  Environment environment_{{"HF_ENDPOINT", server_.url() + "/"},
                           {"HF_HOME", home_.path().string()},
                           {"HF_HUB_CACHE", ""},
                           {"HUGGINGFACE_HUB_CACHE", ""},
                           {"HF_TOKEN", ""},
                           {"HF_TOKEN_PATH", ""},
                           {"HF_HUB_OFFLINE", ""},
                           {"TRANSFORMERS_OFFLINE", ""},
                           {"FERRY_HTTP_RETRIES", "1"}};
  std::unique_ptr<RemoteStore> store_ = make_hub_store();
};

TEST_F(HubStoreTest, ListsTheFilesOfARevision) {
  const auto files = store_->list("hf://org/model").files;
  ASSERT_EQ(files.size(), 2U);
  EXPECT_EQ(files[0].address, "hf://org/model/config.json");
  EXPECT_EQ(files[0].size, 2);
  EXPECT_EQ(files[1].size, std::nullopt);
  EXPECT_EQ(server_.requests().at(0).target, "/api/models/org/model/revision/main?blobs=true");
}

TEST_F(HubStoreTest, ListsAFolderOfARevisionWithASlash) {
  EXPECT_EQ(list("hf://org/model@refs%2Fpr%2F1/onnx"),
            std::vector<std::string>{"hf://org/model@refs%2Fpr%2F1/onnx/model.onnx"});
  EXPECT_EQ(server_.requests().at(0).target,
            "/api/models/org/model/revision/refs%2Fpr%2F1?blobs=true");
}

TEST_F(HubStoreTest, AsksForAllFilesOfOneCommit) {
  EXPECT_EQ(store_->request("hf://org/model/a b.json").url,
            fmt::format("{}/org/model/resolve/{}/a%20b.json", server_.url(), kCommit));
  store_->request("hf://org/model/config.json");
  EXPECT_EQ(server_.requests().size(), 1U);  // the revision was asked for once
}

TEST_F(HubStoreTest, FindsFilesOfTheCommitInTheCache) {
  put(cached(fmt::format("snapshots/{}/config.json", kCommit)), "{}");
  const auto files = store_->list("hf://org/model").files;
  EXPECT_EQ(files.at(0).local, cached(fmt::format("snapshots/{}/config.json", kCommit)));
  EXPECT_EQ(files.at(1).local, fs::path());
}

TEST_F(HubStoreTest, SendsTheTokenOfTheEnvironmentOrOfItsFile) {
  put(home_ / "token", "  of the file\r\n");
  EXPECT_EQ(store_->request("hf://org/model/a").bearer, "of the file");
  const Environment own{{"HF_TOKEN", "own\n"}};
  EXPECT_EQ(store_->request("hf://org/model/a").bearer, "own");
}

TEST_F(HubStoreTest, ReadsTheCacheAloneWhenOffline) {
  put(cached("refs/main"), "abc");
  put(cached("snapshots/abc/config.json"), "{}");
  put(cached("snapshots/abc/onnx/model.onnx"), "x");
  const Environment offline{{"HF_HUB_OFFLINE", "True"}};
  const auto files = store_->list("hf://org/model").files;
  ASSERT_EQ(files.size(), 2U);
  EXPECT_EQ(files[1].local, cached("snapshots/abc/onnx/model.onnx"));
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"hf://org/model/none", "HF_HUB_OFFLINE"},
                    [&] { store_->request("hf://org/model/none"); }));
  EXPECT_TRUE(server_.requests().empty());
}

TEST_F(HubStoreTest, SaysWhatReadsTheCacheWhereNoServerAnswers) {
  const Environment nobody{{"HF_ENDPOINT", "http://127.0.0.1:9"}, {"FERRY_HTTP_RETRIES", "1"}};
  EXPECT_TRUE(fails(ErrorKind::kIo, {"127.0.0.1"}, [&] {
    try {
      list("hf://org/model");
    } catch (const Error& error) {
      EXPECT_EQ(error.hint(), "");
      throw;
    }
  }));
  put(cached("refs/main"), "abc");
  put(cached("snapshots/abc/config.json"), "{}");
  EXPECT_TRUE(fails(ErrorKind::kIo, {"HF_HUB_OFFLINE=1"}, [&] { list("hf://org/model"); }));
}

TEST_F(HubStoreTest, ExpandsTheCachesPathAsHuggingfaceHubDoes) {
  put(cached("refs/main"), "abc");
  put(cached("snapshots/abc/config.json"), "{}");
  const Environment here{{"HF_HUB_OFFLINE", "1"},
                         {"HOME", home_.path().parent_path().string()},
                         {"FERRY_TEST_NAME", home_.path().filename().string()}};
  for (const auto* path : {"~/$FERRY_TEST_NAME/hub", "$HOME/${FERRY_TEST_NAME}/hub"}) {
    const Environment cache{{"HF_HUB_CACHE", path}};
    EXPECT_EQ(make_hub_store()->list("hf://org/model").files.size(), 1U) << path;
  }
  const Environment none{{"HF_HUB_CACHE", "~/$FERRY_TEST_NONE/${x"}};
  const auto kept = home_.path().parent_path().string() + "/$FERRY_TEST_NONE/${x";
  EXPECT_TRUE(
      fails(ErrorKind::kNotFound, {kept}, [&] { make_hub_store()->list("hf://org/model"); }));
}

TEST_F(HubStoreTest, IsOfflineAsHuggingfaceHubIs) {
  for (const auto* word : {"1", "on", "Yes", "TRUE"}) {
    const Environment offline{{"TRANSFORMERS_OFFLINE", word}};
    EXPECT_TRUE(fails(ErrorKind::kNotFound, {"is not in the hub's cache"}, [&] {
      make_hub_store()->list("hf://org/model");
    })) << word;
  }
  const Environment online{{"HF_HUB_OFFLINE", "0"}, {"TRANSFORMERS_OFFLINE", "1"}};
  EXPECT_EQ(list("hf://org/model").size(), 2U);
}

TEST_F(HubStoreTest, SaysWhatAModelThatItMayNotReadNeeds) {
  answer_ = [](const StubRequest&) { return stub_answer(401); };
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"hf://org/model", "private, gated", "set HF_TOKEN"},
                    [&] { list("hf://org/model"); }));
  const Environment token{{"HF_TOKEN", "mine"}};
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"HF_TOKEN may lack the right"},
                    [&] { list("hf://org/model"); }));
}

TEST_F(HubStoreTest, NamesAModelThatIsNotThere) {
  answer_ = [](const StubRequest&) { return stub_answer(404); };
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"hf://org/model@x", "no such model or revision"},
                    [&] { list("hf://org/model@x"); }));
}

TEST_F(HubStoreTest, RefusesACommitThatIsNone) {
  for (const auto* commit : {"main", "../../etc", "0123456789ABCDEF0123456789ABCDEF01234567"}) {
    answer_ = [&](const StubRequest&) { return stub_answer(200, model("", commit)); };
    EXPECT_TRUE(
        fails(ErrorKind::kCorrupt, {"names the commit", commit}, [&] { list("hf://org/model"); }));
  }
}

TEST_F(HubStoreTest, RefusesFilesThatLeaveTheRepository) {
  for (const auto* name : {"../secret", "/etc/passwd", "a/../../b", ""}) {
    answer_ = [&](const StubRequest&) {
      return stub_answer(200, model(fmt::format(R"({{"rfilename": "{}"}})", name)));
    };
    EXPECT_TRUE(
        fails(ErrorKind::kCorrupt, {"lists a file", name}, [&] { list("hf://org/model"); }));
  }
}

TEST_F(HubStoreTest, NamesARepositoryByTwoWords) {
  for (const auto* address : {"hf://model", "hf:///model", "hf://org/", "hf://org/model@"}) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {address, "hf://ORG/REPO"}, [&] { list(address); }));
  }
}

}  // namespace hub_store_test
}  // namespace ferry::distckpt
