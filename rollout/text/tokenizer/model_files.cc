#include "rollout/text/tokenizer/model_files.h"

#include <utility>

#include "distckpt/storage/file_io.h"

namespace ferry::rollout::text {

ModelFiles::ModelFiles(const std::filesystem::path& folder)
    : ModelFiles(
          [folder](const std::string& name) -> std::optional<std::string> {
            if (!std::filesystem::exists(folder / name)) return std::nullopt;
            return distckpt::read_text(folder / name);
          },
          folder.string()) {}

ModelFiles::ModelFiles(Read read, std::string source)
    : read_(std::move(read)), source_(std::move(source)) {}

}  // namespace ferry::rollout::text
