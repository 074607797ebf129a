// The fuzz targets: each gives bytes to one parser and throws where the answer is neither an Error
// nor a value with the properties that it must have. libFuzzer calls them from entry.cc,
// replay_test.cc gives them the files in seeds/ and found/.
#pragma once

#include <span>
#include <string_view>

namespace ferry::fuzz {

struct Target {
  std::string_view name{};  // of its folders in seeds/ and found/
  void (*run)(std::string_view input) = nullptr;
};

void safetensors(std::string_view input);    // a file, or a header's JSON
void pickle(std::string_view input);         // a pickle
void zip(std::string_view input);            // what torch.save writes
void torch_dist(std::string_view input);     // a .metadata
void hf_config(std::string_view input);      // a config.json
void megatron_args(std::string_view input);  // the pickle of a common state
void manifest(std::string_view input);       // a manifest
void journal(std::string_view input);        // a journal
void shard_store(std::string_view input);    // an archive's index
void tokenizer(std::string_view input);      // a tokenizer.json
void tiktoken(std::string_view input);       // a tokenizer_config.json's line, and the tokens of a
                                             // tiktoken.model that are no bytes
void chat_template(std::string_view input);  // a chat template
void json_schema(std::string_view input);    // a schema of structured outputs
void tool_calls(std::string_view input);     // a byte for the format, and an answer
void chat_request(std::string_view input);   // the body of a completion or a chat
void http_request(std::string_view input);   // what comes over a connection

inline constexpr Target kTargets[] = {
    {"safetensors", safetensors},   {"pickle", pickle},         {"zip", zip},
    {"torch_dist", torch_dist},     {"hf_config", hf_config},   {"megatron_args", megatron_args},
    {"manifest", manifest},         {"journal", journal},       {"shard_store", shard_store},
    {"tokenizer", tokenizer},       {"tiktoken", tiktoken},     {"chat_template", chat_template},
    {"json_schema", json_schema},   {"tool_calls", tool_calls}, {"chat_request", chat_request},
    {"http_request", http_request},
};
inline constexpr std::span<const Target> targets() {
  return kTargets;
}

}  // namespace ferry::fuzz
