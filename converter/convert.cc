#include "converter/convert.h"

#include <functional>
#include <optional>
#include <utility>

#include "converter/conversion_plan.h"
#include "converter/digest_checkpoint.h"
#include "converter/families/hf_config.h"
#include "converter/proof.h"
#include "converter/shared_work.h"
#include "converter/write/megatron_target.h"
#include "converter/write/publication.h"
#include "converter/write/run_config.h"
#include "converter/write/store_target.h"
#include "converter/write/target_folder.h"
#include "distckpt/base/error.h"
#include "distckpt/base/interruption.h"
#include "distckpt/base/stopwatch.h"
#include "distckpt/execute/upload_sink.h"
#include "distckpt/storage/remote_store.h"
#include "distckpt/storage/work_folder.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::Digest;
using distckpt::Role;

bool is_stopped(const Error& error) {
  return error.kind() == ErrorKind::kCancelled || error.kind() == ErrorKind::kIo;
}

// The source, read and digested, and copied unless it was only read.
struct Copied {
  std::vector<Digest> digests{};  // of PlannedConversion::tensors; on rank 0
  std::vector<distckpt::NonZeroPadding> nonzero_padding{};
  std::vector<FileSize> files{};
  std::int64_t resumed_bytes = 0;
  double seconds = 0;
};

struct Proved {
  bool from_disk = false;
  double seconds = 0;
};

// One conversion, from the options to the report.
class Conversion {
 public:
  Conversion(const ConvertOptions& options, const ProgressFunction& progress)
      : options_(options), progress_(progress), opened_(open_conversion(options)) {}

  ConvertReport run() {
    const bool first = options_.job.rank == 0;
    if (options_.dry_run != DryRun::kNo) return first ? dry_run() : ConvertReport{};
    if (first) return publish();
    if (!opened_.published) help();
    return {};
  }

  // True if run() failed because of the files of an interrupted run, which no run goes on with any
  // more: to begin anew may help.
  bool may_begin_anew() const { return damaged_ && options_.job.size == 1; }

 private:
  ConvertReport dry_run() const {
    const auto planned = plan_conversion(opened_, options_, opened_.target);
    require_writable(opened_.target);
    if (options_.dry_run == DryRun::kPlan) return report(planned, {.files = planned.tensor_files});
    auto copied = read(planned, nullptr);
    finish_amendment(copied);
    return report(planned, std::move(copied));
  }

  // Rank 0 owns the working folder, alone or with helpers.
  ConvertReport publish() {
    distckpt::WorkFolder work(to_store_ ? buffer_folder(opened_.target) : opened_.target,
                              options_.resume && !streams_, opened_.target);
    try {
      return work.folder().with_its_name([&] {
        if (to_store_) return write_to_store(work);
        return opened_.published ? finish(work) : write(work);
      });
    } catch (Error& error) {
      fail(error, work.folder());
      if (streams_) say_what_is_sent(error);
      const bool kept = !streams_ && is_worth_keeping(error, work);
      if (kept) work.keep();
      say_what_is_left(error, work, kept);
      throw;
    }
  }

  ConvertReport write(distckpt::WorkFolder& work) {
    shared_ = SharedWork(options_.job, work.path());
    const auto planned = plan_conversion(opened_, options_, work.output());
    work.expect(planned.files);
    auto copied = copy(planned);
    const auto proved = check(planned, copied, work.output());
    std::function<std::vector<fs::path>(const fs::path&)> replaceable;
    if (options_.overwrite) {
      replaceable = [&](const fs::path& old) {
        return replaceable_files(old, opened_.format, planned.files);
      };
    }
    work.publish(replaceable, modes());
    set_tracker(work);
    return report(planned, std::move(copied), proved);
  }

  // Writes to S3: the working folder holds what is not sent yet, of an archive everything until it
  // is proved.
  ConvertReport write_to_store(distckpt::WorkFolder& work) {
    shared_ = SharedWork({}, work.path());
    const auto planned = plan_conversion(opened_, options_, work.output());
    work.expect(planned.files);
    StoreTarget store(opened_.target, work.output(), planned.files, options_.overwrite);
    auto copied = streams_ ? send(planned, store) : copy(planned);
    const auto proved = check(planned, copied, streams_ ? opened_.target : work.output());
    store.publish();
    const distckpt::InterruptedBy nothing({});  // what is published has its tracker
    if (opened_.format == Format::kTorchDist)
      put_beside(opened_.target, distckpt::kTracker, distckpt::iteration_text(opened_.iteration));
    return report(planned, std::move(copied), proved);
  }

  Copied send(const PlannedConversion& planned, StoreTarget& store) const {
    const distckpt::Stopwatch stopwatch;
    auto& target = dynamic_cast<FileTarget&>(*planned.target);
    auto& files = target.open_leaving_files();
    std::vector<distckpt::UploadedFile> uploads;
    for (const auto& file : planned.tensor_files)
      uploads.push_back(store.weights(file.name, file.bytes));
    distckpt::UploadSink sink(files, std::move(uploads), options_.resume,
                              [&](std::uint32_t range) { target.finish_range(files, range); });
    target.begin_files(files);
    auto done = execute(planned, copying_options(planned, options_), &sink, "copying");
    target.close_sink();
    store.unseal();
    sink.complete();
    store.weights_are_there();
    return {.digests = std::move(done.digests),
            .nonzero_padding = std::move(done.nonzero_padding),
            .files = planned.tensor_files,
            .resumed_bytes = sink.kept_bytes(),
            .seconds = stopwatch.seconds()};
  }

  void say_what_is_sent(Error& error) const {
    if (!is_stopped(error) || !error.hint().empty()) return;  // first what there is to mend
    error.set_hint(options_.resume
                       ? "what was sent stays in the store: the same command sends the rest"
                       : "what was sent was removed; with --resume an interrupted run leaves it, "
                         "and the next one sends the rest");
  }

  // An interrupted run published the target: it is proved, and the last steps are done.
  ConvertReport finish(distckpt::WorkFolder& work) {
    shared_ = SharedWork({}, work.path());
    work.mark_published();
    const auto planned = plan_conversion(opened_, options_, work.output());
    require_planned_files(planned);
    auto copied = read(planned, &work);
    const auto proved = check(planned, copied, opened_.target);
    set_tracker(work);
    return report(planned, std::move(copied), proved);
  }

  // The other ranks do their share in the working folder of rank 0.
  void help() {
    distckpt::HeldFolder work(distckpt::work_folder(opened_.target));
    try {
      work.with_its_name([&] {
        shared_ = SharedWork(options_.job, work.path(),
                             [&] { distckpt::join_work_folder(opened_.target, work); });
        const auto output = work.path() / distckpt::kWorkOutput;
        const auto planned = plan_conversion(opened_, options_, output);
        prove(planned, copy(planned), output);
      });
    } catch (const Error& error) {
      fail(error, work);
      throw;
    }
  }

  // The source's digests, from the journal of an earlier run as far as it has one.
  Copied read(const PlannedConversion& planned, const distckpt::WorkFolder* work) const {
    const distckpt::Stopwatch stopwatch;
    std::optional<distckpt::Journal> journal;
    if (work != nullptr) {
      // Not the one of copying: there a task that is done is one that was written.
      journal.emplace(work->path() / distckpt::kRereadJournal, fingerprint(opened_, planned), true,
                      std::vector{work->journal()});
    }
    auto options = copying_options(planned, options_);
    options.journal = journal ? &*journal : nullptr;
    auto done = execute(planned, std::move(options), nullptr, "reading");
    return {.digests = std::move(done.digests),
            .nonzero_padding = std::move(done.nonzero_padding),
            .files = planned.tensor_files,
            .resumed_bytes = done.resumed_bytes,
            .seconds = stopwatch.seconds()};
  }

  // This rank's share of the copies; rank 0 closes the files.
  Copied copy(const PlannedConversion& planned) {
    using Mode = distckpt::WriteFile::Mode;
    const distckpt::Stopwatch stopwatch;
    const auto own = fingerprint(opened_, planned);
    auto& target = *planned.target;
    std::optional<distckpt::Journal> journal;
    distckpt::BoxSink* sink = nullptr;
    shared_.meet(own, progress_, [&] {  // the files are made by rank 0
      std::vector<fs::path> others;
      if (options_.resume) others = shared_.other_journals(distckpt::kJournal);
      journal.emplace(shared_.journal(distckpt::kJournal), own, options_.resume, others);
      resumed_ = journal->num_finished() > 0;
      const bool reopen = resumed_ || !shared_.is_first();
      sink = &target.open_sink(planned.copy, *journal, reopen ? Mode::kReopen : Mode::kCreate);
    });
    auto options = copying_options(planned, options_);
    options.journal = &*journal;
    shared_.limit(options);
    auto done = execute(planned, std::move(options), sink, "copying");
    Copied copied{.files = planned.tensor_files, .resumed_bytes = done.resumed_bytes};
    if (!shared_.is_alone()) target.sync_sink();
    shared_.barrier("copied");
    shared_.by_first("written", [&] {
      if (!shared_.is_alone()) done = merge_journals(planned, own);
      target.close_sink();
    });
    for (auto& file : copied.files)
      file.bytes = static_cast<std::int64_t>(fs::file_size(planned.folder / file.name));
    copied.seconds = stopwatch.seconds();
    copied.digests = std::move(done.digests);
    copied.nonzero_padding = std::move(done.nonzero_padding);
    return copied;
  }

  // Everything is done: the journals of all ranks know the digests and the checksums.
  distckpt::ExecuteReport merge_journals(const PlannedConversion& planned, const Digest& own) {
    distckpt::Journal all(shared_.journal(distckpt::kJournal), own, true,
                          shared_.other_journals(distckpt::kJournal));
    auto options = copying_options(planned, options_);
    options.journal = &all;
    auto& sink = planned.target->open_sink(planned.copy, all, distckpt::WriteFile::Mode::kReopen);
    return execute(planned, std::move(options), &sink, "");
  }

  distckpt::ExecuteReport execute(const PlannedConversion& planned,
                                  distckpt::ExecutorOptions options,
                                  distckpt::BoxSink* sink,
                                  std::string_view stage) const {
    const auto source = opened_.source.source();
    if (auto* const amendment = options_.amendment) {
      options.on_read = [amendment, this](auto tensor, auto element, auto elements) {
        if (tensor < opened_.source.tensors.size())  // else padding
          amendment->amend(tensor, element, elements);
      };
    }
    const distckpt::Executor executor(std::move(options));
    auto report = wait_reporting(executor.submit(planned.copy, *source, sink), stage, progress_);
    source->verify_checksums();
    return report;
  }

  // All that has to hold before anything is published.
  Proved check(const PlannedConversion& planned, const Copied& copied, const fs::path& folder) {
    finish_amendment(copied);
    const auto proved = prove(planned, copied, folder);
    require_same_source(opened_, options_);
    return proved;
  }

  // The amended tensors became those that the amendment names.
  void finish_amendment(const Copied& copied) const {
    if (options_.amendment != nullptr) options_.amendment->finish(copied.digests);
  }

  // Every rank reads its share of `folder`; rank 0 compares all digests with those of the source.
  Proved prove(const PlannedConversion& planned, const Copied& copied, const fs::path& folder) {
    const distckpt::Stopwatch stopwatch;
    const bool training_state = opened_.source.training.has_value();
    Proof proof(folder,
                {.keep_quantized = options_.keep_quantized || options_.quantize,
                 .training_state = training_state},
                planned.shared_padding, shared_, executor_options(options_));
    proof.read(progress_);
    shared_.leave("proved");
    if (!shared_.is_first()) return {};
    proof.finish();
    proof.require_same(planned.tensors, copied.digests);
    return {.from_disk = proof.from_disk(), .seconds = stopwatch.seconds()};
  }

  void set_tracker(const distckpt::WorkFolder& work) const {
    if (opened_.format != Format::kTorchDist) return;
    work.replace_beside(distckpt::kTracker, distckpt::iteration_text(opened_.iteration),
                        modes().file);
  }

  // The target that is there has the files that this run would write; the proof compares what they
  // hold.
  void require_planned_files(const PlannedConversion& planned) const {
    for (const auto& file : planned.tensor_files) {
      std::error_code error;
      const auto size = fs::file_size(opened_.target / file.name, error);
      // An archive's size is not known before it is written.
      const bool as_planned =
          !planned.target->knows_file_sizes() || static_cast<std::int64_t>(size) == file.bytes;
      if (!error && as_planned) continue;
      throw Error(ErrorKind::kUsage,
                  fmt::format("{}: exists already, and is not what this run would write ({} {})",
                              opened_.target.string(), file.name,
                              error ? "is missing" : fmt::format("holds {} bytes", size)),
                  "choose another target, or replace it with --overwrite");
    }
  }

  distckpt::PublishedModes modes() const {
    auto modes = modes_like({&opened_.source});
    if (options_.amendment != nullptr) {
      for (const auto& path : options_.amendment->sources()) modes.narrow_all(path);
    }
    return modes;
  }

  // Tells the other ranks, and later runs if the files of an interrupted run may be the reason.
  void fail(const Error& error, const distckpt::HeldFolder& work) {
    shared_.fail(error.what());
    if (!resumed_ || is_stopped(error) || error.kind() == ErrorKind::kUsage) return;
    damaged_ = true;
    distckpt::mark_damaged(work);
  }

  // A later run can go on: after an interruption, when the disk was full, or with the options
  // that the interrupted run had.
  bool is_worth_keeping(const Error& error, const distckpt::WorkFolder& work) const {
    if (options_.memory != nullptr) return false;  // nobody names its tensors again
    if (opened_.published) return is_stopped(error);
    if (damaged_ || (options_.resume && error.kind() == ErrorKind::kUsage)) return true;
    return is_stopped(error) && fs::exists(work.journal()) && is_source_unchanged();
  }

  bool is_source_unchanged() const {
    try {
      opened_.source.files->require_unchanged();
      return true;
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kCancelled;  // not asked: the next run compares them
    }
  }

  static void say_what_is_left(Error& error, const distckpt::WorkFolder& work, bool kept) {
    if (!is_stopped(error) || !error.hint().empty()) return;
    error.set_hint(kept ? fmt::format("{} holds what was done: the same command with --resume goes "
                                      "on, and without it begins anew",
                                      work.folder().shown().string())
                        : "nothing was left behind: the same command begins anew");
  }

  ConvertReport report(const PlannedConversion& planned,
                       Copied copied,
                       const std::optional<Proved>& proved = {}) const {
    const auto& source = opened_.source;
    ConvertReport report{.source_format = source.location.format,
                         .target_format = opened_.format,
                         .source = source.location.folder,
                         .target = opened_.target,
                         .family = source.map.config.family,
                         .part = source.hf ? source.hf->part : Part(),
                         .bytes = planned.copy.num_bytes(),
                         .files = std::move(copied.files),
                         .threads = planned.staging.threads,
                         .staging_bytes = planned.staging.bytes,
                         .ranks = options_.job.size,
                         .dry_run = options_.dry_run,
                         .resumed_bytes = copied.resumed_bytes,
                         .copy_seconds = copied.seconds,
                         .proof_seconds = proved ? proved->seconds : 0,
                         .proved = proved.has_value(),
                         .proof_from_disk = proved && proved->from_disk && !streams_,
                         .proof_from_store = proved && streams_,
                         .nonzero_padding = std::move(copied.nonzero_padding)};
    if (!copied.digests.empty())
      report.model_digest = model_digest(planned.tensors, copied.digests);
    for (const auto& one : planned.copy.tensors) {
      const bool weight = one.tensor.role == Role::kWeight;
      if (weight) report.num_parameters += num_parameters(one.tensor);
      if (weight || one.tensor.role == Role::kDerived) ++report.num_tensors;
      const auto is_second = [&](const distckpt::Cover& cover) {  // and not the same, rounded
        return cover.front().less == one.source.front().less;
      };
      if (weight && std::ranges::any_of(one.replicas, is_second))
        report.second_copies.push_back(one.tensor.name);
      report.num_pieces += static_cast<std::int64_t>(distckpt::copy_ops(one).size());
    }
    if (opened_.format == Format::kTorchDist) {
      const auto layout = written_layout(*source.map.family,
                                         options_.megatron_layout.value_or(source.megatron_layout));
      report.run_config_problem = run_config_problem(source, layout).value_or("");
    }
    report.num_adapter_tensors = source.num_adapter_tensors;
    add_training_state(report);
    if (source.untied) {
      report.training_notes.push_back(
          fmt::format("{} is not the embedding, though config.json ties them: they are untied, as "
                      "transformers does it",
                      source.map.family->names->output_layer()));
    }
    if (opened_.format == Format::kHuggingFace && source.hf) {
      const auto lacking = class_that_transformers_lacks(
          source.map.config, source.hf->config_text(), source.hf->config_source());
      if (lacking)
        report.training_notes.push_back(fmt::format(
            "transformers has no {}: docs/converting.md says how to open it", *lacking));
    }
    return report;
  }

  // The parts of the training run that go along, and those that stay.
  void add_training_state(ConvertReport& report) const {
    const auto& source = opened_.source;
    if (!source.training) {
      report.num_training_state = static_cast<std::int64_t>(source.training_state.size());
      return;
    }
    const auto& training = *source.training;
    report.optimizer_form = training.optimizer.form;
    report.optimizer_kinds = training.optimizer.kinds;
    report.training_notes = training.notes;
    if (training.rng.empty()) return;
    report.rng = keeps_rng(training, options_.parallel);
    if (report.rng) return;
    report.training_notes.push_back(
        fmt::format("rng_state was left out: it is that of TP {}, PP {}",
                    training.parallel.tensor_model_parallel_size,
                    training.parallel.pipeline_model_parallel_size));
  }

  const ConvertOptions& options_;
  const ProgressFunction& progress_;
  const OpenedConversion opened_;
  const bool to_store_ = distckpt::is_remote(opened_.target);
  // Sends while it reads. An archive's first bytes are known last.
  const bool streams_ = to_store_ && opened_.format != Format::kArchive;
  SharedWork shared_{{}, {}};
  bool resumed_ = false;
  bool damaged_ = false;
};

}  // namespace

Format format_like_source(const ConvertOptions& options) {
  const auto own = locate(options.from, options.iteration).format;
  const bool written = own == Format::kArchive || own == Format::kTorchDist;
  return written ? own : Format::kHuggingFace;
}

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

}  // namespace ferry::converter
