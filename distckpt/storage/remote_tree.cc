#include "distckpt/storage/remote_tree.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/base/threads.h"
#include "distckpt/storage/network/http.h"

namespace ferry::distckpt {
namespace fs = std::filesystem;
namespace {

constexpr std::array<std::string_view, 4> kSchemes{"https://", "http://", "hf://", "s3://"};
constexpr std::int64_t kSideBySide = 32;  // files that are opened at a time

std::string_view scheme_of(std::string_view address) {
  for (const auto scheme : kSchemes) {
    if (address.starts_with(scheme)) return scheme;
  }
  return {};
}

bool is_below(std::string_view address, std::string_view folder) {
  return address.size() > folder.size() && address.starts_with(folder) &&
         address[folder.size()] == '/';
}

// "~/out" that no shell replaced: a folder of that name invites `rm -rf ~`.
void refuse_home_sign(const std::string& text) {
  if (!text.starts_with('~')) return;
  const auto first = text.substr(0, text.find('/'));
  std::error_code unknown;
  if (first != "~" && fs::exists(first, unknown)) return;
  throw Error(
      ErrorKind::kUsage, fmt::format("{}: ~ stands for a folder in a shell alone", text),
      fmt::format("write out the folder, as $HOME does; one that is named so is ./{}", text));
}

// "https://huggingface.co/ORG/REPO/tree/main", as a browser shows it.
void refuse_page_of_hub(const std::string& text) {
  std::vector<std::string> parts;
  for (const auto& hub : {environment("HF_ENDPOINT").value_or(""),
                          std::string("https://huggingface.co"), std::string("https://hf.co")}) {
    if (hub.empty() || !text.starts_with(hub) || text.find('?') != std::string::npos) continue;
    std::istringstream rest(text.substr(hub.size()));
    for (std::string part; std::getline(rest, part, '/');) {
      if (!part.empty()) parts.push_back(std::move(part));
    }
    break;
  }
  const bool in_folder = parts.size() > 3 && (parts[2] == "tree" || parts[2] == "blob");
  if ((parts.size() != 2 && !in_folder) || parts[0] == "api") return;
  auto address = fmt::format("hf://{}/{}", parts[0], parts[1]);
  if (in_folder) address += "@" + parts[3];
  for (std::size_t i = 4; i < parts.size(); ++i) address += "/" + parts[i];
  throw Error(ErrorKind::kUsage, fmt::format("{}: is a page of the Hugging Face hub", text),
              "the model is " + address);
}

}  // namespace

bool is_remote(const fs::path& path) {
  return !scheme_of(path.native()).empty();
}

void refuse_mistaken_path(const fs::path& path) {
  const auto& text = path.native();
  refuse_home_sign(text);
  refuse_page_of_hub(text);
  const auto colon = text.find(":/");
  const bool scheme = colon != std::string::npos && colon > 1 &&
                      std::isalpha(static_cast<unsigned char>(text[0])) &&
                      std::ranges::all_of(std::string_view(text).substr(0, colon), [](char letter) {
                        return std::isalnum(static_cast<unsigned char>(letter)) ||
                               std::string_view("+.-").find(letter) != std::string_view::npos;
                      });
  std::error_code unknown;
  if (!scheme || is_remote(path) || fs::exists(text.substr(0, colon + 1), unknown)) return;
  throw Error(
      ErrorKind::kUsage,
      fmt::format("{}: is an address of no known kind: https://, http://, hf://, s3://", text),
      "as text, not as a pathlib.Path, which takes a slash away; a folder of that name is ./" +
          text);
}

std::string address_of(const fs::path& path) {
  auto address = path.string();
  while (address.ends_with('/')) address.pop_back();
  const auto scheme = scheme_of(address);
  const auto rest = std::string_view(address).substr(std::min(scheme.size(), address.size()));
  const auto refuse = [&](std::string_view why) {
    throw Error(ErrorKind::kUsage, fmt::format("{}: {}", shown_url(address), why));
  };
  if (scheme.empty() || rest.empty()) refuse("names no place");
  if (scheme.starts_with("http")) {
    if (address.find_first_of("?#") != std::string::npos)
      refuse("an address with a query names no folder");
    if (rest.substr(0, rest.find('/')).find('@') != std::string_view::npos) {
      throw Error(ErrorKind::kUsage,
                  "an address with a user's name or password would be shown in "
                  "reports and manifests, and is not taken");
    }
  }
  for (std::size_t at = 0; at < rest.size();) {
    const auto end = std::min(rest.find('/', at), rest.size());
    const auto part = rest.substr(at, end - at);
    if (part.empty() || part == "." || part == "..") refuse("holds an empty name, . or ..");
    at = end + 1;
  }
  return address;
}

// One for the process: a path is known by its text alone, and a connection serves many of them.
// A child that is forked has none of the threads that may hold its lock, and begins anew: objects
// of before refer to what stays behind.
RemoteTree& RemoteTree::instance() {
  static std::atomic<RemoteTree*> tree{nullptr};
  static const int watched = [] {
    tree = new RemoteTree;
    return pthread_atfork(nullptr, nullptr, [] { tree = new RemoteTree; });
  }();
  static_cast<void>(watched);
  return *tree;
}

RemoteStore& RemoteTree::store_of(const std::string& address) {
  const std::string scheme(scheme_of(address));
  auto& store = stores_[scheme];
  if (!store) {
    store = scheme == "hf://"   ? make_hub_store()
            : scheme == "s3://" ? make_s3_store()
                                : make_http_store();
  }
  return *store;
}

const RemoteTree::Listing* RemoteTree::covering(const std::string& address) const {
  for (const auto& [folder, listing] : listings_) {
    if (address == folder || is_below(address, folder)) return &listing;
  }
  return nullptr;
}

const RemoteTree::Listing& RemoteTree::listing_of(const std::string& asked) {
  if (const auto* known = covering(asked)) return *known;
  // A folder that was listed before is listed again as a whole: the innermost.
  auto address = asked;
  std::size_t longest = 0;
  for (const auto& folder : roots_) {
    if (folder.size() < longest || (folder != asked && !is_below(asked, folder))) continue;
    address = folder;
    longest = folder.size();
  }
  roots_.insert(address);
  auto& store = store_of(address);
  Listing listing;
  auto listed = store.list(address);
  listing.complete = listed.complete || listed.files.empty();
  for (auto& entry : listed.files) {
    auto name = entry.address;
    if (is_below(name, address)) listing.files.emplace(std::move(name), std::move(entry));
  }
  for (const auto& [name, path] : local_) {
    if (is_below(name, address))
      listing.files.insert_or_assign(name, RemoteEntry{.address = name, .local = path});
  }
  // It may be a file itself.
  if (listing.files.empty()) {
    if (auto object = RemoteObject::open(address, store)) {
      listing.files.emplace(address, RemoteEntry{.address = address, .size = object->size()});
      objects_.emplace(address, std::move(object));
    }
  }
  return listings_.emplace(address, std::move(listing)).first->second;
}

const RemoteEntry* RemoteTree::find(const std::string& address) {
  const auto& files = listing_of(address).files;
  const auto at = files.find(address);
  return at == files.end() ? nullptr : &at->second;
}

bool RemoteTree::is_file(const fs::path& path) {
  const std::lock_guard lock(mutex_);
  return find(address_of(path)) != nullptr;
}

bool RemoteTree::is_folder(const fs::path& path) {
  const std::lock_guard lock(mutex_);
  const auto address = address_of(path);
  const auto& files = listing_of(address).files;
  const auto next = files.lower_bound(address + "/");
  return next != files.end() && is_below(next->first, address);
}

std::vector<fs::path> RemoteTree::list_below(const fs::path& folder) {
  const std::lock_guard lock(mutex_);
  const auto address = address_of(folder);
  require(listing_of(address).complete, ErrorKind::kUsage,
          "{}: the server lists no files, and so there may be more than those known by name: "
          "--tensors-only leaves files away",
          address);
  return below(address);
}

std::vector<fs::path> RemoteTree::below(const std::string& address) {
  const auto& files = listing_of(address).files;
  std::vector<fs::path> found;
  for (auto at = files.lower_bound(address + "/");
       at != files.end() && is_below(at->first, address); ++at) {
    found.emplace_back(at->first);
  }
  return found;
}

std::vector<fs::path> RemoteTree::list(const fs::path& folder) {
  const std::lock_guard lock(mutex_);
  const auto address = address_of(folder);
  const auto skip = address.size() + 1;
  std::set<std::string> names;
  for (const auto& path : below(address)) {
    const auto name = path.string();
    names.insert(name.substr(0, name.find('/', skip)));
  }
  return {names.begin(), names.end()};
}

fs::path RemoteTree::local_copy(const fs::path& path) {
  const std::lock_guard lock(mutex_);
  const auto* entry = find(address_of(path));
  return entry == nullptr ? fs::path() : entry->local;
}

std::shared_ptr<const RemoteObject> RemoteTree::open(const fs::path& path) {
  const auto address = address_of(path);
  RemoteStore* store = nullptr;
  std::optional<std::int64_t> listed;
  {
    const std::lock_guard lock(mutex_);
    const auto known = objects_.find(address);
    if (known != objects_.end()) return known->second;
    const auto* entry = find(address);
    if (entry != nullptr) listed = entry->size;
    store = &store_of(address);
  }
  auto object = RemoteObject::open(address, *store);
  require(object != nullptr, ErrorKind::kNotFound, "{}: is not there", address);
  require(!listed || *listed == object->size(), ErrorKind::kIo,
          "{}: has {} bytes, but {} in the list of its folder: it is being written", address,
          object->size(), listed.value_or(0));
  const std::lock_guard lock(mutex_);
  return objects_.emplace(address, std::move(object)).first->second;
}

void RemoteTree::open_all(const std::vector<fs::path>& paths) {
  side_by_side(std::ssize(paths), kSideBySide, [&](std::int64_t i) {
    const auto& path = paths[static_cast<std::size_t>(i)];
    if (local_copy(path).empty()) open(path);
  });
}

void RemoteTree::add_local(const std::map<std::string, fs::path>& files) {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, path] : files) local_.insert_or_assign(name, path);
}

void RemoteTree::drop_local(const std::string& address) {
  const std::lock_guard lock(mutex_);
  std::erase_if(local_, [&](const auto& file) { return is_below(file.first, address); });
}

void RemoteTree::forget() {
  const std::lock_guard lock(mutex_);
  listings_.clear();
  objects_.clear();
}

void RemoteTree::add_root(const fs::path& folder) {
  const std::lock_guard lock(mutex_);
  roots_.insert(address_of(folder));
}

}  // namespace ferry::distckpt
