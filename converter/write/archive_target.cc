#include "converter/write/archive_target.h"

#include <map>
#include <string>

#include "converter/stored/sidecar.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/archive/shard_store.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::ModelTensor;

class ArchiveTarget : public Target {
 public:
  ArchiveTarget(const Checkpoint& source,
                const std::vector<ModelTensor>& tensors,
                std::optional<distckpt::DType> dtype,
                std::optional<std::int64_t> max_shard_size,
                const fs::path& folder)
      : hf_(*source.hf),
        dtype_(dtype),
        store_(folder, stored(tensors), {.max_file_bytes = max_shard_size}) {
    refuse_large_files();
    layout_ = store_.layout();
    for (std::uint32_t i = 0; i < tensors.size(); ++i)
      links_.links.push_back(
          distckpt::BoxLink::whole(i, *layout_.find(tensors[i].name), tensors[i].shape));
  }

  distckpt::BoxSink& open_sink(const distckpt::CopyPlan& plan,
                               distckpt::Journal& journal,
                               distckpt::WriteFile::Mode) override {
    return store_.open(plan, journal);
  }

  void close_sink() override {
    std::map<std::string, std::string> files;
    std::optional<HfForm> cast;
    const auto& form = form_as(hf_, dtype_, cast);
    for (const auto& [name, file] : sidecar_files(form, !dtype_)) files.emplace(name, file.text());
    store_.finish(files);
  }

  bool knows_file_sizes() const override { return false; }

 private:
  std::vector<fs::path> other_files() const override { return {}; }

  // They are held in memory for a moment, here and by the reader of the archive.
  void refuse_large_files() const {
    constexpr std::int64_t kMost = std::int64_t{1} << 28;
    std::int64_t bytes = 0;
    for (const auto& name : hf_.carried) {
      bytes += hf_.file(name).size();
      if (bytes <= kMost) continue;
      throw Error(ErrorKind::kUsage,
                  fmt::format("{}: with {} the files that travel have more than the {} MiB that an "
                              "archive takes",
                              hf_.folder.string(), name, kMost >> 20),
                  "leave it out of the source, or convert to another format");
    }
  }

  static std::vector<distckpt::ShardStoreTensor> stored(const std::vector<ModelTensor>& tensors) {
    std::vector<distckpt::ShardStoreTensor> result;
    for (const auto& tensor : tensors)
      result.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
    return result;
  }

  const HfForm& hf_;
  std::optional<distckpt::DType> dtype_;
  distckpt::ShardStoreTarget store_;
};

}  // namespace

std::unique_ptr<Target> make_archive_target(const Checkpoint& source,
                                            const std::vector<ModelTensor>& tensors,
                                            std::optional<distckpt::DType> dtype,
                                            std::optional<std::int64_t> max_shard_size,
                                            const fs::path& folder) {
  require_hf_form(source);
  return std::make_unique<ArchiveTarget>(source, tensors, dtype, max_shard_size, folder);
}

}  // namespace ferry::converter
