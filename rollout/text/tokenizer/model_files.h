// The files beside a model's weights, such as tokenizer.json, in a folder or in an archive.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

namespace ferry::rollout::text {

class ModelFiles {
 public:
  // Returns the text of a file, or nothing if it does not exist.
  using Read = std::function<std::optional<std::string>(const std::string& name)>;

  explicit ModelFiles(const std::filesystem::path& folder);
  ModelFiles(Read read, std::string source);

  std::optional<std::string> read(const std::string& name) const { return read_(name); }
  std::string where(const std::string& name) const { return source_ + "/" + name; }
  const std::string& source() const { return source_; }

 private:
  Read read_;
  std::string source_;  // for messages
};

}  // namespace ferry::rollout::text
