// Models of the Hugging Face hub: "hf://ORG/REPO", "hf://ORG/REPO@REVISION/FOLDER". The revision is
// turned into a commit once, so that all files are of one state; files that are in the hub's cache
// on this machine are read there.
#include <algorithm>
#include <cctype>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>

#include "distckpt/base/encodings.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/base/printable.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/remote_store.h"

namespace ferry::distckpt {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kHubScheme = "hf://";
constexpr std::int64_t kMaxAnswer = std::int64_t{256} << 20;

struct HubPlace {
  std::string repo{};      // "org/name"
  std::string revision{};  // "main", a tag, a commit
  std::string root{};      // "hf://org/name@revision", as it was named
  std::string path{};      // in the repository, may be empty
};

HubPlace parse_hub_address(std::string_view address) {
  const auto rest = address.substr(kHubScheme.size());
  const auto org = rest.find('/');
  const auto end = org == std::string_view::npos ? org : rest.find('/', org + 1);
  const auto root = rest.substr(0, end);
  const auto at = root.find('@');
  HubPlace place{
      .repo = std::string(root.substr(0, at)),
      .revision = at == std::string_view::npos ? "main" : percent_decoded(root.substr(at + 1)),
      .root = fmt::format("{}{}", kHubScheme, root),
      .path = end == std::string_view::npos ? "" : std::string(rest.substr(end + 1))};
  const bool good = org != std::string_view::npos && org > 0 && place.repo.size() > org + 1 &&
                    !place.revision.empty();
  if (!good) {
    throw Error(ErrorKind::kUsage, fmt::format("{}: names no repository of the hub", address),
                "write hf://ORG/REPO or hf://ORG/REPO@REVISION");
  }
  return place;
}

// The path with ~ and the variables $NAME and ${NAME} in it replaced, as huggingface_hub does:
// files of settings, which no shell reads, have such.
std::string expanded(const std::string& path) {
  const bool home = path == "~" || path.starts_with("~/");
  std::string result = home ? environment("HOME").value_or("~") : "";
  for (std::size_t at = home ? 1 : 0; at < path.size();) {
    const auto begin = at + (path.compare(at, 2, "${") == 0 ? 2 : 1);
    auto end = begin;
    while (end < path.size() &&
           (std::isalnum(static_cast<unsigned char>(path[end])) != 0 || path[end] == '_'))
      ++end;
    const auto past = end + (begin - at - 1);
    const bool closed = begin == at + 1 || path.compare(end, 1, "}") == 0;
    const auto value = path[at] == '$' && closed && end > begin
                           ? environment(path.substr(begin, end - begin).c_str())
                           : std::nullopt;
    if (value) {
      result += *value;
      at = past;
    } else {
      result += path[at++];
    }
  }
  return result;
}

fs::path hub_home() {
  if (const auto home = environment("HF_HOME")) return expanded(*home);
  if (const auto cache = environment("XDG_CACHE_HOME"))
    return fs::path(expanded(*cache)) / "huggingface";
  return fs::path(environment("HOME").value_or("/")) / ".cache" / "huggingface";
}

fs::path hub_cache() {
  for (const auto* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}) {
    if (const auto folder = environment(name)) return expanded(*folder);
  }
  return hub_home() / "hub";
}

// Without the white space around a token and the ends of lines in it, as huggingface_hub reads it.
std::string cleaned(std::string token) {
  std::erase_if(token, [](char c) { return c == '\n' || c == '\r'; });
  const auto begin = std::min(token.find_first_not_of(" \t"), token.size());
  return token.substr(begin, token.find_last_not_of(" \t") + 1 - begin);
}

std::string hub_token() {
  if (auto token = cleaned(environment("HF_TOKEN").value_or("")); !token.empty()) return token;
  const auto own = environment("HF_TOKEN_PATH");
  const auto path = own ? fs::path(expanded(*own)) : hub_home() / "token";
  std::error_code unknown;
  return fs::is_regular_file(path, unknown) ? cleaned(read_text(path, 4096)) : "";
}

bool is_offline() {
  auto value = environment("HF_HUB_OFFLINE");
  if (!value) value = environment("TRANSFORMERS_OFFLINE");
  if (!value) return false;
  for (auto& c : *value) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return *value == "1" || *value == "TRUE" || *value == "YES" || *value == "ON";
}

class HubStore : public RemoteStore {
 public:
  RemoteList list(const std::string& folder) override {
    const auto place = parse_hub_address(folder);
    RemoteList below;
    for (const auto& [path, entry] : snapshot(place).files) {
      if (place.path.empty() || path.starts_with(place.path + "/")) below.files.push_back(entry);
    }
    return below;
  }

  HttpRequest request(const std::string& address) override {
    const auto place = parse_hub_address(address);
    require(!is_offline(), ErrorKind::kNotFound,
            "{}: is not in the hub's cache {}, and HF_HUB_OFFLINE is set", address,
            hub_cache().string());
    return {.url = fmt::format("{}/{}/resolve/{}/{}", endpoint(), url_encode(place.repo, "/"),
                               snapshot(place).commit, url_encode(place.path, "/")),
            .bearer = hub_token()};
  }

 private:
  struct Snapshot {
    std::string commit{};
    std::map<std::string, RemoteEntry> files{};  // by their path in the repository
  };

  static std::string endpoint() {
    auto url = environment("HF_ENDPOINT").value_or("https://huggingface.co");
    while (url.ends_with('/')) url.pop_back();
    return url;
  }

  static fs::path cache_of(const HubPlace& place) {
    auto name = "models--" + place.repo;
    name.replace(name.find('/'), 1, "--");
    return hub_cache() / name;
  }

  const Snapshot& snapshot(const HubPlace& place) {
    const std::lock_guard lock(mutex_);
    const auto known = snapshots_.find(place.root);
    if (known != snapshots_.end()) return known->second;
    return snapshots_.emplace(place.root, is_offline() ? read_cached(place) : ask_or_hint(place))
        .first->second;
  }

  // A cached revision may be an old one: whoever wants it says so.
  static Snapshot ask_or_hint(const HubPlace& place) {
    try {
      return ask(place);
    } catch (Error& error) {
      if (error.kind() == ErrorKind::kIo && error.hint().empty() && cached_folder(place))
        error.set_hint("the hub's cache has it: HF_HUB_OFFLINE=1 reads it there");
      throw;
    }
  }

  static Snapshot ask(const HubPlace& place) {
    HttpRequest asked{.url = fmt::format("{}/api/models/{}/revision/{}?blobs=true", endpoint(),
                                         url_encode(place.repo, "/"), url_encode(place.revision)),
                      .bearer = hub_token(),
                      .max_body = kMaxAnswer};
    const auto response = http_send(asked);
    if (response.status == 401 || response.status == 403 || response.status == 404) {
      const auto said = response.header("x-error-message");
      throw Error(ErrorKind::kNotFound,
                  fmt::format("{}: the hub answers {}: {}", place.root, response.status,
                              !said.empty()            ? printable(said)
                              : response.status == 404 ? "it has no such model or revision"
                                                       : "it is private, gated, or not there"),
                  asked.bearer.empty() ? "for a private or gated model set HF_TOKEN"
                                       : "HF_TOKEN may lack the right to read it");
    }
    require(response.ok(), ErrorKind::kIo, "{}: the hub answers {}", place.root, response.status);
    const auto json = parse_json(response.body, place.root);
    Snapshot found{.commit = json_string(json_at(json, "sha", place.root), "sha", place.root)};
    const bool hex = found.commit.find_first_not_of("0123456789abcdef") == std::string::npos;
    require(hex && found.commit.size() == 40, ErrorKind::kCorrupt,
            "{}: the hub names the commit {}, which is none", place.root, printable(found.commit));
    const auto cached = cache_of(place) / "snapshots" / found.commit;
    for (const auto& file : json_at(json, "siblings", place.root)) {
      const auto name =
          json_string(json_at(file, "rfilename", place.root), "rfilename", place.root);
      require(!name.empty() && name.front() != '/' &&
                  ("/" + name + "/").find("/../") == std::string::npos,
              ErrorKind::kCorrupt, "{}: the hub lists a file {}", place.root, printable(name));
      RemoteEntry entry{.address = fmt::format("{}/{}", place.root, name)};
      if (file.contains("size") && file.at("size").is_number_integer())
        entry.size = json_int(file.at("size"), "size", place.root);
      if (is_cached(cached / name, entry.size)) entry.local = cached / name;
      found.files.emplace(name, std::move(entry));
    }
    return found;
  }

  // A file that a full disk cut off is not: the network has the whole one.
  static bool is_cached(const fs::path& file, std::optional<std::int64_t> size) {
    std::error_code unknown;
    if (!fs::is_regular_file(file, unknown)) return false;
    return !size || static_cast<std::int64_t>(fs::file_size(file, unknown)) == *size;
  }

  // The folder of the revision in the cache, if that has it; its name is the commit.
  static std::optional<fs::path> cached_folder(const HubPlace& place) {
    const auto cache = cache_of(place);
    auto commit = place.revision;
    std::error_code unknown;
    if (const auto ref = cache / "refs" / place.revision; fs::is_regular_file(ref, unknown))
      commit = cleaned(read_text(ref, 4096));
    auto folder = cache / "snapshots" / commit;
    if (!fs::is_directory(folder, unknown)) return std::nullopt;
    return folder;
  }

  static Snapshot read_cached(const HubPlace& place) {
    const auto folder = cached_folder(place);
    require(folder.has_value(), ErrorKind::kNotFound,
            "{}: is not in the hub's cache {}, and HF_HUB_OFFLINE is set", place.root,
            hub_cache().string());
    Snapshot found{.commit = folder->filename().string()};
    for (const auto& entry : fs::recursive_directory_iterator(*folder)) {
      if (!entry.is_regular_file()) continue;
      const auto name = entry.path().lexically_relative(*folder).string();
      found.files.emplace(name, RemoteEntry{.address = fmt::format("{}/{}", place.root, name),
                                            .local = entry.path()});
    }
    return found;
  }

  std::mutex mutex_;
  std::map<std::string, Snapshot> snapshots_;
};

}  // namespace

std::unique_ptr<RemoteStore> make_hub_store() {
  return std::make_unique<HubStore>();
}

}  // namespace ferry::distckpt
