#include "converter/fingerprint.h"

#include <sys/stat.h>

#include <string>
#include <variant>

#include "distckpt/error.h"

namespace ferry::converter {
namespace fs = std::filesystem;

using distckpt::CopyPlan;
using distckpt::Digest;

std::vector<std::pair<fs::path, std::int64_t>> files_of(const distckpt::Layout& layout) {
  std::vector<std::pair<fs::path, std::int64_t>> files;
  for (const auto& storage : layout.storages()) {
    const auto& path = *distckpt::file_of(storage);
    const auto* file = std::get_if<distckpt::FileStorage>(&storage);
    const auto bytes =
        file != nullptr ? file->size : std::get<distckpt::ChunkStorage>(storage).decoded_size;
    if (file == nullptr && !files.empty() && files.back().first == path) {
      files.back().second += bytes;
    } else {
      files.emplace_back(path, bytes);
    }
  }
  return files;
}

Digest fingerprint(const Checkpoint& source, const CopyPlan& plan, const distckpt::Layout& target) {
  std::string text = "1\n";
  for (const auto& [path, bytes] : files_of(source.layout)) {
    struct stat status {};
    require(::stat(path.c_str(), &status) == 0, ErrorKind::kIo, "{}: cannot be examined",
            path.string());
    text += fmt::format("{} {} {}.{}\n", fs::weakly_canonical(path).string(), status.st_size,
                        status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
  }
  for (const auto& planned : plan.tensors) {
    text += fmt::format("{} {} {}\n", planned.tensor.name, short_name(planned.tensor.dtype),
                        to_string(planned.tensor.shape));
    for (const auto& cover : planned.targets) {
      for (const auto& piece : cover) {
        text += fmt::format("{} {} {}\n", to_string(piece.box), piece.at.storage, piece.at.offset);
      }
    }
  }
  for (const auto& [path, bytes] : files_of(target)) {
    text += fmt::format("{} {}\n", path.string(), bytes);
  }
  return distckpt::digest_block(distckpt::as_bytes(text));
}

}  // namespace ferry::converter
