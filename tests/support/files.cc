#include "tests/support/files.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <ios>
#include <stdexcept>

namespace ferry::support {
namespace fs = std::filesystem;
namespace {

std::fstream open(const fs::path& path, std::ios::openmode mode) {
  std::fstream file(path, mode | std::ios::binary);
  if (!file) throw std::runtime_error("cannot open " + path.string());
  file.exceptions(std::ios::badbit | std::ios::failbit);
  return file;
}

}  // namespace

fs::path test_data(std::string_view name) {
  const char* const folder = std::getenv("FERRY_TEST_DATA");
  if (folder == nullptr) throw std::runtime_error("FERRY_TEST_DATA is not set: use meson test");
  return fs::path(folder) / name;
}

std::vector<std::byte> read_bytes(const fs::path& path) {
  std::vector<std::byte> bytes(fs::file_size(path));
  auto file = open(path, std::ios::in);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

void write_bytes(const fs::path& path, std::span<const std::byte> bytes) {
  auto file = open(path, std::ios::out | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

void corrupt(const fs::path& path, std::int64_t offset) {
  auto file = open(path, std::ios::in | std::ios::out);
  file.seekg(offset);
  const auto byte = static_cast<char>(~file.get());
  file.seekp(offset);
  file.put(byte);
}

void cut(const fs::path& path, std::int64_t size) {
  fs::resize_file(path, static_cast<std::uintmax_t>(size));
}

void append(const fs::path& path, std::string_view text) {
  auto file = open(path, std::ios::out | std::ios::app);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
}

std::vector<std::string> list(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    names.push_back(fs::relative(entry.path(), folder).string());
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace ferry::support
