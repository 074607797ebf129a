#include "converter/adapter/split_adapter.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include "converter/adapter/factors/one_rank.h"
#include "converter/adapter/loops/truncated_svd.h"
#include "converter/adapter/open_adapter.h"
#include "converter/bridge/tensor_stream.h"
#include "converter/delta/spool.h"
#include "converter/families/megatron_args.h"
#include "converter/families/megatron_links.h"
#include "distckpt/base/error.h"
#include "distckpt/base/stopwatch.h"
#include "distckpt/base/threads.h"
#include "distckpt/elements/cast.h"
#include "distckpt/plan/box_io.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace {

using distckpt::DType;

// A parameter that an adapter may change, and the tensors that its factors change together; or one
// tensor that no adapter changes.
struct SplitUnit {
  std::optional<AdaptedParameter> adapted{};
  std::vector<std::uint32_t> tensors{};  // indices into the base's map
};

// The factors of a unit, in the spool. Without pieces they are zeros.
struct SplitFactors {
  AdaptedParameter adapted{};
  Extent first{};
  Extent second{};
};

// Tensors of a checkpoint one after another, while the next ones are read.
class TensorFeed {
 public:
  TensorFeed(const std::shared_ptr<const Checkpoint>& checkpoint,
             const std::vector<std::string>& names,
             const SplitOptions& options)
      : stream_(checkpoint,
                wanted(*checkpoint, names),
                {.threads = options.threads, .max_memory = options.max_memory}) {}

  // The next one's elements as fp32.
  std::vector<float> next() {
    if (at_ == ready_.end) advance();
    const auto& tensor = stream_.tensors()[at_];
    const auto bytes = std::move(memory_[at_]);
    ++at_;
    std::vector<float> values(static_cast<std::size_t>(tensor.shape.product()));
    const auto into = std::as_writable_bytes(std::span(values));
    if (tensor.dtype == DType::kF32) {
      std::memcpy(into.data(), bytes.data(), bytes.size());
      return values;
    }
    const auto refused =
        distckpt::cast(tensor.dtype, bytes, DType::kF32, into, distckpt::CastRule::kRound);
    require(!refused, ErrorKind::kLayout, "{}: a number of it overflows fp32", tensor.name);
    return values;
  }

  // After the last one: holds the files to the checksums that they state.
  void finish() {
    stream_.release(ready_);
    require(!stream_.wait({}), ErrorKind::kBug, "tensors are left that nobody took");
  }

 private:
  static WantedTensors wanted(const Checkpoint& checkpoint, const std::vector<std::string>& names) {
    auto all = whole_tensors(checkpoint, {});
    std::map<std::string, WantedTensor> found;
    for (auto& one : all.tensors) found.emplace(one.name, std::move(one));
    all.tensors.clear();
    for (const auto& name : names) all.tensors.push_back(std::move(found.at(name)));
    return all;
  }

  void advance() {
    if (ready_.end > 0) stream_.release(ready_);
    while (const auto batch = stream_.next_batch()) {
      std::vector<std::byte*> into;
      for (auto i = batch->begin; i < batch->end; ++i) {
        auto& memory = memory_[i];
        memory.resize(static_cast<std::size_t>(stream_.tensors()[i].num_bytes()));
        into.push_back(memory.data());
      }
      stream_.start(std::move(into));
    }
    const auto done = stream_.wait({});
    require(done.has_value(), ErrorKind::kBug, "no tensor is left to be read");
    ready_ = *done;
  }

  std::map<std::size_t, std::vector<std::byte>> memory_;  // outlives the stream
  TensorStream stream_;
  TensorStream::Range ready_{};
  std::size_t at_ = 0;
};

// The factors of an adapter as the bytes of storages.
class SpooledFactors : public distckpt::ComputedBytes {
 public:
  explicit SpooledFactors(std::shared_ptr<const Spool> spool) : spool_(std::move(spool)) {}

  std::uint32_t add(const Extent& extent) {
    extents_.push_back(extent);
    return static_cast<std::uint32_t>(extents_.size() - 1);
  }

  void compute(std::uint32_t index,
               distckpt::BoxSource& /*source*/,
               std::span<std::byte> into,
               std::vector<distckpt::ChecksumPart>& /*parts*/) const override {
    const auto& extent = extents_[index];
    if (extent.size == 0) {
      std::ranges::fill(into, std::byte{0});
    } else {
      spool_->read(extent, 0, into);
    }
  }

 private:
  std::shared_ptr<const Spool> spool_;
  std::vector<Extent> extents_;
};

class AdapterSplit {
 public:
  explicit AdapterSplit(const SplitOptions& options)
      : options_(options),
        base_(open_end(options.base, options.base_iteration)),
        tuned_(open_end(options.tuned, options.tuned_iteration)) {
    require(options.rank > 0, ErrorKind::kUsage, "--rank {}: is not positive", options.rank);
    require_adaptable(*base_);
    require_same_model(base_->map.config, tuned_->map.config, options.base.string(),
                       options.tuned.string());
    const auto& [names, others] = std::tie(base_->map.tensors, tuned_->map.tensors);
    const bool same = std::ranges::equal(names, others, {}, &distckpt::ModelTensor::name,
                                         &distckpt::ModelTensor::name);
    require(same, ErrorKind::kLayout, "{} and {}: the tensors have different names",
            options.base.string(), options.tuned.string());
    base_->files->settle();
    tuned_->files->settle();
    if (!options.selection.is_all()) options.selection.require_matches(base_->tensors);
    list_units();
  }

  SplitReport run(const ProgressFunction& progress) {
    const distckpt::Stopwatch stopwatch;
    const ConvertAdapterOptions writing{.from = options_.tuned,
                                        .to = options_.to,
                                        .base = options_.base,
                                        .form = options_.form,
                                        .parallel = options_.parallel,
                                        .threads = options_.threads,
                                        .max_memory = options_.max_memory};
    Publication place(adapter_target(writing));
    const auto spool = std::make_shared<Spool>(place.work().path());
    for (const auto& unit : units_) total_ += bytes_of(unit);
    split_all(*spool, progress);
    keep_whole_layers_of_experts();
    if (options_.form == AdapterForm::kMegatron) add_missing_modules();
    require(!report_.tensors.empty(), ErrorKind::kUsage,
            "{} and {} do not differ{}: there is no {}", options_.base.string(),
            options_.tuned.string(),
            options_.selection.is_all() ? "" : " in " + options_.selection.describe(),
            "change to split");
    report_.written = write_adapter(make_adapter(spool), *base_, writing, place, progress);
    report_.num_parameters = report_.written.num_parameters;
    report_.change = std::sqrt(change_);
    report_.error = std::sqrt(error_);
    report_.seconds = stopwatch.seconds();
    return std::move(report_);
  }

 private:
  std::shared_ptr<const Checkpoint> open_end(
      const std::filesystem::path& path,
      const std::optional<distckpt::Iteration>& iteration) const {
    OpenOptions how{.iteration = iteration};
    if (!locate(path, iteration).has_own_config()) how.hf_config = options_.hf_config;
    return std::make_shared<const Checkpoint>(open(path, how));
  }

  // Factors of a larger rank than every weight has would be larger than the weights.
  void require_rank() const {
    std::int64_t largest = 0;
    for (const auto& unit : units_) {
      if (!unit.adapted) continue;
      const auto& shape = base_->map.tensors[unit.tensors.front()].shape;
      largest = std::max(largest, std::min(shape[0] * std::ssize(unit.tensors), shape[1]));
    }
    require(largest == 0 || options_.rank <= largest, ErrorKind::kUsage,
            "--rank {}: no weight of the model has a rank above {}", options_.rank, largest);
  }

  // Every selected tensor once, in the model's order.
  void list_units() {
    std::map<std::uint32_t, SplitUnit> by_first;
    std::set<std::uint32_t> taken;
    const auto selected = [&](std::uint32_t index) {
      return options_.selection.selects(base_->map.tensors[index].name);
    };
    for (std::uint32_t i = 0; i < base_->map.megatron.size(); ++i) {
      const auto& of = base_->map.megatron[i];
      if (!is_adaptable(of)) continue;
      const auto merged = merged_tensors(of);
      if (of.expert) {
        const auto num_selected = std::ranges::count_if(merged, selected);
        require(num_selected == 0 || num_selected == std::ssize(merged), ErrorKind::kUsage,
                "{}: {} is one parameter with others of its expert: select all or none",
                options_.selection.describe(), base_->map.tensors[merged.front()].name);
        if (num_selected == 0) continue;
        by_first[merged.front()] = {
            .adapted = AdaptedParameter{.megatron = i, .rank = options_.rank}, .tensors = merged};
        taken.insert(merged.begin(), merged.end());
        continue;
      }
      for (std::size_t part = 0; part < merged.size(); ++part) {
        if (!selected(merged[part]) || !taken.insert(merged[part]).second) continue;
        by_first[merged[part]] = {
            .adapted = AdaptedParameter{.megatron = i,
                                        .part = merged.size() == 1 ? AdaptedParameter::kFused
                                                                   : static_cast<int>(part),
                                        .rank = options_.rank},
            .tensors = {merged[part]}};
      }
    }
    for (std::uint32_t i = 0; i < base_->map.tensors.size(); ++i) {
      if (base_->tensors[i].role == distckpt::Role::kWeight && selected(i) && !taken.contains(i))
        by_first[i] = {.tensors = {i}};
    }
    for (auto& [_, unit] : by_first) units_.push_back(std::move(unit));
    require_rank();
  }

  // Linear layers, and the routers that PEFT adapts as parameters; an embedding's rows are none,
  // and transformers has no prediction layers.
  bool is_adaptable(const MegatronTensor& of) const {
    if (of.shape.rank() != 2) return false;
    const auto merged = merged_tensors(of);
    if (is_prediction_tensor(base_->map.config, base_->map.tensors[merged.front()].name))
      return false;
    if (of.vocabulary && of.key != models::kOutputLayerKey) return false;
    if (of.key.find(".router.") != std::string::npos) return true;
    if (of.expert) return base_->map.tensors[merged.front()].shape.rank() == 2;
    return merged.size() == 1 || of.merge == Merge::kQkvGroups || of.merge == Merge::kGateUp;
  }

  std::int64_t bytes_of(const SplitUnit& unit) const {
    std::int64_t bytes = 0;
    for (const auto index : unit.tensors)
      bytes += base_->tensors[index].num_bytes() + tuned_->tensors[index].num_bytes();
    return bytes;
  }

  void split_all(Spool& spool, const ProgressFunction& progress) {
    std::vector<std::string> names;
    for (const auto& unit : units_) {
      for (const auto index : unit.tensors) names.push_back(base_->map.tensors[index].name);
    }
    TensorFeed base(base_, names, options_);
    TensorFeed tuned(tuned_, names, options_);
    std::int64_t done = 0;
    for (const auto& unit : units_) {
      const auto change = next_change(unit, base, tuned);
      if (unit.adapted) {
        split_unit(unit, change, spool);
      } else {
        require_equal(unit, change);
      }
      done += bytes_of(unit);
      const bool more = !progress || progress({.stage = "splitting",
                                               .bytes_done = done,
                                               .bytes_total = total_,
                                               .finished = done == total_});
      if (!more) throw Error(ErrorKind::kCancelled, "interrupted");
    }
    base.finish();
    tuned.finish();
  }

  // tuned - base, in fp32; of several tensors one below the other.
  static std::vector<float> next_change(const SplitUnit& unit,
                                        TensorFeed& base,
                                        TensorFeed& tuned) {
    std::vector<float> change;
    for (std::size_t i = 0; i < unit.tensors.size(); ++i) {
      const auto before = base.next();
      auto after = tuned.next();
      for (std::size_t k = 0; k < after.size(); ++k) after[k] -= before[k];
      if (change.empty()) {
        change = std::move(after);
      } else {
        change.insert(change.end(), after.begin(), after.end());
      }
    }
    return change;
  }

  static bool is_zero(const std::vector<float>& values) {
    return std::ranges::all_of(values, [](float value) { return value == 0; });
  }

  const std::string& name_of(const SplitUnit& unit) const {
    return base_->map.tensors[unit.tensors.front()].name;
  }

  void require_equal(const SplitUnit& unit, const std::vector<float>& change) {
    if (!is_zero(change)) {
      const bool stacked = base_->map.tensors[unit.tensors.front()].shape.rank() == 3;
      throw Error(ErrorKind::kLayout,
                  fmt::format("{}: differs, and is {}", name_of(unit),
                              stacked ? "a stack of experts, which are not split"
                                      : "no weight of a linear layer"),
                  "--exclude leaves tensors out that an adapter does not change");
    }
    ++report_.num_equal;
  }

  void split_unit(const SplitUnit& unit, const std::vector<float>& change, Spool& spool) {
    if (is_zero(change)) {
      report_.num_equal += std::ssize(unit.tensors);
      if (base_->map.megatron[unit.adapted->megatron].expert)
        factors_.push_back({.adapted = *unit.adapted});
      return;
    }
    const auto& name = name_of(unit);
    const std::span adapted(&*unit.adapted, 1);
    static_cast<void>(make_adapter_map(base_->map, adapted));  // throws
    if (options_.form == AdapterForm::kMegatron) require_own_factors(base_->map, adapted);
    const bool finite =
        std::ranges::all_of(change, [](float value) { return std::isfinite(value); });
    require(finite, ErrorKind::kLayout, "{}: a number of it, or its change, is not finite", name);
    const auto columns = base_->map.tensors[unit.tensors.front()].shape[1];
    const auto rows = static_cast<std::int64_t>(change.size()) / columns;
    const auto threads = distckpt::threads_or_cores(options_.threads);
    const auto svd = truncated_svd(change, rows, columns, options_.rank, threads);
    factors_.push_back({.adapted = *unit.adapted,
                        .first = spool.append(std::as_bytes(std::span(svd.right))),
                        .second = spool.append(std::as_bytes(std::span(svd.left)))});
    report_.tensors.push_back({.name = name,
                               .rows = rows,
                               .columns = columns,
                               .change = std::sqrt(svd.matrix_norm),
                               .error = std::sqrt(svd.error_norm)});
    change_ += svd.matrix_norm;
    error_ += svd.error_norm;
  }

  // PEFT has the factors of all experts of a layer in one tensor: one that does not differ has
  // zeros there. A layer in which none does has no factors.
  void keep_whole_layers_of_experts() {
    const auto layer_of = [&](const SplitFactors& one) {
      const auto& of = base_->map.megatron[one.adapted.megatron];
      return std::pair(of.key, of.layer);
    };
    std::set<std::pair<std::string, std::optional<std::int64_t>>> changed;
    std::map<std::pair<std::string, std::optional<std::int64_t>>, std::int64_t> num_experts;
    for (const auto& one : factors_) {
      if (one.first.size > 0) changed.insert(layer_of(one));
      if (base_->map.megatron[one.adapted.megatron].expert) ++num_experts[layer_of(one)];
    }
    std::erase_if(factors_,
                  [&](const SplitFactors& one) { return !changed.contains(layer_of(one)); });
    for (const auto& [layer, count] : num_experts) {
      require(!changed.contains(layer) || count == base_->map.config.num_moe_experts,
              ErrorKind::kUsage, "{}: experts of {} differ, and an adapter has all of a layer",
              options_.selection.describe(), layer.first);
    }
  }

  void add_missing_modules() {
    std::vector<AdaptedParameter> adapted;
    for (const auto& one : factors_) adapted.push_back(one.adapted);
    for (const auto& missing : missing_modules(base_->map, adapted))
      factors_.push_back({.adapted = missing});
  }

  // The factors as a source: under the keys of Megatron-Bridge's canonical form, saved by one rank.
  Adapter make_adapter(const std::shared_ptr<const Spool>& spool) const {
    Adapter adapter{.canonical = std::ranges::any_of(factors_, [](const SplitFactors& one) {
                      return one.adapted.part != AdaptedParameter::kFused;
                    })};
    auto& checkpoint = adapter.checkpoint;
    checkpoint.location = tuned_->location;
    checkpoint.megatron_names = true;
    checkpoint.files = tuned_->files;
    for (const auto& one : factors_) adapter.adapted.push_back(one.adapted);
    adapter.scaling.assign(factors_.size(), 1);
    checkpoint.map = make_adapter_map(base_->map, adapter.adapted);
    const auto bytes = std::make_shared<SpooledFactors>(spool);
    for (std::size_t i = 0; i < checkpoint.map.megatron.size(); ++i) {
      const auto& factor = checkpoint.map.megatron[i];
      const auto& factors = factors_[i / 2];  // the first and the second of each
      const auto index = bytes->add(i % 2 == 0 ? factors.first : factors.second);
      const auto storage = checkpoint.layout.add_storage(distckpt::ComputedStorage{
          .size = factor.shape.product() * size_of(DType::kF32), .bytes = bytes, .index = index});
      checkpoint.layout.add_tensor(
          {.name = single_key(factor),
           .dtype = DType::kF32,
           .shape = factor.shape,
           .shards = {distckpt::packed_shard(distckpt::Box::whole(factor.shape), DType::kF32,
                                             storage, 0)}});
    }
    checkpoint.links = link_megatron(checkpoint.map, checkpoint.layout, LinkedSide::kSource);
    if (options_.form == AdapterForm::kMegatron) {
      // The target's map; both have the same tensors in Hugging Face terms.
      for (auto& one : adapter.adapted) one.tp = options_.parallel.tensor_model_parallel_size;
      checkpoint.map = make_adapter_map(base_->map, adapter.adapted);
    }
    checkpoint.tensors = checkpoint.map.tensors;
    for (auto& tensor : checkpoint.tensors) tensor.dtype = DType::kF32;
    return adapter;
  }

  const SplitOptions& options_;
  std::shared_ptr<const Checkpoint> base_;
  std::shared_ptr<const Checkpoint> tuned_;
  std::vector<SplitUnit> units_;
  std::vector<SplitFactors> factors_;
  SplitReport report_;
  std::int64_t total_ = 0;  // bytes of both ends
  double change_ = 0;       // squares
  double error_ = 0;
};

}  // namespace

SplitReport split_adapter(const SplitOptions& options, const ProgressFunction& progress) {
  return AdapterSplit(options).run(progress);
}

}  // namespace ferry::converter
