#include "converter/alignment/logits_check.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ranges>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/messages.h"
#include "models/distributed/parallel_state.h"
#include "models/pipeline_forward.h"
#include "models/transformer/packed_sequences.h"

namespace ferry::converter {
namespace {

using nlohmann::json;

// Bits as integers in the order of the numbers.
at::Tensor ordered(const at::Tensor& x) {
  const auto bits = x.element_size() == 2   ? x.view(at::kShort).to(at::kLong)
                    : x.element_size() == 4 ? x.view(at::kInt).to(at::kLong)
                                            : x.view(at::kLong);
  const auto least = x.element_size() == 2   ? -(std::int64_t{1} << 15)
                     : x.element_size() == 4 ? -(std::int64_t{1} << 31)
                                             : std::numeric_limits<std::int64_t>::min();
  return at::where(bits < 0, least - bits, bits);
}

json to_json(const OutputDifference& difference) {
  return {difference.module,  difference.elements,     difference.unequal,
          difference.largest, difference.largest_ulps, difference.finite};
}

OutputDifference from_json(const json& value) {
  return {.module = value[0],
          .elements = value[1],
          .unequal = value[2],
          .largest = value[3],
          .largest_ulps = value[4],
          .finite = value[5]};
}

// log p(token | the tokens before it) of each token but the first: [tokens - 1].
at::Tensor log_probs(const at::Tensor& logits, const at::Tensor& tokens) {
  const auto length = tokens.size(0);
  return at::log_softmax(logits.narrow(0, 0, length - 1).to(at::kFloat), -1)
      .gather(1, tokens.narrow(0, 1, length - 1).unsqueeze(1))
      .squeeze(1);
}

class Check {
 public:
  Check(const std::vector<std::unique_ptr<models::GPTModel>>& chunks, const Reference& reference)
      : chunks_(chunks), reference_(reference), model_(*chunks.front()) {}

  LogitsReport run(const LogitsOptions& options) {
    const c10::InferenceMode no_gradients;
    for (const auto& sequence : reference_.sequences) check_fits(sequence);
    report_ = {.regime = reference_.regime, .packed = options.packed};
    report_.sequences.resize(reference_.sequences.size());
    std::vector<std::size_t> all;
    for (std::size_t i = 0; i < reference_.sequences.size(); ++i) {
      report_.sequences[i].num_tokens = reference_.sequences[i].tokens.size(0);
      if (options.packed) {
        all.push_back(i);
      } else {
        run_batch({i});
      }
    }
    if (options.packed) run_batch(all);
    share();
    return std::move(report_);
  }

 private:
  // On every rank, before any of them computes: a stage that fails alone would leave others
  // waiting.
  void check_fits(const ReferenceSequence& sequence) const {
    const auto& config = model_.config();
    const bool words = config.head == models::Head::kLanguageModel;
    const auto width = words ? config.vocab_size : config.num_labels;
    require(sequence.logits.size(1) == width, ErrorKind::kLayout,
            "the reference has {} logits for each token, the model has {} {}",
            sequence.logits.size(1), words ? "a vocabulary of" : "labels:", width);
    const auto most = sequence.tokens.max().item<std::int64_t>();
    require(sequence.tokens.min().item<std::int64_t>() >= 0 && most < config.vocab_size,
            ErrorKind::kLayout, "the reference has token {}, the model a vocabulary of {}", most,
            config.vocab_size);
    for (const auto& [module, _] : sequence.predicted) {
      const auto known = [&](std::int64_t k) { return module == fmt::format("mtp.layers.{}", k); };
      const auto layers = std::views::iota(std::int64_t{0}, config.mtp_num_layers);
      require(std::ranges::any_of(layers, known), ErrorKind::kLayout,
              "the reference has predictions of {}, the model {} such layers", module,
              config.mtp_num_layers);
    }
  }

  void run_batch(const std::vector<std::size_t>& indices) {
    std::vector<at::Tensor> sequences;
    for (const auto i : indices) sequences.push_back(reference_.sequences[i].tokens);
    const auto packed = models::pack(sequences);
    const models::SequencePartition batch(packed, model_.mesh());
    // Every part of a batch is compared by each rank that has it; rank 0 of a stage counts.
    const auto each = [&](const at::Tensor& whole, auto&& visit) {
      const auto host = whole.to(at::kCPU);
      for (std::size_t i = 0; i < indices.size(); ++i) {
        const auto begin = packed.cu_seqlens[i];
        visit(indices[i], host.narrow(0, begin, packed.cu_seqlens[i + 1] - begin));
      }
    };
    const bool has_hidden = std::ranges::any_of(
        indices, [&](std::size_t i) { return !reference_.sequences[i].hidden.empty(); });
    models::Observer observe;
    if (has_hidden) {
      observe = [&](const std::string& module, const at::Tensor& output) {
        each(model_.whole_batch(output, batch), [&](std::size_t i, const at::Tensor& ours) {
          const auto& hidden = reference_.sequences[i].hidden;
          const auto theirs = hidden.find(module);
          if (theirs == hidden.end()) return;
          report_.sequences[i].modules.push_back(compare_tensors(module, ours, theirs->second));
        });
      };
    }
    const auto hidden = models::pipeline_forward(chunks_, batch, observe);
    if (!hidden.defined()) return;
    each(chunks_.back()->all_logits(hidden, batch),
         [&](std::size_t i, const at::Tensor& ours) { compare_logits(i, ours); });
    const bool has_predicted = std::ranges::any_of(
        indices, [&](std::size_t i) { return !reference_.sequences[i].predicted.empty(); });
    if (!has_predicted) return;
    const auto predicted = chunks_.back()->predict(hidden, batch);
    for (std::size_t k = 0; k < predicted.size(); ++k) {
      each(chunks_.back()->all_logits(predicted[k], batch),
           [&](std::size_t i, const at::Tensor& ours) { compare_predicted(i, k, ours); });
    }
  }

  // Compares the logits of prediction layer `k`, at the tokens that it predicts from.
  void compare_predicted(std::size_t i, std::size_t k, const at::Tensor& ours) {
    const auto module = fmt::format("mtp.layers.{}", k);
    const auto& predicted = reference_.sequences[i].predicted;
    const auto theirs = predicted.find(module);
    const auto tokens = ours.size(0) - static_cast<std::int64_t>(k) - 1;
    if (theirs == predicted.end() || tokens <= 0) return;
    report_.sequences[i].modules.push_back(
        compare_tensors(module, ours.narrow(0, 0, tokens), theirs->second.narrow(0, 0, tokens)));
  }

  void compare_logits(std::size_t i, const at::Tensor& ours) {
    const auto& sequence = reference_.sequences[i];
    auto& difference = report_.sequences[i];
    difference.logits = compare_tensors("logits", ours, sequence.logits);
    if (model_.config().head != models::Head::kLanguageModel || sequence.tokens.size(0) < 2) return;
    const auto gap =
        (log_probs(ours, sequence.tokens) - log_probs(sequence.logits, sequence.tokens)).abs();
    if (!gap.isfinite().all().item<bool>()) return;  // NaN among the logits, which the report says
    difference.largest_log_prob = gap.max().item<double>();
    difference.mean_log_prob = gap.mean().item<double>();
  }

  // Each stage has seen its own modules: put together what the first rank of each has.
  void share() {
    const auto& mesh = model_.mesh();
    json mine = json::array();
    for (const auto& sequence : report_.sequences) {
      json modules = json::array();
      for (const auto& module : sequence.modules) modules.push_back(to_json(module));
      mine.push_back(
          {modules, to_json(sequence.logits), sequence.largest_log_prob, sequence.mean_log_prob});
    }
    const auto all = models::gather(mesh.pp(), mine);
    for (auto& sequence : report_.sequences) sequence.modules.clear();
    for (const auto& theirs : all) {
      for (std::size_t i = 0; i < theirs.size(); ++i) {
        auto& sequence = report_.sequences[i];
        for (const auto& module : theirs[i][0]) sequence.modules.push_back(from_json(module));
        sequence.logits = from_json(theirs[i][1]);
        sequence.largest_log_prob = theirs[i][2];
        sequence.mean_log_prob = theirs[i][3];
      }
    }
  }

  const std::vector<std::unique_ptr<models::GPTModel>>& chunks_;
  const Reference& reference_;
  const models::GPTModel& model_;
  LogitsReport report_;
};

}  // namespace

bool LogitsReport::equal() const {
  return std::ranges::all_of(sequences, [](const SequenceDifference& sequence) {
    return sequence.logits.unequal == 0 &&
           std::ranges::all_of(sequence.modules,
                               [](const OutputDifference& of) { return of.unequal == 0; });
  });
}

std::optional<std::pair<std::size_t, OutputDifference>> LogitsReport::first_difference() const {
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    for (const auto& module : sequences[i].modules) {
      if (module.unequal > 0) return std::pair(i, module);
    }
    if (sequences[i].logits.unequal > 0) return std::pair(i, sequences[i].logits);
  }
  return std::nullopt;
}

OutputDifference compare_tensors(const std::string& module,
                                 const at::Tensor& ours,
                                 const at::Tensor& theirs) {
  require(ours.sizes() == theirs.sizes(), ErrorKind::kLayout,
          "{}: the model gives [{}], the reference has [{}]", module, fmt::join(ours.sizes(), ", "),
          fmt::join(theirs.sizes(), ", "));
  require(ours.scalar_type() == theirs.scalar_type(), ErrorKind::kLayout,
          "{}: the model gives {}, the reference has {}", module, c10::toString(ours.scalar_type()),
          c10::toString(theirs.scalar_type()));
  const auto a = ours.contiguous();
  const auto b = theirs.contiguous();
  const auto steps = (ordered(a) - ordered(b)).abs();
  const auto both_nan = a.isnan().logical_and(b.isnan());
  // -0 and +0 are different bytes.
  const auto unequal = (a.view(at::kByte) != b.view(at::kByte))
                           .view({-1, static_cast<std::int64_t>(a.element_size())})
                           .any(1)
                           .logical_and(both_nan.flatten().logical_not());
  OutputDifference difference{.module = module,
                              .elements = a.numel(),
                              .unequal = unequal.sum().item<std::int64_t>(),
                              .finite = a.isfinite().all().item<bool>()};
  if (difference.unequal == 0 || !difference.finite || !b.isfinite().all().item<bool>())
    return difference;
  difference.largest = (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
  difference.largest_ulps = steps.max().item<std::int64_t>();
  return difference;
}

LogitsReport check_logits(const std::vector<std::unique_ptr<models::GPTModel>>& chunks,
                          const Reference& reference,
                          const LogitsOptions& options) {
  return Check(chunks, reference).run(options);
}

}  // namespace ferry::converter
