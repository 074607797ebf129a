#include "converter/proof.h"

#include <map>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/execute/journal.h"
#include "distckpt/storage/filenames.h"

namespace ferry::converter {
namespace {

const distckpt::Digest kNothing;  // a proof is never resumed

}  // namespace

Proof::Proof(const std::filesystem::path& folder,
             const OpenOptions& how,
             const std::set<std::string>& padding,
             const SharedWork& shared,
             distckpt::ExecutorOptions options)
    : shared_(shared),
      options_(std::move(options)),
      written_(with_context([] { return std::string("proving what was written"); },
                            [&] { return open(folder, how); })),
      tensors_(written_.tensors) {
  auto links = written_.links;
  distckpt::promote_padding(padding, written_.layout, links, tensors_);
  plan_ = distckpt::plan_read(tensors_, {.layout = &written_.layout, .map = &links});
  source_ = written_.source(distckpt::ReadMode::kDirect);
}

void Proof::read(const ProgressFunction& progress) {
  auto options = options_;
  std::optional<distckpt::Journal> journal;
  if (!shared_.is_alone()) {
    shared_.limit(options);
    journal.emplace(shared_.journal(distckpt::kProofJournal), kNothing, false);
    options.journal = &*journal;
  }
  digests_ = wait_reporting(distckpt::Executor(options).submit(plan_, *source_, nullptr), "proving",
                            progress)
                 .digests;
  source_->verify_checksums();
}

void Proof::finish() {
  if (shared_.is_alone()) return;
  distckpt::Journal all(shared_.journal(distckpt::kProofJournal), kNothing, true,
                        shared_.other_journals(distckpt::kProofJournal));
  auto options = options_;
  options.journal = &all;
  digests_ =
      wait_reporting(distckpt::Executor(options).submit(plan_, *source_, nullptr), "", {}).digests;
  source_->verify_checksums();
}

bool Proof::from_disk() const {
  return source_->reads_directly();
}

void Proof::require_same(const std::vector<distckpt::ModelTensor>& copied,
                         const std::vector<distckpt::Digest>& digests) const {
  std::map<std::string_view, std::size_t> index;
  for (std::size_t i = 0; i < tensors_.size(); ++i) index.emplace(tensors_[i].name, i);
  std::size_t proved = 0;
  for (std::size_t i = 0; i < copied.size(); ++i) {
    const auto at = index.find(copied[i].name);
    const bool lost = at == index.end();
    // save_pretrained writes no derived tensors, and neither does the canonical form.
    if (lost && copied[i].role == distckpt::Role::kDerived) continue;
    if (lost || digests_[at->second] != digests[i]) {
      throw Error(ErrorKind::kCorrupt,
                  fmt::format("{}: what was written is not what was read{}", copied[i].name,
                              lost ? ": it is missing" : ""),
                  "the disk or the memory may be faulty; nothing was published. Run it again "
                  "without --resume");
    }
    ++proved;
  }
  require(proved == tensors_.size(), ErrorKind::kBug, "{} tensors were written, {} were copied",
          tensors_.size(), proved);
}

}  // namespace ferry::converter
