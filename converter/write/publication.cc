#include "converter/write/publication.h"

#include "converter/write/target_folder.h"
#include "distckpt/base/error.h"
#include "distckpt/base/interruption.h"
#include "distckpt/storage/remote_store.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

const fs::path& require_free(const fs::path& target) {
  if (is_free(target)) return target;
  throw Error(ErrorKind::kUsage, fmt::format("{}: exists already", target.string()),
              "choose another target");
}

}  // namespace

distckpt::PublishedModes modes_like(std::initializer_list<const Checkpoint*> sources) {
  distckpt::PublishedModes modes;
  for (const auto* source : sources) {
    modes.narrow(*source->files);
    for (const auto& folder : {source->location.root, source->location.folder})
      modes.narrow(folder);
  }
  return modes;
}

Publication::Publication(const fs::path& target)
    : target_(require_free(target)),
      work_(
          distckpt::is_remote(target) ? buffer_folder(target) : target, /*resume=*/false, target) {}

void Publication::expect(const std::vector<fs::path>& files) {
  work_.expect(files);
  if (distckpt::is_remote(target_))
    store_.emplace(target_, work_.output(), files, /*overwrite=*/false);
}

void Publication::publish(const distckpt::PublishedModes& modes) {
  if (store_) return store_->publish();
  work_.publish({}, modes);
}

void Publication::replace_beside(std::string_view name,
                                 std::string_view text,
                                 unsigned mode) const {
  const distckpt::InterruptedBy nothing({});  // the rest is published
  if (store_) return put_beside(target_, name, text);
  work_.replace_beside(name, text, mode);
}

}  // namespace ferry::converter
