#include "converter/convert.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <utility>

#include "converter/fingerprint.h"
#include "converter/open/part.h"
#include "converter/option_check.h"
#include "converter/proof.h"
#include "converter/shared_work.h"
#include "converter/write/archive_target.h"
#include "converter/write/hf_target.h"
#include "converter/write/megatron_target.h"
#include "converter/write/target_folder.h"
#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/storage/work_folder.h"

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
    source_ = open(options_.from, source_options());
    source_.files->settle();
    opened_ = summary(source_);
    check_derived(source_);
    choose_target();
    require_effective(options_, source_.location, target_format_);
    select_part();
    // An interrupted run may have published and lacked only its last steps, or have lacked none.
    published_ = options_.resume &&
                 (distckpt::WorkFolder::published_earlier(target_path_) ||
                  (is_checkpoint(target_path_) && !options_.overwrite &&
                   !fs::exists(distckpt::work_folder(target_path_) / distckpt::kJournal)));
    if (!published_)
      refuse_unsafe_target(target_path_, target_format_, source_.location.folder,
                           options_.overwrite);
    tensors_ = with_dtypes(source_.map, source_.tensors, options_.dtype);
    require(is_alone() || target_format_ != Format::kArchive, ErrorKind::kUsage,
            "--to h5: an archive is written by one process; --no-ranks works alone");
    if (options_.dry_run != DryRun::kNo) {
      if (!is_first()) return std::move(report_);
      make_plan(target_path_);
      if (options_.dry_run == DryRun::kRead) read_only(nullptr);
    } else if (is_first()) {
      distckpt::WorkFolder work(target_path_, options_.resume);
      try {
        work.folder().with_its_name([&] { work_in(work); });
      } catch (Error& error) {
        fail(error, work.folder());
        const bool kept = is_worth_keeping(error, work);
        if (kept) work.keep();
        say_what_is_left(error, work, kept);
        throw;
      }
    } else if (!published_) {
      distckpt::HeldFolder work(distckpt::work_folder(target_path_));
      try {
        work.with_its_name([&] { work_along(work); });
      } catch (const Error& error) {
        fail(error, work);
        throw;
      }
    }
    return std::move(report_);
  }

  // It failed because of what an interrupted run had left, which nobody goes on with any more: to
  // begin anew may help.
  bool may_begin_anew() const { return damaged_ && is_alone(); }

 private:
  OpenOptions source_options() const {
    return {.iteration = lacks_iterations(options_.from) ? std::nullopt : options_.iteration,
            .hf_config = options_.hf_config,
            .keep_fp8 = options_.keep_fp8,
            .training_state = options_.format == Format::kTorchDist && !options_.no_save_optim &&
                              options_.selection.is_all(),
            .links = options_.follow_symlinks ? Links::kAll : Links::kInside};
  }

  // One source is all that is published: it is opened again, and is what it was.
  void require_same_source() const {
    with_context([] { return std::string("looking at the source again, before publishing"); },
                 [&] {
                   source_.files->require_unchanged();
                   require(summary(open(source_.location, source_options())) == opened_,
                           ErrorKind::kIo,
                           "{}: its headers are not what they were when the conversion began",
                           source_.location.folder.string());
                 });
  }

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
    planned_ = target_->files(folder);
    folder_ = folder;
    const bool replaces = !published_ && is_first() && fs::exists(target_path_);
    if (replaces && !fs::is_empty(target_path_)) replaceable_files(target_path_);
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

  bool is_first() const { return options_.job.rank == 0; }
  bool is_alone() const { return options_.job.size == 1; }

  void work_in(distckpt::WorkFolder& work) {
    shared_ = SharedWork(published_ ? distckpt::RankOfJob{} : options_.job, work.path());
    if (published_) work.mark_published();
    make_plan(work.output());
    if (published_) {
      require_planned_files(target_path_);
      read_only(&work);
      prove(target_path_);
      require_same_source();
    } else {
      work.expect(target_->files(work.output()));
      copy(work.output());
      prove(work.output());
      require_same_source();
      if (options_.overwrite) {
        work.publish([&](const fs::path& old) { return replaceable_files(old); }, modes());
      } else {
        work.publish({}, modes());
      }
    }
    if (target_format_ == Format::kTorchDist) {
      work.replace_beside(distckpt::kTracker, distckpt::iteration_text(iteration_), modes().file);
    }
  }

  // Rank 0 has the folder; the others help.
  void work_along(distckpt::HeldFolder& work) {
    shared_ = SharedWork(options_.job, work.path(),
                         [&] { distckpt::join_work_folder(target_path_, work); });
    const auto output = work.path() / distckpt::kWorkOutput;
    make_plan(output);
    copy(output);
    prove(output);
  }

  // Tells the others; and later runs, if what was gone on with may be the reason.
  void fail(const Error& error, const distckpt::HeldFolder& work) {
    shared_.fail(error.what());
    const bool by_bytes = error.kind() != ErrorKind::kCancelled &&
                          error.kind() != ErrorKind::kUsage && error.kind() != ErrorKind::kIo;
    if (!resumed_ || !by_bytes) return;
    damaged_ = true;
    distckpt::mark_damaged(work);
  }

  // A later run can go on: after an interruption, when the disk was full, or with the options
  // that the interrupted run had.
  bool is_worth_keeping(const Error& error, const distckpt::WorkFolder& work) const {
    const bool stopped = error.kind() == ErrorKind::kCancelled || error.kind() == ErrorKind::kIo;
    if (published_) return stopped;
    if (damaged_ || (options_.resume && error.kind() == ErrorKind::kUsage)) return true;
    return stopped && fs::exists(work.journal()) && is_source_unchanged();
  }

  static void say_what_is_left(Error& error, const distckpt::WorkFolder& work, bool kept) {
    const bool stopped = error.kind() == ErrorKind::kCancelled || error.kind() == ErrorKind::kIo;
    if (!stopped || !error.hint().empty()) return;
    error.set_hint(kept ? fmt::format("{} holds what was done: the same command with --resume goes "
                                      "on, and without it begins anew",
                                      work.folder().shown().string())
                        : "nothing was left behind: the same command begins anew");
  }

  bool is_source_unchanged() const {
    try {
      source_.files->require_unchanged();
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  std::vector<fs::path> replaceable_files(const fs::path& old) const {
    return converter::replaceable_files(old, target_format_, planned_);
  }

  // Nobody may read the target who could not read the source.
  distckpt::PublishedModes modes() const {
    distckpt::PublishedModes modes;
    for (const auto& [path, file] : source_.files->files()) modes.file &= file.mode;
    for (const auto& folder : {source_.location.root, source_.location.folder})
      modes.folder &= distckpt::identity_of(folder).mode;
    return modes;
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
    if (work != nullptr) {
      // Not the one of copying: there a task that is done is one that was written.
      journal.emplace(work->path() / distckpt::kRereadJournal, own_fingerprint(), true,
                      std::vector{work->journal()});
    }
    const auto source = source_.source();
    auto done = execute(plan_, *source, nullptr, journal ? &*journal : nullptr, "reading");
    report_.copy_seconds = seconds_since(start);
    report_.resumed_bytes = done.resumed_bytes;
    take(std::move(done));
  }

  void copy(const fs::path& output) {
    using Mode = distckpt::WriteFile::Mode;
    const auto start = std::chrono::steady_clock::now();
    const auto own = own_fingerprint();
    if (!shared_.is_first()) shared_.meet(own, progress_);  // once the files are there
    std::vector<fs::path> others;
    if (options_.resume) others = shared_.other_journals(distckpt::kJournal);
    distckpt::Journal journal(shared_.journal(distckpt::kJournal), own, options_.resume, others);
    resumed_ = journal.num_finished() > 0;
    const bool reopen = resumed_ || !shared_.is_first();
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

  Digest own_fingerprint() const { return fingerprint(source_, plan_, target_->layout(), folder_); }

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
  Digest opened_;  // its summary
  Format target_format_ = Format::kTorchDist;
  Iteration iteration_;
  fs::path target_path_;
  std::vector<ModelTensor> tensors_;
  std::set<std::string> shared_padding_;
  bool published_ = false;  // by an interrupted run
  bool resumed_ = false;
  bool damaged_ = false;
  std::unique_ptr<Target> target_;
  fs::path folder_;  // that it writes
  std::vector<fs::path> planned_;
  CopyPlan plan_;
  std::vector<Digest> digests_;
  ConvertReport report_;
};

}  // namespace

ConvertReport convert(const ConvertOptions& options, const ProgressFunction& progress) {
  Conversion conversion(options, progress);
  try {
    return conversion.run();
  } catch (const Error&) {
    if (!conversion.may_begin_anew()) throw;
  }
  auto report = Conversion(options, progress).run();
  report.redone = true;
  return report;
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
