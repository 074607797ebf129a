#include "converter/delta/make_delta.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <utility>

#include "converter/delta/delta_writer.h"
#include "converter/delta/seen_blocks.h"
#include "converter/delta/slime_version.h"
#include "converter/families/megatron_args.h"
#include "converter/write/publication.h"
#include "converter/write/target_folder.h"
#include "distckpt/base/error.h"
#include "distckpt/base/stopwatch.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

class DeltaMaker {
 public:
  explicit DeltaMaker(const MakeDeltaOptions& options) : options_(options), pair_(options.ends) {
    target_ = resolve_target(options.to);
    if (options.form == DeltaTarget::kSlime) place_version();
    require_same_tensors();
    take_tensors();
    take_files();
  }

  MakeDeltaReport run(const ProgressFunction& progress) {
    Publication target(target_);
    return target.work().folder().with_its_name([&] { return make(target, progress); });
  }

 private:
  MakeDeltaReport make(Publication& target, const ProgressFunction& progress) {
    const distckpt::Stopwatch stopwatch;
    const auto folder = target.output();
    Spool spool(target.work().path());
    const auto writer = make_writer(spool);
    std::vector<fs::path> names;
    for (const auto& name : changed_files_) names.push_back(fs::path(kDeltaFiles) / name);
    std::ranges::copy(writer->files(), std::back_inserter(names));
    target.expect(names);
    compare(*writer, progress);
    writer->write(folder, manifest_);
    for (const auto& name : changed_files_) {
      fs::create_directories(folder / kDeltaFiles);
      pair_.right().hf->file(name).copy_to(folder / kDeltaFiles / name);
    }
    pair_.left().files->require_unchanged();
    pair_.right().files->require_unchanged();
    auto report = make_report();
    for (const auto& name : names)
      report.stored_bytes += static_cast<std::int64_t>(fs::file_size(folder / name));
    target.publish(modes_like({&pair_.left(), &pair_.right()}));
    report.seconds = stopwatch.seconds();
    return report;
  }

  void place_version() {
    const auto versions = slime_versions(target_);
    version_ = options_.version.value_or(versions.empty() ? 1 : versions.rbegin()->first + 1);
    require(version_ > 0, ErrorKind::kUsage, "--version {}: version 0 is the base itself",
            version_);
    require(versions.empty() || version_ <= versions.rbegin()->first + 1, ErrorKind::kUsage,
            "--version {}: version {} is the last that is there, and each delta is applied to the "
            "one before it",
            version_, versions.empty() ? 0 : versions.rbegin()->first);
    target_ /= slime_version_folder(version_);
  }

  void require_same_tensors() const {
    if (const auto& unpaired = pair_.unpaired(); !unpaired.empty()) {
      const auto& one = unpaired.front();
      using Kind = UnpairedTensor::Kind;
      const std::string_view why = one.kind == Kind::kOnlyLeft    ? "is in the base only"
                                   : one.kind == Kind::kOnlyRight ? "is in the result only"
                                   : one.kind == Kind::kShape     ? "is of two shapes: "
                                                                  : "is of two dtypes: ";
      throw Error(ErrorKind::kLayout,
                  fmt::format("{}: {}{}{}", one.tensor, why, one.detail,
                              unpaired.size() > 1 ? fmt::format(", and {} more tensors differ so",
                                                                unpaired.size() - 1)
                                                  : ""),
                  "a delta changes the elements of the same tensors");
    }
    require_same_model(pair_.left().map.config, pair_.right().map.config,
                       pair_.left().location.folder.string(),
                       pair_.right().location.folder.string());
  }

  void take_tensors() {
    manifest_.keep_quantized = pair_.keeps_quantized();
    for (std::size_t i = 0; i < pair_.num_tensors(); ++i) {
      const auto& tensor = pair_.tensor(i);
      indices_.push_back(kNone);
      if (tensor.role != distckpt::Role::kWeight) continue;
      if (pair_.compared_less_one(i)) {
        throw Error(ErrorKind::kLayout,
                    fmt::format("{}: Megatron-Core holds it less one, rounded", tensor.name),
                    "make the delta of Hugging Face's forms: ferry convert --to hf");
      }
      indices_.back() = static_cast<std::uint32_t>(manifest_.tensors.size());
      manifest_.tensors.push_back(
          {.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
      weights_.push_back(tensor);
    }
  }

  // Files of the result that the base has not, or as others.
  void take_files() {
    const auto& left = pair_.left().hf;
    const auto& right = pair_.right().hf;
    if (!left || !right) return;
    for (const auto& name : right->carried) {
      const bool there = std::ranges::binary_search(left->carried, name);
      if (there && same_bytes(left->file(name), right->file(name))) continue;
      if (options_.form != DeltaTarget::kFerry) {
        notes_.push_back(
            fmt::format("{}: is another file than the base's, and not in this form "
                        "of a delta",
                        name));
        continue;
      }
      const auto file = right->file(name);
      changed_files_.push_back(name);
      manifest_.files.push_back({.name = name, .size = file.size(), .digest = file.digest()});
    }
    for (const auto& name : left->carried) {
      if (!std::ranges::binary_search(right->carried, name))
        notes_.push_back(fmt::format("{}: is a file of the base only, and stays", name));
    }
  }

  std::unique_ptr<DeltaWriter> make_writer(Spool& spool) const {
    switch (options_.form) {
      case DeltaTarget::kSlime:
        return make_slime_writer(manifest_.tensors, second_names(), version_, spool);
      case DeltaTarget::kVllm:
        return make_patch_writer(manifest_.tensors, spool);
      case DeltaTarget::kFerry:
        break;
    }
    return make_ferry_writer(manifest_.tensors, spool);
  }

  // Tensors that the base's files hold under a second name (a tied head): slime's readers change
  // what has a tensor's name.
  std::vector<std::pair<std::string, std::uint32_t>> second_names() const {
    std::vector<std::pair<std::string, std::uint32_t>> names;
    const auto& base = pair_.left();
    if (base.megatron_names) return names;
    for (const auto& link : base.links.links) {
      if (link.copy == 0) continue;
      const auto& first = base.tensors[link.model].name;
      const auto at = std::ranges::find(manifest_.tensors, first, &DeltaTensor::name);
      if (at == manifest_.tensors.end()) continue;
      names.emplace_back(base.layout.tensor(link.stored).name,
                         static_cast<std::uint32_t>(at - manifest_.tensors.begin()));
    }
    return names;
  }

  void compare(DeltaWriter& writer, const ProgressFunction& progress) {
    SeenBlocks of_base(weights_);
    SeenBlocks of_result(weights_);
    std::vector<std::atomic<std::int64_t>> changed(weights_.size());
    pair_.compare(
        [&](const distckpt::Comparison& part) {
          const auto index = indices_[part.tensor];
          if (index == kNone) return;
          const auto offset = part.element * size_of(weights_[index].dtype);
          auto& entry = manifest_.tensors[index];
          if (const auto digest = of_base.add(index, offset, part.expected)) entry.base = *digest;
          if (const auto digest = of_result.add(index, offset, part.found)) entry.result = *digest;
          changed[index] += writer.add({.tensor = index,
                                        .offset = offset,
                                        .base = part.expected,
                                        .result = part.found,
                                        .equal = part.equal});
        },
        progress, writer.in_order());
    for (std::size_t i = 0; i < changed.size(); ++i) manifest_.tensors[i].num_changed = changed[i];
  }

  MakeDeltaReport make_report() const {
    MakeDeltaReport report{.base = pair_.left().location.folder,
                           .result = pair_.right().location.folder,
                           .target = target_,
                           .base_digest = manifest_.base_digest(),
                           .result_digest = manifest_.result_digest(),
                           .num_tensors = static_cast<std::int64_t>(manifest_.tensors.size()),
                           .files = changed_files_,
                           .notes = pair_.notes()};
    report.notes.insert(report.notes.end(), notes_.begin(), notes_.end());
    for (const auto& tensor : manifest_.tensors) {
      report.num_elements += tensor.shape.product();
      report.model_bytes += tensor.shape.product() * size_of(tensor.dtype);
      report.num_changed += tensor.num_changed;
      if (tensor.num_changed > 0) ++report.num_changed_tensors;
    }
    return report;
  }

  static constexpr std::uint32_t kNone = static_cast<std::uint32_t>(-1);

  const MakeDeltaOptions& options_;
  CheckpointPair pair_;
  fs::path target_;
  std::int64_t version_ = 0;
  DeltaManifest manifest_;
  std::vector<std::uint32_t> indices_;          // of the pair's tensors, in the manifest
  std::vector<distckpt::ModelTensor> weights_;  // of the manifest
  std::vector<std::string> changed_files_;
  std::vector<std::string> notes_;
};

}  // namespace

MakeDeltaReport make_delta(const MakeDeltaOptions& options, const ProgressFunction& progress) {
  return DeltaMaker(options).run(progress);
}

}  // namespace ferry::converter
