#include "converter/bridge/save.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "converter/bridge/carried_tensors.h"
#include "converter/bridge/load.h"
#include "converter/bridge/memory_checkpoint.h"
#include "converter/digest_checkpoint.h"
#include "converter/families/hf_config.h"
#include "converter/families/megatron_links.h"
#include "converter/optimizer/optimizer_tensors.h"
#include "converter/proof.h"
#include "converter/shared_work.h"
#include "converter/stored/sidecar.h"
#include "converter/write/megatron_target.h"
#include "converter/write/publication.h"
#include "converter/write/target_folder.h"
#include "distckpt/base/cbor.h"
#include "distckpt/base/error.h"
#include "distckpt/base/stopwatch.h"
#include "distckpt/execute/executor.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/storage/remote_store.h"
#include "distckpt/storage/work_folder.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::Iteration;
using distckpt::MeshLayout;
using distckpt::ModelTensor;

// A sink that writes nothing: what would be written is compared with what is there already.
class ComparingSink : public distckpt::BoxSink {
 public:
  // Both outlive it; `there` is of `layout`.
  ComparingSink(const distckpt::Layout& layout, distckpt::BoxSource& there)
      : layout_(layout), there_(there) {}

  // Throws Error(kCorrupt) naming the storage whose bytes are others.
  void write(const distckpt::Region& region,
             std::span<const std::byte> packed,
             std::vector<distckpt::ChecksumPart>& /*parts*/) override {
    std::vector<std::byte> found(packed.size());
    std::vector<distckpt::ChecksumPart> of_found;
    there_.read(region, found, of_found);
    require(std::ranges::equal(found, packed), ErrorKind::kCorrupt,
            "{}: other bytes than were written", describe(layout_.storages()[region.at.storage]));
  }

 private:
  const distckpt::Layout& layout_;
  distckpt::BoxSource& there_;
};

// config.json and what travels with it, of the same model in the dtypes that it has now, perhaps
// with a new head of scores and without its prediction layers.
std::optional<HfForm> carried_form(const Checkpoint& origin, const Checkpoint& model) {
  if (!origin.hf) return std::nullopt;
  auto form = *origin.hf;
  form.files.reset();  // a run takes days: what travels is what is there by then
  auto config = origin.map.config;
  const auto& own = model.map.config;
  if (config.head == models::Head::kLanguageModel && own.head != config.head) {
    config.head = own.head;
    config.num_labels = own.num_labels;
    form.contents[std::string(distckpt::kHfConfig)] =
        with_classification_head(form.config_text(), own, form.config_source());
  }
  if (own.mtp_num_layers == 0) config.mtp_num_layers = 0;
  if (config != own) return std::nullopt;
  return form;
}

// Throws if the arguments of the run would pad the vocabulary to another size.
void check_padding(const Checkpoint& model, const models::ParallelConfig& parallel) {
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
  if (options.origin != nullptr)
    require_megatron_form(*options.origin, "no modules of Megatron-Core hold them");
  Checkpoint model{.megatron_names = true,
                   .map = options.origin != nullptr
                              ? make_model_map(options.config, spelling_of(options.origin->map))
                              : make_model_map(options.config),
                   .tensors = {},
                   .layout = mesh.layout};
  model.map.trains_tower = holds_tower(mesh.layout);
  model.links = link_megatron(model.map, model.layout, LinkedSide::kSource);
  check_padding(model, options.parallel);
  model.tensors = model.map.tensors;
  if (model.map.trains_tower)
    add_held_tower(options.config, mesh.layout, model.tensors, model.links);
  for (const auto& link : model.links.links) {
    if (link.copy == 0) model.tensors[link.model].dtype = model.layout.tensor(link.stored).dtype;
  }
  if (options.origin != nullptr) {
    model.hf = carried_form(*options.origin, model);
    if (model.hf) {
      add_carried_tensors(*options.origin, model);
      adapt_form(*options.origin, model, *model.hf);
    }
    model.common = options.origin->common;
  }
  if (options.common) model.common = options.common;
  return model;
}

// The tensors of an optimizer that the ranks hold, and the objects of all of them.
void add_training(const SaveOptions& options,
                  const std::vector<distckpt::StoredObject>& objects,
                  Checkpoint& model) {
  TrainingState training{.parallel = options.parallel,
                         .first_tensor = static_cast<std::uint32_t>(model.tensors.size())};
  for (const auto& object : objects) {
    require(is_training_state(object.key) && object.key.find('/') != std::string::npos,
            ErrorKind::kUsage, "{}: is no key of an object that a training run has", object.key);
    (object.key.starts_with(kTrainerPrefix) ? training.objects : training.rng).push_back(object);
  }
  auto& optimizer = training.optimizer;
  optimizer.kinds = optimizer_kinds(model.layout);
  if (!optimizer.kinds.empty()) {
    require(
        model.common != nullptr, ErrorKind::kUsage,
        "the state of an optimizer is saved with the common state of its run, and there is none");
    const auto state = distckpt::common_dict(*model.common).find("optimizer");
    if (state) training.param_groups = param_groups_of_common(*state);
    if (training.param_groups.empty() && !options.common && options.origin->training)
      training.param_groups = options.origin->training->param_groups;  // from objects
    require(!training.param_groups.empty(), ErrorKind::kUsage,
            "{}: has no param_groups of the optimizer whose state is saved",
            model.common->source());
    link_optimizer(model.map, optimizer.kinds, training.first_tensor, model.layout, model.links);
    for (const auto& kind : optimizer.kinds) {
      const auto tensors = optimizer_map(model.map, kind).tensors;
      model.tensors.insert(model.tensors.end(), tensors.begin(), tensors.end());
    }
  }
  model.training = std::move(training);
}

using KeysAndArchives = std::vector<std::pair<std::string, std::string>>;  // of objects

std::string encode(const std::vector<distckpt::StoredObject>& objects) {
  KeysAndArchives pairs;
  for (const auto& object : objects) pairs.emplace_back(object.key, object.archive);
  return to_cbor(pairs);
}

// The objects of all ranks, in the order of the ranks.
std::vector<distckpt::StoredObject> decode(const std::vector<std::string>& of_ranks) {
  std::vector<distckpt::StoredObject> objects;
  for (const auto& bytes : of_ranks) {
    for (auto& [key, archive] : from_cbor<KeysAndArchives>(bytes)) {
      require(std::ranges::find(objects, key, &distckpt::StoredObject::key) == objects.end(),
              ErrorKind::kUsage, "{}: several ranks save it", key);
      objects.push_back({.key = std::move(key), .archive = std::move(archive)});
    }
  }
  return objects;
}

std::int64_t bytes_to_write(const distckpt::CopyPlan& plan) {
  std::int64_t bytes = 0;
  for (const auto& planned : plan.tensors) {
    for (const auto& cover : planned.targets) {
      for (const auto& piece : cover) bytes += piece.box.volume() * size_of(piece.dtype);
    }
  }
  return bytes;
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
        folder_(fs::absolute(options.to) / distckpt::iteration_folder(options.iteration)),
        held_(distckpt::work_folder(folder_)) {}

  SaveReport run() {
    const distckpt::Stopwatch stopwatch;
    together([&] {
      if (group_.rank == 0) begin();
    });
    together([&] {
      require(distckpt::join_work_folder(folder_, held_), ErrorKind::kIo,
              "{}: was made by rank 0, but is not there", held_.shown().string());
    });
    const auto objects = group_.gather(encode(options_.objects));
    together([&] { plan(objects); });
    together([&] {
      if (group_.rank == 0) work_->expect(target_->files(output()));
    });
    together([&] { with_context([&] { return needs(); }, [&] { write(); }); });
    together([&] {
      if (group_.rank == 0) target_->close_folder();
    });
    if (options_.prove) prove();
    together([&] {
      if (group_.rank == 0) publish();
    });
    report_.folder = folder_;
    report_.seconds = stopwatch.seconds();
    return report_;
  }

 private:
  void together(const std::function<void()>& body) {
    run_together(group_, [&] { held_.with_its_name(body); });
  }

  void begin() {
    distckpt::refuse_mistaken_path(options_.to);
    std::error_code error;
    if (fs::exists(folder_, error) && !fs::is_empty(folder_, error) && !options_.overwrite) {
      throw Error(ErrorKind::kUsage, fmt::format("{}: exists already", folder_.string()),
                  "choose another folder or iteration, or overwrite it");
    }
    work_.emplace(folder_, false);
  }

  fs::path output() const { return held_.path() / distckpt::kWorkOutput; }

  void plan(const std::vector<std::string>& objects_of_ranks) {
    model_ = describe_mesh(mesh_, options_);
    add_training(options_, decode(objects_of_ranks), model_);
    target_ = make_megatron_target(model_, model_.tensors,
                                   {.parallel = options_.parallel,
                                    .mesh = &mesh_,
                                    .iteration = options_.iteration,
                                    .dtype = {}},
                                   output());
    padding_ = target_->share_padding(model_.layout, model_.links, model_.tensors);
    plan_ =
        distckpt::keep_targets(distckpt::plan_copy(model_.tensors, model_.side(), target_->side()),
                               [&](distckpt::StorageId file) { return is_mine(file); });
    plan_.discards.clear();
    if (model_.layout.storages().size() > mesh_.layout.storages().size())
      carried_.emplace(memory_, mesh_.layout.storages().size(), *options_.origin);
    for (auto& planned : plan_.tensors) keep_my_replicas(planned);
  }

  // Each rank's file holds what it has the main replica of; the first one writes what no rank
  // holds.
  bool is_mine(distckpt::StorageId file) const {
    const auto* path = distckpt::file_of(target_->layout().storages()[file]);
    return path->filename() == distckpt::distcp_filename(group_.rank) ||
           (group_.rank == 0 && *path == derived_path(output()));
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
    const distckpt::Executor executor(executor_options());
    auto& source = carried_ ? static_cast<distckpt::BoxSource&>(*carried_) : memory_;
    report_.bytes =
        wait_reporting(executor.submit_pieces(plan_, source, sink), "saving", progress_).bytes;
    if (carried_) carried_->verify();
    target_->close_files();
  }

  // For errors: whether the disk is full.
  std::string needs() const {
    std::error_code unknown;
    const auto space = fs::space(held_.path(), unknown);
    return fmt::format("writing {} as rank {}: {} bytes are needed for tensors, {} are free there",
                       folder_.string(), group_.rank, bytes_to_write(plan_),
                       unknown ? "an unknown number" : std::to_string(space.available));
  }

  distckpt::ExecutorOptions executor_options() const {
    return {.threads = options_.threads,
            .max_memory = options_.max_memory,
            .staging = options_.staging,
            .on_compared = {}};
  }

  void prove() {
    const distckpt::Stopwatch stopwatch;
    const SharedWork shared({.rank = group_.rank, .size = group_.size}, held_.path());
    std::optional<Proof> proof;
    together([&] {
      proof.emplace(output(), OpenOptions{.training_state = true}, padding_, shared,
                    executor_options());
      compare_with_memory(proof->written());
      proof->read(progress_);
    });
    together([&] {
      if (group_.rank != 0) return;
      proof->finish();
      report_.manifest = manifest_of(proof->written(), proof->digests());
    });
    report_.proved = true;
    report_.proof_from_disk = proof->from_disk();
    report_.proof_seconds = stopwatch.seconds();
  }

  // Compares the boxes that this rank would load with those that it holds. Other ranks compare
  // their own replicas.
  void compare_with_memory(const Checkpoint& written) {
    const auto loaded =
        plan_load(written, mesh_, {.config = options_.config, .keep_padding = true});
    ComparingSink sink(mesh_.layout, memory_);
    const distckpt::Executor executor(executor_options());
    const auto source = written.source(distckpt::ReadMode::kDirect);
    wait_reporting(executor.submit_pieces(loaded.copy, *source, sink), "comparing", progress_);
  }

  void publish() {
    std::function<std::vector<fs::path>(const fs::path&)> replaceable;
    if (options_.overwrite) {
      replaceable = [planned = target_->files(output())](const fs::path& old) {
        return replaceable_files(old, Format::kTorchDist, planned);
      };
    }
    const auto modes =
        options_.origin != nullptr ? modes_like({options_.origin}) : distckpt::PublishedModes();
    work_->publish(replaceable, modes);
    work_->replace_beside(distckpt::kTracker, distckpt::iteration_text(options_.iteration),
                          modes.file);
  }

  const distckpt::RankGroup& group_;
  const MeshLayout& mesh_;
  distckpt::BoxSource& memory_;
  const SaveOptions& options_;
  const ProgressFunction& progress_;
  fs::path folder_;
  distckpt::HeldFolder held_;                 // the working folder
  std::optional<distckpt::WorkFolder> work_;  // of rank 0, which owns it
  Checkpoint model_;
  std::unique_ptr<FileTarget> target_;
  std::set<std::string> padding_;  // that is saved too
  distckpt::CopyPlan plan_;
  std::optional<CarriedSource> carried_;  // where the origin has tensors that no rank holds
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
