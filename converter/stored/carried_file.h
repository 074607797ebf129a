// A file that travels with the weights (config.json, the tokenizer, ...), wherever its bytes are.
// It may be large: it is read in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <variant>

#include "distckpt/elements/digest.h"
#include "distckpt/storage/file_io.h"

namespace ferry::converter {

class CarriedFile {
 public:
  explicit CarriedFile(std::string text) : bytes_(std::move(text)) {}
  explicit CarriedFile(distckpt::ReadFile file) : bytes_(std::move(file)) {}

  std::int64_t size() const;  // bytes

  // Hands out all of it, in order, in pieces of at most a mebibyte.
  void read(const std::function<void(std::span<const std::byte>)>& take) const;

  std::string text() const;  // whole. Throws Error(kCorrupt) for more than a gibibyte

  // Writes a copy, durably.
  void copy_to(const std::filesystem::path& path) const;

  distckpt::Digest digest() const;  // as digest_block() of all of it

 private:
  friend bool same_bytes(const CarriedFile& a, const CarriedFile& b);
  void read_at(std::int64_t offset, std::span<std::byte> into) const;

  std::variant<std::string, distckpt::ReadFile> bytes_;
};

bool same_bytes(const CarriedFile& a, const CarriedFile& b);

}  // namespace ferry::converter
