#include "distckpt/base/foreign_error.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <new>
#include <system_error>

namespace ferry {
namespace foreign_error_test {

std::system_error system(std::errc code) {
  return std::system_error(std::make_error_code(code));
}

TEST(ForeignError, WantOfMemoryAndOfThreadsIsToldFromOthers) {
  EXPECT_TRUE(is_out_of_memory(std::bad_alloc()));
  EXPECT_TRUE(is_out_of_memory(std::bad_array_new_length()));
  EXPECT_TRUE(is_out_of_memory(system(std::errc::resource_unavailable_try_again)));
  EXPECT_FALSE(is_out_of_memory(system(std::errc::permission_denied)));
  EXPECT_FALSE(is_out_of_memory(std::runtime_error("out of memory")));
}

TEST(ForeignError, BecomesAnErrorOfItsKind) {
  const auto report = [](const std::exception& error) {
    const auto seen = as_error(error);
    return fmt::format("{} {}", to_string(seen.kind()), seen.what());
  };
  EXPECT_EQ(report(std::bad_alloc()), "io out of memory");
  EXPECT_EQ(report(system(std::errc::resource_unavailable_try_again)),
            "io no thread could be started: out of memory, or of threads");
  const std::filesystem::filesystem_error of_files(
      "rename", std::make_error_code(std::errc::no_such_file_or_directory));
  EXPECT_EQ(report(of_files), std::string("io ") + of_files.what());
  const std::filesystem::filesystem_error of_one(
      "status", "a/b", std::make_error_code(std::errc::too_many_symbolic_link_levels));
  EXPECT_EQ(report(of_one), "io a/b: cannot be examined: Too many levels of symbolic links");
  EXPECT_EQ(report(std::logic_error("never")), "bug never");
}

TEST(ForeignError, SaysOfAFolderThatItCannotBeCreated) {
  try {
    std::filesystem::create_directory("/proc/ferry");
    FAIL() << "/proc takes folders";
  } catch (const std::filesystem::filesystem_error& error) {
    EXPECT_EQ(as_error(error).what(),
              fmt::format("/proc/ferry: cannot be created: {}", error.code().message()));
  }
}

TEST(ForeignError, AnErrorKeepsAllItSays) {
  Error own(ErrorKind::kLayout, "rows", "count them");
  own.add_context("reading");
  EXPECT_EQ(as_error(own).report(), own.report());
  EXPECT_EQ(as_error(own).kind(), ErrorKind::kLayout);
}

}  // namespace foreign_error_test
}  // namespace ferry
