#include "converter/delta/apply_delta.h"

#include <algorithm>
#include <utility>

#include "converter/conversion_plan.h"
#include "converter/digest_checkpoint.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace {

// The tensors of a quantised base are changed as they are.
bool keeps_quantized(const DeltaChain& chain, const std::filesystem::path& base) {
  const auto& deltas = chain.deltas();
  const auto is_slime = [](const auto& delta) {
    return delta->summary().form == DeltaForm::kSlime;
  };
  const auto of_quantized = std::ranges::find_if(deltas, [&](const auto& delta) {
    return !is_slime(delta) && delta->summary().keep_quantized;
  });
  if (of_quantized == deltas.end() && std::ranges::none_of(deltas, is_slime)) return false;
  const bool quantized = stored_quantization(base).has_value();
  if (of_quantized != deltas.end()) {
    require(quantized, ErrorKind::kLayout,
            "{}: changes quantised weights as they are stored, and {} has none",
            (*of_quantized)->summary().path.string(), base.string());
  }
  return quantized;
}

std::vector<std::unique_ptr<Delta>> open_all(std::span<const std::filesystem::path> paths) {
  std::vector<std::unique_ptr<Delta>> deltas;
  for (const auto& path : paths) {
    for (auto& delta : open_deltas(path)) deltas.push_back(std::move(delta));
  }
  return deltas;
}

}  // namespace

DeltaChain::DeltaChain(std::vector<std::unique_ptr<Delta>> deltas) : deltas_(std::move(deltas)) {
  require(!deltas_.empty(), ErrorKind::kUsage, "no delta is given");
  require_chain(deltas_);
}

DeltaChain::DeltaChain(std::span<const std::filesystem::path> paths)
    : DeltaChain(open_all(paths)) {}

distckpt::Digest DeltaChain::identity() const {
  distckpt::RunningDigest all;
  for (const auto& delta : deltas_) all.add(std::as_bytes(std::span(delta->identity().bytes)));
  return all.digest();
}

std::vector<std::filesystem::path> DeltaChain::sources() const {
  std::vector<std::filesystem::path> paths;
  for (const auto& delta : deltas_) paths.push_back(delta->summary().path);
  return paths;
}

void DeltaChain::begin(Checkpoint& source) {
  element_sizes_.clear();
  for (const auto& tensor : source.tensors) element_sizes_.push_back(size_of(tensor.dtype));
  for (const auto& delta : deltas_) {
    delta->begin(source);
    if (!source.hf) continue;  // a Megatron checkpoint alone: nothing travels along
    for (auto& [name, content] : delta->files()) {
      auto& carried = source.hf->carried;
      const auto at = std::ranges::lower_bound(carried, name);
      if (at == carried.end() || *at != name) carried.insert(at, name);
      source.hf->contents[name] = content;
    }
  }
}

void DeltaChain::amend(std::uint32_t tensor, std::int64_t element, std::span<std::byte> elements) {
  for (const auto& delta : deltas_)
    delta->apply(tensor, element * element_sizes_[tensor], elements);
}

bool DeltaChain::in_order() const {
  return std::ranges::any_of(deltas_, [](const auto& delta) { return delta->in_order(); });
}

void DeltaChain::finish(const std::vector<distckpt::Digest>& digests) {
  for (const auto& delta : deltas_) delta->require_applied();
  deltas_.back()->require_result(digests);
}

ConvertReport apply_delta(ConvertOptions options,
                          DeltaChain& chain,
                          const ProgressFunction& progress) {
  require(!options.resume || !chain.in_order(), ErrorKind::kUsage,
          "--resume: a delta of slime's form is read from front to back");
  options.keep_quantized = keeps_quantized(chain, options.from);
  options.amendment = &chain;
  return convert(options, progress);
}

VerifyDeltaReport verify_delta(const VerifyDeltaOptions& options,
                               DeltaChain& chain,
                               const ProgressFunction& progress) {
  auto base = open(options.base, {.iteration = options.iteration,
                                  .hf_config = options.hf_config,
                                  .keep_quantized = keeps_quantized(chain, options.base)});
  check_derived(base);
  chain.begin(base);
  const auto plan = distckpt::plan_read(base.tensors, base.side());
  require_amendable(plan);
  const distckpt::Executor executor(
      {.threads = distckpt::reading_threads(options.threads, options.base),
       .max_memory = options.max_memory,
       .in_order = chain.in_order() ? distckpt::InOrder::kTensors : distckpt::InOrder::kStretches,
       .on_compared = {},
       .on_read = [&](auto tensor, auto element, auto elements) {
         chain.amend(tensor, element, elements);
       }});
  const auto source = base.source();
  const auto done = wait_reporting(executor.submit(plan, *source, nullptr), "verifying", progress);
  source->verify_checksums();
  chain.finish(done.digests);
  VerifyDeltaReport report{.bytes = plan.num_bytes(),
                           .result_digest = model_digest(base.tensors, done.digests)};
  for (const auto& tensor : base.tensors)
    if (tensor.role == distckpt::Role::kWeight) ++report.num_tensors;
  return report;
}

}  // namespace ferry::converter
