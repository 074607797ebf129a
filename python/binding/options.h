// The keyword arguments of Python, as JSON, become option structs. Python checks their names; a
// value of the wrong type is an Error(kUsage) that names it.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "converter/bridge/tensor_stream.h"
#include "converter/checkpoint_pair.h"
#include "converter/convert.h"
#include "converter/digest_checkpoint.h"
#include "models/spec/parallel_config.h"

namespace ferry::python {

class Options {
 public:
  explicit Options(const char* json) : json_(nlohmann::json::parse(json)) {}

  // Nothing for None, or for a name that is not there.
  template <typename T>
  std::optional<T> find(const char* name) const {
    const auto at = json_.find(name);
    if (at == json_.end() || at->is_null()) return std::nullopt;
    try {
      return at->get<T>();
    } catch (const nlohmann::json::exception&) {
      fail(ErrorKind::kUsage, "{}: {} is of another type", name, at->dump());
    }
  }
  template <typename T>
  T get(const char* name, T fallback = {}) const {
    return find<T>(name).value_or(std::move(fallback));
  }
  std::filesystem::path path(const char* name) const { return get<std::string>(name); }
  std::optional<distckpt::Iteration> iteration(const char* name = "iteration") const;
  std::optional<distckpt::DType> dtype() const;
  converter::Selection selection() const;
  models::ParallelConfig parallel() const;
  const nlohmann::json& json() const { return json_; }

 private:
  nlohmann::json json_;
};

converter::ConvertOptions convert_options(const Options& options);
converter::PairOptions pair_options(const Options& options);
converter::DigestOptions digest_options(const Options& options);
converter::StreamOptions stream_options(const Options& options);

}  // namespace ferry::python
