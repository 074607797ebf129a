#include "cli/output_file.h"

#include <algorithm>
#include <string>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/published_modes.h"

namespace ferry::cli {
namespace fs = std::filesystem;
namespace {

bool has_mark(const fs::path& path, std::string_view mark) {
  constexpr std::int64_t kHead = 4096;
  const distckpt::ReadFile file(path);
  std::string head(static_cast<std::size_t>(std::min(file.size(), kHead)), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(head)));
  return head.find(mark) != std::string::npos;
}

}  // namespace

OutputFile::OutputFile(fs::path path, std::string_view mark, bool overwrite)
    : path_(std::move(path)), mark_(mark), overwrite_(overwrite) {
  check();
}

void OutputFile::check() const {
  if (path_.empty()) return;
  const auto folder = path_.has_parent_path() ? path_.parent_path() : fs::path(".");
  require(fs::is_directory(folder), ErrorKind::kNotFound, "{}: {} is not a folder", path_.string(),
          folder.string());
  const auto there = fs::symlink_status(path_).type();
  if (there == fs::file_type::not_found) return;
  require(there == fs::file_type::regular || there == fs::file_type::symlink, ErrorKind::kUsage,
          "{}: is there already, and not a file", path_.string());
  if (overwrite_ || (there == fs::file_type::regular && has_mark(path_, mark_))) return;
  throw Error(ErrorKind::kUsage,
              fmt::format("{}: is there already, and {}", path_.string(),
                          there == fs::file_type::symlink ? "a symbolic link"
                                                          : "not a file that ferry wrote"),
              "choose another name, or replace it with --overwrite");
}

void OutputFile::write(std::string_view text, const std::vector<fs::path>& sources) const {
  if (path_.empty()) return;
  check();  // the work may have taken hours
  distckpt::PublishedModes modes;
  for (const auto& path : sources) {
    if (!path.empty()) modes.narrow_all(path);
  }
  const auto mode = modes.lone_file();
  // A file that is there keeps its permissions, but for those that the sources deny.
  if (fs::is_regular_file(fs::symlink_status(path_)))
    fs::permissions(path_, static_cast<fs::perms>(0777U & ~mode & 077U), fs::perm_options::remove);
  distckpt::replace_text(path_, text, mode);
}

CLI::Option* add_overwrite_output(CLI::App& command, bool& overwrite) {
  return command.add_flag("--overwrite", overwrite,
                          "Replace a file that is there, whatever it is. Default: only one that "
                          "ferry wrote");
}

CLI::Validator not_empty() {
  return {[](const std::string& name) { return name.empty() ? "is empty" : ""; }, ""};
}

}  // namespace ferry::cli
