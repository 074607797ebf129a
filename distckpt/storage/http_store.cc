// Files of a web server. One that lists its folders (Apache's, nginx's and most others' pages of
// links) is read as any folder; of others the files of a Hugging Face model are asked for by name.
#include <algorithm>
#include <array>
#include <set>
#include <string_view>

#include "distckpt/base/encodings.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/filenames.h"
#include "distckpt/storage/remote_store.h"

namespace ferry::distckpt {
namespace {

constexpr std::size_t kMaxFolders = 200;
constexpr std::int64_t kMaxPage = std::int64_t{16} << 20;
constexpr std::int64_t kMaxIndex = std::int64_t{64} << 20;

constexpr std::array<std::string_view, 24> kModelFiles{"config.json",
                                                       "generation_config.json",
                                                       "tokenizer.json",
                                                       "tokenizer.model",
                                                       "tokenizer_config.json",
                                                       "special_tokens_map.json",
                                                       "vocab.json",
                                                       "added_tokens.json",
                                                       "vocab.txt",
                                                       "merges.txt",
                                                       "chat_template.jinja",
                                                       "chat_template.json",
                                                       "spiece.model",
                                                       "tiktoken.model",
                                                       "sentencepiece.bpe.model",
                                                       "preprocessor_config.json",
                                                       "processor_config.json",
                                                       kPartRecord,
                                                       kSafetensorsModel,
                                                       kSafetensorsIndex,
                                                       kTorchModel,
                                                       kTorchModelIndex,
                                                       kArchiveFile,
                                                       "LICENSE"};

// The names that a page of links has of this folder: files, and folders with a slash behind them.
std::set<std::string> linked_names(std::string_view page) {
  std::set<std::string> names;
  for (std::size_t at = page.find("href=\""); at != std::string_view::npos;
       at = page.find("href=\"", at)) {
    at += std::string_view("href=\"").size();
    auto link = page.substr(at, page.find('"', at) - at);
    if (link.starts_with("./")) link.remove_prefix(2);
    const auto name = percent_decoded(link);
    const auto stem = std::string_view(name).substr(0, name.find('/'));
    const bool plain = !stem.empty() && stem != "." && stem != ".." &&
                       (stem.size() == name.size() || stem.size() + 1 == name.size()) &&
                       link.find_first_of("?#:") == std::string_view::npos &&
                       name.find_first_of(std::string_view("\0\\", 2)) == std::string::npos;
    if (plain) names.insert(name);
  }
  return names;
}

class HttpStore : public RemoteStore {
 public:
  RemoteList list(const std::string& folder) override {
    RemoteList found;
    std::vector<std::string> folders{folder};
    for (std::size_t i = 0; i < folders.size(); ++i) {
      require(i < kMaxFolders, ErrorKind::kUsage,
              "{}: holds more than {} folders: name the checkpoint's own", folder, kMaxFolders);
      const auto names = read_page(folders[i]);
      if (!names && i == 0) return guess(folder);
      if (!names) continue;
      for (const auto& name : *names) {
        if (name.ends_with('/')) {
          folders.push_back(fmt::format("{}/{}", folders[i], name.substr(0, name.size() - 1)));
        } else {
          found.files.push_back({.address = fmt::format("{}/{}", folders[i], name)});
        }
      }
    }
    return found;
  }

  HttpRequest request(const std::string& address) override {
    return {.url = origin_of(address) == address
                       ? address
                       : std::string(origin_of(address)) +
                             url_encode(std::string_view(address).substr(origin_of(address).size()),
                                        "/:@%+,;=!$&'()*")};
  }

 private:
  std::optional<std::set<std::string>> read_page(const std::string& folder) {
    auto asked = request(folder + "/");
    asked.max_body = kMaxPage;
    const auto response = http_send(asked);
    if (!response.ok() || !response.header("content-type").starts_with("text/html"))
      return std::nullopt;
    auto names = linked_names(response.body);
    return names.empty() ? std::nullopt : std::optional(std::move(names));
  }

  bool is_there(const std::string& address) {
    auto asked = request(address);
    asked.method = "HEAD";
    return http_send(asked).ok();
  }

  RemoteList guess(const std::string& folder) {
    RemoteList found{.complete = false};
    std::set<std::string> names;
    for (const auto name : kModelFiles) {
      if (is_there(fmt::format("{}/{}", folder, name))) names.emplace(name);
    }
    for (const auto name : {kSafetensorsIndex, kTorchModelIndex}) {
      if (!names.contains(std::string(name))) continue;
      const auto source = fmt::format("{}/{}", folder, name);
      auto asked = request(source);
      asked.max_body = kMaxIndex;
      const auto response = http_send(asked);
      require(response.ok(), ErrorKind::kIo, "{}: the server answers {}", source, response.status);
      const auto index = parse_json(response.body, source);
      for (const auto& [tensor, file] : json_at(index, "weight_map", source).items()) {
        auto part = json_string(file, tensor, source);
        require_plain_filename(part, source);
        names.insert(std::move(part));
      }
    }
    for (const auto& name : names)
      found.files.push_back({.address = fmt::format("{}/{}", folder, name)});
    return found;
  }
};

}  // namespace

std::unique_ptr<RemoteStore> make_http_store() {
  return std::make_unique<HttpStore>();
}

}  // namespace ferry::distckpt
