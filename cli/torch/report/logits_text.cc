#include <fmt/format.h>

#include "cli/report/text.h"
#include "cli/torch/report/logits_report.h"
#include "distckpt/base/json.h"

namespace ferry::cli {
namespace {

using converter::LogitsReport;
using converter::OutputDifference;
using converter::SequenceDifference;

std::string mesh_text(const LogitsSubject& subject) {
  const auto& mesh = subject.mesh;
  auto text = fmt::format("tp {}", mesh.tp());
  if (subject.sequence_parallel) text += " (sequence parallel)";
  for (const auto& [name, size] : {std::pair("pp", mesh.pp()), std::pair("cp", mesh.cp()),
                                   std::pair("ep", mesh.ep()), std::pair("dp", mesh.dp())}) {
    if (size > 1) text += fmt::format(", {} {}", name, size);
  }
  if (mesh.etp() != mesh.tp()) text += fmt::format(", etp {}", mesh.etp());
  return text;
}

// {"torch": "2.11.0", ...} -> "torch 2.11.0, ..."
std::string regime_text(const std::string& regime) {
  const auto parsed = distckpt::json_or_discarded(regime);
  if (!parsed.is_object()) return regime;
  std::string text;
  for (const char* key :
       {"transformers", "megatron_core", "torch", "dtype", "device", "attention", "experts"}) {
    if (!parsed.contains(key)) continue;
    const auto& value = parsed[key];
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", key,
                        value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

std::string difference_text(const OutputDifference& difference) {
  if (difference.unequal == 0) return "equal in every bit";
  if (!difference.finite)
    return fmt::format("{} of {} values differ, and ours are not all finite",
                       format_count(difference.unequal), format_count(difference.elements));
  return fmt::format("{} of {} values differ, by {:.3g} at most ({} ulps)",
                     format_count(difference.unequal), format_count(difference.elements),
                     difference.largest, format_count(difference.largest_ulps));
}

nlohmann::ordered_json difference_json(const OutputDifference& difference) {
  return {{"module", difference.module},     {"elements", difference.elements},
          {"unequal", difference.unequal},   {"largest", difference.largest},
          {"ulps", difference.largest_ulps}, {"finite", difference.finite}};
}

}  // namespace

std::string logits_text(const LogitsSubject& subject, const LogitsReport& report) {
  auto text =
      fmt::format("model      {} ({}), {} {} on {}, {}\n", subject.checkpoint, subject.family,
                  subject.alignment, subject.dtype, subject.device, mesh_text(subject));
  text += fmt::format("reference  {} ({})\n", subject.reference, regime_text(report.regime));
  for (std::size_t i = 0; i < report.sequences.size(); ++i) {
    const auto& sequence = report.sequences[i];
    text += fmt::format("sequence   {}, {} tokens{}: logits {}\n", i, sequence.num_tokens,
                        report.packed ? ", packed" : "", difference_text(sequence.logits));
    if (sequence.largest_log_prob > 0) {
      text +=
          fmt::format("           log-probabilities differ by {:.3g} at most, {:.3g} in the mean\n",
                      sequence.largest_log_prob, sequence.mean_log_prob);
    }
  }
  if (const auto first = report.first_difference()) {
    const auto& [i, module] = *first;
    if (module.module != "logits") {
      text += fmt::format("first      {} of sequence {}: {}\n", module.module, i,
                          difference_text(module));
    }
    return text + "DIFFERENT\n";
  }
  return text + "EQUAL\n";
}

nlohmann::ordered_json logits_json(const LogitsSubject& subject, const LogitsReport& report) {
  nlohmann::ordered_json json{{"equal", report.equal()},
                              {"checkpoint", subject.checkpoint},
                              {"reference", subject.reference},
                              {"family", subject.family},
                              {"alignment", subject.alignment},
                              {"dtype", subject.dtype},
                              {"device", subject.device},
                              {"mesh",
                               {{"tp", subject.mesh.tp()},
                                {"pp", subject.mesh.pp()},
                                {"cp", subject.mesh.cp()},
                                {"ep", subject.mesh.ep()},
                                {"etp", subject.mesh.etp()},
                                {"dp", subject.mesh.dp()},
                                {"sequence_parallel", subject.sequence_parallel}}},
                              {"packed", report.packed}};
  json["regime"] = nlohmann::ordered_json::parse(report.regime, nullptr, false);
  if (json["regime"].is_discarded()) json["regime"] = report.regime;
  for (const auto& sequence : report.sequences) {
    auto& entry = json["sequences"].emplace_back();
    entry = {{"tokens", sequence.num_tokens},
             {"logits", difference_json(sequence.logits)},
             {"largest_log_prob", sequence.largest_log_prob},
             {"mean_log_prob", sequence.mean_log_prob}};
    for (const auto& module : sequence.modules) entry["modules"].push_back(difference_json(module));
  }
  if (const auto first = report.first_difference())
    json["first_difference"] = {{"sequence", first->first}, {"module", first->second.module}};
  return json;
}

}  // namespace ferry::cli
