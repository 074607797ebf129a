// SHA-256 (FIPS 180-4), for the digests that sha256.json holds: written down by others, so that
// what is read here is proved against something Ferry has not computed.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace ferry::support {

std::string sha256(std::span<const std::byte> bytes);  // 64 hexadecimal digits

}  // namespace ferry::support
