// A tensor's digest depends on its dtype, shape and row-major bytes alone: not on format, layout,
// threads or order of reading. docs/formats/digest.md gives the bytes.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"

namespace ferry::distckpt {

// XXH3-128 in canonical (big-endian) order.
struct Digest {
  std::array<std::uint8_t, 16> bytes{};
  auto operator<=>(const Digest&) const = default;
};

std::string to_string(const Digest& digest);  // 32 hexadecimal digits
std::optional<Digest> digest_from_string(std::string_view text);

// Content is digested in blocks of this many bytes, each on its own, in any order.
inline constexpr std::int64_t kDigestBlock = std::int64_t{1} << 20;

Digest digest_block(std::span<const std::byte> bytes);

// The same of bytes that come in pieces.
class RunningDigest {
 public:
  RunningDigest();
  ~RunningDigest();
  RunningDigest(RunningDigest&&) noexcept;
  RunningDigest& operator=(RunningDigest&&) noexcept;

  void add(std::span<const std::byte> bytes);
  Digest digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The digest of a tensor whose blocks have these digests. A file's digest is that of a tensor U8 of
// its bytes.
Digest digest_tensor(DType dtype, const Shape& shape, std::span<const Digest> blocks);

struct NamedDigest {
  std::string name{};
  Digest digest{};
};

// The digest of a whole model: of its tensors' names and digests, in the order of their names.
Digest digest_model(std::vector<NamedDigest> tensors);

}  // namespace ferry::distckpt
