// Makes, reads and damages files of tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::support {

// tests/data/<name>, from FERRY_TEST_DATA.
std::filesystem::path test_data(std::string_view name);

std::vector<std::byte> read_bytes(const std::filesystem::path& path);
void write_bytes(const std::filesystem::path& path, std::span<const std::byte> bytes);

void corrupt(const std::filesystem::path& path, std::int64_t offset);  // inverts one byte
void cut(const std::filesystem::path& path, std::int64_t size);
void append(const std::filesystem::path& path, std::string_view text);

// The names below a folder, sorted: "iter_0000010/__0_0.distcp".
std::vector<std::string> list(const std::filesystem::path& folder);

}  // namespace ferry::support
