#include "converter/verify.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "converter/families/megatron_args.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/base/stopwatch.h"
#include "distckpt/elements/cast.h"
#include "distckpt/elements/difference.h"

namespace ferry::converter {
namespace {

using distckpt::DType;

// The differences of one tensor while its parts are compared in any order.
struct TensorDifference {
  std::int64_t first = -1;
  double left_value = 0;
  double right_value = 0;
  distckpt::ElementCounts counts{};

  void add(DType dtype, const distckpt::Comparison& part, const distckpt::ElementCounts& more) {
    counts += more;
    if (first >= 0 && first < part.element + more.first_different) return;
    const auto at = more.first_different * size_of(dtype);
    first = part.element + more.first_different;
    left_value = distckpt::element_value(dtype, part.expected.data() + at);
    right_value = distckpt::element_value(dtype, part.found.data() + at);
  }
};

class Verification {
 public:
  Verification(const PairOptions& pair, bool weights_only)
      : weights_only_(weights_only),
        pair_(pair, /*without_adapter=*/true),
        left_(pair_.left()),
        right_(pair_.right()) {
    report_.is_part = !pair.selection.is_all();
  }

  VerifyReport run(const ProgressFunction& progress) {
    report_.left = left_.location.folder;
    report_.right = right_.location.folder;
    report_.left_format = left_.location.format;
    report_.right_format = right_.location.format;
    compare_tensors(progress);
    report_.notes = pair_.notes();
    if (weights_only_) {
      report_.notes.emplace_back("configuration and carried files were not compared, as asked");
    } else {
      compare_configuration();
      compare_files();
    }
    report_.seconds = stopwatch_.seconds();
    return std::move(report_);
  }

 private:
  void compare_tensors(const ProgressFunction& progress) {
    std::mutex mutex;
    std::map<std::uint32_t, TensorDifference> differences;
    pair_.compare(
        [&](const distckpt::Comparison& part) {
          if (part.equal) return;
          const auto dtype = pair_.tensor(part.tensor).dtype;
          const auto counts = distckpt::compare_elements(dtype, part.expected, part.found).counts;
          const std::lock_guard lock(mutex);
          differences[part.tensor].add(dtype, part, counts);
        },
        progress);
    report_.num_compared = static_cast<std::int64_t>(pair_.num_tensors());
    report_.bytes = pair_.num_bytes();
    report_.unpaired = pair_.unpaired();
    for (const auto& [index, difference] : differences) {
      const auto& tensor = pair_.tensor(index);
      report_.tensors.push_back(
          {.tensor = tensor.name,
           .first_element = distckpt::coordinates_of(tensor.shape, difference.first),
           .left_value = difference.left_value,
           .right_value = difference.right_value,
           .num_different = difference.counts.different,
           .num_elements = tensor.shape.product(),
           .max_difference = difference.counts.max_difference,
           .max_ulps = difference.counts.max_ulps});
    }
  }

  void compare_configuration() {
    if (!left_.hf || !right_.hf) {
      try {
        require_same_model(left_.map.config, right_.map.config, report_.left.string(),
                           report_.right.string());
      } catch (const Error& error) {
        report_.configuration.emplace_back(error.what());
      }
      report_.notes.emplace_back(
          "config.json and carried files were not compared: one side has none (name them with "
          "--hf-config)");
      return;
    }
    const auto left =
        distckpt::parse_python_json(left_.hf->config_text(), left_.hf->config_source());
    const auto right =
        distckpt::parse_python_json(right_.hf->config_text(), right_.hf->config_source());
    std::set<std::string> keys;
    for (const auto* side : {&left, &right}) {
      for (const auto& [key, value] : side->items()) keys.insert(key);
    }
    const auto text = [](const nlohmann::json& object, const std::string& key) {
      return object.contains(key) ? distckpt::python_json(object.at(key)) : std::string("absent");
    };
    for (const auto& key : keys) {
      if (text(left, key) == text(right, key)) continue;
      report_.configuration.push_back(
          fmt::format("config.json: {}: {}, {}", key, text(left, key), text(right, key)));
    }
  }

  void compare_files() {
    if (!left_.hf || !right_.hf) return;
    std::set<std::string> names(left_.hf->carried.begin(), left_.hf->carried.end());
    names.insert(right_.hf->carried.begin(), right_.hf->carried.end());
    names.erase(std::string(distckpt::kHfConfig));
    for (const auto& name : names) {
      const auto has = [&](const HfForm& form) {
        return std::ranges::find(form.carried, name) != form.carried.end();
      };
      if (!has(*left_.hf) || !has(*right_.hf)) {
        report_.files.push_back(
            fmt::format("{}: is on the {} only", name, has(*left_.hf) ? "left" : "right"));
      } else if (!same_bytes(left_.hf->file(name), right_.hf->file(name))) {
        report_.files.push_back(fmt::format("{}: differs", name));
      }
    }
    if (left_.hf->headers.empty() || right_.hf->headers.empty()) return;
    const auto metadata = [](const HfForm& form) {
      std::map<std::string, std::string> all;
      for (const auto& header : form.headers)
        all.insert(header.metadata.begin(), header.metadata.end());
      return all;
    };
    if (metadata(*left_.hf) != metadata(*right_.hf)) {
      report_.files.emplace_back("the safetensors files' __metadata__ differs");
    }
  }

  const distckpt::Stopwatch stopwatch_;
  bool weights_only_;
  CheckpointPair pair_;
  const Checkpoint& left_;
  const Checkpoint& right_;
  VerifyReport report_;
};

}  // namespace

VerifyReport verify(const PairOptions& pair, bool weights_only, const ProgressFunction& progress) {
  auto with_state = pair;
  with_state.training_state = pair.selection.is_all();
  return Verification(with_state, weights_only).run(progress);
}

}  // namespace ferry::converter
