// Records that can be trained on, in verl's columns: a conversation for supervised
// fine-tuning, a prompt with its ground truth for reinforcement learning. Whatever else a record
// holds is left alone.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "rollout/text/content_parts.h"
#include "trainer/config/sft_config.h"
#include "trainer/data/record_file.h"

namespace ferry::trainer {

// A list of {role, content, ...}, as chat templates take it: at least one; content is text, a list
// of parts, or null beside tool_calls.
using Messages = Record;

struct Conversation {
  Messages messages{};
  Record tools{};                                    // a list, or null
  std::vector<rollout::text::ImageSource> images{};  // of the parts {"type": "image"}
  std::optional<bool> enable_thinking{};             // not set: the template decides
};

// Out of the column of messages if there is one; else out of a prompt (text: what the user says; or
// messages) and the response to it (text: what the assistant says). Some message is the
// assistant's: those are learned. `keys` names the columns. Throws Error(kCorrupt) "<column>: ...".
Conversation parse_conversation(const Record& record, const DataConfig& keys);

struct RewardModel {
  std::string style{};    // "rule", "model"
  Record ground_truth{};  // of any type; null only where the style is not "rule"
};

struct PromptExample {
  std::string data_source{};  // which reward function judges it
  Messages prompt{};
  std::string ability{};     // "" if there is none, or one that is no text
  std::string agent_name{};  // the loop that answers it; "": the default one
  RewardModel reward_model{};
  Record extra_info{};                               // an object, or null
  std::vector<rollout::text::ImageSource> images{};  // of the parts {"type": "image"}
};

// The `schemas` of tools that a record's extra_info.tool_selection names, in its order: all where
// it names none. Names that no tool has are passed over (verl's tool_agent_loop.py). Throws
// Error(kCorrupt) for one that is no list of texts.
Record selected_tools(const Record& schemas, const Record& tool_selection);

// A prompt is messages, or text: what the user says. Throws Error(kCorrupt) "<column>: ...".
PromptExample parse_prompt(const Record& record,
                           const std::string& prompt_key = "prompt",
                           const std::string& image_key = "images");

}  // namespace ferry::trainer
