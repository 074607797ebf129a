#include "converter/write/linked_target.h"

#include <utility>

#include "distckpt/storage/file_io.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

class LinkedTarget : public FileTarget {
 public:
  LinkedTarget(distckpt::SafetensorsHeader header,
               distckpt::TensorMap links,
               std::map<std::string, std::string> texts,
               fs::path folder)
      : header_(std::move(header)), texts_(std::move(texts)), folder_(std::move(folder)) {
    distckpt::add_to_layout(header_, folder_, layout_);
    links_ = std::move(links);
  }

 private:
  std::vector<fs::path> other_files() const override {
    std::vector<fs::path> names;
    for (const auto& [name, _] : texts_) names.emplace_back(name);
    return names;
  }

  void prepare() const override {}

  void begin_files(distckpt::FileSink& sink) const override {
    sink.write_raw(0, 0, distckpt::as_bytes(header_.prefix));
  }

  void finish_files(distckpt::FileSink& sink) const override {
    begin_files(sink);
    sink.sync();
  }

  void finish_folder() const override {
    for (const auto& [name, text] : texts_) distckpt::write_text(folder_ / name, text);
  }

  distckpt::SafetensorsHeader header_;
  std::map<std::string, std::string> texts_;
  fs::path folder_;
};

}  // namespace

std::unique_ptr<FileTarget> make_linked_target(distckpt::SafetensorsHeader header,
                                               distckpt::TensorMap links,
                                               std::map<std::string, std::string> texts,
                                               const fs::path& folder) {
  return std::make_unique<LinkedTarget>(std::move(header), std::move(links), std::move(texts),
                                        folder);
}

}  // namespace ferry::converter
