#include "converter/stored/carried_file.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace ferry::converter {
namespace {

constexpr std::int64_t kPiece = std::int64_t{1} << 20;

}  // namespace

std::int64_t CarriedFile::size() const {
  if (const auto* text = std::get_if<std::string>(&bytes_))
    return static_cast<std::int64_t>(text->size());
  return std::get<distckpt::ReadFile>(bytes_).size();
}

void CarriedFile::read_at(std::int64_t offset, std::span<std::byte> into) const {
  if (const auto* file = std::get_if<distckpt::ReadFile>(&bytes_))
    return file->read_at(offset, into);
  const auto& text = std::get<std::string>(bytes_);
  std::memcpy(into.data(), text.data() + offset, into.size());
}

void CarriedFile::read(const std::function<void(std::span<const std::byte>)>& take) const {
  std::vector<std::byte> piece(static_cast<std::size_t>(std::min(kPiece, size())));
  for (std::int64_t at = 0; at < size(); at += kPiece) {
    const auto part =
        std::span(piece).first(static_cast<std::size_t>(std::min(kPiece, size() - at)));
    read_at(at, part);
    take(part);
  }
}

std::string CarriedFile::text() const {
  if (const auto* text = std::get_if<std::string>(&bytes_)) return *text;
  return distckpt::read_text(std::get<distckpt::ReadFile>(bytes_));
}

void CarriedFile::copy_to(const std::filesystem::path& path) const {
  const distckpt::WriteFile file(path, size());
  std::int64_t at = 0;
  read([&](std::span<const std::byte> piece) {
    file.write_at(at, piece);
    at += static_cast<std::int64_t>(piece.size());
  });
  file.sync();
}

distckpt::Digest CarriedFile::digest() const {
  distckpt::RunningDigest running;
  read([&](std::span<const std::byte> piece) { running.add(piece); });
  return running.digest();
}

bool same_bytes(const CarriedFile& a, const CarriedFile& b) {
  if (a.size() != b.size()) return false;
  bool same = true;
  std::int64_t at = 0;
  std::vector<std::byte> other;
  a.read([&](std::span<const std::byte> piece) {
    other.resize(piece.size());
    b.read_at(at, other);
    same = same && std::ranges::equal(piece, other);
    at += static_cast<std::int64_t>(piece.size());
  });
  return same;
}

}  // namespace ferry::converter
