#include "converter/save.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "converter/hf_config.h"
#include "converter/megatron_links.h"
#include "converter/megatron_target.h"
#include "distckpt/error.h"
#include "distckpt/executor.h"
#include "distckpt/safetensors.h"
#include "distckpt/work_folder.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::Iteration;
using distckpt::MeshLayout;
using distckpt::ModelTensor;

// A Hugging Face file's header lists what the model still has, as it has it.
bool fits(const distckpt::SafetensorsHeader& header, const Checkpoint& model) {
  return std::ranges::all_of(header.entries, [&](const distckpt::SafetensorsEntry& entry) {
    const auto copy = model.map.copies.find(entry.name);
    const auto at = copy != model.map.copies.end() ? copy : model.map.index.find(entry.name);
    return at != model.map.index.end() && model.tensors[at->second].dtype == entry.dtype;
  });
}

// config.json and what travels with it, of the same model in the dtypes that it has now.
std::optional<HfForm> carried_form(const Checkpoint& origin, const Checkpoint& model) {
  if (!origin.hf || origin.map.config != model.map.config) return std::nullopt;
  auto form = *origin.hf;
  const auto dtype = model.tensors.front().dtype;
  if (dtype != origin.tensors.front().dtype) {
    form.contents[std::string(distckpt::kHfConfig)] =
        with_dtype(form.config_text(), dtype, form.config_source());
  }
  const bool keep = std::ranges::all_of(
      form.headers, [&](const distckpt::SafetensorsHeader& header) { return fits(header, model); });
  if (!keep) {
    form.headers.clear();
    form.index_text.reset();
  }
  return form;
}

// What the arguments of the run would make of the vocabulary.
void check_padding(const Checkpoint& model, const distckpt::ParallelConfig& parallel) {
  for (const auto& tensor : model.map.megatron) {
    if (!tensor.vocabulary) continue;
    const auto rows = model.layout.tensor(*model.layout.find(single_key(tensor))).shape[0];
    const auto expected = parallel.padded_vocab_size(tensor.shape[0]);
    require(rows == expected, ErrorKind::kUsage,
            "{}: has {} rows, but a vocabulary of {} in multiples of {} for tp {} has {}",
            tensor.key, rows, tensor.shape[0], parallel.make_vocab_size_divisible_by,
            parallel.tensor_model_parallel_size, expected);
  }
}

// The memory of the ranks as the source of a plan, as open() describes files.
Checkpoint describe_mesh(const MeshLayout& mesh, const SaveOptions& options) {
  Checkpoint model{.megatron_names = true,
                   .map = make_model_map(options.config),
                   .tensors = {},
                   .layout = mesh.layout};
  model.links = link_megatron(model.map, model.layout);
  check_padding(model, options.parallel);
  model.tensors = model.map.tensors;
  for (const auto& link : model.links.links) {
    if (link.copy == 0) model.tensors[link.model].dtype = model.layout.tensor(link.stored).dtype;
  }
  if (options.origin != nullptr) {
    model.hf = carried_form(*options.origin, model);
    model.common = options.origin->common;
  }
  return model;
}

class Saving {
 public:
  Saving(const distckpt::RankGroup& group,
         const MeshLayout& mesh,
         distckpt::BoxSource& memory,
         const SaveOptions& options,
         const ProgressFunction& progress)
      : group_(group),
        mesh_(mesh),
        memory_(memory),
        options_(options),
        progress_(progress),
        folder_(fs::absolute(options.to) / distckpt::iteration_folder(options.iteration)) {}

  SaveReport run() {
    const auto start = std::chrono::steady_clock::now();
    run_together(group_, [&] {
      if (group_.rank == 0) begin();
    });
    run_together(group_, [&] { plan(); });
    run_together(group_, [&] { write(); });
    run_together(group_, [&] {
      if (group_.rank == 0) publish();
    });
    report_.folder = folder_;
    report_.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return report_;
  }

 private:
  void begin() {
    std::error_code error;
    if (fs::exists(folder_, error) && !fs::is_empty(folder_, error) && !options_.overwrite) {
      throw Error(ErrorKind::kUsage, fmt::format("{}: exists already", folder_.string()),
                  "choose another folder or iteration, or overwrite it");
    }
    work_.emplace(folder_, false);
  }

  void plan() {
    model_ = describe_mesh(mesh_, options_);
    target_ = make_megatron_target(model_, model_.tensors,
                                   {.parallel = options_.parallel,
                                    .mesh = &mesh_,
                                    .iteration = options_.iteration,
                                    .dtype = {}},
                                   distckpt::work_folder(folder_) / distckpt::kWorkOutput);
    target_->share_padding(model_.layout, model_.links, model_.tensors);
    plan_ =
        distckpt::keep_targets(distckpt::plan_copy(model_.tensors, model_.side(), target_->side()),
                               [&](distckpt::StorageId file) { return is_mine(file); });
    plan_.discards.clear();
    for (auto& planned : plan_.tensors) keep_my_replicas(planned);
  }

  // Each rank's file holds what it has the main replica of.
  bool is_mine(distckpt::StorageId file) const {
    const auto* path = distckpt::file_of(target_->layout().storages()[file]);
    return path->filename() == distckpt::distcp_filename(group_.rank);
  }

  // A second copy (a tied output layer of its own) is compared where both are in this memory.
  void keep_my_replicas(distckpt::PlannedTensor& planned) const {
    for (auto& replica : planned.replicas) {
      std::erase_if(replica,
                    [&](const distckpt::Piece& piece) { return !mesh_.is_mine(piece.at.storage); });
    }
  }

  void write() {
    auto& sink = target_->open_files([&](distckpt::StorageId file) { return is_mine(file); });
    const distckpt::ExecutorOptions how{.threads = options_.threads,
                                        .max_memory = options_.max_memory,
                                        .staging = options_.staging,
                                        .by_target = true,
                                        .on_compared = {}};
    report_.bytes =
        wait_reporting(distckpt::Executor(how).submit(plan_, memory_, &sink), "saving", progress_)
            .bytes;
    target_->close_files();
  }

  void publish() {
    target_->close_folder();
    work_->publish(options_.overwrite);
    distckpt::replace_text(folder_.parent_path() / distckpt::kTracker,
                           distckpt::iteration_text(options_.iteration));
  }

  const distckpt::RankGroup& group_;
  const MeshLayout& mesh_;
  distckpt::BoxSource& memory_;
  const SaveOptions& options_;
  const ProgressFunction& progress_;
  fs::path folder_;
  std::optional<distckpt::WorkFolder> work_;  // of rank 0
  Checkpoint model_;
  std::unique_ptr<FileTarget> target_;
  distckpt::CopyPlan plan_;
  SaveReport report_;
};

}  // namespace

SaveReport save(const distckpt::RankGroup& group,
                const MeshLayout& mesh,
                distckpt::BoxSource& memory,
                const SaveOptions& options,
                const ProgressFunction& progress) {
  require(group.rank == mesh.rank && group.size == static_cast<int>(mesh.ranks.size()),
          ErrorKind::kBug, "rank {} of {} saves a mesh as rank {} of {}", group.rank, group.size,
          mesh.rank, mesh.ranks.size());
  return with_context([&] { return fmt::format("saving {}", options.to.string()); },
                      [&] { return Saving(group, mesh, memory, options, progress).run(); });
}

}  // namespace ferry::converter
