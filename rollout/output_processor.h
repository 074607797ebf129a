// Answers in text out of the engine's tokens (vLLM's OutputProcessor): each sample is detokenized
// as it goes on, ends where a stop string appears, and is handed out whole when its request is
// over.
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
#include "rollout/text/tokenizer/incremental_detokenizer.h"

namespace ferry::rollout {

std::string_view to_string(FinishReason reason);  // "stop", "length", ... as vLLM; "" of kNone

// A sample, as far as it has come.
struct Completion {
  std::string text{};  // without a tokenizer empty
  std::vector<TokenOutput> tokens{};
  // With enable_return_routed_experts: of the prompt and of all tokens but the last one.
  std::vector<std::byte> routed_experts{};
  FinishReason finish_reason = FinishReason::kNone;
  std::optional<std::int64_t> stop_token{};  // of kStop: one of these two
  std::optional<std::string> stop_string{};
};

struct Answer {
  std::string request_id{};
  std::vector<Completion> completions{};  // of the n samples
  std::optional<Error> error{};           // why there are none
  double seconds_to_first_token = 0;      // since the request was added
};

class OutputProcessor {
 public:
  using Clock = std::chrono::steady_clock;
  // Called with the text of a sample that is certain now.
  using OnText =
      std::function<void(const std::string& request_id, std::int64_t index, std::string_view text)>;

  // Both outlive this. Without a tokenizer answers have no text, and requests no stop strings.
  OutputProcessor(LLMEngine& engine, const text::Tokenizer* tokenizer)
      : engine_(engine), tokenizer_(tokenizer) {}

  // What is wrong with a request is its answer: returned at once, or by a step.
  std::optional<Answer> add_request(const std::string& request_id,
                                    std::vector<std::int64_t> prompt_token_ids,
                                    SamplingParams params);
  bool has_unfinished() const { return engine_.has_unfinished(); }  // of ranks as LLMEngine's

  // A step of the engine. Returns the answers that are complete with it.
  std::vector<Answer> step(const OnText& on_text = {});
  // Ends all requests: their answers as far as they have come, in the order they were added. What
  // was not finished has finish reason kAbort.
  std::vector<Answer> abort_all(const OnText& on_text = {});

 private:
  struct Request {
    Answer answer{};
    std::vector<text::IncrementalDetokenizer> texts{};  // of the samples; none without tokenizer
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
