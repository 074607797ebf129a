#include <ATen/Parallel.h>

#include <span>
#include <vector>

#include "rollout/kernels/draw.h"
#include "rollout/kernels/host_row.h"

namespace ferry::rollout {
namespace {

template <typename T>
void draw_rows(const at::Tensor& logits,
               std::int64_t vocab_size,
               const Draws& draws,
               at::Tensor& tokens,
               at::Tensor& processed_logprobs) {
  const auto* values = logits.const_data_ptr<T>();
  auto* drawn = tokens.mutable_data_ptr<std::int64_t>();
  auto* log_probs = processed_logprobs.mutable_data_ptr<float>();
  const auto num_plain = static_cast<std::int64_t>(draws.plain.size());
  at::parallel_for(0, logits.size(0), 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> z(static_cast<std::size_t>(vocab_size));
    for (auto i = begin; i < end; ++i) {
      const bool shaped = i >= num_plain;
      const auto& draw = shaped ? draws.shaped[static_cast<std::size_t>(i - num_plain)]
                                : draws.plain[static_cast<std::size_t>(i)];
      HostRow row(draw, z);
      row.read(values + draw.row * logits.size(1),
               std::span(draws.changes)
                   .subspan(static_cast<std::size_t>(draw.first_change),
                            static_cast<std::size_t>(draw.num_changes)));
      if (shaped) row.truncate();
      drawn[draw.row] = row.draw();
      if (shaped) log_probs[draw.row] = row.log_prob(drawn[draw.row]);
    }
  });
}

}  // namespace

void draw_on_host(const at::Tensor& logits,
                  std::int64_t vocab_size,
                  const Draws& draws,
                  at::Tensor& tokens,
                  at::Tensor& processed_logprobs) {
  if (logits.scalar_type() == at::kFloat) {
    draw_rows<float>(logits, vocab_size, draws, tokens, processed_logprobs);
  } else {
    draw_rows<at::BFloat16>(logits, vocab_size, draws, tokens, processed_logprobs);
  }
}

}  // namespace ferry::rollout
