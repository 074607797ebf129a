// The keyword arguments of Python, as JSON, become option structs. Python checks their names; a
// value of the wrong type is an Error(kUsage) that names it.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "converter/adapter/convert_adapter.h"
#include "converter/adapter/merge_adapter.h"
#include "converter/adapter/split_adapter.h"
#include "converter/bridge/tensor_stream.h"
#include "converter/checkpoint_pair.h"
#include "converter/convert.h"
#include "converter/delta/apply_delta.h"
#include "converter/delta/make_delta.h"
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
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      const bool fits = at->is_number_unsigned()
                            ? std::in_range<T>(at->get<std::uint64_t>())
                            : at->is_number_integer() && std::in_range<T>(at->get<std::int64_t>());
      require(fits, ErrorKind::kUsage, "{}: {} is not a number that it can be", name, at->dump());
    }
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
  // Text, or the bytes of a name that is not UTF-8 as an array of numbers.
  std::filesystem::path path(const char* name) const;
  std::vector<std::filesystem::path> paths(const char* name) const;
  // Threads, 0 for one per core.
  int threads() const;
  // A number of bytes of at least `least`.
  std::int64_t bytes(const char* name, std::int64_t fallback, std::int64_t least) const;
  std::optional<distckpt::Iteration> iteration(const char* name = "iteration") const;
  std::optional<distckpt::DType> dtype() const;
  converter::Selection selection() const;
  models::ParallelConfig parallel() const;
  const nlohmann::json& json() const { return json_; }

 private:
  nlohmann::json json_;
};

converter::ConvertOptions convert_options(const Options& options);
converter::ConvertAdapterOptions adapter_options(const Options& options);
// Options of a changed base, whose own format is the target's default.
converter::ConvertOptions changed_options(const Options& options);
converter::AdapterToMerge merged_adapter(const Options& options);
converter::SplitOptions split_options(const Options& options);
converter::MakeDeltaOptions make_delta_options(const Options& options);
converter::VerifyDeltaOptions verify_delta_options(const Options& options);
converter::PairOptions pair_options(const Options& options);
converter::DigestOptions digest_options(const Options& options);
converter::StreamOptions stream_options(const Options& options);

}  // namespace ferry::python
