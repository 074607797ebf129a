// The program of tests/interop/rollout/test_tokenizer.py and test_chat_templates.py: a request in
// JSON on each line of standard input, an answer in JSON on each line of standard output.
//
//   {"op": "encode", "tokenizer": FILE or folder, "texts": [...]}
//     -> {"ids": [[...]], "plain": [[...]]}, plain: without special tokens
//   {"op": "encode_bytes", "tokenizer": FILE, "hex": H}
//     -> {"ids": [...]} of bytes that need not be UTF-8
//   {"op": "decode", "tokenizer": FILE, "ids": [[...]]}
//     -> {"texts": [...], "kept": [...], "streamed": [[...]]}
//   {"op": "detokenize", "tokenizer": FILE, "cases": [{"prompt": [ids], "ids": [ids],
//     "stop": [...], "min_tokens": n, "skip_special_tokens": b}]}
//     -> {"cases": [{"parts": [...], "stop": s or null}]}, parts: of each token until the stop
//     string, then the rest
//   {"op": "tokenizer", "folder": DIR}
//     -> {"vocab_size": n, "bos": id, "eos": id, "pad": id}
//   {"op": "pieces", "pre_tokenizer": {...}, "texts": [...]}
//     -> {"pieces": [[...]]}
//   {"op": "normalize", "normalizer": {...}, "texts": [...]}
//     -> {"texts": [...]}
//   {"op": "render", "template": TEXT, "chats": [{"messages": [...], "tools": ...,
//     "add_generation_prompt": b, "continue_final_message": b, "variables": {...}}]}
//     -> {"texts": [...]}; {"error": m} in place of a text
//
// An Error is answered by {"error": message}.
#include <fmt/format.h>

#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "rollout/text/chat_template.h"
#include "rollout/text/tokenizer/incremental_detokenizer.h"
#include "rollout/text/tokenizer/tokenizer.h"
#include "tests/support/encode_batch.h"

namespace ferry {
namespace {

using nlohmann::ordered_json;
using rollout::text::DecodeStream;
using rollout::text::IncrementalDetokenizer;
using rollout::text::TokenId;
using rollout::text::Tokenizer;

const Tokenizer& tokenizer_of(const ordered_json& request) {
  static std::map<std::string, std::unique_ptr<Tokenizer>> known;
  const auto path = request.at("tokenizer").get<std::string>();
  auto& tokenizer = known[path];
  if (!tokenizer && std::filesystem::is_directory(path)) tokenizer = Tokenizer::from_folder(path);
  if (!tokenizer) tokenizer = std::make_unique<Tokenizer>(distckpt::read_text(path), path);
  return *tokenizer;
}

ordered_json encode(const ordered_json& request) {
  const auto& tokenizer = tokenizer_of(request);
  const auto texts = request.at("texts").get<std::vector<std::string>>();
  return {{"ids", support::encode_batch(tokenizer, texts, 2)},
          {"plain", support::encode_batch(tokenizer, texts, 1, {.add_special_tokens = false})}};
}

ordered_json encode_bytes(const ordered_json& request) {
  const auto hex = request.at("hex").get<std::string>();
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return {{"ids", tokenizer_of(request).encode(bytes)}};
}

ordered_json decode(const ordered_json& request) {
  const auto& tokenizer = tokenizer_of(request);
  auto texts = ordered_json::array(), kept = texts, streamed = texts;
  for (const auto& ids : request.at("ids").get<std::vector<std::vector<TokenId>>>()) {
    texts.push_back(tokenizer.decode(ids));
    kept.push_back(tokenizer.decode(ids, {.skip_special_tokens = false}));
    DecodeStream stream(tokenizer);
    std::vector<std::string> parts;
    for (const auto id : ids) parts.push_back(stream.push(id));
    parts.push_back(stream.finish());
    streamed.push_back(parts);
  }
  return {{"texts", texts}, {"kept", kept}, {"streamed", streamed}};
}

ordered_json detokenize(const ordered_json& request) {
  auto cases = ordered_json::array();
  for (const auto& one : request.at("cases")) {
    IncrementalDetokenizer detokenizer(
        tokenizer_of(request), one.at("prompt").get<std::vector<TokenId>>(),
        {.stop = one.value("stop", std::vector<std::string>()),
         .min_tokens = one.value("min_tokens", 0),
         .skip_special_tokens = one.value("skip_special_tokens", true)});
    std::vector<std::string> parts;
    for (const TokenId id : one.at("ids"))
      if (!detokenizer.stop_reason()) parts.push_back(detokenizer.update(id));
    parts.push_back(detokenizer.finish());
    const auto& stop = detokenizer.stop_reason();
    cases.push_back({{"parts", parts}, {"stop", stop ? ordered_json(*stop) : ordered_json()}});
  }
  return {{"cases", cases}};
}

ordered_json describe(const ordered_json& request) {
  const auto tokenizer = Tokenizer::from_folder(request.at("folder").get<std::string>());
  const auto eos = tokenizer->eos_token_id();
  return {{"vocab_size", tokenizer->vocab_size()},
          {"eos", eos ? ordered_json(*eos) : ordered_json()}};
}

ordered_json pieces(const ordered_json& request) {
  const rollout::text::PreTokenizer pre_tokenizer(request.at("pre_tokenizer"), "pre_tokenizer");
  auto found = ordered_json::array();
  for (const auto& text : request.at("texts").get<std::vector<std::string>>()) {
    rollout::text::Pieces cut;
    pre_tokenizer.split(text, true, cut);
    auto& words = found.emplace_back(ordered_json::array());
    for (const auto& piece : cut.pieces) words.push_back(cut[piece]);
  }
  return {{"pieces", found}};
}

ordered_json normalize(const ordered_json& request) {
  const rollout::text::Normalizer normalizer(request.at("normalizer"), "normalizer");
  auto found = ordered_json::array();
  for (const auto& text : request.at("texts").get<std::vector<std::string>>()) {
    found.push_back(normalizer.normalize(text));
  }
  return {{"texts", found}};
}

ordered_json render(const ordered_json& request) {
  const rollout::text::ChatTemplate chat_template(request.at("template").get<std::string>(),
                                                  "template");
  auto found = ordered_json::array();
  for (const auto& chat : request.at("chats")) {
    const rollout::text::ChatOptions options{
        .add_generation_prompt = chat.value("add_generation_prompt", false),
        .continue_final_message = chat.value("continue_final_message", false),
        .tools = chat.value("tools", ordered_json()),
        .documents = chat.value("documents", ordered_json()),
        .variables = chat.value("variables", ordered_json::object())};
    try {
      found.push_back(chat_template.apply(chat.at("messages"), options));
    } catch (const Error& error) {
      found.push_back({{"error", error.what()}});
    }
  }
  return {{"texts", found}};
}

ordered_json answer(const ordered_json& request) {
  static const std::map<std::string, ordered_json (*)(const ordered_json&)> operations{
      {"encode", encode},       {"encode_bytes", encode_bytes},
      {"decode", decode},       {"detokenize", detokenize},
      {"tokenizer", describe},  {"pieces", pieces},
      {"normalize", normalize}, {"render", render},
  };
  try {
    return operations.at(request.at("op").get<std::string>())(request);
  } catch (const Error& error) {
    return {{"error", error.what()}};
  }
}

}  // namespace
}  // namespace ferry

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << ferry::answer(nlohmann::ordered_json::parse(line)).dump() << std::endl;
  }
}
