#include "cli/report/json.h"

#include <string>

#include "cli/report/diff.h"
#include "converter/stored/part.h"

namespace ferry::cli {
namespace {

using nlohmann::ordered_json;

std::vector<std::int64_t> list(const distckpt::Dims& dims) {
  return {dims.begin(), dims.end()};
}

template <typename T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

ordered_json unpaired_json(const std::vector<converter::UnpairedTensor>& tensors) {
  ordered_json list = ordered_json::array();
  for (const auto& tensor : tensors) {
    list.push_back({{"name", tensor.tensor}, {"kind", to_string(tensor.kind)}});
    if (!tensor.detail.empty()) list.back()["detail"] = tensor.detail;
  }
  return list;
}

// Numbers of elements by their distance in ulps: {"0": 12, "3-4": 1}, without empty ones.
ordered_json ulps_json(const distckpt::ElementCounts& counts) {
  ordered_json json = ordered_json::object();
  for (std::size_t i = 0; i < counts.ulps.size(); ++i) {
    if (counts.ulps[i] > 0) json[format_bucket(i)] = counts.ulps[i];
  }
  return json;
}

void add_difference(ordered_json& json, const distckpt::ElementDifference& difference) {
  const auto& counts = difference.counts;
  json["elements"] = counts.elements;
  json["changed"] = counts.different;
  json["changed_share"] = counts.changed_share();
  json["left_norm"] = difference.left_norm();
  json["right_norm"] = difference.right_norm();
  json["difference_norm"] = difference.difference_norm();
  json["relative_difference"] = difference.relative_difference();
  json["max_difference"] = or_null(counts.max_difference);
  json["max_ulps"] = or_null(counts.max_ulps);
  json["ulps"] = ulps_json(counts);
  json["nans"] = {counts.left_nans, counts.right_nans};
  json["infinities"] = {counts.left_infinities, counts.right_infinities};
}

ordered_json row_json(const converter::DiffRow& row) {
  ordered_json json{{"layer", or_null(row.layer)},
                    {"tensors", row.num_tensors},
                    {"changed_tensors", row.num_changed}};
  add_difference(json, row.difference);
  return json;
}

}  // namespace

ordered_json convert_json(const converter::ConvertReport& report) {
  ordered_json json;
  json["source"] = {{"path", report.source.string()}, {"format", to_string(report.source_format)}};
  json["target"] = {{"path", report.target.string()}, {"format", to_string(report.target_format)}};
  json["family"] = report.family;
  if (!report.part.empty()) json["part"] = converter::part_json(report.part);
  json["tensors"] = report.num_tensors;
  json["parameters"] = report.num_parameters;
  json["bytes"] = report.bytes;
  json["copies"] = report.num_pieces;
  json["threads"] = report.threads;
  json["staging_bytes"] = report.staging_bytes;
  json["dry_run"] = report.dry_run != converter::DryRun::kNo;
  json["resumed_bytes"] = report.resumed_bytes;
  json["copy_seconds"] = report.copy_seconds;
  json["ranks"] = report.ranks;
  json["proof_seconds"] = report.proof_seconds;
  json["proved"] = report.proved;
  json["proof_from_disk"] = report.proof_from_disk;
  json["model_digest"] = report.model_digest;
  json["second_copies"] = report.second_copies;
  json["training_state_left_out"] = report.num_training_state;
  json["adapter_left_out"] = report.num_adapter_tensors;
  json["optimizer_form"] = report.optimizer_form;
  json["optimizer"] = report.optimizer_kinds;
  json["rng"] = report.rng;
  json["redone"] = report.redone;
  json["training_notes"] = report.training_notes;
  json["run_config_problem"] = report.run_config_problem;
  json["nonzero_padding"] = ordered_json::array();
  for (const auto& padding : report.nonzero_padding) {
    json["nonzero_padding"].push_back(fmt::format("{} {}", padding.tensor, to_string(padding.box)));
  }
  json["files"] = ordered_json::array();
  for (const auto& file : report.files)
    json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  return json;
}

ordered_json adapter_json(const converter::ConvertAdapterReport& report) {
  return {{"source", report.source.string()},
          {"source_form", form_name(report.source_form)},
          {"target", report.target.string()},
          {"target_form", form_name(report.target_form)},
          {"canonical", report.canonical},
          {"factors", report.num_factors},
          {"parameters", report.num_parameters},
          {"bytes", report.bytes},
          {"proved", true}};
}

ordered_json merge_json(const converter::MergeReport& report) {
  auto json = convert_json(report.converted);
  json["adapter"] = {{"tensors", report.num_tensors},
                     {"elements", report.num_elements},
                     {"changed", report.num_changed},
                     {"vanished", report.num_vanished},
                     {"rescaled", report.num_rescaled}};
  return json;
}

ordered_json split_json(const converter::SplitReport& report, std::int64_t rank) {
  ordered_json text{{"target", report.written.target.string()},
                    {"rank", rank},
                    {"canonical", report.written.canonical},
                    {"parameters", report.num_parameters},
                    {"equal", report.num_equal},
                    {"change", report.change},
                    {"error", report.error},
                    {"proved", true},
                    {"tensors", ordered_json::array()}};
  for (const auto& tensor : report.tensors) {
    text["tensors"].push_back({{"name", tensor.name},
                               {"shape", {tensor.rows, tensor.columns}},
                               {"change", tensor.change},
                               {"error", tensor.error}});
  }
  return text;
}

ordered_json make_delta_json(const converter::MakeDeltaReport& report) {
  return {{"base", report.base.string()},
          {"result", report.result.string()},
          {"delta", report.target.string()},
          {"base_model", report.base_digest},
          {"result_model", report.result_digest},
          {"tensors", report.num_tensors},
          {"changed_tensors", report.num_changed_tensors},
          {"elements", report.num_elements},
          {"changed_elements", report.num_changed},
          {"model_bytes", report.model_bytes},
          {"delta_bytes", report.stored_bytes},
          {"files", report.files},
          {"notes", report.notes},
          {"seconds", report.seconds}};
}

ordered_json verify_delta_json(const converter::VerifyDeltaReport& report) {
  return {{"fits", true},
          {"tensors", report.num_tensors},
          {"bytes", report.bytes},
          {"result_model", report.result_digest}};
}

ordered_json delta_json(const converter::DeltaSummary& summary) {
  ordered_json json{{"delta", summary.path.string()}};
  if (summary.form == converter::DeltaForm::kSlime) {
    json["form"] = "slime";
    json["encoding"] = summary.encoding;
    json["version"] = summary.version;
    json["base_version"] = summary.base_version;
  } else {
    json["form"] = "ferry";
    json["base_model"] = summary.base_digest;
    json["result_model"] = summary.result_digest;
    json["tensors"] = summary.num_tensors;
    json["model_bytes"] = summary.model_bytes;
    json["files"] = summary.files;
  }
  json["delta_bytes"] = summary.stored_bytes;
  auto& changed = json["changed"] = ordered_json::array();
  for (const auto& tensor : summary.tensors) {
    ordered_json entry{{"tensor", tensor.name}, {"bytes", tensor.stored_bytes}};
    if (tensor.num_changed) entry["elements"] = *tensor.num_changed;
    changed.push_back(std::move(entry));
  }
  return json;
}

ordered_json inspect_json(const converter::InspectReport& report, std::string_view filter) {
  ordered_json json;
  json["path"] = report.location.folder.string();
  json["format"] = to_string(report.location.format);
  json["iteration"] = report.location.iteration
                          ? ordered_json(distckpt::iteration_text(*report.location.iteration))
                          : ordered_json(nullptr);
  if (report.config) {
    const auto& config = *report.config;
    json["family"] = config.family;
    json["config"] = {{"num_layers", config.num_layers},
                      {"hidden_size", config.hidden_size},
                      {"ffn_hidden_size", config.ffn_hidden_size},
                      {"num_attention_heads", config.num_attention_heads},
                      {"num_query_groups", config.num_query_groups},
                      {"kv_channels", config.kv_channels},
                      {"vocab_size", config.vocab_size},
                      {"max_position_embeddings", config.max_position_embeddings}};
    auto& more = json["config"];
    if (report.only_sizes) {
      for (auto at = more.begin(); at != more.end();) {
        if (*at == 0) {
          at = more.erase(at);
        } else {
          ++at;
        }
      }
    } else {
      more["rotary_base"] = config.rotary_base;
      more["layernorm_epsilon"] = config.layernorm_epsilon;
      more["add_qkv_bias"] = config.add_qkv_bias;
      more["add_bias_linear"] = config.add_bias_linear;
      more["qk_layernorm"] = config.qk_layernorm;
    }
    more["untie_embeddings_and_output_weights"] = config.untie_embeddings_and_output_weights;
    if (config.num_moe_experts > 0) {
      more["num_experts"] = config.num_moe_experts;
      more["moe_layer_freq"] = config.moe_layer_freq;
      more["moe_ffn_hidden_size"] = config.moe_ffn_hidden_size;
      more["moe_shared_expert_intermediate_size"] = config.moe_shared_expert_intermediate_size;
    }
    if (config.multi_latent_attention && config.kv_lora_rank > 0) {
      more["q_lora_rank"] = config.q_lora_rank;
      more["kv_lora_rank"] = config.kv_lora_rank;
      more["qk_head_dim"] = config.qk_head_dim;
      more["qk_pos_emb_head_dim"] = config.qk_pos_emb_head_dim;
      more["v_head_dim"] = config.v_head_dim;
    }
    if (config.mtp_num_layers > 0) more["mtp_num_layers"] = config.mtp_num_layers;
  } else {
    json["family"] = nullptr;
    json["config_problem"] = report.config_problem;
  }
  if (report.saved_with) {
    json["saved_with"] = {
        {"tensor_model_parallel_size", report.saved_with->tensor_model_parallel_size},
        {"pipeline_model_parallel_size", report.saved_with->pipeline_model_parallel_size},
        {"expert_model_parallel_size", report.saved_with->expert_model_parallel_size},
        {"make_vocab_size_divisible_by", report.saved_with->make_vocab_size_divisible_by}};
  }
  json["sidecar"] = report.has_sidecar;
  if (!report.part.empty()) json["part"] = converter::part_json(report.part);
  json["parameters"] = nullptr;
  if (report.num_parameters) json["parameters"] = *report.num_parameters;
  json["stored_elements"] = report.num_stored;
  json["bytes"] = report.num_bytes;
  json["elements_by_dtype"] = report.elements_by_dtype;
  json["chunks_by_file"] = report.chunks_by_file;
  json["objects"] = report.objects;
  json["training_state"] = report.num_training_state;
  json["adapter"] = report.num_adapter_tensors;
  json["tensors"] = ordered_json::array();
  for (const auto& tensor : report.tensors) {
    if (!converter::matches(filter, tensor.name)) continue;
    ordered_json chunks = ordered_json::array();
    for (const auto& chunk : tensor.chunks) {
      chunks.push_back({{"file", chunk.file},
                        {"offset", chunk.offset},
                        {"length", chunk.length},
                        {"offsets", list(chunk.box.offset)},
                        {"sizes", list(chunk.box.size)}});
    }
    json["tensors"].push_back({{"name", tensor.name},
                               {"dtype", torch_name(tensor.dtype)},
                               {"shape", list(tensor.shape)},
                               {"chunks", std::move(chunks)}});
  }
  return json;
}

ordered_json verify_json(const converter::VerifyReport& report) {
  ordered_json json;
  json["identical"] = report.identical();
  json["left"] = report.left.string();
  json["right"] = report.right.string();
  json["compared"] = report.num_compared;
  json["bytes"] = report.bytes;
  json["tensors"] = unpaired_json(report.unpaired);
  for (const auto& difference : report.tensors) {
    json["tensors"].push_back({{"name", difference.tensor},
                               {"kind", "values"},
                               {"first_element", list(difference.first_element)},
                               {"left_value", difference.left_value},
                               {"right_value", difference.right_value},
                               {"num_different", difference.num_different},
                               {"num_elements", difference.num_elements},
                               {"max_difference", or_null(difference.max_difference)},
                               {"max_ulps", or_null(difference.max_ulps)}});
  }
  json["configuration"] = report.configuration;
  json["files"] = report.files;
  json["notes"] = report.notes;
  json["seconds"] = report.seconds;
  return json;
}

ordered_json diff_json(const converter::DiffReport& report) {
  ordered_json json;
  json["identical"] = report.identical();
  json["left"] = {{"path", report.left.string()}, {"format", to_string(report.left_format)}};
  json["right"] = {{"path", report.right.string()}, {"format", to_string(report.right_format)}};
  json["family"] = report.family;
  json["compared"] = report.tensors.size();
  json["changed_tensors"] = report.num_changed;
  json["bytes"] = report.bytes;
  add_difference(json["total"], report.total);
  const auto table = tabulate(report);
  json["outside_layers"] = row_json(table.outside);
  json["layers"] = ordered_json::array();
  for (const auto& row : table.layers) json["layers"].push_back(row_json(row));
  json["tensors"] = ordered_json::array();
  for (const auto& tensor : report.tensors) {
    ordered_json entry{
        {"name", tensor.name}, {"dtype", torch_name(tensor.dtype)}, {"shape", list(tensor.shape)}};
    add_difference(entry, tensor.difference);
    json["tensors"].push_back(std::move(entry));
  }
  json["unpaired"] = unpaired_json(report.unpaired);
  json["notes"] = report.notes;
  json["seconds"] = report.seconds;
  return json;
}

ordered_json check_json(const converter::ManifestCheck& check) {
  return {{"matches", check.differences.empty()},
          {"model", check.found.model_digest},
          {"files_compared", check.files_compared},
          {"differences", check.differences}};
}

ordered_json error_json(const Error& error) {
  return {{"error",
           {{"kind", to_string(error.kind())},
            {"message", error.what()},
            {"context", error.context()},
            {"hint", error.hint()}}}};
}

std::string json_text(const ordered_json& json, int indent) {
  return json.dump(indent, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace ferry::cli
