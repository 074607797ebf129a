// CRC-32, that of zip and zlib, at the speed of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ferry::distckpt {

// `crc` is that of the bytes before, to go on from.
std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t crc = 0);

}  // namespace ferry::distckpt
