#include "distckpt/formats/archive/hdf5_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace ferry::distckpt {
namespace {

constexpr std::size_t kLarge = std::size_t{3} << 20;  // free in no heap

void use_up_memory() {
  const rlimit none{.rlim_cur = 1, .rlim_max = 1};
  if (setrlimit(RLIMIT_AS, &none) != 0) std::abort();
}

// A death test runs this in a process of its own: status 0 if the reserve served, and was noticed.
[[noreturn]] void take_from_reserve() {
  const Hdf5Memory memory;
  require_hdf5_memory();
  auto* const small = static_cast<char*>(std::malloc(8));
  std::memcpy(small, "content", 8);
  use_up_memory();
  auto* const grown = static_cast<char*>(std::realloc(small, kLarge));
  if (grown == nullptr || std::strcmp(grown, "content") != 0) std::_Exit(1);
  grown[kLarge - 1] = 'x';
  std::free(grown);
  try {
    require_hdf5_memory();
  } catch (const std::bad_alloc&) {
    std::_Exit(0);
  }
  std::_Exit(2);
}

TEST(Hdf5MemoryDeathTest, IsThereWhenMallocHasNone) {
  EXPECT_EXIT(take_from_reserve(), testing::ExitedWithCode(0), "");
}

[[noreturn]] void ask_without_reserve() {
  { const Hdf5Memory memory; }
  use_up_memory();
  void* volatile data = std::malloc(kLarge);
  std::_Exit(data == nullptr ? 0 : 1);
}

TEST(Hdf5MemoryDeathTest, IsForNobodyElse) {
  EXPECT_EXIT(ask_without_reserve(), testing::ExitedWithCode(0), "");
}

[[noreturn]] void begin_without_memory() {
  use_up_memory();
  try {
    const Hdf5Memory memory;
  } catch (const std::bad_alloc&) {
    std::_Exit(0);
  }
  std::_Exit(1);
}

TEST(Hdf5MemoryDeathTest, ThrowsWithoutRoomForTheReserve) {
  EXPECT_EXIT(begin_without_memory(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace ferry::distckpt
