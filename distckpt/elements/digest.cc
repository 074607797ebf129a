#include "distckpt/elements/digest.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <charconv>

namespace ferry::distckpt {
namespace {

Digest canonical(XXH128_hash_t hash) {
  XXH128_canonical_t bytes;
  XXH128_canonicalFromHash(&bytes, hash);
  Digest digest;
  std::copy(std::begin(bytes.digest), std::end(bytes.digest), digest.bytes.begin());
  return digest;
}

void append_u64(std::string& text, std::int64_t value) {
  for (int shift = 0; shift < 64; shift += 8) {
    text.push_back(static_cast<char>(static_cast<std::uint64_t>(value) >> shift & 0xFFU));
  }
}

void append(std::string& text, const Digest& digest) {
  text.append(digest.bytes.begin(), digest.bytes.end());
}

Digest digest_text(std::string_view text) {
  return canonical(XXH3_128bits(text.data(), text.size()));
}

}  // namespace

std::string to_string(const Digest& digest) {
  return fmt::format("{:02x}", fmt::join(digest.bytes, ""));
}

std::optional<Digest> digest_from_string(std::string_view text) {
  Digest digest;
  if (text.size() != 2 * digest.bytes.size()) return std::nullopt;
  for (std::size_t i = 0; i < digest.bytes.size(); ++i) {
    const auto* begin = text.data() + 2 * i;
    const auto [end, error] = std::from_chars(begin, begin + 2, digest.bytes[i], 16);
    if (error != std::errc() || end != begin + 2) return std::nullopt;
  }
  return digest;
}

Digest digest_block(std::span<const std::byte> bytes) {
  return canonical(XXH3_128bits(bytes.data(), bytes.size()));
}

struct RunningDigest::State {
  XXH3_state_t hash;
};

RunningDigest::RunningDigest() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(&state_->hash);
}
RunningDigest::~RunningDigest() = default;
RunningDigest::RunningDigest(RunningDigest&&) noexcept = default;
RunningDigest& RunningDigest::operator=(RunningDigest&&) noexcept = default;

void RunningDigest::add(std::span<const std::byte> bytes) {
  XXH3_128bits_update(&state_->hash, bytes.data(), bytes.size());
}

Digest RunningDigest::digest() const {
  return canonical(XXH3_128bits_digest(&state_->hash));
}

Digest digest_tensor(DType dtype, const Shape& shape, std::span<const Digest> blocks) {
  std::string text(safetensors_name(dtype));
  text.push_back('\0');
  append_u64(text, shape.rank());
  for (const auto dim : shape) append_u64(text, dim);
  for (const auto& block : blocks) append(text, block);
  return digest_text(text);
}

Digest digest_model(std::vector<NamedDigest> tensors) {
  std::ranges::sort(tensors, {}, &NamedDigest::name);
  std::string text;
  for (const auto& tensor : tensors) {
    text += tensor.name;
    text.push_back('\0');
    append(text, tensor.digest);
  }
  return digest_text(text);
}

}  // namespace ferry::distckpt
