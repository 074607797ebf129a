#include "converter/verify.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "converter/hf_config.h"
#include "converter/megatron_args.h"
#include "distckpt/cast.h"
#include "distckpt/error.h"
#include "distckpt/file_io.h"
#include "distckpt/json.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::CopyPlan;
using distckpt::DType;
using distckpt::ModelTensor;

// Two sources as one: the right one's storages come after the left one's.
class PairSource : public distckpt::BoxSource {
 public:
  PairSource(distckpt::FileSource& left, distckpt::FileSource& right, distckpt::StorageId split)
      : left_(left), right_(right), split_(split) {}

  void read(const distckpt::Region& region,
            std::span<std::byte> packed,
            std::vector<distckpt::ChecksumPart>& parts) override {
    if (region.at.storage < split_) return left_.read(region, packed, parts);
    auto shifted = region;
    shifted.at.storage -= split_;
    const auto first = parts.size();
    right_.read(shifted, packed, parts);
    for (auto i = first; i < parts.size(); ++i) parts[i].storage += split_;
  }

  void commit(std::span<const distckpt::ChecksumPart> parts) override {
    std::vector<distckpt::ChecksumPart> mine;
    std::vector<distckpt::ChecksumPart> theirs;
    for (auto part : parts) {
      auto& side = part.storage < split_ ? mine : theirs;
      if (part.storage >= split_) part.storage -= split_;
      side.push_back(part);
    }
    left_.commit(mine);
    right_.commit(theirs);
  }

 private:
  distckpt::FileSource& left_;
  distckpt::FileSource& right_;
  distckpt::StorageId split_;
};

// The row-major index of an element, as coordinates.
distckpt::Dims coordinates(const distckpt::Shape& shape, std::int64_t index) {
  auto at = distckpt::Dims::filled(shape.rank(), 0);
  for (int d = shape.rank() - 1; d >= 0; --d) {
    at[d] = index % shape[d];
    index /= shape[d];
  }
  return at;
}

// What is known of one tensor's differences while its parts are compared in any order.
struct Difference {
  std::int64_t first = -1;
  double left_value = 0;
  double right_value = 0;
  std::int64_t count = 0;
  std::optional<double> max_difference;
  std::optional<std::uint64_t> max_ulps;

  void add(DType dtype, const distckpt::Inequality& part) {
    const auto size = size_of(dtype);
    const auto elements = static_cast<std::int64_t>(part.expected.size()) / size;
    for (std::int64_t i = 0; i < elements; ++i) {
      const auto* const left = part.expected.data() + i * size;
      const auto* const right = part.found.data() + i * size;
      if (std::memcmp(left, right, static_cast<std::size_t>(size)) == 0) continue;
      ++count;
      const auto a = distckpt::element_value(dtype, left);
      const auto b = distckpt::element_value(dtype, right);
      if (first < 0 || part.element + i < first) {
        first = part.element + i;
        left_value = a;
        right_value = b;
      }
      const auto distance = std::fabs(a - b);
      if (!std::isnan(distance)) max_difference = std::max(max_difference.value_or(0), distance);
      if (const auto ulps = distckpt::ulp_distance(dtype, left, right)) {
        max_ulps = std::max(max_ulps.value_or(0), *ulps);
      }
    }
  }
};

class Verification {
 public:
  Verification(const VerifyOptions& options, const ProgressFunction& progress)
      : options_(options), progress_(progress) {}

  VerifyReport run() {
    const auto start = std::chrono::steady_clock::now();
    keep_fp8_ = is_quantized(options_.left) && is_quantized(options_.right);
    left_ = open_side(options_.left, options_.left_iteration);
    right_ = open_side(options_.right, options_.right_iteration);
    require(
        options_.hf_config.empty() || hf_config_used_, ErrorKind::kUsage,
        "both sides are Hugging Face checkpoints, which have their own config.json: --hf-config "
        "is for Megatron checkpoints");
    report_.left = left_.location.folder;
    report_.right = right_.location.folder;
    report_.left_format = left_.location.format;
    report_.right_format = right_.location.format;
    compare_tensors();
    if (options_.weights_only) {
      report_.notes.emplace_back("configuration and carried files were not compared, as asked");
    } else {
      compare_configuration();
      compare_files();
    }
    report_.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return std::move(report_);
  }

 private:
  // Two quantised sides are compared as they are; one, dequantised as convert does it.
  static bool is_quantized(const fs::path& path) {
    const auto config = path / distckpt::kHfConfig;
    return is_hf_checkpoint(path) && fs::exists(config) &&
           parse_quantization(distckpt::read_text(config), config.string()).has_value();
  }

  Checkpoint open_side(const fs::path& path, std::optional<distckpt::Iteration> iteration) {
    OpenOptions how{.iteration = iteration, .hf_config = {}, .keep_fp8 = keep_fp8_};
    if (!locate(path, iteration).has_own_config()) {
      how.hf_config = options_.hf_config;
      hf_config_used_ = true;
    }
    auto checkpoint = open(path, how);
    check_derived(checkpoint);
    if (!checkpoint.training_state.empty()) {
      report_.notes.push_back(
          fmt::format("{}: {} entries of training state (optimizer, RNG) were not compared",
                      checkpoint.location.folder.string(), checkpoint.training_state.size()));
    }
    return checkpoint;
  }

  // Padding that both sides hold is compared as a tensor is.
  void promote_shared_padding() {
    auto shared = distckpt::padding_names(left_.tensors, left_.links);
    const auto of_right = distckpt::padding_names(right_.tensors, right_.links);
    std::erase_if(shared, [&](const std::string& name) { return !of_right.contains(name); });
    distckpt::promote_padding(shared, left_.layout, left_.links, left_.tensors);
    distckpt::promote_padding(shared, right_.layout, right_.links, right_.tensors);
  }

  // What Megatron keeps in fp32 whatever the model's dtype is compared in fp32.
  void widen_fp32() {
    for (const auto& tensor : left_.map.megatron) {
      if (!tensor.fp32) continue;
      const auto index = tensor.parts.front().model;
      auto& left = left_.tensors[index];
      const auto there = right_.map.index.find(left.name);
      if (there == right_.map.index.end()) continue;
      auto& right = right_.tensors[there->second];
      if (left.dtype != right.dtype) left.dtype = right.dtype = DType::kF32;
    }
  }

  // Its storages and scales come after the left one's.
  static void shift_behind_left(CopyPlan& plan, distckpt::StorageId split, int num_scales) {
    const auto shift = [&](distckpt::Cover& cover) {
      for (auto& piece : cover) {
        piece.at.storage += split;
        if (piece.scale >= 0) piece.scale += num_scales;
      }
    };
    for (auto& planned : plan.tensors) {
      shift(planned.source);
      for (auto& cover : planned.replicas) shift(cover);
    }
    for (auto& padding : plan.discards) padding.at.storage += split;
    for (auto& scale : plan.scales) scale.at.storage += split;
  }

  void compare_tensors() {
    promote_shared_padding();
    widen_fp32();
    const auto left_plan = distckpt::plan_read(left_.tensors, left_.side());
    auto right_plan = distckpt::plan_read(right_.tensors, right_.side());
    const auto split = static_cast<distckpt::StorageId>(left_.layout.storages().size());
    shift_behind_left(right_plan, split, static_cast<int>(left_plan.scales.size()));
    std::map<std::string_view, std::size_t> right_index;
    for (std::size_t i = 0; i < right_.tensors.size(); ++i)
      right_index.emplace(right_.tensors[i].name, i);

    CopyPlan plan;
    plan.discards = left_plan.discards;
    std::ranges::move(right_plan.discards, std::back_inserter(plan.discards));
    plan.scales = left_plan.scales;
    std::ranges::move(right_plan.scales, std::back_inserter(plan.scales));
    // Second copies (a tied head) are held against the first of their own side: the left one's are
    // replicas before `right_replica`, the right one's are tensors of their own, behind the others.
    std::vector<std::uint32_t> right_replica;
    std::vector<distckpt::PlannedTensor> right_copies;
    for (std::size_t i = 0; i < left_.tensors.size(); ++i) {
      const auto& tensor = left_.tensors[i];
      const auto found = right_index.find(tensor.name);
      if (found == right_index.end()) {
        only_one_side(tensor, TensorDifference::Kind::kOnlyLeft, left_.location);
        continue;
      }
      auto& other = right_plan.tensors[found->second];
      right_index.erase(found);
      if (!same_kind(tensor, other.tensor)) continue;
      auto planned = left_plan.tensors[i];
      right_replica.push_back(static_cast<std::uint32_t>(planned.replicas.size()));
      // Pieces with scales are dequantised whatever this says: it is for those that are cast.
      using distckpt::Transform;
      if (planned.on_read == Transform::kNone || planned.on_read == Transform::kDequantize)
        planned.on_read = other.on_read;
      planned.replicas.push_back(other.source);
      plan.tensors.push_back(std::move(planned));
      if (!other.replicas.empty()) right_copies.push_back(std::move(other));
    }
    std::ranges::move(right_copies, std::back_inserter(plan.tensors));
    for (const auto& [name, index] : right_index) {
      only_one_side(right_.tensors[index], TensorDifference::Kind::kOnlyRight, right_.location);
    }
    execute(plan, split, right_replica);
  }

  void only_one_side(const ModelTensor& tensor,
                     TensorDifference::Kind kind,
                     const Location& location) {
    if (tensor.role == distckpt::Role::kDerived) {
      report_.notes.push_back(fmt::format("{}: follows from the configuration, and is in {} only",
                                          tensor.name, location.folder.string()));
      return;
    }
    report_.tensors.push_back({.kind = kind, .tensor = tensor.name});
  }

  bool same_kind(const ModelTensor& left, const ModelTensor& right) {
    if (left.shape != right.shape) {
      report_.tensors.push_back(
          {.kind = TensorDifference::Kind::kShape,
           .tensor = left.name,
           .detail = fmt::format("{}, {}", to_string(left.shape), to_string(right.shape))});
      return false;
    }
    if (left.dtype != right.dtype) {
      report_.tensors.push_back(
          {.kind = TensorDifference::Kind::kDType,
           .tensor = left.name,
           .detail = fmt::format("{}, {}", short_name(left.dtype), short_name(right.dtype))});
      return false;
    }
    return true;
  }

  void execute(const CopyPlan& plan,
               distckpt::StorageId split,
               const std::vector<std::uint32_t>& right_replica) {
    std::map<std::uint32_t, Difference> differences;
    distckpt::ExecutorOptions options{
        .threads = options_.threads, .max_memory = options_.max_memory, .on_inequality = {}};
    options.on_inequality = [&](const distckpt::Inequality& part) {
      const auto& tensor = plan.tensors[part.tensor].tensor;
      const bool is_left = part.tensor < right_replica.size();
      require(is_left && part.replica == right_replica[part.tensor], ErrorKind::kLayout,
              "{}: {}: its second copy differs from the first",
              (is_left ? left_ : right_).location.folder.string(), tensor.name);
      differences[part.tensor].add(tensor.dtype, part);
    };
    const auto left = left_.source();
    const auto right = right_.source();
    PairSource both(*left, *right, split);
    const auto done = wait_reporting(distckpt::Executor(options).submit(plan, both, nullptr),
                                     "comparing", progress_);
    left->verify_checksums();
    right->verify_checksums();
    report_.num_compared = static_cast<std::int64_t>(right_replica.size());
    for (std::size_t i = 0; i < right_replica.size(); ++i) {
      report_.bytes += plan.tensors[i].tensor.num_bytes();
    }
    for (const auto& padding : done.nonzero_padding) {
      report_.notes.push_back(
          fmt::format("{} {}: padding that is not zero", padding.tensor, to_string(padding.box)));
    }
    for (const auto& [index, difference] : differences) {
      const auto& tensor = plan.tensors[index].tensor;
      report_.tensors.push_back({.kind = TensorDifference::Kind::kValues,
                                 .tensor = tensor.name,
                                 .first_element = coordinates(tensor.shape, difference.first),
                                 .left_value = difference.left_value,
                                 .right_value = difference.right_value,
                                 .num_different = difference.count,
                                 .num_elements = tensor.shape.product(),
                                 .max_difference = difference.max_difference,
                                 .max_ulps = difference.max_ulps});
    }
  }

  void compare_configuration() {
    if (!left_.hf || !right_.hf) {
      try {
        require_same_model(left_.map.config, right_.map.config, report_.left.string(),
                           report_.right.string());
      } catch (const Error& error) {
        report_.configuration.emplace_back(error.what());
      }
      report_.notes.emplace_back(
          "config.json and carried files were not compared: one side has none (name them with "
          "--hf-config)");
      return;
    }
    const auto left = distckpt::parse_json(left_.hf->config_text(), left_.hf->config_source());
    const auto right = distckpt::parse_json(right_.hf->config_text(), right_.hf->config_source());
    std::set<std::string> keys;
    for (const auto* side : {&left, &right}) {
      for (const auto& [key, value] : side->items()) keys.insert(key);
    }
    const auto text = [](const nlohmann::json& object, const std::string& key) {
      return object.contains(key) ? object.at(key).dump() : std::string("absent");
    };
    for (const auto& key : keys) {
      if (text(left, key) == text(right, key)) continue;
      report_.configuration.push_back(
          fmt::format("config.json: {}: {}, {}", key, text(left, key), text(right, key)));
    }
  }

  void compare_files() {
    if (!left_.hf || !right_.hf) return;
    std::set<std::string> names(left_.hf->carried.begin(), left_.hf->carried.end());
    names.insert(right_.hf->carried.begin(), right_.hf->carried.end());
    names.erase(std::string(distckpt::kHfConfig));
    for (const auto& name : names) {
      const auto has = [&](const HfForm& form) {
        return std::ranges::find(form.carried, name) != form.carried.end();
      };
      if (!has(*left_.hf) || !has(*right_.hf)) {
        report_.files.push_back(
            fmt::format("{}: is on the {} only", name, has(*left_.hf) ? "left" : "right"));
      } else if (distckpt::read_text(left_.hf->folder / name) !=
                 distckpt::read_text(right_.hf->folder / name)) {
        report_.files.push_back(fmt::format("{}: differs", name));
      }
    }
    if (left_.hf->headers.empty() || right_.hf->headers.empty()) return;
    const auto metadata = [](const HfForm& form) {
      std::map<std::string, std::string> all;
      for (const auto& header : form.headers)
        all.insert(header.metadata.begin(), header.metadata.end());
      return all;
    };
    if (metadata(*left_.hf) != metadata(*right_.hf)) {
      report_.files.emplace_back("the safetensors files' __metadata__ differs");
    }
  }

  const VerifyOptions& options_;
  const ProgressFunction& progress_;
  Checkpoint left_;
  Checkpoint right_;
  bool hf_config_used_ = false;
  bool keep_fp8_ = false;
  VerifyReport report_;
};

}  // namespace

VerifyReport verify(const VerifyOptions& options, const ProgressFunction& progress) {
  return Verification(options, progress).run();
}

}  // namespace ferry::converter
