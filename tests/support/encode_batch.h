// Texts encoded by several threads at a time.
#pragma once

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "rollout/text/tokenizer/tokenizer.h"

namespace ferry::support {

// encode() for each text, by `num_threads` threads, which share the tokenizer.
inline std::vector<std::vector<rollout::text::TokenId>> encode_batch(
    const rollout::text::Tokenizer& tokenizer,
    const std::vector<std::string>& texts,
    int num_threads,
    rollout::text::EncodeOptions options = {}) {
  std::vector<std::vector<rollout::text::TokenId>> found(texts.size());
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (auto i = next++; i < texts.size(); i = next++)
      found[i] = tokenizer.encode(texts[i], options);
  };
  std::vector<std::jthread> threads;
  for (int i = 1; i < num_threads; ++i) threads.emplace_back(work);
  work();
  threads.clear();  // joins
  return found;
}

}  // namespace ferry::support
