#include "converter/delta/spool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/formats/safetensors.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace spool_test {

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

TEST(Spool, LeavesNoNameInItsFolder) {
  const support::TempDir dir;
  Spool spool(dir.path());
  spool.append(bytes_of("text"));
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(Spool, GivesEachThreadAPlaceOfItsOwn) {
  const support::TempDir dir;
  Spool spool(dir.path());
  constexpr int kThreads = 4;
  constexpr int kPieces = 200;
  std::vector<std::vector<Extent>> extents(kThreads);
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kPieces; ++i)
          extents[static_cast<std::size_t>(t)].push_back(spool.append(bytes_of(
              std::string(static_cast<std::size_t>(i % 7 + 1), static_cast<char>('a' + t)))));
      });
    }
  }
  for (int t = 0; t < kThreads; ++t) {
    for (const auto& extent : extents[static_cast<std::size_t>(t)]) {
      std::string text(static_cast<std::size_t>(extent.size), ' ');
      spool.read(extent, 0, std::as_writable_bytes(std::span(text)));
      ASSERT_EQ(text, std::string(text.size(), static_cast<char>('a' + t)));
    }
  }
}

TEST(WriteSpooled, PutsHeadsAndPiecesTogether) {
  const support::TempDir dir;
  Spool spool(dir.path());
  const auto first = spool.append(bytes_of("spool"));
  const std::vector<std::byte> large(5'000'003, std::byte{7});  // longer than a buffer
  const auto second = spool.append(large);
  const auto path = dir.path() / "delta.safetensors";
  const auto size =
      write_spooled(path,
                    {{.name = "b", .head = bytes_of("head"), .pieces = {first, first}},
                     {.name = "a", .pieces = {second}},
                     {.name = "empty"}},
                    {{"kind", "test"}}, spool);
  EXPECT_EQ(size, static_cast<std::int64_t>(std::filesystem::file_size(path)));
  const auto header = distckpt::read_safetensors_header(path);
  EXPECT_EQ(header.metadata.at("kind"), "test");
  const auto file = support::read_bytes(path);
  for (const auto& entry : header.entries) {
    const auto found = std::span(file).subspan(static_cast<std::size_t>(entry.begin),
                                               static_cast<std::size_t>(entry.end - entry.begin));
    const auto wanted = entry.name == "a"   ? large
                        : entry.name == "b" ? bytes_of("headspoolspool")
                                            : std::vector<std::byte>();
    EXPECT_TRUE(support::same_bytes(wanted, found)) << entry.name;
  }
  EXPECT_EQ(header.entries.size(), 3U);
}

TEST(Spool, SaysWhereItCannotLie) {
  EXPECT_TRUE(support::fails(ErrorKind::kIo, {"/absent/folder"}, [] { Spool("/absent/folder"); }));
}

}  // namespace spool_test
}  // namespace ferry::converter
