#include "cli/report/run/trajectory.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string_view>
#include <utility>

#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"

namespace ferry::cli {
namespace {

using nlohmann::json;

std::string as_text(const json& value) {
  return value.is_string() ? value.get<std::string>()
                           : value.dump(-1, ' ', false, json::error_handler_t::replace);
}

// A message to the model, and its worth.
Turn answer_turn(const json& question, const json& answer) {
  Turn turn{.who = question.contains("name") ? as_text(question["name"]) : "environment"};
  for (const char* member : {"content", "observation"})
    if (answer.contains(member)) turn.text = as_text(answer[member]);
  if (answer.contains("error"))  // the words of tool_agent
    turn.text = fmt::format("Error executing tool '{}': {}", turn.who, as_text(answer["error"]));
  if (question.contains("arguments")) turn.note = as_text(question["arguments"]);
  const auto add = [&](const std::string& note) {
    turn.note += (turn.note.empty() ? "" : ", ") + note;
  };
  if (answer.contains("reward")) add("reward " + as_text(answer["reward"]));
  if (answer.value("done", json(false)) == true) add("done");
  if (answer.contains("error")) add("error");
  return turn;
}

// The exchanges of a session of the journal; none if it is damaged.
json exchanges_of(const json& session) {
  const auto is_exchange = [](const json& one) {
    return one.is_object() && one.value("question", json()).is_object() &&
           one.value("answer", json()).is_object();
  };
  const auto found = session.value("exchanges", json());
  return found.is_array() && std::ranges::all_of(found, is_exchange) ? found : json::array();
}

bool asks_to(const json& exchange, const char* method) {
  return exchange.at("question").value("method", json()) == method;
}

// A question whose answer is no turn: the text of a reset is the prompt's, and a program asks
// itself.
bool has_no_turn(const json& exchange) {
  return asks_to(exchange, "reset") || asks_to(exchange, "run") || asks_to(exchange, "answer");
}

bool are_turns(const json& turns) {
  return turns.is_array() && !turns.empty() && std::ranges::all_of(turns, [](const json& turn) {
           return turn.is_array() && turn.size() == 2 && turn[0].is_boolean() &&
                  turn[1].is_string();
         });
}

// Names what the model was told by the next exchanges: by one, and by those behind it whose texts
// are found there, too, each from where its text begins.
class ToldTurns {
 public:
  explicit ToldTurns(const json& exchanges) {
    for (const auto& one : exchanges) {
      if (asks_to(one, "run")) others_ = "program";
      if (!has_no_turn(one)) answers_.push_back(answer_turn(one["question"], one["answer"]));
    }
  }

  void add(const std::string& text, std::vector<Turn>& turns) {
    if (next_ == answers_.size()) return turns.push_back({.who = others_, .text = text});
    const auto take = [&] { turns.push_back(std::move(answers_[next_++])); };
    std::size_t begin = 0;
    auto at = behind(text, 0);
    take();
    while (at != text.npos && next_ < answers_.size()) {
      at = behind(text, at);
      if (at == text.npos) break;
      const auto first = at - probe().size();
      turns.back().text = text.substr(begin, first - begin);
      begin = first;
      take();
    }
    turns.back().text = text.substr(begin);
  }

  // The exchanges that the answer has no text of: the last step of an environment.
  void add_rest(std::vector<Turn>& turns) {
    for (; next_ < answers_.size(); ++next_) turns.push_back(std::move(answers_[next_]));
  }

 private:
  // The beginning of the next answer: tools that say more may be cut.
  std::string_view probe() const {
    constexpr std::size_t kMost = 64;
    return std::string_view(answers_[next_].text).substr(0, kMost);
  }
  std::size_t behind(const std::string& text, std::size_t at) const {
    const auto found = probe().empty() ? text.npos : text.find(probe(), at);
    return found == text.npos ? text.npos : found + probe().size();
  }

  std::vector<Turn> answers_;
  std::size_t next_ = 0;
  std::string others_ = "environment";  // who says what no exchange tells of
};

}  // namespace

std::vector<Turn> turns_of(const std::string& output,
                           const json& exchanges,
                           const json& told_turns) {
  std::vector<Turn> turns;
  if (are_turns(told_turns)) {
    ToldTurns others(exchanges);
    for (const auto& turn : told_turns) {
      if (turn[0].get<bool>())
        turns.push_back({.who = "model", .text = turn[1].get<std::string>()});
      else
        others.add(turn[1].get<std::string>(), turns);
    }
    others.add_rest(turns);
    return turns;
  }
  std::size_t told = 0;  // bytes of the output
  const auto model_says = [&](std::size_t end) {
    if (output.find_first_not_of(" \n\t", told) < end)
      turns.push_back({.who = "model", .text = output.substr(told, end - told)});
    told = end;
  };
  for (std::size_t i = 0; i < exchanges.size(); ++i) {
    const auto question = exchanges[i].value("question", json::object());
    if (has_no_turn(exchanges[i])) continue;
    auto turn = answer_turn(question, exchanges[i].value("answer", json::object()));
    const auto action = question.value("action", json());
    if (action.is_string()) {
      const auto text = action.get<std::string>();
      const auto at = output.find(text, told);
      if (at != output.npos) {
        told = at;
        model_says(at + text.size());
      }
    }
    const auto at = turn.text.empty() ? output.npos : output.find(turn.text, told);
    if (at != output.npos) {
      if (!action.is_string()) model_says(at);
      told = at + turn.text.size();
    } else if (i + 1 == exchanges.size()) {  // nothing is said behind it
      model_says(output.size());
    }
    turns.push_back(std::move(turn));
  }
  model_says(output.size());
  return turns;
}

std::vector<json> read_exchanges(const std::filesystem::path& sessions,
                                 std::int64_t step,
                                 std::size_t num_answers) {
  const auto path = sessions / fmt::format("{}.jsonl", step);
  std::vector<json> found;
  if (!std::filesystem::exists(path)) return found;
  std::istringstream lines(distckpt::read_text(path));
  for (std::string line; std::getline(lines, line);) {
    const auto session = distckpt::json_or_discarded(line);
    if (session.is_object()) found.push_back(exchanges_of(session));
  }
  if (found.size() != num_answers) found.clear();
  return found;
}

}  // namespace ferry::cli
