// Writes torch_dist in the profile that stock megatron-core 0.13 to 0.20 loads: everything is
// placed before a byte is copied, the copying is the executor's, and what depends on it (checksums)
// is filled in afterwards. metadata.json is written last.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "distckpt/execute/checksum_ledger.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "distckpt/formats/torch_save/torch_zip.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/sharded_tensor.h"

namespace ferry::distckpt {

// An object that is kept as another checkpoint holds it.
struct StoredObject {
  std::string key{};      // "rng_state/shard_0.1_1.2"
  std::string archive{};  // torch.save of it
};

struct RankState {
  std::vector<ShardedTensor> tensors{};
  std::vector<ShardedObject> extra_states{};  // each stored as an empty tensor of bytes
  std::vector<StoredObject> objects{};
};

class TorchDistTarget {
 public:
  // `ranks[r]` is what rank r would save: its main replicas are written to __r_0.distcp, if it has
  // any. `common` emits the common state, a dict. Throws Error(kLayout) if the ranks disagree about
  // a tensor.
  TorchDistTarget(std::filesystem::path folder,
                  const std::vector<RankState>& ranks,
                  const std::function<void(PickleWriter&)>& common);

  const Layout& layout() const { return layout_; }
  std::vector<ChecksumRange> protected_ranges() const;
  std::int64_t num_bytes() const;  // of all files

  // For the files that the sink writes: the objects, which are known before anything is copied; and
  // of each chunk, once all of it was written, the headers of its archive with the checksum. A
  // chunk has the index of its range. Throws Error(kBug) for one that was not written whole.
  void begin_files(FileSink& sink) const;
  void finish_chunk(FileSink& sink, std::uint32_t index) const;

  // After the executor is done: both, for everything. Durable when it returns.
  void finish_files(FileSink& sink) const;

  // After all files are finished: .metadata, common.pt and metadata.json.
  void finish_folder() const;

 private:
  struct Chunk {
    std::uint32_t tensor = 0;  // index in layout_
    Box box{};
    StorageId file = 0;
    std::int64_t offset = 0;  // of the archive
    TensorItemLayout item{};
  };
  struct Object {
    std::string key{};
    StorageId file = 0;
    std::int64_t offset = 0;
    std::string archive{};  // empty: that of an extra state
  };

  std::string metadata_pickle() const;
  const std::string& archive_of(const Object& object) const;

  std::filesystem::path folder_;
  Layout layout_;
  std::vector<Chunk> chunks_;
  std::vector<Object> objects_;
  std::vector<std::string> file_names_;  // by storage
  std::vector<std::int64_t> file_sizes_;
  std::string extra_state_archive_;
  std::string common_file_;  // common.pt
};

}  // namespace ferry::distckpt
