// The parts of the zip format that torch.save archives consist of: all records are stored, none
// compressed.
#pragma once

#include <cstdint>

namespace ferry::distckpt::zip {

// Signatures.
constexpr std::uint32_t kLocalHeader = 0x04034B50;
constexpr std::uint32_t kDataDescriptor = 0x08074B50;
constexpr std::uint32_t kCentralEntry = 0x02014B50;
constexpr std::uint32_t kZip64End = 0x06064B50;
constexpr std::uint32_t kZip64Locator = 0x07064B50;
constexpr std::uint32_t kEnd = 0x06054B50;

constexpr std::int64_t kLocalHeaderBytes = 30;
constexpr std::int64_t kCentralEntryBytes = 46;
constexpr std::int64_t kZip64EndBytes = 56;
constexpr std::int64_t kZip64LocatorBytes = 20;
constexpr std::int64_t kEndBytes = 22;

constexpr std::uint16_t kFlagDescriptor = 0x0008;  // sizes and CRC follow the payload
constexpr std::uint16_t kFlagUtf8 = 0x0800;
constexpr std::uint16_t kZip64Extra = 0x0001;
constexpr std::uint16_t kPaddingExtra = 0x4246;  // "FB"

constexpr std::uint16_t kMax16 = 0xFFFF;
constexpr std::uint32_t kMax32 = 0xFFFFFFFF;  // in a 32-bit field: the value is in the ZIP64 one

constexpr std::int64_t kAlignment = 64;  // of payloads, from the start of the archive

}  // namespace ferry::distckpt::zip
