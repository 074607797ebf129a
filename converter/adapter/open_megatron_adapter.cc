// A LoRA adapter as Megatron-Bridge saves it, also where verl has it save one.
#include <charconv>
#include <map>
#include <set>
#include <utility>

#include "converter/adapter/factors/lora_settings.h"
#include "converter/adapter/open_adapter.h"
#include "converter/families/megatron_links.h"
#include "converter/write/run_config.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace {

// A number in the section "peft" of run_config.yaml: "  alpha: 32".
std::optional<double> peft_number(const std::string& yaml, std::string_view name) {
  bool inside = false;
  for (std::size_t at = 0; at < yaml.size();) {
    const auto end = std::min(yaml.find('\n', at), yaml.size());
    std::string_view line(yaml.data() + at, end - at);
    at = end + 1;
    if (!line.empty() && line.front() != ' ' && line.front() != '-') inside = line == "peft:";
    const auto start = line.find_first_not_of(' ');
    if (!inside || start != 2) continue;
    line.remove_prefix(start);
    if (!line.starts_with(name) || !line.substr(name.size()).starts_with(": ")) continue;
    line.remove_prefix(name.size() + 2);
    double number = 0;
    const auto [stop, error] = std::from_chars(line.data(), line.data() + line.size(), number);
    if (error == std::errc() && stop == line.data() + line.size()) return number;
  }
  return std::nullopt;
}

class MegatronAdapterOpener {
 public:
  MegatronAdapterOpener(const Location& location,
                        const ModelMap& base,
                        const OpenAdapterOptions& options)
      : base_(base), options_(options), location_(location) {}

  Adapter open() {
    const auto stored = distckpt::read_torch_dist(location_.folder);
    std::vector<const distckpt::TorchDistTensor*> factors;
    for (const auto& tensor : stored.tensors) {
      if (is_training_state(tensor.key) || !is_adapter_key(tensor.key)) continue;
      factors.push_back(&tensor);
      by_key_.emplace(models::strip_wrappers(tensor.key), &tensor);
    }
    require(!factors.empty(), ErrorKind::kLayout, "{}: holds no factors of an adapter",
            location_.folder.string());
    auto resolved = distckpt::resolve_layout(stored, factors);
    Adapter adapter{.form = AdapterForm::kMegatron};
    auto& checkpoint = adapter.checkpoint;
    checkpoint.location = location_;
    checkpoint.megatron_names = true;
    for (std::uint32_t i = 0; i < base_.megatron.size(); ++i) find_factors(i, adapter);
    checkpoint.map = make_adapter_map(base_, adapter.adapted);
    checkpoint.layout = std::move(resolved.layout);
    checkpoint.checksums = std::move(resolved.checksums);
    checkpoint.links = link_megatron(checkpoint.map, checkpoint.layout, LinkedSide::kSource);
    checkpoint.tensors = checkpoint.map.tensors;
    for (const auto& link : checkpoint.links.links)
      checkpoint.tensors[link.model].dtype = checkpoint.layout.tensor(link.stored).dtype;
    const auto alpha = read_alpha();
    for (const auto& one : adapter.adapted)
      adapter.scaling.push_back(
          lora_scaling(alpha, static_cast<double>(one.rank), location_.folder.string()));
    return adapter;
  }

 private:
  void find_factors(std::uint32_t index, Adapter& adapter) {
    const auto& of = base_.megatron[index];
    if (of.shape.rank() != 2) return;
    if (const auto* in = find(of, "linear_in"))
      adapter.adapted.push_back({.megatron = index, .rank = in->shape[in->shape.rank() - 2]});
    const auto parts = static_cast<int>(merged_tensors(of).size());
    if (parts == 1 || of.expert || of.merge == Merge::kCopy) return;
    for (int part = 0; part < parts; ++part) {
      const auto prefix = canonical_prefix(of, part);
      const auto* in = find(of, prefix + "linear_in");
      const auto* out = find(of, prefix + "linear_out");
      if (in == nullptr || out == nullptr) continue;
      adapter.canonical = true;
      adapter.adapted.push_back({.megatron = index,
                                 .part = part,
                                 .rank = in->shape[in->shape.rank() - 2],
                                 .tp = saving_ranks(of, *out)});
    }
  }

  const distckpt::TorchDistTensor* find(const MegatronTensor& of, const std::string& factor) const {
    for (const auto& key : {of.stacked_key, of.key}) {
      if (key.empty()) continue;
      const auto found = by_key_.find(adapter_key(key, factor));
      if (found != by_key_.end()) return found->second;
    }
    return nullptr;
  }

  // Each rank saved its rows, in two halves where they are of gate or up.
  static int saving_ranks(const MegatronTensor& of, const distckpt::TorchDistTensor& out) {
    const int dim = out.shape.rank() - 2;
    std::set<std::int64_t> offsets;
    for (const auto& chunk : out.chunks) offsets.insert(chunk.box.offset[dim]);
    return std::max(1, static_cast<int>(offsets.size()) / (of.merge == Merge::kGateUp ? 2 : 1));
  }

  double read_alpha() const {
    if (options_.alpha) return *options_.alpha;
    for (const auto& folder : {location_.folder, location_.root}) {
      const auto path = folder / kRunConfig;
      if (!distckpt::source_exists(path)) continue;
      if (const auto alpha = peft_number(distckpt::read_text(path), "alpha")) return *alpha;
    }
    const auto record = find_lora_record(location_);
    if (record && record->alpha) return *record->alpha;
    throw Error(ErrorKind::kLayout,
                fmt::format("{}: neither a {} nor a {} says the adapter's alpha",
                            location_.folder.string(), kRunConfig, kVerlLoraRecord),
                "name it with --lora-alpha");
  }

  const ModelMap& base_;
  const OpenAdapterOptions& options_;
  Location location_;
  std::map<std::string, const distckpt::TorchDistTensor*, std::less<>> by_key_;
};

}  // namespace

Adapter open_megatron_adapter(const Location& location,
                              const ModelMap& base,
                              const OpenAdapterOptions& options) {
  return MegatronAdapterOpener(location, base, options).open();
}

}  // namespace ferry::converter
