#include "distckpt/storage/remote_tree.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/source_tree.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/remote/environment.h"
#include "tests/support/remote/stub_server.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace remote_tree_test {

namespace fs = std::filesystem;
using support::Environment;
using support::fails;
using support::stub_answer;
using support::StubRequest;
using support::StubServer;
using Paths = std::vector<fs::path>;

// A web server of these pages and files: those that end in "/" are lists of links.
class WebServer : public testing::Test {
 protected:
  std::string answer(const StubRequest& asked) const {
    const auto found = pages_.find(asked.target);
    if (found == pages_.end()) return stub_answer(404);
    const bool is_page = asked.target.ends_with("/");
    return stub_answer(200, found->second, {is_page ? "Content-Type: text/html" : "ETag: 1"});
  }
  fs::path at(const std::string& path) const { return server_.url() + path; }

  std::map<std::string, std::string> pages_{
      {"/run/",
       "<a href=\"../\">up</a><a href=\"a%20b\">a b</a><a href=\"./deep/\">deep</a>"
       "<a href=\"?C=M\">by time</a><a href=\"https://else/where\">x</a>"
       "<a href=\"/root\">r</a><a href=\"a/b\">a/b</a><a href=\"..\">..</a>"},
      {"/run/deep/", "<a href=\"c\">c</a>"},
      {"/run/a%20b", "hello"},
      {"/run/deep/c", "deep"}};
  StubServer server_{[this](const StubRequest& asked) { return answer(asked); }};
  Environment quick_{{"FERRY_HTTP_RETRIES", "1"}};
  RemoteTree tree_;
};

TEST_F(WebServer, HasTheFilesThatItsPagesLinkTo) {
  EXPECT_EQ(tree_.list_below(at("/run")), (Paths{at("/run/a b"), at("/run/deep/c")}));
  EXPECT_EQ(tree_.list(at("/run")), (Paths{at("/run/a b"), at("/run/deep")}));
}

TEST_F(WebServer, TellsFilesFromFolders) {
  EXPECT_TRUE(tree_.is_folder(at("/run/")));
  EXPECT_TRUE(tree_.is_folder(at("/run/deep")));
  EXPECT_FALSE(tree_.is_folder(at("/run/a b")));
  EXPECT_TRUE(tree_.is_file(at("/run/a b")));
  EXPECT_FALSE(tree_.is_file(at("/run/deep")));
  EXPECT_FALSE(tree_.is_file(at("/run/c")));
}

TEST_F(WebServer, IsAskedForAListOnce) {
  tree_.list(at("/run"));
  const auto asked = server_.requests().size();
  tree_.list(at("/run/deep"));
  tree_.is_file(at("/run/a b"));
  EXPECT_EQ(server_.requests().size(), asked);
  tree_.forget();
  tree_.is_file(at("/run/deep/c"));  // of the folder that was listed before
  EXPECT_EQ(server_.requests().size(), 2 * asked);
}

TEST_F(WebServer, OpensAFileOnce) {
  const auto object = tree_.open(at("/run/a b"));
  EXPECT_EQ(object->size(), 5);
  const auto asked = server_.requests().size();
  EXPECT_EQ(tree_.open(at("/run/a b")), object);
  EXPECT_EQ(server_.requests().size(), asked);
}

TEST_F(WebServer, NamesAFileThatIsNotThere) {
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"/run/none: is not there"},
                    [&] { tree_.open(at("/run/none")); }));
}

TEST_F(WebServer, OpensManyAndNamesTheOneThatIsNotThere) {
  tree_.open_all({at("/run/a b"), at("/run/deep/c")});
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"/run/none"}, [&] {
    tree_.open_all({at("/run/deep/c"), at("/run/none")});
  }));
}

TEST_F(WebServer, AFileMayBeNamedByItself) {
  pages_.erase("/run/");
  EXPECT_TRUE(tree_.is_file(at("/run/a%20b")));  // which may be encoded already
  EXPECT_TRUE(tree_.is_file(at("/run/a b")));
  EXPECT_FALSE(tree_.is_folder(at("/run/a b")));
}

TEST_F(WebServer, ThatListsNothingIsAskedForTheFilesOfAModel) {
  pages_ = {{"/hf/config.json", "{}"},
            {"/hf/model.safetensors.index.json",
             R"({"weight_map": {"w": "model-00001-of-00001.safetensors"}})"},
            {"/hf/model-00001-of-00001.safetensors", "weights"}};
  EXPECT_EQ(tree_.list(at("/hf")),
            (Paths{at("/hf/config.json"), at("/hf/model-00001-of-00001.safetensors"),
                   at("/hf/model.safetensors.index.json")}));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"the server lists no files", "--tensors-only"},
                    [&] { tree_.list_below(at("/hf")); }));
}

TEST_F(WebServer, RefusesAnIndexThatLeadsOutOfTheFolder) {
  pages_ = {{"/hf/model.safetensors.index.json", R"({"weight_map": {"w": "../secret"}})"}};
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"../secret"}, [&] { tree_.list(at("/hf")); }));
}

TEST_F(WebServer, GivesUpALabyrinthOfFolders) {
  pages_.clear();
  std::string path = "/run/";
  for (int i = 0; i < 210; ++i) {
    pages_[path] = "<a href=\"d/\">d</a>";
    path += "d/";
  }
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"more than 200 folders"}, [&] { tree_.list(at("/run")); }));
}

TEST_F(WebServer, IsOverlaidByWhatIsAboutToBeSent) {
  tree_.add_local({{at("/run/new").string(), "/tmp/new"}});
  EXPECT_EQ(tree_.list(at("/run")).size(), 3U);
  EXPECT_EQ(tree_.local_copy(at("/run/new")), fs::path("/tmp/new"));
  EXPECT_EQ(tree_.local_copy(at("/run/a b")), fs::path());
  tree_.drop_local(at("/run").string());
  tree_.forget();
  EXPECT_FALSE(tree_.is_file(at("/run/new")));
}

TEST(RemoteAddress, HasASchemeOfAStore) {
  for (const auto* address : {"https://a", "http://a", "hf://a/b", "s3://a"})
    EXPECT_TRUE(is_remote(address)) << address;
  for (const auto* path : {"/a", "a", "./https://a", "ftp://a", ""})
    EXPECT_FALSE(is_remote(path)) << path;
}

TEST(RemoteAddress, ThatCouldMisleadIsRefused) {
  RemoteTree tree;
  for (const auto* address : {"http://", "http://host/a//b", "http://host/../b", "s3://a/./b"}) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {}, [&] { tree.is_file(address); })) << address;
  }
}

TEST(RemoteAddress, OfAPageOfTheHubIsTheModelsAddress) {
  const support::Environment own{{"HF_ENDPOINT", "http://hub.here:80"}};
  const auto refused = [](const char* page, const char* model) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {page, model}, [&] { refuse_mistaken_path(page); }));
  };
  refused("https://huggingface.co/org/repo", "is hf://org/repo\n");
  refused("https://huggingface.co/org/repo/tree/main", "is hf://org/repo@main\n");
  refused("http://hub.here:80/org/repo/blob/v1/a/b", "is hf://org/repo@v1/a/b\n");
  for (const auto* address :
       {"https://huggingface.co/org/repo/resolve/main", "https://host/org/repo", "hf://org/repo"})
    EXPECT_NO_THROW(refuse_mistaken_path(address)) << address;
}

TEST(RemoteAddress, RefusesTheSignOfAShellsHome) {
  for (const auto* path : {"~", "~/out", "~nobody_of_this_name/out"}) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {path, "$HOME"}, [&] { refuse_mistaken_path(path); }));
  }
  for (const auto* path : {"./~/out", "/tmp/~", "a~"}) EXPECT_NO_THROW(refuse_mistaken_path(path));
}

TEST(RemoteAddress, WithASecretIsRefusedWithoutSayingIt) {
  RemoteTree tree;
  for (const auto* address : {"http://me:secret@host/a", "http://host/a?token=secret"}) {
    try {
      tree.is_file(address);
      ADD_FAILURE() << address;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_EQ(error.report().find("secret"), std::string::npos) << error.report();
    }
  }
}

TEST(SourceTree, LooksAtFilesOfThisSystem) {
  const support::TempDir dir;
  fs::create_directory(dir / "folder");
  support::append(dir / "file", "x");
  fs::create_symlink("file", dir / "link");
  EXPECT_TRUE(source_is_file(dir / "link"));
  EXPECT_TRUE(source_is_folder(dir / "folder"));
  EXPECT_TRUE(source_exists(dir / "folder"));
  EXPECT_FALSE(source_exists(dir / "none"));
  EXPECT_EQ(list_source(dir.path()).size(), 3U);
  EXPECT_TRUE(list_source(dir / "file").empty());
  EXPECT_EQ(canonical_source(dir / "folder/../link"), fs::canonical(dir / "file"));
}

TEST(SourceTree, ReadsAnAddressWithMoreThreadsThanAFolder) {
  EXPECT_EQ(reading_threads(0, "/folder"), 0);
  EXPECT_GE(reading_threads(0, "s3://bucket"), 16);
  EXPECT_EQ(reading_threads(3, "s3://bucket"), 3);
}

}  // namespace remote_tree_test
}  // namespace ferry::distckpt
