// Ferry's own archive: a folder with one HDF5 file or several, whose chunks are compressed outside
// HDF5 (distckpt/execute/plane_codec.h), in parallel. A trailer behind the HDF5 file says where the
// chunks lie, and plain reads fetch them: libhdf5 writes, but never reads. docs/formats/hdf5.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distckpt/execute/journal.h"
#include "distckpt/plan/box_io.h"
#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

struct ShardStore {
  Layout layout{};
  std::map<std::string, std::string> files{};  // small files inside, by name: "hf/config.json"
};

// Throws Error(kCorrupt) that names file, tensor and byte: nothing is allocated that the files'
// sizes and checksums do not vouch for.
ShardStore read_shard_store(const std::filesystem::path& folder);

struct ShardStoreTensor {
  std::string name{};
  DType dtype = DType::kBF16;
  Shape shape{};
};

struct ShardStoreOptions {
  std::optional<std::int64_t>
      max_file_bytes{};  // of tensors, before compression. Default: one file
  std::int64_t chunk_bytes = std::int64_t{1} << 20;         // at most, before compression
  std::int64_t small_tensor_bytes = std::int64_t{1} << 15;  // smaller tensors share chunks
};

// An archive to be written. The order of the chunks in the files is that of the plan, so that the
// bytes are the same at any number of threads.
class ShardStoreTarget {
 public:
  ShardStoreTarget(std::filesystem::path folder,
                   const std::vector<ShardStoreTensor>& tensors,
                   const ShardStoreOptions& options);
  ~ShardStoreTarget();

  const Layout& layout() const;

  // Takes the bytes of `plan`, whose only target is layout(). Goes on with what an interrupted run
  // left, if the journal holds some of it: files that are finished stay, others are begun anew, and
  // the journal forgets what belonged there. The plan need not outlive the call.
  BoxSink& open(const CopyPlan& plan, Journal& journal);

  // After everything was written: adds the small files, and finishes the last file.
  void finish(const std::map<std::string, std::string>& small_files);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ferry::distckpt
