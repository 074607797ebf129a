#include "converter/write/quantize_checkpoint.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "converter/open/experts_form.h"
#include "distckpt/base/error.h"
#include "distckpt/execute/quantized_bands.h"

namespace ferry::converter {
namespace {

using distckpt::ModelTensor;
namespace extent = models::extent;
using Method = Quantization::Method;
using Kept = std::vector<std::optional<std::uint32_t>>;

// A projection from many channels to many: not a router, a gate, an embedding or an output layer.
bool is_linear(const MegatronTensor& tensor) {
  constexpr std::array kNoRows{extent::kVocab, extent::kLabels,     extent::kExperts,
                               extent::kOne,   extent::kIndexHeads, extent::kLinearHeads};
  constexpr std::array kNoColumns{extent::kNone, extent::kTwiceHidden};
  const auto& row = *tensor.row;
  return row.depth == extent::kNone && std::ranges::find(kNoRows, row.rows) == kNoRows.end() &&
         std::ranges::find(kNoColumns, row.columns) == kNoColumns.end();
}

// The indices of the tensors that the source holds in four bits (E2M1).
std::set<std::uint32_t> four_bit_tensors(const distckpt::TensorMap& links) {
  std::set<std::uint32_t> found;
  for (const auto& link : links.links) {
    if (link.scale < 0) continue;
    const auto& scale = links.scales[static_cast<std::size_t>(link.scale)];
    if (scale.encoding == distckpt::Encoding::kE2M1) found.insert(link.model);
  }
  return found;
}

// Throws unless a weight has a form in blocks of FP8: it is of one module, or of all experts of a
// layer, whose gate and up readers take apart at the end of a block.
void require_blocks(const ModelMap& map, const MegatronTensor& tensor, const ModelTensor& model) {
  if (model.shape.rank() == 2) return;
  require(map.family->names->fp8_experts && tensor.expert && model.shape.rank() == 3,
          ErrorKind::kUsage,
          "--quantize fp8-block: {} is {}: experts that lie in one tensor have no such form",
          model.name, to_string(model.shape));
  const auto ffn = map.config.moe_ffn_hidden_size;
  require(ffn % distckpt::kE4M3Block == 0, ErrorKind::kUsage,
          "--quantize fp8-block: {} is {}: experts that lie in one tensor have a form only where "
          "their width, here {}, is a multiple of {}",
          model.name, to_string(model.shape), ffn, distckpt::kE4M3Block);
}

// The indices of the tensors that are quantised.
std::set<std::uint32_t> chosen_tensors(const Checkpoint& checkpoint, Method method) {
  const auto& map = checkpoint.map;
  if (method == Method::kFp8Lossless) {
    auto chosen = four_bit_tensors(checkpoint.links);
    require(!chosen.empty(), ErrorKind::kUsage,
            "--quantize fp8-block-lossless: the source holds no weights of four bits (E2M1)");
    for (const auto index : chosen) {
      require(map.tensors[index].shape.rank() == 2, ErrorKind::kUsage,
              "--quantize fp8-block-lossless: {} is {}: experts that lie in one tensor have no "
              "such form",
              map.tensors[index].name, to_string(map.tensors[index].shape));
    }
    return chosen;
  }
  std::set<std::uint32_t> chosen;
  for (const auto& tensor : map.megatron) {
    if (!is_linear(tensor)) continue;
    for (const auto& part : tensor.parts) {
      const auto& model = map.tensors[part.model];
      if (method == Method::kMxfp4) {
        if (map.family->names->mxfp4_experts && tensor.expert && !part.axes.empty() &&
            model.shape.rank() == 3)
          chosen.insert(part.model);
        continue;
      }
      require_blocks(map, tensor, model);
      chosen.insert(part.model);
    }
  }
  require(!chosen.empty() || method == Method::kFp8, ErrorKind::kUsage,
          "--quantize mxfp4: only the experts of GPT-OSS have such a form, and {} has none",
          map.family->model_type);
  require(!chosen.empty(), ErrorKind::kUsage,
          "--quantize fp8-block: {} has no weights of linear layers", map.family->model_type);
  return chosen;
}

// The modules whose weights stay as they are, as transformers wants to know.
std::vector<std::string> modules_not_converted(const std::vector<ModelTensor>& tensors,
                                               const std::set<std::uint32_t>& chosen,
                                               bool tied) {
  constexpr std::string_view kWeight = ".weight";
  std::vector<std::string> modules;
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    const auto& name = tensors[i].name;
    if (!chosen.contains(i) && tensors[i].shape.rank() == 2 && name.ends_with(kWeight))
      modules.push_back(name.substr(0, name.size() - kWeight.size()));
  }
  if (tied) modules.emplace_back("lm_head");
  return modules;
}

// The new places of tensors, of which only those that `keep` takes stay.
template <typename Keep>
Kept kept_where(std::size_t count, const Keep& keep) {
  Kept at;
  std::uint32_t next = 0;
  for (std::uint32_t i = 0; i < count; ++i)
    at.push_back(keep(i) ? std::optional(next++) : std::nullopt);
  return at;
}

std::vector<ModelTensor> kept_tensors(const std::vector<ModelTensor>& tensors, const Kept& at) {
  std::vector<ModelTensor> kept;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (at[i]) kept.push_back(tensors[i]);
  }
  return kept;
}

// Reads the chosen tensors in the order in which the source holds them.
distckpt::CopyPlan plan_chosen(const Checkpoint& checkpoint,
                               const std::vector<ModelTensor>& tensors,
                               const std::set<std::uint32_t>& chosen,
                               distckpt::Transform cast) {
  const auto at = kept_where(tensors.size(), [&](std::uint32_t i) { return chosen.contains(i); });
  auto links = checkpoint.links;
  distckpt::restrict_links(links, checkpoint.layout, at);
  auto plan = distckpt::plan_read(kept_tensors(tensors, at),
                                  {.layout = &checkpoint.layout, .map = &links}, cast);
  std::ranges::stable_sort(plan.tensors, {}, [](const distckpt::PlannedTensor& planned) {
    const auto& first = planned.source.front().at;
    return std::pair(first.storage, first.offset);
  });
  return plan;
}

}  // namespace

void quantize_checkpoint(Checkpoint& checkpoint,
                         std::vector<ModelTensor>& tensors,
                         Method method,
                         distckpt::Transform cast) {
  require_hf_form(checkpoint);
  if (method == Method::kFp8) separate_experts(checkpoint, tensors);
  const bool fp8 = method != Method::kMxfp4;
  const auto chosen = chosen_tensors(checkpoint, method);
  auto& hf = *checkpoint.hf;
  hf.quantize(method, modules_not_converted(tensors, chosen, checkpoint.map.config.is_tied()));
  auto plan = plan_chosen(checkpoint, tensors, chosen, cast);
  std::vector<std::string> names;
  for (const auto& planned : plan.tensors) names.push_back(planned.tensor.name);

  const auto at = kept_where(tensors.size(), [&](std::uint32_t i) { return !chosen.contains(i); });
  distckpt::restrict_links(checkpoint.links, checkpoint.layout, at);
  keep_tensors(checkpoint.map, at);
  tensors = kept_tensors(tensors, at);
  const auto added = distckpt::add_quantized(
      std::move(plan), fp8 ? distckpt::Encoding::kE4M3 : distckpt::Encoding::kE2M1,
      method == Method::kFp8Lossless ? distckpt::E4M3Scale::kPowerOfTwo
                                     : distckpt::E4M3Scale::kLargest,
      checkpoint.layout);
  const auto add = [&](std::string name, std::uint32_t stored) {
    const auto& tensor = checkpoint.layout.tensor(stored);
    checkpoint.links.links.push_back(
        distckpt::BoxLink::whole(static_cast<std::uint32_t>(tensors.size()), stored, tensor.shape));
    tensors.push_back({.name = std::move(name), .dtype = tensor.dtype, .shape = tensor.shape});
  };
  for (std::size_t i = 0; i < added.size(); ++i) {
    add(fmt::format("{}{}", names[i], fp8 ? "" : kBlocksSuffix), added[i].elements);
    add(fmt::format("{}{}", names[i], fp8 ? kScaleSuffix : kBlockScalesSuffix), added[i].scales);
  }
  checkpoint.tensors = tensors;
}

}  // namespace ferry::converter
