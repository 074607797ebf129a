#include "cli/report/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "converter/stored/part.h"
#include "distckpt/base/printable.h"

namespace ferry::cli {
namespace {

constexpr std::size_t kMaxFiles = 16;  // of a plan, before the rest is only counted
constexpr std::size_t kMaxCopies = 4;  // of tensors stored twice, before they are only counted
constexpr std::size_t kMaxLines = 40;  // of tensors that differ, before the rest is only counted
constexpr std::size_t kMaxNote = 2000;

std::string shown(const std::filesystem::path& path) {
  return printable(path.string(), kMaxNote);
}

std::string describe(const converter::TensorDifference& difference) {
  auto text = fmt::format(
      "{} of {} elements differ, first at {}: {}, {}", format_count(difference.num_different),
      format_count(difference.num_elements), to_string(difference.first_element),
      difference.left_value, difference.right_value);
  if (difference.max_difference)
    text += fmt::format("; largest difference {:.6g}", *difference.max_difference);
  if (difference.max_ulps)
    text += fmt::format(" ({} ulp{})", *difference.max_ulps, *difference.max_ulps == 1 ? "" : "s");
  return text;
}

// "1 layer", "2 layers".
std::string counted(std::int64_t count, std::string_view what) {
  if (count == 1) return std::string("1 ").append(what);
  return fmt::format("{} {}s", format_count(count), what);
}

std::string describe_attention(const models::TransformerConfig& config) {
  const auto heads = config.num_attention_heads;
  if (config.kv_channels == 0 && !config.multi_latent_attention) return counted(heads, "head");
  if (!config.multi_latent_attention) {
    return fmt::format("{} of {}, {}", counted(heads, "head"), config.kv_channels,
                       counted(config.num_query_groups, "query group"));
  }
  if (config.kv_lora_rank == 0) {
    return fmt::format("{} of sizes that its arguments do not say", counted(heads, "latent head"));
  }
  return fmt::format("{} of {}+{} and {}, {}kv rank {}", counted(heads, "latent head"),
                     config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim,
                     config.q_lora_rank > 0 ? fmt::format("q rank {}, ", config.q_lora_rank) : "",
                     config.kv_lora_rank);
}

std::string describe(const models::TransformerConfig& config) {
  auto text =
      fmt::format("{}: {}, hidden {}, {}{}", config.family, counted(config.num_layers, "layer"),
                  config.hidden_size,
                  config.ffn_hidden_size > 0 ? fmt::format("ffn {}, ", config.ffn_hidden_size) : "",
                  describe_attention(config));
  if (config.num_moe_experts > 0) {
    text += fmt::format(", {} of {} in {}", counted(config.num_moe_experts, "expert"),
                        config.moe_ffn_hidden_size,
                        counted(std::ranges::count(config.moe_layer_freq, true), "layer"));
  }
  if (config.moe_shared_expert_intermediate_size > 0)
    text += fmt::format(", shared ones of {}", config.moe_shared_expert_intermediate_size);
  if (config.mtp_num_layers > 0)
    text += fmt::format(", {}", counted(config.mtp_num_layers, "prediction layer"));
  text += fmt::format(", vocabulary {}, ", config.vocab_size);
  if (config.head != models::Head::kLanguageModel) {
    return text +
           fmt::format("{} for each {}", counted(config.num_labels, "score"),
                       config.head == models::Head::kTokenClassification ? "token" : "sequence");
  }
  return text + (config.untie_embeddings_and_output_weights ? "untied" : "tied") + " output layer";
}

std::string plan_lines(const converter::ConvertReport& report) {
  auto text = fmt::format("plan     {} rectangular copies, {}, {} of staging buffers\n",
                          format_count(report.num_pieces), counted(report.threads, "thread"),
                          format_bytes(report.staging_bytes));
  const auto shown = report.files.size() > kMaxFiles + 1 ? kMaxFiles : report.files.size();
  std::int64_t hidden = 0;
  for (std::size_t i = 0; i < report.files.size(); ++i) {
    const auto& file = report.files[i];
    if (i < shown) {
      text += fmt::format("file     {}  {}\n", printable(file.name), format_bytes(file.bytes));
    } else {
      hidden += file.bytes;
    }
  }
  if (hidden > 0) {
    text += fmt::format("file     and {} others, {}\n",
                        format_count(static_cast<std::int64_t>(report.files.size() - shown)),
                        format_bytes(hidden));
  }
  return text;
}

std::string copied_line(const converter::ConvertReport& report) {
  auto text = fmt::format("copied   in {}{} ({}/s)", format_seconds(report.copy_seconds),
                          report.ranks > 1 ? fmt::format(" by {} processes", report.ranks) : "",
                          format_bytes(static_cast<std::int64_t>(
                              static_cast<double>(report.bytes - report.resumed_bytes) /
                              std::max(report.copy_seconds, 1e-3))));
  if (report.resumed_bytes > 0) {
    text +=
        fmt::format(", {} were done by the interrupted run", format_bytes(report.resumed_bytes));
  }
  return text + "\n";
}

std::string archive_line(const converter::ConvertReport& report) {
  std::int64_t stored = 0;
  for (const auto& file : report.files) stored += file.bytes;
  return fmt::format(
      "archive  {}, {:.3g} times smaller\n", format_bytes(stored),
      static_cast<double>(report.bytes) / static_cast<double>(std::max<std::int64_t>(stored, 1)));
}

std::string second_copies_lines(const converter::ConvertReport& report) {
  std::string text;
  const bool planned = report.dry_run == converter::DryRun::kPlan;
  if (const auto count = report.second_copies.size(); count > kMaxCopies) {
    text += fmt::format("note     {} tensors are stored more than once; {}\n", count,
                        planned ? "all copies will be compared" : "all copies hold the same bytes");
  } else {
    for (const auto& name : report.second_copies) {
      text +=
          fmt::format("note     {} is stored twice; {}\n", printable(name),
                      planned ? "both copies will be compared" : "both copies hold the same bytes");
    }
  }
  return text;
}

std::string state_line(const converter::ConvertReport& report) {
  return fmt::format("state    {} of the optimizer{}, carried over{}\n",
                     fmt::join(report.optimizer_kinds, ", "), report.rng ? ", and the RNG" : "",
                     report.optimizer_form == "fully_reshardable"
                         ? ""
                         : fmt::format(" from {} as fully_reshardable", report.optimizer_form));
}

std::string note_lines(const converter::ConvertReport& report) {
  std::string text;
  if (report.redone)
    text += "note     what an interrupted run had left was damaged: all of it was copied anew\n";
  if (!report.run_config_problem.empty())
    text += fmt::format("note     no run_config.yaml: {}\n", printable(report.run_config_problem));
  for (const auto& note : report.training_notes)
    text += fmt::format("note     {}\n", printable(note, kMaxNote));
  if (report.num_training_state > 0) {
    text += fmt::format("note     {} entries of training state (optimizer, RNG) were left out\n",
                        report.num_training_state);
  }
  if (report.num_adapter_tensors > 0) {
    text += fmt::format(
        "note     a LoRA adapter of {} factors was left out; with the source as ADAPTER, {}\n",
        report.num_adapter_tensors, converter::kAdapterHint);
  }
  return text;
}

}  // namespace

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array kUnits{"B", "kB", "MB", "GB", "TB", "PB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.3g} {}", value, kUnits[unit]);
}

std::string format_seconds(double seconds) {
  if (seconds < 60) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<std::int64_t>(std::lround(seconds));
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole % 3600 / 60);
}

std::string format_count(std::int64_t count) {
  const auto digits = fmt::format("{}", count);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string convert_text(const converter::ConvertReport& report) {
  std::string text;
  text += fmt::format("source   {} ({}, {})\n", shown(report.source),
                      describe(report.source_format), report.family);
  text += fmt::format("target   {} ({})\n", shown(report.target), describe(report.target_format));
  text +=
      fmt::format("model    {} parameters, {} tensors, {}\n", format_count(report.num_parameters),
                  report.num_tensors, format_bytes(report.bytes));
  if (!report.part.empty())
    text += fmt::format("part     only this of the model: {}\n",
                        printable(converter::describe(report.part), kMaxNote));
  text += report.dry_run != converter::DryRun::kNo ? plan_lines(report) : copied_line(report);
  if (report.target_format == converter::Format::kArchive && report.proved)
    text += archive_line(report);
  text += second_copies_lines(report);
  for (const auto& padding : report.nonzero_padding) {
    text += fmt::format("note     {} {}: padding that was not zero was dropped\n",
                        printable(padding.tensor), to_string(padding.box));
  }
  if (!report.optimizer_kinds.empty()) text += state_line(report);
  text += note_lines(report);
  if (report.proved) {
    text +=
        fmt::format("proved   every tensor, re-read {} in {}, has the digest of what was copied\n",
                    report.proof_from_store  ? "from the store"
                    : report.proof_from_disk ? "from the disk"
                                             : "from memory-backed files",
                    format_seconds(report.proof_seconds));
  }
  if (!report.model_digest.empty()) text += fmt::format("digest   {}\n", report.model_digest);
  if (report.dry_run != converter::DryRun::kNo) text += "dry run: nothing was written\n";
  return text;
}

std::string inspect_text(const converter::InspectReport& report, std::string_view filter) {
  std::string text;
  text += fmt::format("checkpoint  {} ({})\n", shown(report.location.folder),
                      describe(report.location.format));
  if (report.location.iteration) {
    text += fmt::format("iteration   {}\n", distckpt::iteration_text(*report.location.iteration));
  }
  text += fmt::format("model       {}\n",
                      report.config ? describe(*report.config)
                                    : "unknown: " + printable(report.config_problem, kMaxNote));
  if (report.num_parameters)
    text += fmt::format("parameters  {}\n", format_count(*report.num_parameters));
  text += fmt::format("stored      {} elements, {}\n", format_count(report.num_stored),
                      format_bytes(report.num_bytes));
  for (const auto& [dtype, elements] : report.elements_by_dtype) {
    text += fmt::format("            {} {}\n", format_count(elements), dtype);
  }
  if (!report.part.empty())
    text += fmt::format("part        only this of the model: {}\n",
                        printable(converter::describe(report.part), kMaxNote));
  if (report.saved_with) {
    text += fmt::format("saved with  TP{} PP{} EP{}, vocabulary divisible by {}\n",
                        report.saved_with->tensor_model_parallel_size,
                        report.saved_with->pipeline_model_parallel_size,
                        report.saved_with->expert_model_parallel_size,
                        report.saved_with->make_vocab_size_divisible_by);
  }
  if (report.location.format == converter::Format::kTorchDist) {
    text += fmt::format("sidecar     {}\n",
                        report.has_sidecar ? "yes: the way back is byte-identical" : "none");
    text += fmt::format("objects     {}\n", report.objects.size());
  }
  if (report.num_training_state > 0)
    text += fmt::format("training    {} entr{} of state\n", report.num_training_state,
                        report.num_training_state == 1 ? "y" : "ies");
  if (report.num_adapter_tensors > 0)
    text += fmt::format("adapter     {} of LoRA{}\n", counted(report.num_adapter_tensors, "factor"),
                        report.num_adapter_tensors == std::ssize(report.tensors)
                            ? ", and nothing of the model"
                            : "");
  for (const auto& [file, chunks] : report.chunks_by_file)
    text += fmt::format("file        {}  {}\n", printable(file), counted(chunks, "chunk"));

  std::vector<std::pair<const converter::InspectedTensor*, std::string>> shown;
  std::size_t width = 0;
  for (const auto& tensor : report.tensors) {
    if (!converter::matches(filter, tensor.name)) continue;
    shown.emplace_back(&tensor, printable(tensor.name));
    width = std::max(width, shown.back().second.size());
  }
  text += fmt::format(
      "tensors     {}{}\n", report.tensors.size(),
      shown.size() == report.tensors.size() ? "" : fmt::format(", {} of them match", shown.size()));
  const auto add = [&text](std::string_view cell, std::size_t columns) {
    text.append(2, ' ').append(cell).append(columns - std::min(columns, cell.size()), ' ');
  };
  for (const auto& [tensor, name] : shown) {
    add(name, width);
    add(short_name(tensor->dtype), 8);
    add(to_string(tensor->shape), 20);
    add(counted(std::ssize(tensor->chunks), "chunk"), 0);
    text += '\n';
  }
  return text;
}

std::string verify_text(const converter::VerifyReport& report) {
  std::string text;
  text += fmt::format("left     {} ({})\n", shown(report.left), describe(report.left_format));
  text += fmt::format("right    {} ({})\n", shown(report.right), describe(report.right_format));
  const auto num_different = report.unpaired.size() + report.tensors.size();
  std::size_t lines = 0;
  const auto add = [&](const auto& difference) {
    if (lines++ >= kMaxLines) return;
    text += fmt::format("differs  {}: {}\n", printable(difference.tensor), describe(difference));
  };
  std::ranges::for_each(report.unpaired, add);
  std::ranges::for_each(report.tensors, add);
  if (num_different > kMaxLines) {
    text +=
        fmt::format("differs  {} more tensors; --json lists them all\n", num_different - kMaxLines);
  }
  for (const auto& line : report.configuration)
    text += fmt::format("differs  {}\n", printable(line, kMaxNote));
  for (const auto& line : report.files)
    text += fmt::format("differs  {}\n", printable(line, kMaxNote));
  for (const auto& note : report.notes)
    text += fmt::format("note     {}\n", printable(note, kMaxNote));
  text += fmt::format("compared {} tensors, {} in {}\n", report.num_compared,
                      format_bytes(report.bytes), format_seconds(report.seconds));
  if (report.identical()) {
    text += fmt::format("equal: every tensor {} was compared, bit for bit\n",
                        report.is_part ? "that was asked for" : "of both");
  } else {
    text += fmt::format("different: {} tensors, {} settings, {} files\n", num_different,
                        report.configuration.size(), report.files.size());
  }
  return text;
}

std::string digest_text(const converter::Manifest& manifest) {
  std::string text;
  for (const auto& tensor : manifest.tensors) {
    text += fmt::format("{}  {}{}\n", to_string(tensor.digest), printable(tensor.name),
                        tensor.role == distckpt::Role::kDerived ? " (derived)" : "");
  }
  for (const auto& file : manifest.files)
    text += fmt::format("{}  file {}\n", to_string(file.digest), printable(file.path));
  return text + fmt::format("{}  model\n", manifest.model_digest);
}

}  // namespace ferry::cli
