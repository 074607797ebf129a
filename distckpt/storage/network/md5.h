// MD5 (RFC 1321), by which S3 checks what it was sent, and names the parts that it has. It guards
// against accidents, not against attackers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ferry::distckpt {

using Md5 = std::array<std::uint8_t, 16>;

Md5 md5(std::span<const std::byte> bytes);
std::string hex_text(const Md5& digest);     // as an ETag has it
std::string base64_text(const Md5& digest);  // as Content-MD5 has it

}  // namespace ferry::distckpt
