// One request to generate: takes the engine's tokens as they come, and writes them to the client.
// On the server's thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "rollout/request_output.h"
#include "rollout/sample_text.h"
#include "rollout/text/answer_reader.h"
#include "serve/api/choices.h"
#include "serve/api/generation_request.h"
#include "serve/engine_fleet.h"
#include "serve/http/http_server.h"
#include "serve/metrics.h"

namespace ferry::serve {

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  using Clock = std::chrono::steady_clock;
  // Makes a body on another thread, and responds with it.
  using RespondLater = std::function<void(std::shared_ptr<Exchange> exchange,
                                          std::function<std::string()> make_body)>;

  // `id`: of the answer; `respond_later`: for one that is long. The other arguments outlive this.
  Generation(GenerationRequest request,
             const ServedModel& model,
             TokenTexts& texts,
             EngineFleet& engine,
             std::shared_ptr<Exchange> exchange,
             std::string id,
             RespondLater respond_later);

  std::size_t num_prompts() const { return request_.prompts.size(); }
  std::string engine_id(std::size_t prompt) const;  // of the engine's request for a prompt
  std::int64_t num_samples() const { return request_.num_samples(); }
  Clock::time_point started() const { return started_; }
  bool is_over() const { return is_over_; }

  void start();
  // Takes an output of the engine for a prompt. `version`: of the weights; `metrics`: of the engine
  // that has drawn it.
  void take(std::size_t prompt,
            rollout::RequestOutput output,
            std::int64_t version,
            EngineMetrics& metrics);
  // Ends all that is under way in the engine, and the response with the error if the client is
  // still there.
  void fail(const ApiError& error);
  // The same where its client has gone, or waits no longer: its samples count as aborted in the
  // metrics of the engine that has drawn them, or in these if none has.
  void abort(const ApiError& error, EngineMetrics& metrics);

 private:
  struct Sample {
    rollout::SampleText text;
    SamplePart part{};  // so far, unless the answer is a stream
    std::optional<rollout::text::AnswerReader> answer{};
    std::size_t num_calls = 0;
    std::int64_t num_tokens = 0;
    bool has_begun = false;  // the client has a part of it
    bool has_echo = false;   // the text begins with the prompt
    Clock::time_point first_token{}, last_token{};
    bool is_over = false;
  };

  void take_sample(Sample& sample,
                   const std::string& id,
                   rollout::CompletionOutput& output,
                   EngineMetrics& metrics);
  void count_tokens(Sample& sample,
                    const rollout::CompletionOutput& output,
                    std::size_t num_tokens,
                    EngineMetrics& metrics);
  void count_end(const Sample& sample, rollout::FinishReason reason, EngineMetrics& metrics) const;
  std::size_t prompt_of(const Sample& sample) const;
  Usage usage_of(const Sample& sample) const;
  void read_answer(Sample& sample, SamplePart& part) const;
  void give(Sample& sample, SamplePart part, EngineMetrics& metrics);
  ordered_json stop_reason_of(const rollout::SampleText::Part& part) const;
  void write_event(const std::string& json);
  void finish(std::int64_t version);

  GenerationRequest request_;
  EngineFleet& engine_;
  std::shared_ptr<Exchange> exchange_;
  std::string id_;
  RespondLater respond_later_;
  bool is_long_;          // the answer takes long to write
  TokenTexts own_texts_;  // of one that is long: another thread writes it
  AnswerWriter writer_;
  std::vector<Sample> samples_;
  std::vector<PromptLogprobs> prompt_logprobs_;
  std::vector<bool> is_answered_;            // by prompt: the engine has no more of it
  std::vector<std::int64_t> cached_tokens_;  // by prompt
  EngineMetrics* metrics_ = nullptr;         // of the engine that drew the last tokens
  std::size_t num_over_ = 0;                 // samples
  Usage usage_{};
  Clock::time_point started_ = Clock::now();
  bool is_over_ = false;
};

}  // namespace ferry::serve
