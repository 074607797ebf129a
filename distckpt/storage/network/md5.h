// MD5 (RFC 1321), by which S3 names the parts that it has, and checks what it was sent where it
// knows nothing faster. It guards against accidents, not against attackers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ferry::distckpt {

using Md5 = std::array<std::uint8_t, 16>;

Md5 md5(std::span<const std::byte> bytes);
std::string hex_text(const Md5& digest);  // as an ETag has it

}  // namespace ferry::distckpt
