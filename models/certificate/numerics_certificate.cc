#include "models/certificate/numerics_certificate.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/base/stopwatch.h"
#include "models/certificate/numerics_digest.h"
#include "models/kernels/attention/attention_cuda.h"
#include "models/kernels/product/gemm.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/rms_norm.h"
#include "models/spec/mesh_shape.h"
#include "models/spec/products.h"
#include "models/spec/sharding.h"
#include "models/vision/vision_functions.h"

namespace ferry::models {
namespace {

constexpr int kSlices[] = {2, 4, 8};
constexpr std::int64_t kNarrowestSlice = 16;
// Lengths at which transformers' own sums over keys agree, few and many.
constexpr std::int64_t kTokensOfTransformers[] = {16, 64, 192, 400};

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() &&
         at::equal(a.contiguous().view(at::kByte), b.contiguous().view(at::kByte));
}

class Examiner {
 public:
  Examiner(const TransformerConfig& config, const NumericsOptions& options, const NumericsOps& ops)
      : config_(config), options_(options), ops_(ops) {
    const bool gpu = options.device.is_cuda();
    rows_ = gpu ? std::vector<std::int64_t>{1, 2, 7, 16, 17, 33, 64, 100, 128, 256, 512, 1000}
                : std::vector<std::int64_t>{1, 2, 7, 16, 17, 33};
    most_rows_ = gpu ? 2048 : 64;
  }

  void run(NumericsCertificate& certificate) {
    const auto shapes = gemm_shapes(config_);
    for (auto shape : shapes) {
      if (options_.most_columns > 0) shape.n = std::min(shape.n, options_.most_columns);
      const auto parts = shape.cut ? shape.cut->parts : 0;
      if (!seen_.insert({shape.n, shape.k, shape.has_bias, shape.is_score(), parts}).second)
        continue;
      product(shape, options_.dtype);
    }
    if (options_.dtype != at::kFloat && routes_in_float())
      product({.name = "router in fp32", .n = config_.num_moe_experts, .k = config_.hidden_size},
              at::kFloat);
    norm();
    softmax();
    for (const auto& shape : attention_shapes(config_)) attention(shape);
    if (config_.computes_vision() && options_.device.is_cpu()) attention_of_frame();
    if (config_.has_linear_attention() && options_.device.is_cpu()) delta_rule();
    for (const auto& shape : shapes)
      if (shape.grouped) experts(shape);
    if (config_.num_moe_experts > 0) sum_of_experts();
    certificate.checks = std::move(checks_);
    certificate.transformers = std::move(transformers_);
  }

 private:
  at::Tensor random(at::IntArrayRef shape, std::optional<at::ScalarType> dtype = {}) const {
    return at::randn(shape, at::TensorOptions().device(options_.device))
        .to(dtype.value_or(options_.dtype));
  }

  // DeepSeek's routers are the ones that add up in fp32.
  bool routes_in_float() const {
    return config_.num_moe_experts > 0 && config_.routes_in_fp32() &&
           !config_.traits.moe_router_logits_in_params_dtype;
  }

  // True if products are ours, and those of transformers MKL's.
  bool in_chains(at::ScalarType dtype) const {
    return options_.device.is_cpu() && dtype == at::kFloat;
  }

  static NumericsCheck check_of(const std::string& subject,
                                const std::string& property,
                                const std::string& differing) {
    const bool passed = differing.empty();
    return {.subject = subject,
            .property = property,
            .passed = passed,
            .detail = passed ? "" : "other bits at" + differing};
  }

  // Adds a check of `property`. `differing` names the places that differ; empty: the check passes.
  void report(const std::string& subject,
              const std::string& property,
              const std::string& differing) {
    checks_.push_back(check_of(subject, property, differing));
  }
  void report_of_transformers(const std::string& subject, const std::string& differing) {
    transformers_.push_back(check_of(subject, "equals LibTorch's", differing));
  }

  void product(const GemmShape& shape, at::ScalarType dtype) {
    const auto x = random({most_rows_, shape.k}, dtype);
    const auto weight = random({shape.n, shape.k}, dtype) / std::sqrt(static_cast<double>(shape.k));
    const auto bias = shape.has_bias ? random({shape.n}, dtype) : at::Tensor();
    const auto& op = shape.is_score() ? ops_.head : shape.cut ? ops_.slice : ops_.linear;
    const auto all = op(x, weight, bias);
    std::string differing;
    for (const auto rows : rows_)
      if (!same_bytes(op(x.narrow(0, 0, rows), weight, bias), all.narrow(0, 0, rows)))
        differing += fmt::format(" {} rows", rows);
    report(shape.subject(), "rows", differing);

    differing.clear();
    const auto order = at::randperm(most_rows_, x.options().dtype(at::kLong));
    if (!same_bytes(op(x.index_select(0, order), weight, bias), all.index_select(0, order)))
      differing = " another order of rows";
    report(shape.subject(), "order", differing);
    if (in_chains(dtype) && !shape.is_score()) {
      differing.clear();
      const auto optional_bias = bias.defined() ? std::optional(bias) : std::nullopt;
      for (const auto rows : kTokensOfTransformers) {
        const auto tokens = random({rows, shape.k}, dtype);
        if (!same_bytes(at::linear(tokens, weight, optional_bias), op(tokens, weight, bias)))
          differing += fmt::format(" {} rows", rows);
      }
      report_of_transformers(shape.subject(), differing);
    }
    if (!shape.cut) return;

    differing.clear();
    for (const auto slices : kSlices) {
      if (shape.n % (std::int64_t{slices} * shape.cut->parts) != 0 ||
          shape.n / slices < kNarrowestSlice)
        continue;
      for (const int rank : {0, slices - 1}) {
        const auto boxes = shape.cut->boxes({shape.n, shape.k}, rank, slices);
        const auto of_rank = [&](const at::Tensor& columns, std::int64_t dim) {
          std::vector<at::Tensor> parts;
          for (const auto& box : boxes)
            parts.push_back(columns.narrow(dim, box.offset[0], box.size[0]));
          return at::cat(parts, dim);
        };
        for (const auto rows : {rows_[3], most_rows_})
          if (!same_bytes(op(x.narrow(0, 0, rows), of_rank(weight, 0),
                             bias.defined() ? of_rank(bias, 0) : bias),
                          of_rank(all.narrow(0, 0, rows), 1)))
            differing +=
                fmt::format(" column {} of TP {} with {} rows", boxes[0].offset[0], slices, rows);
      }
    }
    report(shape.subject(), "slices", differing);
  }

  void norm() {
    for (const auto width : norm_widths(config_)) {
      const auto x = random({most_rows_, width});
      const auto weight = random({width});
      const auto all = ops_.rms_norm(x, weight);
      std::string differing;
      for (const auto rows : rows_)
        if (!same_bytes(ops_.rms_norm(x.narrow(0, 0, rows), weight), all.narrow(0, 0, rows)))
          differing += fmt::format(" {} rows", rows);
      report(fmt::format("RMSNorm {}", width), "rows", differing);
    }
  }

  // Rows have to begin at multiples of 16 bytes: ATen's kernel adds up in another order elsewhere.
  void softmax() {
    if (config_.vocab_size == 0) return;
    const auto width = distckpt::round_up(config_.vocab_size, 4);
    const auto x = at::randn({64, width}, at::TensorOptions().device(options_.device));
    const auto all = at::log_softmax(x, -1);
    std::string differing;
    for (const std::int64_t rows : {1, 2, 7, 33})
      if (!same_bytes(at::log_softmax(x.narrow(0, 5, rows).clone(), -1), all.narrow(0, 5, rows)))
        differing += fmt::format(" {} rows", rows);
    report(fmt::format("log_softmax {}", width), "rows", differing);
  }

  void attention(const AttentionShape& shape) {
    const auto [heads, groups, dim, value_dim] = shape;
    const auto query = random({400, heads, dim});
    const auto key = random({400, groups, dim});
    const auto value = random({400, groups, value_dim});
    const AttentionOptions how{.scale = 1 / std::sqrt(static_cast<double>(dim)),
                               .sinks = config_.softmax_offset ? random({heads}) : at::Tensor(),
                               .alignment = Alignment::kBitwise};
    const auto run = [&](const std::vector<AttentionSegment>& segments) {
      return ops_.attention(query, key, value, segments, how);
    };
    const auto subject = fmt::format("attention {}x{}x{}", heads, groups, dim);
    const auto whole = run({{0, 400, 0, 400}});

    std::string differing;
    for (const std::int64_t rows : {16, 100, 300})
      if (!same_bytes(run({{0, rows, 0, rows}}).narrow(0, 0, rows), whole.narrow(0, 0, rows)))
        differing += fmt::format(" a prefix of {}", rows);
    report(subject, "length", differing);

    differing.clear();
    if (!same_bytes(run({{0, 130, 0, 130}, {130, 70, 0, 200}, {200, 200, 0, 400}}), whole))
      differing += " chunks";
    for (const std::int64_t at : {20, 128, 399})
      if (!same_bytes(run({{at, 1, 0, at + 1}}).narrow(0, at, 1), whole.narrow(0, at, 1)))
        differing += fmt::format(" row {} decoded", at);
    report(subject, "chunks", differing);

    differing.clear();
    const auto packed = run({{0, 130, 0, 130}, {130, 270, 130, 270}});
    const auto alone = ops_.attention(query.narrow(0, 130, 270), key.narrow(0, 130, 270),
                                      value.narrow(0, 130, 270), {{0, 270, 0, 270}}, how);
    if (!same_bytes(packed.narrow(0, 130, 270), alone)) differing = " the second of two sequences";
    report(subject, "packing", differing);

    if (!in_chains(options_.dtype)) return;
    differing.clear();
    auto theirs = how;
    theirs.alignment = Alignment::kFast;  // at::matmul's products
    for (const auto rows : kTokensOfTransformers)
      if (!same_bytes(
              ops_.attention(query, key, value, {{0, rows, 0, rows}}, theirs).narrow(0, 0, rows),
              run({{0, rows, 0, rows}}).narrow(0, 0, rows)))
        differing += fmt::format(" {} tokens", rows);
    report_of_transformers(subject, differing);
  }

  // The tower computes queries in parts of 256 rows and more.
  void attention_of_frame() {
    constexpr std::int64_t kPatches = 400;
    const auto heads = config_.vision->num_heads;
    const auto dim = config_.vision->hidden_size / heads;
    const auto query = random({1, heads, kPatches, dim});
    const auto key = random({1, heads, kPatches, dim});
    const auto value = random({1, heads, kPatches, dim});
    const auto subject = fmt::format("attention of a frame {}x{}", heads, dim);
    const auto whole = ops_.attention_of_frame(query, key, value, Alignment::kBitwise);
    std::string differing;
    for (const std::int64_t rows : {256, 300})
      if (!same_bytes(
              ops_.attention_of_frame(query.narrow(2, 0, rows), key, value, Alignment::kBitwise),
              whole.narrow(1, 0, rows)))
        differing += fmt::format(" {} rows", rows);
    report(subject, "rows", differing);

    if (!in_chains(options_.dtype)) return;
    differing.clear();
    for (const auto patches : kTokensOfTransformers) {
      const auto of = [&](const at::Tensor& x) { return x.narrow(2, 0, patches); };
      if (!same_bytes(ops_.attention_of_frame(of(query), of(key), of(value), Alignment::kFast),
                      ops_.attention_of_frame(of(query), of(key), of(value), Alignment::kBitwise)))
        differing += fmt::format(" {} patches", patches);
    }
    report_of_transformers(subject, differing);
  }

  // The rule computes in fp32 in models of any dtype: their roundings would hide most differences.
  void delta_rule() {
    constexpr std::int64_t kTokens = 400;
    constexpr std::int64_t kCut = 2 * kDeltaChunk;
    const auto heads = config_.linear_num_key_heads;
    const auto values = config_.linear_num_value_heads;
    const auto of_heads = [&](std::int64_t count, std::int64_t dim) {
      return random({1, kTokens, count, dim}, at::kFloat);
    };
    const auto rows = DeltaRows{.query = of_heads(heads, config_.linear_key_head_dim),
                                .key = of_heads(heads, config_.linear_key_head_dim),
                                .value = of_heads(values, config_.linear_value_head_dim),
                                .decay = -random({1, kTokens, values}, at::kFloat).abs(),
                                .beta = random({1, kTokens, values}, at::kFloat).sigmoid()};
    const auto part = [](const DeltaRows& of, std::int64_t dim, std::int64_t begin,
                         std::int64_t count, std::int64_t values_of_key) {
      const auto narrow = [&](const at::Tensor& x, std::int64_t each) {
        return x.narrow(dim, each * begin, each * count);
      };
      return DeltaRows{.query = narrow(of.query, 1),
                       .key = narrow(of.key, 1),
                       .value = narrow(of.value, values_of_key),
                       .decay = narrow(of.decay, values_of_key),
                       .beta = narrow(of.beta, values_of_key)};
    };
    const auto run = [&](const DeltaRows& of, const at::Tensor& state = {}) {
      return ops_.delta_rule(of, state, Alignment::kBitwise);
    };
    const auto subject = fmt::format("delta rule {}x{}, {}x{}", heads, config_.linear_key_head_dim,
                                     values, config_.linear_value_head_dim);
    const auto whole = run(rows).output;
    const auto prefix = [&](std::int64_t tokens) { return part(rows, 1, 0, tokens, 1); };

    std::string differing;
    for (const std::int64_t tokens : {16, 100, 300})
      if (!same_bytes(run(prefix(tokens)).output, whole.narrow(1, 0, tokens)))
        differing += fmt::format(" a prefix of {}", tokens);
    report(subject, "length", differing);

    differing.clear();
    const auto before = run(prefix(kCut + 1)).state_of_chunks;
    if (!same_bytes(run(part(rows, 1, kCut, kTokens - kCut, 1), before).output,
                    whole.narrow(1, kCut, kTokens - kCut)))
      differing = fmt::format(" going on behind {}", kCut);
    report(subject, "chunks", differing);

    differing.clear();
    const auto each = values / heads;
    for (const auto head : {std::int64_t{0}, heads - 1})
      if (!same_bytes(run(part(rows, 2, head, 1, each)).output, whole.narrow(2, head * each, each)))
        differing += fmt::format(" head {} alone", head);
    report(subject, "slices", differing);

    differing.clear();
    for (const auto tokens : kTokensOfTransformers)
      if (!same_bytes(ops_.delta_rule(prefix(tokens), {}, Alignment::kFast).output,
                      whole.narrow(1, 0, tokens)))
        differing += fmt::format(" {} tokens", tokens);
    report_of_transformers(subject, differing);
  }

  // Hugging Face's grouped product must give each expert the bits that the linear layer gives.
  void experts(const GemmShape& shape) {
    const std::vector<std::int64_t> sizes =
        options_.device.is_cuda() ? std::vector<std::int64_t>{1, 2, 7, 0, 16, 100, 3, 300}
                                  : std::vector<std::int64_t>{12, 16, 0, 33};
    const auto n = shape.n;
    const auto k = shape.k;
    const auto experts = static_cast<std::int64_t>(sizes.size());
    std::vector<std::int32_t> ends;
    std::int64_t rows = 0;
    for (const auto size : sizes) ends.push_back(static_cast<std::int32_t>(rows += size));
    const auto x = random({rows, k});
    const auto weight = random({experts, n, k}) / std::sqrt(static_cast<double>(k));
    const auto grouped =
        at::_grouped_mm(x, weight.transpose(1, 2), at::tensor(ends, at::kInt).to(options_.device));
    std::string differing;
    std::int64_t first = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      const auto size = sizes[static_cast<std::size_t>(e)];
      if (size > 0 && !same_bytes(ops_.slice(x.narrow(0, first, size), weight[e], {}),
                                  grouped.narrow(0, first, size)))
        differing += fmt::format(" {} rows", size);
      first += size;
    }
    const auto subject = fmt::format("grouped product {}x{}", n, k);
    if (in_chains(options_.dtype))
      report_of_transformers(subject, differing);
    else
      report(subject, "equals linear", differing);
  }

  void sum_of_experts() {
    const auto parts = random({most_rows_, config_.moe_router_topk, config_.hidden_size});
    const auto sums = parts.sum(1);
    std::string differing;
    for (const auto size : rows_)
      if (!same_bytes(parts.narrow(0, 0, size).sum(1), sums.narrow(0, 0, size)))
        differing += fmt::format(" {} rows", size);
    report(fmt::format("sum of {} experts", config_.moe_router_topk), "rows", differing);
  }

  const TransformerConfig& config_;
  const NumericsOptions& options_;
  const NumericsOps& ops_;
  std::vector<std::int64_t> rows_;
  std::int64_t most_rows_ = 0;
  std::set<std::tuple<std::int64_t, std::int64_t, bool, bool, int>> seen_;
  std::vector<NumericsCheck> checks_;
  std::vector<NumericsCheck> transformers_;
};

std::vector<std::pair<std::string, std::string>> environment(const NumericsOptions& options) {
  auto facts = numerics_environment(options.device);
  facts.emplace_back("dtype", c10::toString(options.dtype));
  facts.emplace_back("host threads", fmt::format("{}", at::get_num_threads()));
  return facts;
}

}  // namespace

bool NumericsCertificate::passed() const {
  return !checks.empty() && std::ranges::all_of(checks, &NumericsCheck::passed);
}

bool NumericsCertificate::equals_transformers() const {
  return std::ranges::all_of(transformers, &NumericsCheck::passed);
}

NumericsOps bitwise_ops(at::Device device) {
  NumericsOps ops;
  ops.linear = [](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    return linear(x, weight, bias, Alignment::kBitwise);
  };
  ops.slice = [](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    return linear_slice(x, weight, bias, Alignment::kBitwise);
  };
  ops.head = [](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    return linear_head(x, weight, bias, Alignment::kBitwise);
  };
  ops.rms_norm = [](const at::Tensor& x, const at::Tensor& weight) {
    return rms_norm(x, weight, 1e-6);
  };
  if (device.is_cuda()) {
    ops.attention = attention_cuda;
  } else {
    ops.attention = attention;
    ops.attention_of_frame = [](const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, Alignment alignment) {
      return eager_attention_of_frame(
          query, key, value, std::pow(static_cast<double>(query.size(3)), -0.5), alignment);
    };
    ops.delta_rule = chunk_gated_delta_rule;
  }
  return ops;
}

NumericsCertificate certify_numerics(const TransformerConfig& config,
                                     const NumericsOptions& options,
                                     const NumericsOps& ops) {
  check_fits(config, MeshShape(ParallelConfig{}, 1));
  require(options.device.is_cpu() ||
              (options.dtype == at::kBFloat16 && !config.layernorm_zero_centered_gamma),
          ErrorKind::kUsage,
          "the bitwise mode on a GPU is of bf16, and of norms that multiply by their weight");
  const distckpt::Stopwatch stopwatch;
  const at::NoGradGuard no_grad;
  at::manual_seed(1);
  NumericsCertificate certificate;
  Examiner(config, options, ops).run(certificate);
  certificate.environment = environment(options);
  if (options.device.is_cuda())
    for (const auto& choice : gemm_choices())
      certificate.kernels.push_back(fmt::format(
          "{}x{}{} rows <= {}: {}, {:.1f} us, the fastest of {}; {} left out", choice.n, choice.k,
          choice.has_bias ? " + bias" : "", choice.bucket,
          choice.algorithm < 0 ? "ordered_rows"
                               : fmt::format("algorithm {} tile {} stages {}", choice.algorithm,
                                             choice.tile, choice.stages),
          choice.microseconds, choice.candidates, choice.dropped));
  certificate.seconds = stopwatch.seconds();
  return certificate;
}

}  // namespace ferry::models
