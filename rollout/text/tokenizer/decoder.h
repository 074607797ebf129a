// The decoder of a tokenizer.json, as a chain of steps through which tokens flow one by one: so a
// whole sequence and a stream are decoded by the same code, and the parts of a stream, put
// together, are the whole.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::rollout::text {

// Takes tokens, gives tokens to what follows. A step holds what it cannot yet give.
class DecoderStep {
 public:
  virtual ~DecoderStep() = default;
  virtual std::unique_ptr<DecoderStep> fresh() const = 0;  // the same step, at the beginning
  virtual void push(std::string_view token, std::vector<std::string>& out) = 0;
  virtual void finish(std::vector<std::string>& out) = 0;
};

class Decoder {
 public:
  // `settings` may be null: then tokens are joined with spaces, as the package does it. Throws
  // Error that names a type that is not supported.
  Decoder(const nlohmann::json& settings, const std::string& where);

  std::vector<std::unique_ptr<DecoderStep>> fresh_steps() const;

 private:
  std::vector<std::unique_ptr<DecoderStep>> steps_;
};

}  // namespace ferry::rollout::text
