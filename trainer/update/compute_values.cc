#include "trainer/update/compute_values.h"

#include <ATen/ops/empty.h>

#include "distckpt/base/error.h"
#include "trainer/engine/forward_sequences.h"

namespace ferry::trainer {
namespace {

using models::Head;

std::vector<at::Tensor> scores_of_tokens(const Pipeline& pipeline,
                                         const std::vector<at::Tensor>& sequences,
                                         const std::vector<Partition>& parts,
                                         const VisualInputs& visual) {
  const TokenFunction say = [](const models::GPTModel& model, const at::Tensor& hidden,
                               const models::SequencePartition&) { return model.output(hidden); };
  auto scores =
      forward_sequences(pipeline, sequences, parts, say, {.channels = 1, .visual = visual});
  for (auto& score : scores) score = score.squeeze(1);
  return scores;
}

}  // namespace

void require_value_head(const Pipeline& pipeline) {
  const auto& config = pipeline.config();
  require(config.head == Head::kTokenClassification && config.num_labels == 1, ErrorKind::kUsage,
          "a model without a token classification head of one label has no values");
}

std::vector<at::Tensor> compute_values(const Pipeline& pipeline,
                                       const std::vector<at::Tensor>& sequences,
                                       const std::vector<Partition>& parts,
                                       const VisualInputs& visual) {
  require_value_head(pipeline);
  return scores_of_tokens(pipeline, sequences, parts, visual);
}

at::Tensor compute_rm_score(const Pipeline& pipeline,
                            const std::vector<at::Tensor>& sequences,
                            const std::vector<Partition>& parts,
                            const VisualInputs& visual) {
  const auto& config = pipeline.config();
  require(config.head != Head::kLanguageModel && config.num_labels == 1, ErrorKind::kUsage,
          "a model without a classification head of one label has no score");
  const auto of_tokens = scores_of_tokens(pipeline, sequences, parts, visual);
  auto scores = at::empty({static_cast<std::int64_t>(of_tokens.size())}, at::kFloat);
  for (std::size_t i = 0; i < of_tokens.size(); ++i)
    scores[static_cast<std::int64_t>(i)] = of_tokens[i][-1];
  return scores;
}

}  // namespace ferry::trainer
