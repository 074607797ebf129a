#include "converter/fingerprint.h"

#include <string>
#include <variant>

#include "distckpt/base/error.h"

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

Digest summary(const Checkpoint& checkpoint) {
  distckpt::RunningDigest digest;
  const auto add = [&](std::string_view text) { digest.add(distckpt::as_bytes(text)); };
  for (const auto& [path, file] : checkpoint.files->files()) {
    add(fmt::format("{} {} {} {} {} {}\n", path.string(), file.device, file.inode, file.size,
                    file.modified_ns, file.changed_ns));
  }
  for (const auto& tensor : checkpoint.layout.tensors()) {
    add(fmt::format("{} {} {}\n", tensor.name, short_name(tensor.dtype), to_string(tensor.shape)));
    for (const auto& [box, at] : tensor.shards) {
      add(fmt::format("{} {} {} {}\n", to_string(box), at.storage, at.offset,
                      to_string(at.strides)));
    }
  }
  for (const auto& [range, crc, _] : checkpoint.checksums)
    add(fmt::format("{} {} {} {}\n", range.storage, range.offset, range.size, crc));
  for (const auto& key : checkpoint.training_state) add(key + "\n");
  if (const auto& hf = checkpoint.hf) {
    add(hf->index_text.value_or(""));
    for (const auto& header : hf->headers) add(header.filename + header.prefix);
    for (const auto& name : hf->carried) add(name + "\n");
    for (const auto& [name, content] : hf->contents) add(name + content);
  }
  return digest.digest();
}

Digest fingerprint(const Checkpoint& source,
                   const CopyPlan& plan,
                   const distckpt::Layout& target,
                   const fs::path& folder) {
  std::string text = "2\n";
  for (const auto& [path, bytes] : files_of(source.layout)) {
    // Machines that share a file system may number devices and inodes in their own ways.
    const auto& file = source.files->files().at(path);
    text += fmt::format("{} {} {} {}\n", fs::weakly_canonical(path).string(), file.size,
                        file.modified_ns, file.changed_ns);
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
    text += fmt::format("{} {}\n", path.lexically_relative(folder).string(), bytes);
  }
  return distckpt::digest_block(distckpt::as_bytes(text));
}

}  // namespace ferry::converter
