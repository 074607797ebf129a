// Archives of torch.save that tests make, and files of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "distckpt/formats/torch_save/torch_zip.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt::torch_zip_test {

inline constexpr std::string_view kZipGlobals[] = {
    "torch.", "argparse.Namespace", "collections.OrderedDict", "numpy.", "_codecs.encode"};

// A file of these bytes.
class ByteFile {
 public:
  explicit ByteFile(const std::string& bytes) : path_(folder_ / "bytes") {
    std::ofstream(path_, std::ios::binary) << bytes;
    file_.emplace(path_);
  }
  const ReadFile& file() const { return *file_; }
  std::string name() const { return path_.string(); }

 private:
  support::TempDir folder_;
  std::filesystem::path path_;
  std::optional<ReadFile> file_;
};

inline std::string bytes_at(const ReadFile& file, std::int64_t offset, std::int64_t size) {
  std::string bytes(static_cast<std::size_t>(size), '\0');
  file.read_at(offset, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

inline std::string pattern(std::int64_t size) {
  std::string bytes(static_cast<std::size_t>(size), '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + i / 256);
  return bytes;
}

inline std::string tensor_archive(DType dtype, const Shape& shape) {
  const TensorItemLayout layout = tensor_item_layout(dtype, shape);
  const std::string payload = pattern(layout.payload_bytes);
  return layout.head() + payload + layout.tail(crc32(as_bytes(payload)));
}

inline TensorItem parse_archive_of(const std::string& archive) {
  const ByteFile file(archive);
  return parse_tensor_item(file.file(), 0, file.file().size());
}

// The error of `archive`, without the file's name.
inline std::string archive_error_of(const std::string& archive) {
  const ByteFile file(archive);
  try {
    parse_tensor_item(file.file(), 0, file.file().size());
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kCorrupt);
    const std::string message = error.what();
    EXPECT_TRUE(message.starts_with(file.name() + ": ")) << message;
    return message.substr(std::min(message.size(), file.name().size() + 2));
  }
  return "no error";
}

template <typename T>
std::string with(std::string archive, std::size_t at, T value) {
  std::memcpy(&archive.at(at), &value, sizeof value);
  return archive;
}

// The position of the n-th central directory entry.
inline std::size_t central_entry(const std::string& archive, int index) {
  std::size_t at = archive.find("PK\1\2");
  for (int i = 0; i < index; ++i) at = archive.find("PK\1\2", at + 4);
  return at;
}

// The data.pkl of a tensor, as _rebuild_tensor_v2 gets it.
struct Rebuild {
  std::string_view storage_class = "torch.FloatStorage";
  std::string_view key = "0";
  std::int64_t count = 12;
  std::int64_t first = 0;
  Dims shape{3, 4};
  Dims strides{4, 1};
};

inline void write(PickleWriter& pickle, const Rebuild& rebuild) {
  pickle.begin_call("torch._utils._rebuild_tensor_v2");
  pickle.begin_persistent_id().string("storage").global(rebuild.storage_class);
  pickle.string(rebuild.key).string("cpu").integer(rebuild.count).end_persistent_id();
  pickle.integer(rebuild.first).integers(rebuild.shape).integers(rebuild.strides).boolean(false);
  pickle.begin_call("collections.OrderedDict").end_call().end_call();
}

inline std::string archive_of(PickleWriter& pickle) {
  const std::string floats = pattern(48);
  const TorchStorage storage{.key = "0", .bytes = floats};
  return torch_archive(pickle.finish(), "archive", {&storage, 1});
}

inline std::string archive_of(const Rebuild& rebuild) {
  PickleWriter pickle;
  write(pickle, rebuild);
  return archive_of(pickle);
}

}  // namespace ferry::distckpt::torch_zip_test
