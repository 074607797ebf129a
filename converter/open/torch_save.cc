// A Hugging Face folder of files that torch.save wrote: pytorch_model.bin, or its parts and an
// index.
#include "distckpt/formats/torch_save/torch_save.h"

#include <map>
#include <set>
#include <utility>

#include "converter/open/formats.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/torch_save/torch_tensor.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kSaveTensorsAnew = "{k:v for k,v in d.items() if torch.is_tensor(v)}";

class TorchSaveReader {
 public:
  TorchSaveReader(const Location& location, const OpenOptions& options)
      : folder_(location.folder), stored_{.hf = hf_form_of(location, options)} {}

  Stored read() {
    const auto index = folder_ / distckpt::kTorchModelIndex;
    if (distckpt::source_exists(index)) {
      const auto text = distckpt::read_text(index);
      for (const auto& file : files_of_model(text, index.string())) {
        require(distckpt::source_exists(folder_ / file), ErrorKind::kNotFound,
                "{}: names the file {}, which is not there", index.string(), file);
        read_file(file);
      }
      check_index(text, file_of_tensor_, index.string());
      const bool has_single = distckpt::source_exists(folder_ / distckpt::kTorchModel);
      require_transformers_reads(*stored_.hf, {.folder = folder_,
                                               .files = files_of_model(text, index.string()),
                                               .index = distckpt::kTorchModelIndex,
                                               .single = has_single ? distckpt::kTorchModel : ""});
      return std::move(stored_);
    }
    if (!distckpt::source_exists(folder_ / distckpt::kTorchModel)) {
      throw Error(ErrorKind::kNotFound,
                  fmt::format("{}: holds parts of {}, but no {}", folder_.string(),
                              distckpt::kTorchModel, distckpt::kTorchModelIndex),
                  "the download may be incomplete");
    }
    read_file(std::string(distckpt::kTorchModel));
    require_transformers_reads(*stored_.hf,
                               {.folder = folder_, .files = {std::string(distckpt::kTorchModel)}});
    return std::move(stored_);
  }

 private:
  void read_file(const std::string& name) {
    const distckpt::TorchFile file(folder_ / name, distckpt::tensor_globals(), kSaveTensorsAnew);
    const auto storage = stored_.layout.add_storage(file.storage());
    std::set<std::int64_t> records;
    for (const auto& [key, value] : file.root().items()) {
      const std::string tensor(key.as_string());
      const auto item = file.tensor(value, tensor);
      const auto [at, added] = file_of_tensor_.emplace(tensor, name);
      require(added, ErrorKind::kCorrupt, "{}: is in {} and in {}", tensor, at->second, name);
      stored_.layout.add_tensor(
          {.name = tensor,
           .dtype = item.dtype,
           .shape = item.shape,
           .shards = {distckpt::shard_of(item, distckpt::Box::whole(item.shape), storage)}});
      auto checksum = distckpt::checksum_of(item, storage, tensor);
      if (checksum && records.insert(checksum->range.offset).second)
        stored_.checksums.push_back(std::move(*checksum));
    }
  }

  fs::path folder_;
  Stored stored_;
  std::map<std::string, std::string> file_of_tensor_;
};

}  // namespace

Stored read_torch_save(const Location& location, const OpenOptions& options) {
  return TorchSaveReader(location, options).read();
}

}  // namespace ferry::converter
