// rollout::LLMEngine as the server's engine: the only part of the server that needs LibTorch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "rollout/llm_engine.h"
#include "rollout/vision/prompt_images.h"
#include "rollout/vision/visual_prompt.h"
#include "serve/engine_loop.h"

namespace ferry::serve {

class RolloutEngine : public EngineSteps {
 public:
  using OpenWeights = std::function<std::function<void()>(const WeightSource&)>;

  // The model outlives this. `reader`: of images in prompts; null: they are refused.
  RolloutEngine(models::GPTModel& model,
                rollout::EngineOptions options,
                OpenWeights open_weights,
                std::optional<rollout::ImageReader> reader)
      : model_(model),
        engine_(model, std::move(options)),
        open_weights_(std::move(open_weights)),
        reader_(std::move(reader)) {}

  void add_request(const std::string& request_id,
                   const std::vector<std::int64_t>& prompt_token_ids,
                   const rollout::SamplingParams& params,
                   const ImageFiles& images) override {
    engine_.add_request(request_id, prompt_token_ids, params,
                        images ? visual_prompt(prompt_token_ids, *images) : nullptr);
  }
  void abort(const std::string& request_id) override { engine_.abort(request_id); }
  void abort(const std::string& request_id, std::int64_t index) override {
    engine_.abort(request_id, index);
  }
  bool has_unfinished() const override { return engine_.has_unfinished(); }
  std::vector<rollout::RequestOutput> step() override { return engine_.step(); }
  rollout::EngineStats stats() const override { return engine_.stats(); }
  void reset_prefix_cache() override { engine_.reset_prefix_cache(); }
  std::function<void()> open_weights(const WeightSource& source) override {
    return open_weights_(source);
  }
  void sleep(int level) override { engine_.sleep(level); }
  void wake_up() override { engine_.wake_up(); }

  const rollout::EngineOptions& options() const { return engine_.options(); }

 private:
  std::shared_ptr<const rollout::VisualPrompt> visual_prompt(
      const std::vector<std::int64_t>& prompt, const std::vector<std::string>& images) const {
    require(reader_.has_value(), ErrorKind::kUsage, "the model's images are not computed");
    std::vector<rollout::text::ImageSource> sources;
    for (const auto& file : images) sources.push_back({.bytes = file});
    return rollout::make_visual_prompt(*model_.config().vision, prompt,
                                       rollout::read_images(sources, *reader_));
  }

  models::GPTModel& model_;
  rollout::LLMEngine engine_;
  OpenWeights open_weights_;
  std::optional<rollout::ImageReader> reader_;
};

}  // namespace ferry::serve
