// Makes answers in text of the engine's tokens (vLLM's OutputProcessor): each sample is detokenized
// token by token, ends before a stop string, and is returned whole when its request is finished.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/llm_engine.h"
#include "rollout/sample_text.h"

namespace ferry::rollout {

// A sample, finished or not.
struct Completion {
  std::string text{};  // empty without a tokenizer
  std::vector<TokenOutput> tokens{};
  // Routes of the prompt and of all tokens but the last, if enable_return_routed_experts.
  std::vector<std::byte> routed_experts{};
  FinishReason finish_reason = FinishReason::kNone;
  std::optional<std::int64_t> stop_token{};  // for kStop: one of these two
  std::optional<std::string> stop_string{};
};

struct Answer {
  std::string request_id{};
  std::vector<Completion> completions{};  // the n samples
  std::optional<Error> error{};           // why there are none
  double seconds_to_first_token = 0;      // since the request was added
};

class OutputProcessor {
 public:
  using Clock = std::chrono::steady_clock;
  // Called with each part of a sample's text that will not change any more.
  using OnText =
      std::function<void(const std::string& request_id, std::int64_t index, std::string_view text)>;

  // Both outlive this. Without a tokenizer answers have no text, and requests no stop strings.
  OutputProcessor(LLMEngine& engine, const text::Tokenizer* tokenizer)
      : engine_(engine), tokenizer_(tokenizer) {}

  // A request that is refused gets an answer with the error: returned here, or by a step. Throws
  // Error(kUsage) if the id is in use.
  std::optional<Answer> add_request(const std::string& request_id,
                                    std::vector<std::int64_t> prompt_token_ids,
                                    SamplingParams params,
                                    const std::shared_ptr<const VisualPrompt>& visual = nullptr);
  bool has_unfinished() const { return engine_.has_unfinished(); }  // a collective like LLMEngine's

  // Runs a step of the engine, and returns the answers that it completes.
  std::vector<Answer> step(const OnText& on_text = {});
  // Ends all requests, and returns their answers so far in the order they were added. Unfinished
  // samples have finish reason kAbort.
  std::vector<Answer> abort_all(const OnText& on_text = {});

 private:
  struct Request {
    Answer answer{};
    std::vector<SampleText> texts{};  // by sample
    std::uint64_t number = 0;
    std::size_t num_finished = 0;
    Clock::time_point added{};
  };

  void take(Request& request, CompletionOutput& output, const OnText& on_text);
  void finish(Request& request, std::size_t index, FinishReason reason, const OnText& on_text);
  static void give(Request& request,
                   std::size_t index,
                   const std::string& text,
                   const OnText& on_text);

  LLMEngine& engine_;
  const text::Tokenizer* tokenizer_;
  std::map<std::string, Request> requests_;
  std::uint64_t num_requests_ = 0;
};

}  // namespace ferry::rollout
