// A checkpoint that is about to be written: placed before anything is copied, finished afterwards.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "distckpt/execute/checksum_ledger.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/execute/journal.h"
#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/tensor_map.h"

namespace ferry::converter {

class Target {
 public:
  virtual ~Target() = default;

  distckpt::PlanSide side() const { return {.layout = &layout_, .map = &links_}; }
  const distckpt::Layout& layout() const { return layout_; }

  // All files that it writes, relative to `folder`, which it was made for.
  std::vector<std::filesystem::path> files(const std::filesystem::path& folder) const {
    auto names = other_files();
    for (const auto& storage : layout_.storages()) {
      auto name = distckpt::file_of(storage)->lexically_relative(folder);
      if (names.empty() || names.back() != name) names.push_back(std::move(name));
    }
    return names;
  }

  // Carries over the padding that `source` holds too: it becomes tensors. Their names.
  std::set<std::string> share_padding(const distckpt::Layout& layout,
                                      distckpt::TensorMap& source,
                                      std::vector<distckpt::ModelTensor>& tensors) {
    return distckpt::promote_shared_padding(layout, source, layout_, links_, tensors);
  }

  // Opens the sink for the bytes of `plan`, which outlives the target: new files, or those that
  // another process or an interrupted run made. Tasks that have to be done again are taken out of
  // the journal.
  virtual distckpt::BoxSink& open_sink(const distckpt::CopyPlan& plan,
                                       distckpt::Journal& journal,
                                       distckpt::WriteFile::Mode mode) = 0;

  // All bytes that were written so far are durable when it returns.
  virtual void sync_sink() {}

  // Writes everything that is not a tensor's bytes: headers, indices, carried files. Durable when
  // it returns.
  virtual void close_sink() = 0;

  // False if the sizes of the files turn out when they are written.
  virtual bool knows_file_sizes() const { return true; }

 protected:
  // The files that it writes beside those of layout(), relative.
  virtual std::vector<std::filesystem::path> other_files() const = 0;

  distckpt::Layout layout_;
  distckpt::TensorMap links_;
};

// A target of plain bytes in files.
class FileTarget : public Target {
 public:
  distckpt::BoxSink& open_sink(const distckpt::CopyPlan&,
                               distckpt::Journal&,
                               distckpt::WriteFile::Mode mode) final {
    prepare();
    sink_.emplace(layout_.storages(), protected_ranges(), mode);
    return *sink_;
  }
  void sync_sink() final { sink_->sync(); }
  void close_sink() final {
    finish_files(*sink_);
    finish_folder();
  }

  // The same by several processes: each opens and closes new files of its own, and once all have,
  // one of them closes the folder.
  distckpt::BoxSink& open_files(const std::function<bool(distckpt::StorageId)>& mine) {
    prepare();
    sink_.emplace(layout_.storages(), protected_ranges(), distckpt::WriteFile::Mode::kCreate, mine);
    return *sink_;
  }

  // Opens new files that leave this machine while they are written: begin_files() and
  // finish_range(), of the sink's checksum ranges, write everything but tensors as early as it is
  // known.
  distckpt::FileSink& open_leaving_files() {
    prepare();
    return sink_.emplace(layout_.storages(), protected_ranges(),
                         distckpt::WriteFile::Mode::kCreate);
  }
  virtual void begin_files(distckpt::FileSink& sink) const = 0;
  virtual void finish_range(distckpt::FileSink&, std::uint32_t) const {}

  void close_files() { finish_files(*sink_); }
  void close_folder() const { finish_folder(); }

 protected:
  virtual std::vector<distckpt::ChecksumRange> protected_ranges() const { return {}; }

  // Creates the folders that the files of layout() lie in.
  virtual void prepare() const = 0;
  // Write the rest of the tensors' files, then the other files. Each is durable when it returns.
  virtual void finish_files(distckpt::FileSink& sink) const = 0;
  virtual void finish_folder() const = 0;

 private:
  std::optional<distckpt::FileSink> sink_;
};

}  // namespace ferry::converter
