#include "converter/write/store_target.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/elements/digest.h"
#include "distckpt/storage/filenames.h"
#include "distckpt/storage/remote_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

// Without them no reader takes a folder for a checkpoint.
constexpr std::array<std::string_view, 4> kSeals{distckpt::kSafetensorsIndex, distckpt::kHfConfig,
                                                 distckpt::kTorchDistMetadata,
                                                 distckpt::kTorchDistConfig};

// Seals are sent in the order of their ranks, after all else. An archive's is its last file, which
// names the others.
std::ptrdiff_t seal_rank(const fs::path& name) {
  const auto file = name.string();
  const auto at = std::ranges::find(kSeals, file);
  if (at != kSeals.end()) return at - kSeals.begin();
  const auto count = distckpt::shard_store_file_count(file).value_or(0);
  return count > 0 && file == distckpt::shard_store_filename(count - 1, count) ? 0 : -1;
}

// Names the runs of this machine that use one buffer, of which one at a time is alive: a later one
// goes on with what an interrupted one has put.
std::string run_of(const fs::path& buffer) {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const auto text = fmt::format("{}\n{}\n{}", host.data(), boot, fs::absolute(buffer).string());
  return to_string(distckpt::digest_block(distckpt::as_bytes(text)));
}

}  // namespace

StoreTarget::StoreTarget(const fs::path& address,
                         fs::path local,
                         const std::vector<fs::path>& files,
                         bool overwrite)
    : folder_(distckpt::parse_s3_address(address.string())),
      local_(std::move(local)),
      files_(files),
      claim_{.run = run_of(buffer_folder(address)), .only_new = !overwrite} {
  const auto skip = folder_.key.size() + 1;
  distckpt::s3_list(folder_, folder_.key + "/", [&](const std::string& key, std::int64_t) {
    there_.emplace_back(key.substr(skip));
  });
  if (there_.empty()) return;
  if (!overwrite) {
    throw Error(ErrorKind::kUsage, fmt::format("{}: exists already", folder_.address()),
                "choose another target, or replace it with --overwrite");
  }
  for (const auto& name : there_) {
    if (std::ranges::find(files_, name) != files_.end()) continue;
    throw Error(ErrorKind::kUsage,
                fmt::format("{}: holds {}, which this conversion does not write, and so it is not "
                            "overwritten",
                            folder_.address(), name.string()),
                "remove it, or choose another target");
  }
}

StoreTarget::~StoreTarget() {
  auto& tree = distckpt::RemoteTree::instance();
  tree.forget();
  tree.drop_local(folder_.address());
  if (published_ || !put_) return;
  // Without its seal it is no checkpoint, whatever is left.
  for (const auto& name : files_)
    if (!distckpt::s3_tidy_own(place(name), claim_.run)) break;
}

distckpt::S3Place StoreTarget::place(const fs::path& name) const {
  return {.bucket = folder_.bucket, .key = fmt::format("{}/{}", folder_.key, name.string())};
}

distckpt::UploadedFile StoreTarget::weights(const fs::path& name, std::int64_t bytes) {
  weights_.push_back(name);
  return {.local = local_ / name, .size = bytes, .place = place(name), .claim = claim_};
}

void StoreTarget::require_alone() const {
  if (!claim_.only_new) return;
  const auto skip = folder_.key.size() + 1;
  distckpt::s3_list(folder_, folder_.key + "/", [&](const std::string& key, std::int64_t) {
    if (put_ && std::ranges::find(weights_, fs::path(key.substr(skip))) != weights_.end()) return;
    throw Error(ErrorKind::kUsage,
                fmt::format("{}: another run has put {} there meanwhile", folder_.address(),
                            key.substr(skip)),
                "wait for that run to end; then choose another target, or replace it with "
                "--overwrite");
  });
}

void StoreTarget::unseal() {
  require_alone();
  put_ = true;
  for (const auto& name : there_) {
    if (seal_rank(name) >= 0) distckpt::s3_delete(place(name));
  }
}

void StoreTarget::weights_are_there() {
  std::map<std::string, fs::path> local;
  for (const auto& name : small_files()) local.emplace(place(name).address(), local_ / name);
  auto& tree = distckpt::RemoteTree::instance();
  tree.forget();
  tree.add_local(local);
}

std::vector<fs::path> StoreTarget::small_files() const {
  std::vector<fs::path> names;
  std::ranges::copy_if(files_, std::back_inserter(names), [&](const fs::path& name) {
    return std::ranges::find(weights_, name) == weights_.end();
  });
  std::ranges::stable_sort(names, {}, seal_rank);
  return names;
}

void StoreTarget::publish() {
  if (!put_) unseal();
  require_alone();
  for (const auto& name : small_files()) {
    const auto size = static_cast<std::int64_t>(fs::file_size(local_ / name));
    distckpt::send_file(
        {.local = local_ / name, .size = size, .place = place(name), .claim = claim_});
  }
  published_ = true;
}

fs::path buffer_folder(const fs::path& address) {
  const auto digest = distckpt::digest_block(distckpt::as_bytes(address.string()));
  return fs::temp_directory_path() / fmt::format("ferry-{}", ::geteuid()) / to_string(digest);
}

void put_beside(const fs::path& address, std::string_view name, std::string_view text) {
  distckpt::s3_put(distckpt::parse_s3_address((address.parent_path() / name).string()),
                   distckpt::as_bytes(text));
}

}  // namespace ferry::converter
