#include "models/certificate/numerics_digest.h"

#define XXH_INLINE_ALL
#include <ATen/Version.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <fmt/format.h>
#include <torch/version.h>
#include <xxhash.h>

#include <algorithm>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "models/kernels/attention/attention.h"
#include "models/kernels/attention/attention_cuda.h"
#include "models/kernels/product/float_chains.h"
#include "models/kernels/product/gemm.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/product/unit_triangular.h"
#include "models/spec/costs.h"

namespace ferry::models {
namespace {

// Raise it when a kernel of ours, or the choice of one, changes the bits of a result.
constexpr int kRevision = 5;

std::string attention_kernel(const GPTModel& model) {
  if (!model.mesh().world().device().is_cuda()) {
    return fmt::format("eager, {} rows and keys", kHostAttentionRows);
  }
  return "flash";
}

std::string product_kernel(const GPTModel& model) {
  if (!model.mesh().world().device().is_cuda())
    return fmt::format("at::linear, {} rows; fp32 in chains of {}", kHostProductRows,
                       host::kLongestChain);
  return "cuBLASLt without split-K";
}

}  // namespace

std::vector<std::pair<std::string, std::string>> numerics_environment(at::Device device) {
  std::vector<std::pair<std::string, std::string>> facts{
      {"LibTorch", TORCH_VERSION}, {"host instructions", at::get_cpu_capability()}};
  if (!device.is_cuda()) return facts;
  for (auto& fact : gemm_environment()) facts.push_back(std::move(fact));
  facts.emplace_back("cuDNN", fmt::format("{}", at::detail::getCUDAHooks().versionRuntimeCuDNN()));
  return facts;
}

NumericsPolicy numerics_policy(const GPTModel& model) {
  const auto& options = model.options();
  const bool bitwise = options.alignment == Alignment::kBitwise;
  NumericsPolicy policy{.entries = numerics_environment(model.mesh().world().device())};
  const auto add = [&](const char* name, std::string value) {
    policy.entries.emplace_back(name, std::move(value));
  };
  add("revision", fmt::format("{}", kRevision));
  add("alignment", bitwise ? "bitwise" : "fast");
  add("dtype", std::string(short_name(options.dtype)));
  add("attention", attention_kernel(model));
  add("products", product_kernel(model));
  const bool on_host = model.mesh().world().device().is_cpu();
  if (bitwise && on_host && model.config().has_linear_attention())  // a GPU solves none
    add("triangular systems", std::string(name_of(triangle_order())));
  return policy;
}

std::string NumericsPolicy::digest() const {
  std::string text;
  for (const auto& [name, value] : entries)
    text += fmt::format("{}:{}={}:{};", name.size(), name, value.size(), value);
  const auto hash = XXH3_128bits(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

void require_same_numerics(const NumericsPolicy& trainer, const NumericsPolicy& rollout) {
  const std::pair<std::string, std::string> bitwise{"alignment", "bitwise"};
  if (std::ranges::find(trainer.entries, bitwise) == trainer.entries.end()) return;
  if (trainer == rollout) return;
  const auto [mine, theirs] = std::ranges::mismatch(trainer.entries, rollout.entries);
  const auto text = [](const auto& entry, const auto& entries) {
    return entry == entries.end() ? std::string("nothing")
                                  : fmt::format("{} {}", entry->first, entry->second);
  };
  throw Error(ErrorKind::kUsage,
              fmt::format("the rollout (numerics {}) does not compute what the trainer ({}) does: "
                          "{} against {}",
                          rollout.digest(), trainer.digest(), text(theirs, rollout.entries),
                          text(mine, trainer.entries)),
              "in bitwise mode both take the same settings, libraries and kind of device");
}

}  // namespace ferry::models
