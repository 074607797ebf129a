#include "converter/convert.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <utility>

#include "converter/archive_target.h"
#include "converter/fingerprint.h"
#include "converter/hf_target.h"
#include "converter/megatron_target.h"
#include "converter/option_check.h"
#include "converter/part.h"
#include "converter/proof.h"
#include "converter/shared_work.h"
#include "distckpt/cast.h"
#include "distckpt/error.h"
#include "distckpt/torch_dist.h"
#include "distckpt/work_folder.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::CopyPlan;
using distckpt::Digest;
using distckpt::Iteration;
using distckpt::ModelTensor;
using distckpt::Role;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Absolute, symbolic links resolved, no trailing slash: what a rename must act on.
fs::path resolve_target(const fs::path& path) {
  auto resolved = fs::weakly_canonical(fs::absolute(path));
  if (!resolved.has_filename()) resolved = resolved.parent_path();
  return resolved;
}

bool is_inside(const fs::path& inner, const fs::path& outer) {
  const auto [end, _] = std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end());
  return end == outer.end();
}

// The tensors with the dtypes that they shall have. What Megatron keeps in fp32 (a router's bias)
// stays as it is.
std::vector<ModelTensor> with_dtypes(const ModelMap& map,
                                     std::vector<ModelTensor> tensors,
                                     std::optional<distckpt::DType> dtype) {
  if (!dtype) return tensors;
  std::set<const ModelTensor*> kept;
  for (const auto& tensor : map.megatron) {
    if (tensor.fp32) kept.insert(&tensors[tensor.parts.front().model]);
  }
  for (auto& tensor : tensors) {
    if (kept.contains(&tensor)) continue;
    if (tensor.role != Role::kWeight || !distckpt::is_floating_point(tensor.dtype)) continue;
    require(distckpt::can_cast(tensor.dtype, *dtype), ErrorKind::kLayout,
            "{}: {} cannot be cast to {}", tensor.name, short_name(tensor.dtype),
            short_name(*dtype));
    tensor.dtype = *dtype;
  }
  return tensors;
}

// One conversion, from the options to the report.
class Conversion {
 public:
  Conversion(const ConvertOptions& options, const ProgressFunction& progress)
      : options_(options), progress_(progress) {}

  ConvertReport run() {
    source_ =
        open(options_.from,
             {.iteration = lacks_iterations(options_.from) ? std::nullopt : options_.iteration,
              .hf_config = options_.hf_config,
              .keep_fp8 = options_.keep_fp8,
              .training_state = options_.format == Format::kTorchDist && !options_.no_save_optim &&
                                options_.selection.is_all()});
    check_derived(source_);
    choose_target();
    require_effective(options_, source_.location, target_format_);
    select_part();
    // An interrupted run may have published and lacked only its last steps, or have lacked none.
    const bool published =
        options_.resume && (distckpt::WorkFolder::published_earlier(target_path_) ||
                            (is_checkpoint(target_path_) && !options_.overwrite &&
                             !fs::exists(distckpt::work_folder(target_path_))));
    if (!published) refuse_unsafe_target();
    tensors_ = with_dtypes(source_.map, source_.tensors, options_.dtype);
    shared_ = SharedWork(options_.job, distckpt::work_folder(target_path_));
    require(shared_.is_alone() || target_format_ != Format::kArchive, ErrorKind::kUsage,
            "--to h5: an archive is written by one process; --no-ranks works alone");
    if (options_.dry_run != DryRun::kNo) {
      if (!shared_.is_first()) return std::move(report_);
      make_plan(target_path_);
      if (options_.dry_run == DryRun::kRead) read_only(nullptr);
      return std::move(report_);
    }
    if (!shared_.is_first()) {
      if (!published) work_along();
      return std::move(report_);
    }
    distckpt::WorkFolder work(target_path_, options_.resume);
    try {
      make_plan(work.output());
      if (published) {
        require_planned_files(target_path_);
        read_only(&work);
        shared_ = SharedWork({}, work.path());
        prove(target_path_);
      } else {
        copy(work.output());
        prove(work.output());
        work.publish(options_.overwrite);
      }
      if (target_format_ == Format::kTorchDist) {
        distckpt::replace_text(target_path_.parent_path() / distckpt::kTracker,
                               distckpt::iteration_text(iteration_));
      }
    } catch (Error& error) {
      shared_.fail(error.what());
      // What can be gone on with is kept: after an interruption, or when the disk was full.
      const bool can_resume =
          error.kind() == ErrorKind::kCancelled || error.kind() == ErrorKind::kIo;
      const bool kept = options_.resume || (can_resume && fs::exists(work.journal()));
      if (kept) work.keep();
      if (can_resume && error.hint().empty()) {
        error.set_hint(kept ? fmt::format("{} holds what was done: the same command with --resume "
                                          "goes on, and without it begins anew",
                                          work.path().string())
                            : "nothing was left behind: the same command begins anew");
      }
      throw;
    }
    return std::move(report_);
  }

 private:
  void choose_target() {
    const auto source_format = source_.location.format;
    const bool to_hf = source_.megatron_names || source_format == Format::kArchive;
    target_format_ = options_.format.value_or(to_hf ? Format::kHuggingFace : Format::kTorchDist);
    iteration_ = source_.location.iteration.value_or(options_.iteration.value_or(Iteration{}));
    target_path_ = resolve_target(options_.to);
    if (target_format_ == Format::kTorchDist)
      target_path_ /= distckpt::iteration_folder(iteration_);
    report_.source_format = source_format;
    report_.target_format = target_format_;
    report_.source = source_.location.folder;
    report_.target = target_path_;
    report_.family = source_.map.config.family;
    report_.ranks = options_.job.size;
    report_training_state();
  }

  // What of the training run goes along, and what stays.
  void report_training_state() {
    if (!source_.training) {
      report_.num_training_state = static_cast<std::int64_t>(source_.training_state.size());
      return;
    }
    const auto& training = *source_.training;
    report_.optimizer_form = training.optimizer.form;
    report_.optimizer_kinds = training.optimizer.kinds;
    report_.training_notes = training.notes;
    if (training.rng.empty()) return;
    if (keeps_rng(training, options_.parallel)) {
      report_.rng = true;
    } else {
      report_.training_notes.push_back(
          fmt::format("rng_state was left out: it is that of TP {}, PP {}",
                      training.parallel.tensor_model_parallel_size,
                      training.parallel.pipeline_model_parallel_size));
    }
  }

  void select_part() {
    if (!options_.selection.is_all()) {
      options_.selection.require_matches(source_.tensors);
      require(source_.hf.has_value(), ErrorKind::kUsage,
              "{}: a part of it needs a place to say so: name the folder of config.json with "
              "--hf-config",
              source_.location.folder.string());
      restrict_checkpoint(source_, options_.selection);
    }
    if (source_.hf) report_.part = source_.hf->part;
  }

  static bool is_checkpoint(const fs::path& folder) {
    return fs::is_directory(folder) &&
           (is_hf_folder(folder) || distckpt::is_torch_dist(folder) || is_archive(folder));
  }

  // An iteration's folder beside the files of another checkpoint would hide that one.
  void refuse_checkpoint_as_root() const {
    const auto root = target_path_.parent_path();
    if (target_format_ != Format::kTorchDist || !fs::is_directory(root)) return;
    const bool has_iterations = fs::exists(root / distckpt::kTracker);
    if (has_iterations || !holds_checkpoint(root)) return;
    throw Error(ErrorKind::kUsage,
                fmt::format("{}: is a checkpoint of its own, which {} in it would hide",
                            root.string(), target_path_.filename().string()),
                "choose another target");
  }

  // The target that is there has the files that this run would write; what they hold is proved.
  void require_planned_files(const fs::path& folder) const {
    for (const auto& file : report_.files) {
      std::error_code error;
      const auto size = fs::file_size(folder / file.name, error);
      // An archive's size is not known before it is written.
      const bool as_planned =
          !target_->knows_file_sizes() || static_cast<std::int64_t>(size) == file.bytes;
      if (!error && as_planned) continue;
      throw Error(ErrorKind::kUsage,
                  fmt::format("{}: exists already, and is not what this run would write ({} {})",
                              folder.string(), file.name,
                              error ? "is missing" : fmt::format("holds {} bytes", size)),
                  "choose another target, or replace it with --overwrite");
    }
  }

  void refuse_unsafe_target() const {
    refuse_checkpoint_as_root();
    const auto source = fs::weakly_canonical(source_.location.folder);
    require(!is_inside(source, target_path_) && !is_inside(target_path_, source), ErrorKind::kUsage,
            "{}: is the source, lies in it or holds it", target_path_.string());
    if (!fs::exists(target_path_)) return;
    require(fs::is_directory(target_path_), ErrorKind::kUsage,
            "{}: exists already, and is not a folder", target_path_.string());
    if (fs::is_empty(target_path_)) return;
    if (!options_.overwrite) {
      throw Error(ErrorKind::kUsage, fmt::format("{}: exists already", target_path_.string()),
                  distckpt::WorkFolder::published_earlier(target_path_)
                      ? "an interrupted run published it: --resume takes the last steps"
                      : "choose another target, or replace it with --overwrite");
    }
    require(is_checkpoint(target_path_), ErrorKind::kUsage,
            "{}: is not a checkpoint, and so is not overwritten", target_path_.string());
  }

  void make_plan(const fs::path& folder) {
    if (target_format_ == Format::kArchive) {
      target_ = make_archive_target(
          source_, tensors_, {.dtype = options_.dtype, .max_shard_size = options_.max_shard_size},
          folder);
    } else if (target_format_ == Format::kHuggingFace) {
      target_ = make_hf_target(source_, tensors_,
                               {.dtype = options_.dtype, .max_shard_size = options_.max_shard_size},
                               folder);
    } else {
      target_ = make_megatron_target(
          source_, tensors_,
          {.parallel = options_.parallel, .iteration = iteration_, .dtype = options_.dtype},
          folder);
    }
    keep_shared_padding();
    try {
      plan_ = distckpt::plan_copy(
          tensors_, source_.side(), target_->side(),
          options_.dtype ? distckpt::Transform::kCast : distckpt::Transform::kCastExact);
    } catch (Error& error) {
      if (!report_.part.empty() && target_format_ == Format::kTorchDist) {
        error.set_hint(
            "a Megatron-Core tensor is written whole: q with k and v, gate with up, all layers and "
            "experts; take all of it or nothing, or write any part with --to hf");
      }
      throw;
    }
    const auto budget = distckpt::staging_budget(plan_, executor_options(nullptr));
    report_.threads = budget.threads;
    report_.staging_bytes = budget.bytes;
    report_.dry_run = options_.dry_run;
    report_.bytes = plan_.num_bytes();
    for (const auto& planned : plan_.tensors) {
      if (planned.tensor.role == Role::kWeight)
        report_.num_parameters += planned.tensor.shape.product();
      if (planned.tensor.role == Role::kWeight || planned.tensor.role == Role::kDerived)
        ++report_.num_tensors;
      if (!planned.replicas.empty() && planned.tensor.role == Role::kWeight)
        report_.second_copies.push_back(planned.tensor.name);
      report_.num_pieces += static_cast<std::int64_t>(distckpt::copy_ops(planned).size());
    }
    for (const auto& [path, bytes] : files_of(target_->layout())) {
      report_.files.push_back({.name = path.lexically_relative(folder).string(), .bytes = bytes});
    }
  }

  // Padding of the same rows on both sides is carried over; other padding is dropped and reported.
  void keep_shared_padding() {
    shared_padding_ = target_->share_padding(source_.layout, source_.links, tensors_);
    if (!options_.dtype) return;
    for (auto& tensor : tensors_) {
      if (tensor.role == Role::kPadding && !tensor.name.starts_with(kStatePrefix))
        tensor.dtype = *options_.dtype;
    }
  }

  // Rank 0 has the folder; the others help.
  void work_along() {
    const auto output = distckpt::work_folder(target_path_) / distckpt::kWorkOutput;
    make_plan(output);
    try {
      copy(output);
      prove(output);
    } catch (const Error& error) {
      shared_.fail(error.what());
      throw;
    }
  }

  distckpt::ExecutorOptions executor_options(distckpt::Journal* journal) const {
    return {.threads = options_.threads,
            .max_memory = options_.max_memory,
            .journal = journal,
            .on_compared = {}};
  }

  distckpt::ExecuteReport execute(const CopyPlan& plan,
                                  distckpt::FileSource& source,
                                  distckpt::BoxSink* sink,
                                  distckpt::Journal* journal,
                                  std::string_view stage,
                                  bool whole = true) {
    auto options = executor_options(journal);
    if (!whole) shared_.limit(options);
    auto report =
        wait_reporting(distckpt::Executor(options).submit(plan, source, sink), stage, progress_);
    source.verify_checksums();
    return report;
  }

  // The source's digests, from the journal of an earlier run as far as it has one.
  void read_only(const distckpt::WorkFolder* work) {
    const auto start = std::chrono::steady_clock::now();
    std::optional<distckpt::Journal> journal;
    if (work != nullptr)
      journal.emplace(work->journal(), fingerprint(source_, plan_, target_->layout()), true);
    const auto source = source_.source();
    auto done = execute(plan_, *source, nullptr, journal ? &*journal : nullptr, "reading");
    report_.copy_seconds = seconds_since(start);
    report_.resumed_bytes = done.resumed_bytes;
    take(std::move(done));
  }

  void copy(const fs::path& output) {
    using Mode = distckpt::WriteFile::Mode;
    const auto start = std::chrono::steady_clock::now();
    const auto own = fingerprint(source_, plan_, target_->layout());
    if (!shared_.is_first()) shared_.meet(own, progress_);  // once the files are there
    std::vector<fs::path> others;
    if (options_.resume) others = shared_.other_journals(distckpt::kJournal);
    distckpt::Journal journal(shared_.journal(distckpt::kJournal), own, options_.resume, others);
    const bool reopen = journal.num_finished() > 0 || !shared_.is_first();
    auto& sink = target_->open_sink(plan_, journal, reopen ? Mode::kReopen : Mode::kCreate);
    if (shared_.is_first()) shared_.meet(own, progress_);
    auto done = execute(plan_, *source_.source(), &sink, &journal, "copying", false);
    report_.resumed_bytes = done.resumed_bytes;
    if (!shared_.is_alone()) {
      target_->sync_sink();
      shared_.barrier("copied");
      if (shared_.is_first()) done = merge_journals(own);
    }
    if (shared_.is_first()) target_->close_sink();
    shared_.barrier("written");
    for (auto& file : report_.files) {
      file.bytes = static_cast<std::int64_t>(fs::file_size(output / file.name));
    }
    report_.copy_seconds = seconds_since(start);
    take(std::move(done));
  }

  // Everything is done: the journals of all ranks know the digests and the checksums.
  distckpt::ExecuteReport merge_journals(const Digest& own) {
    distckpt::Journal all(shared_.journal(distckpt::kJournal), own, true,
                          shared_.other_journals(distckpt::kJournal));
    auto& sink = target_->open_sink(plan_, all, distckpt::WriteFile::Mode::kReopen);
    return execute(plan_, *source_.source(), &sink, &all, "");
  }

  void take(distckpt::ExecuteReport done) {
    digests_ = std::move(done.digests);
    report_.nonzero_padding = std::move(done.nonzero_padding);
    report_.model_digest = converter::model_digest(tensors_, digests_);
  }

  void prove(const fs::path& folder) {
    const auto start = std::chrono::steady_clock::now();
    Proof proof(folder,
                {.keep_fp8 = options_.keep_fp8, .training_state = source_.training.has_value()},
                shared_padding_, shared_, executor_options(nullptr));
    proof.read(progress_);
    shared_.leave("proved");
    if (!shared_.is_first()) return;
    proof.finish();
    proof.require_same(tensors_, digests_);
    report_.proved = true;
    report_.proof_from_disk = proof.from_disk();
    report_.proof_seconds = seconds_since(start);
  }

  const ConvertOptions& options_;
  const ProgressFunction& progress_;
  SharedWork shared_{{}, {}};
  Checkpoint source_;
  Format target_format_ = Format::kTorchDist;
  Iteration iteration_;
  fs::path target_path_;
  std::vector<ModelTensor> tensors_;
  std::set<std::string> shared_padding_;
  std::unique_ptr<Target> target_;
  CopyPlan plan_;
  std::vector<Digest> digests_;
  ConvertReport report_;
};

}  // namespace

ConvertReport convert(const ConvertOptions& options, const ProgressFunction& progress) {
  return Conversion(options, progress).run();
}

std::string model_digest(const std::vector<ModelTensor>& tensors,
                         const std::vector<Digest>& digests) {
  std::vector<distckpt::NamedDigest> named;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].role == Role::kWeight)
      named.push_back({.name = tensors[i].name, .digest = digests[i]});
  }
  return to_string(distckpt::digest_model(std::move(named)));
}

}  // namespace ferry::converter
