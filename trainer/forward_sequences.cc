#include "trainer/forward_sequences.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include "distckpt/error.h"
#include "models/tensor_parallel/mappings.h"
#include "models/world.h"
#include "trainer/micro_batches.h"

namespace ferry::trainer {

std::vector<at::Tensor> forward_sequences(const Pipeline& pipeline,
                                          const std::vector<at::Tensor>& sequences,
                                          const std::vector<Partition>& parts,
                                          std::int64_t channels,
                                          const TokenFunction& say) {
  const auto& mesh = pipeline.chunks.front()->mesh();
  const auto batches = pack_micro_batches(sequences, parts, mesh);
  std::int64_t num_tokens = 0;
  for (const auto& batch : batches) num_tokens += batch.num_tokens();
  std::vector<at::Tensor> of_batches(batches.size());  // on the last stage
  const LossFunction keep = [&](const models::GPTModel& model, const at::Tensor& hidden,
                                std::size_t i) {
    const auto all =
        models::gather_from_sequence_parallel_region(say(model, hidden, batches[i]), mesh.cp());
    of_batches[i] = batches[i].in_pack_order(all).narrow(0, 0, batches[i].num_tokens());
    return LossOutput{};
  };
  forward_backward(pipeline, batches, keep, {.forward_only = true});

  const auto options = at::TensorOptions().dtype(at::kFloat).device(mesh.world().device());
  const auto mine = mesh.is_last_stage() ? at::cat(of_batches).to(at::kFloat)
                                         : at::zeros({num_tokens, channels}, options);
  const auto all = mesh.pp().broadcast(mine, mesh.pp().size() - 1).cpu();

  std::vector<at::Tensor> results(sequences.size());
  std::int64_t begin = 0;
  for (const auto& part : parts) {
    for (const auto i : part) {
      const auto tokens = sequences[i].size(0);
      require(tokens > 0 && !results[i].defined(), ErrorKind::kBug,
              "sequence {} is empty, or in two micro-batches", i);
      results[i] = all.narrow(0, begin, tokens);
      begin += tokens;
    }
  }
  require(begin == num_tokens, ErrorKind::kBug, "{} tokens in micro-batches of {}", begin,
          num_tokens);
  return results;
}

}  // namespace ferry::trainer
