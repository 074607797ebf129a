#include "models/tensor_parallel/cross_entropy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "distckpt/base/error.h"
#include "models/kernels/product/float_product.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/whole_vectors.h"

namespace ferry::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct ChunkLogits {
  at::Tensor values{};  // [tokens, vocabulary/tp]
  at::Tensor tanh{};    // what a soft cap multiplied; undefined: there is none
};

// The head without its weight, which autograd keeps: the computations that forward and backward
// share.
class Chunks {
 public:
  Chunks(const OutputHead& head, double temperature)
      : group_(head.parallel.group),
        alignment_(head.parallel.alignment),
        vocab_size_(head.vocab_size),
        chunk_tokens_(head.chunk_tokens),
        logits_scaling_(head.logits_scaling),
        softcap_(head.softcap),
        temperature_(temperature) {
    require(chunk_tokens_ > 0 && temperature > 0, ErrorKind::kUsage,
            "log-probabilities: temperature {} and chunks of {} tokens have to be positive",
            temperature, chunk_tokens_);
  }

  // Calls `body(begin, tokens)` for each chunk.
  template <typename Body>
  void for_each(std::int64_t tokens, const Body& body) const {
    for (std::int64_t begin = 0; begin < tokens; begin += chunk_tokens_)
      body(begin, std::min(chunk_tokens_, tokens - begin));
  }
  bool one_chunk(std::int64_t tokens) const { return tokens <= chunk_tokens_; }
  Alignment alignment() const { return alignment_; }

  ChunkLogits logits(const at::Tensor& hidden, const at::Tensor& weight) const {
    auto products = linear(hidden, weight, {}, alignment_).contiguous();
    if (logits_scaling_ != 1) products.div_(logits_scaling_);
    if (!softcap_) return {.values = products};
    const auto tanh = models::tanh(products / *softcap_);
    return {.values = tanh * *softcap_, .tanh = tanh};
  }

  // Statistics [4, tokens] of whole rows of the vocabulary, the same on all ranks. Overwrites the
  // logits that the mask leaves out.
  at::Tensor statistics(ChunkLogits& of_chunk,
                        const at::Tensor& labels,
                        const SamplingMask& mask = {}) const {
    auto& logits = of_chunk.values;
    if (group_->size() == 1 || alignment_ == Alignment::kFast) {
      apply_sampling_mask(logits, mask, range(logits));
      auto mine = row_statistics(logits, labels, range(logits), temperature_);
      if (group_->size() == 1) return mine;
      return combine_row_statistics(group_->all_gather(mine.unsqueeze(0)));
    }
    const auto ranks = static_cast<std::int64_t>(group_->size());
    auto whole = group_
                     ->all_gather(logits)  // [ranks * tokens, padded/ranks]
                     .view({ranks, logits.size(0), logits.size(1)})
                     .transpose(0, 1)
                     .reshape({logits.size(0), ranks * logits.size(1)});
    const VocabularyRange all{.first = 0, .count = vocab_size_};
    apply_sampling_mask(whole, mask, all);
    return row_statistics(whole, labels, all, temperature_);
  }

  // Overwrites the logits with the gradient of their products.
  void to_gradient(ChunkLogits& of_chunk,
                   const at::Tensor& statistics,
                   const at::Tensor& labels,
                   const at::Tensor& of_log_prob,
                   const at::Tensor& of_entropy,
                   const SamplingMask& mask = {}) const {
    auto& logits = of_chunk.values;
    apply_sampling_mask(logits, mask, range(logits));
    logits_to_gradient(logits, statistics, labels, of_log_prob, of_entropy, range(logits),
                       temperature_);
    if (softcap_) logits = at::tanh_backward(logits * *softcap_, of_chunk.tanh) / *softcap_;
    if (logits_scaling_ != 1) logits.div_(logits_scaling_);
  }

  void save(AutogradContext& context) const {
    context.saved_data["group"] = reinterpret_cast<std::int64_t>(group_);
    context.saved_data["alignment"] = static_cast<std::int64_t>(alignment_);
    context.saved_data["vocab_size"] = vocab_size_;
    context.saved_data["chunk_tokens"] = chunk_tokens_;
    context.saved_data["logits_scaling"] = logits_scaling_;
    context.saved_data["softcap"] = softcap_.value_or(0);
    context.saved_data["temperature"] = temperature_;
  }
  explicit Chunks(AutogradContext& context)
      // NOLINTNEXTLINE(performance-no-int-to-ptr): an IValue holds no pointers
      : group_(reinterpret_cast<const ProcessGroup*>(context.saved_data["group"].toInt())),
        alignment_(static_cast<Alignment>(context.saved_data["alignment"].toInt())),
        vocab_size_(context.saved_data["vocab_size"].toInt()),
        chunk_tokens_(context.saved_data["chunk_tokens"].toInt()),
        logits_scaling_(context.saved_data["logits_scaling"].toDouble()),
        temperature_(context.saved_data["temperature"].toDouble()) {
    if (const auto c = context.saved_data["softcap"].toDouble(); c != 0) softcap_ = c;
  }

 private:
  VocabularyRange range(const at::Tensor& logits) const {
    const auto first = group_->rank() * logits.size(1);
    return {.first = first,
            .count = std::clamp<std::int64_t>(vocab_size_ - first, 0, logits.size(1))};
  }

  const ProcessGroup* group_;
  Alignment alignment_;
  std::int64_t vocab_size_;
  std::int64_t chunk_tokens_;
  double logits_scaling_;
  std::optional<double> softcap_;
  double temperature_;
};

// The gradients of hidden states and weight, chunk by chunk; the weight's is summed in fp32.
class HeadGradients {
 public:
  HeadGradients(const at::Tensor& hidden,
                const at::Tensor& weight,
                bool of_hidden,
                bool of_weight,
                const Chunks& chunks)
      : weight_(weight),
        of_weight_(of_weight),
        one_chunk_(chunks.one_chunk(hidden.size(0))),
        alignment_(chunks.alignment()) {
    if (of_hidden) hidden_ = at::empty_like(hidden);
  }

  // `gradient` [tokens, vocabulary/tp] of the logits of hidden states from `begin` on.
  void add(const at::Tensor& gradient, const at::Tensor& hidden, std::int64_t begin) {
    if (hidden_.defined()) {
      auto part = hidden_.narrow(0, begin, hidden.size(0));
      if (alignment_ == Alignment::kBitwise && is_host_float(gradient))
        part.copy_(models::matmul(gradient, weight_, alignment_));
      else
        at::mm_out(part, gradient, weight_);
    }
    if (!of_weight_) return;
    const auto transposed = gradient.t();
    const auto product = [&] { return models::matmul(transposed, hidden, alignment_); };
    const bool to_float = !one_chunk_ && hidden.is_cuda() && hidden.scalar_type() != at::kFloat;
    if (!sum_.defined() && to_float)
      sum_ = at::mm(transposed, hidden, at::kFloat);
    else if (!sum_.defined())
      sum_ = one_chunk_ ? product() : product().to(at::kFloat);
    else if (to_float)
      at::addmm_out(sum_, sum_, transposed, hidden, at::kFloat);
    else
      sum_ += product();
  }

  at::Tensor of_hidden() const { return hidden_; }
  at::Tensor of_weight() const {
    if (!of_weight_) return {};
    return sum_.defined() ? sum_.to(weight_.scalar_type()) : at::zeros_like(weight_);  // no token
  }

 private:
  at::Tensor weight_, hidden_, sum_;
  bool of_weight_;
  bool one_chunk_;
  Alignment alignment_;
};

class LinearLogProbs : public torch::autograd::Function<LinearLogProbs> {
 public:
  static variable_list forward(AutogradContext* context,
                               const at::Tensor& hidden,
                               const at::Tensor& weight,
                               const at::Tensor& labels,
                               const Chunks& chunks,
                               const SamplingMask& mask) {
    std::vector<at::Tensor> parts;
    chunks.for_each(hidden.size(0), [&](std::int64_t begin, std::int64_t tokens) {
      auto logits = chunks.logits(hidden.narrow(0, begin, tokens), weight);
      parts.push_back(
          chunks.statistics(logits, labels.narrow(0, begin, tokens), mask.rows(begin, tokens)));
    });
    const auto statistics = parts.empty()
                                ? at::zeros({kRowStatistics, 0}, hidden.options().dtype(at::kFloat))
                                : at::cat(parts, 1);
    context->save_for_backward({hidden, weight, labels, statistics, mask.token_ids});
    context->saved_data["mask_offsets"] = mask.offsets;
    context->set_materialize_grads(false);
    chunks.save(*context);
    return {log_probs_of(statistics), entropies_of(statistics)};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto& hidden = saved[0];
    const auto& weight = saved[1];
    const Chunks chunks(*context);
    const SamplingMask mask{.token_ids = saved[4],
                            .offsets = context->saved_data["mask_offsets"].toIntVector()};
    HeadGradients sums(hidden, weight, context->needs_input_grad(0), context->needs_input_grad(1),
                       chunks);
    chunks.for_each(hidden.size(0), [&](std::int64_t begin, std::int64_t tokens) {
      const auto part = [&](const at::Tensor& x) {
        return x.defined() ? x.narrow(0, begin, tokens) : x;
      };
      auto logits = chunks.logits(part(hidden), weight);
      const auto of_log_prob =
          grads[0].defined() ? part(grads[0]) : at::zeros({tokens}, saved[3].options());
      chunks.to_gradient(logits, saved[3].narrow(1, begin, tokens), part(saved[2]), of_log_prob,
                         part(grads[1]), mask.rows(begin, tokens));
      sums.add(logits.values, part(hidden), begin);
    });
    return {sums.of_hidden(), sums.of_weight(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static variable_list forward(AutogradContext* context,
                               const at::Tensor& hidden,
                               const at::Tensor& weight,
                               const at::Tensor& labels,
                               const at::Tensor& token_weights,
                               const Chunks& chunks) {
    HeadGradients sums(hidden, weight, hidden.requires_grad(), weight.requires_grad(), chunks);
    std::vector<at::Tensor> parts{at::empty({0}, token_weights.options())};
    chunks.for_each(hidden.size(0), [&](std::int64_t begin, std::int64_t tokens) {
      const auto part = [&](const at::Tensor& x) { return x.narrow(0, begin, tokens); };
      auto logits = chunks.logits(part(hidden), weight);
      const auto statistics = chunks.statistics(logits, part(labels));
      parts.push_back(log_probs_of(statistics));
      chunks.to_gradient(logits, statistics, part(labels), -part(token_weights), {});
      sums.add(logits.values, part(hidden), begin);
    });
    context->save_for_backward({sums.of_hidden(), sums.of_weight()});
    const auto log_probs = at::cat(parts);
    context->mark_non_differentiable({log_probs});
    return {-(token_weights * log_probs).sum(), log_probs};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    auto gradients = context->get_saved_variables();
    for (auto& gradient : gradients) {
      if (gradient.defined()) gradient = gradient * grads[0];
    }
    return {gradients[0], gradients[1], at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

TokenLogProbs linear_log_probs(const at::Tensor& hidden,
                               const at::Tensor& labels,
                               const OutputHead& head,
                               double temperature,
                               const SamplingMask& mask) {
  auto results = LinearLogProbs::apply(hidden.contiguous(), head.weight, labels,
                                       Chunks(head, temperature), mask);
  return {.log_probs = results[0], .entropy = results[1]};
}

CrossEntropy linear_cross_entropy(const at::Tensor& hidden,
                                  const at::Tensor& labels,
                                  const at::Tensor& token_weights,
                                  const OutputHead& head) {
  const Chunks chunks(head, /*temperature=*/1);
  if (!at::GradMode::is_enabled() || !(hidden.requires_grad() || head.weight.requires_grad())) {
    const auto log_probs = linear_log_probs(hidden, labels, head).log_probs;
    return {.loss = -(token_weights * log_probs).sum(), .log_probs = log_probs};
  }
  auto results =
      LinearCrossEntropy::apply(hidden.contiguous(), head.weight, labels, token_weights, chunks);
  return {.loss = results[0], .log_probs = results[1]};
}

}  // namespace ferry::models
