// The proof of a checkpoint that was just written: it is opened as any reader would, and each
// tensor is digested anew, from the disk. Ranks that wrote it together share the reading.
//
//   Proof proof(folder, {}, padding, shared, how);
//   proof.read(progress);            // this rank's share
//   (wait until all have read)
//   if (shared.is_first()) proof.finish();
#pragma once

#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "converter/open/checkpoint.h"
#include "converter/progress.h"
#include "converter/shared_work.h"
#include "distckpt/execute/executor.h"

namespace ferry::converter {

class Proof {
 public:
  // `padding`: names of the padding that was carried over, and so counts as tensors. `shared` and
  // what `options` point at outlive it. Throws as open() does.
  Proof(const std::filesystem::path& folder,
        const OpenOptions& how,
        const std::set<std::string>& padding,
        const SharedWork& shared,
        distckpt::ExecutorOptions options);

  void read(const ProgressFunction& progress);
  void finish();

  const Checkpoint& written() const { return written_; }  // as it was opened
  bool from_disk() const;                                 // past the page cache

  // Once it is finished: of written().tensors, and of the padding behind them.
  const std::vector<distckpt::Digest>& digests() const { return digests_; }

  // Throws Error(kCorrupt) naming a tensor that is missing, or of another digest.
  void require_same(const std::vector<distckpt::ModelTensor>& copied,
                    const std::vector<distckpt::Digest>& digests) const;

 private:
  const SharedWork& shared_;
  distckpt::ExecutorOptions options_;
  Checkpoint written_;
  std::vector<distckpt::ModelTensor> tensors_;  // with the padding
  distckpt::CopyPlan plan_;
  std::unique_ptr<distckpt::FileSource> source_;
  std::vector<distckpt::Digest> digests_;
};

}  // namespace ferry::converter
