// rollout::LLMEngine as the server's engine: the only part of the server that needs LibTorch.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/base/interruption.h"
#include "rollout/llm_engine.h"
#include "rollout/vision/visual_prompt.h"
#include "serve/bridge/decoded_images.h"
#include "serve/engine_loop.h"

namespace ferry::serve {

class RolloutEngine : public EngineSteps {
 public:
  using OpenWeights = std::function<std::function<void()>(const WeightSource&)>;

  // The model outlives this. `images`: those in prompts; null: they are refused. `open_weights` is
  // also called on a thread of its own, between the loading of weights.
  RolloutEngine(models::GPTModel& model,
                rollout::EngineOptions options,
                OpenWeights open_weights,
                std::shared_ptr<DecodedImages> images)
      : model_(model),
        engine_(model, std::move(options)),
        open_weights_(std::move(open_weights)),
        images_(std::move(images)) {}
  ~RolloutEngine() override { ends_ = true; }  // for the thread that opens weights

  void add_request(const std::string& request_id,
                   const std::vector<std::int64_t>& prompt_token_ids,
                   const rollout::SamplingParams& params,
                   const ImageFiles& images) override {
    engine_.add_request(request_id, prompt_token_ids, params,
                        images ? visual_prompt(prompt_token_ids, images) : nullptr);
  }
  void abort(const std::string& request_id) override { engine_.abort(request_id); }
  void abort(const std::string& request_id, std::int64_t index) override {
    engine_.abort(request_id, index);
  }
  bool has_unfinished() const override { return engine_.has_unfinished(); }
  std::vector<rollout::RequestOutput> step() override { return engine_.step(); }
  rollout::EngineStats stats() const override { return engine_.stats(); }
  void reset_prefix_cache() override { engine_.reset_prefix_cache(); }
  void begin_open_weights(const WeightSource& source) override {
    opening_ = std::async(std::launch::async, [this, source] {
      const distckpt::InterruptedBy end([this] { return ends_.load(); });
      return open_weights_(source);
    });
  }
  bool is_opening() const override {
    return opening_.valid() &&
           opening_.wait_for(std::chrono::seconds(0)) == std::future_status::timeout;
  }
  std::function<void()> open_weights(const WeightSource& source) override {
    return opening_.valid() ? opening_.get() : open_weights_(source);
  }
  void sleep(int level) override { engine_.sleep(level); }
  void wake_up() override { engine_.wake_up(); }

  const rollout::EngineOptions& options() const { return engine_.options(); }
  std::int64_t longest_sequence(std::int64_t num_blocks) const {
    return engine_.longest_sequence(num_blocks);
  }

 private:
  std::shared_ptr<const rollout::VisualPrompt> visual_prompt(
      const std::vector<std::int64_t>& prompt, const ImageFiles& files) const {
    require(images_ != nullptr, ErrorKind::kUsage, "the model's images are not computed");
    return rollout::make_visual_prompt(*model_.config().vision, prompt, images_->read(files));
  }

  models::GPTModel& model_;
  rollout::LLMEngine engine_;
  OpenWeights open_weights_;
  std::atomic<bool> ends_ = false;
  std::future<std::function<void()>> opening_{};  // waits for its thread where it is destroyed
  std::shared_ptr<DecodedImages> images_;
};

}  // namespace ferry::serve
