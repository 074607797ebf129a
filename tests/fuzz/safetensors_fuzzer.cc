#include <algorithm>
#include <string>
#include <vector>

#include "distckpt/formats/safetensors.h"
#include "distckpt/plan/coverage.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

using distckpt::SafetensorsEntry;
using distckpt::SafetensorsHeader;

std::string length_prefix(std::size_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(length >> (8 * i) & 0xFF));
  return bytes;
}

// The part of a header that does not depend on where the bytes lie.
std::vector<std::string> tensors_of(const SafetensorsHeader& header) {
  std::vector<std::string> lines;
  for (const auto& entry : header.entries) {
    lines.push_back(
        fmt::format("{} {} {}", entry.name, safetensors_name(entry.dtype), to_string(entry.shape)));
  }
  std::ranges::sort(lines);
  return lines;
}

// The tensors' bytes tile the file behind the header.
void expect_tiled(const SafetensorsHeader& header) {
  auto position = static_cast<std::int64_t>(header.prefix.size());
  for (const auto& entry : header.entries) {
    expect(entry.begin == position && entry.end >= entry.begin, "{}: {} to {}, expected from {}",
           entry.name, entry.begin, entry.end, position);
    expect(entry.end - entry.begin == entry.shape.product() * size_of(entry.dtype), "{}: {} bytes",
           entry.name, entry.end - entry.begin);
    position = entry.end;
  }
  expect(header.file_size == position, "{} bytes, expected {}", header.file_size, position);
  distckpt::Layout layout;
  add_to_layout(header, "folder", layout);
  check_layout(layout);
}

// The header that is written for the same tensors says the same, and is written alike once more.
void expect_written_alike(const SafetensorsHeader& header) {
  const auto written = distckpt::make_safetensors_header("again", header.entries, header.metadata);
  const auto parsed = distckpt::parse_safetensors_prefix(written.prefix, "again", "again");
  expect(tensors_of(parsed) == tensors_of(header), "the tensors differ once written");
  expect(parsed.metadata == header.metadata, "the metadata differs once written");
  expect(parsed.file_size == written.file_size, "{} bytes, expected {}", parsed.file_size,
         written.file_size);
  const auto again = distckpt::make_safetensors_header("again", parsed.entries, parsed.metadata);
  expect(again.prefix == written.prefix, "is written in another way the second time");
}

// A file of any other size is refused.
void expect_size_matters(const SafetensorsHeader& header) {
  constexpr std::int64_t kMaxSparse = std::int64_t{1} << 40;
  if (header.file_size >= kMaxSparse) return;
  const MemoryFile file(header.prefix);
  for (const auto change : {0, 1, -1}) {
    file.resize(header.file_size + change);
    const bool taken = accepts([&] {
      expect(distckpt::read_safetensors_header(file.path()).prefix == header.prefix,
             "the header differs when read from a file");
    });
    expect(taken == (change == 0), "a file of {} bytes, {} too many, is {}",
           header.file_size + change, change, taken ? "taken" : "refused");
  }
}

void check_prefix(const std::string& prefix) {
  SafetensorsHeader header;
  if (!accepts([&] { header = distckpt::parse_safetensors_prefix(prefix, "fuzz", "fuzz"); }))
    return;
  expect(header.prefix == prefix, "the prefix is not kept");
  expect_tiled(header);
  expect_written_alike(header);
  expect_size_matters(header);
}

}  // namespace

void safetensors(std::string_view input) {
  if (input.starts_with('{')) return check_prefix(length_prefix(input.size()) + std::string(input));
  check_prefix(std::string(input));
  const MemoryFile file(input);
  accepts([&] { check_prefix(distckpt::read_safetensors_header(file.path()).prefix); });
}

}  // namespace ferry::fuzz
