// A file that a report goes to, named by the user. It replaces a report that ferry wrote before,
// and nothing else unless --overwrite says so.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string_view>
#include <vector>

namespace ferry::cli {

class OutputFile {
 public:
  // `mark` is what the first bytes of our files of this kind say, and no other's. Throws
  // Error(kUsage) if something lies at `path` that may not be replaced: made before the work
  // begins, it tells of it at once. Without a path nothing is written.
  OutputFile(std::filesystem::path path, std::string_view mark, bool overwrite);

  // `sources`: the files and folders that the text was made from. Who may not read them may not
  // read it either, wherever it lies.
  void write(std::string_view text, const std::vector<std::filesystem::path>& sources) const;

 private:
  void check() const;

  std::filesystem::path path_;
  std::string_view mark_;
  bool overwrite_;
};

CLI::Option* add_overwrite_output(CLI::App& command, bool& overwrite);

// Refuses an empty name of a file, such as that of a variable that is not set.
CLI::Validator not_empty();

}  // namespace ferry::cli
