#include "trainer/algorithms/turn_advantages.h"

#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

constexpr double kTurnEpsilon = 1e-6;

struct Turn {
  std::size_t sequence = 0;
  std::int64_t begin = 0, end = 0;  // its tokens
  // The tokens since the turn before, or of the prompt: its anchor.
  std::vector<std::int64_t> observed{};
  double reward = 0;
  double to_go = 0;  // discounted from turn to turn
  double advantage = 0;
};

struct Moments {
  double mean = 0, std = 1;  // of one value: itself, 1
};

Moments moments(const std::vector<double>& values) {
  Moments result{.mean = 0};
  for (const auto value : values) result.mean += value;
  result.mean /= static_cast<double>(values.size());
  if (values.size() == 1) return result;
  double squares = 0;
  for (const auto value : values) squares += (value - result.mean) * (value - result.mean);
  result.std = std::sqrt(squares / static_cast<double>(values.size() - 1));
  return result;
}

// The moments of each group. `alone` are those of a group of one value, where they are not its own.
template <typename Key>
std::map<Key, Moments> moments_of_groups(const std::map<Key, std::vector<double>>& groups,
                                         const std::optional<Moments>& alone = std::nullopt) {
  std::map<Key, Moments> result;
  for (const auto& [key, values] : groups)
    result.emplace(key, alone && values.size() == 1 ? *alone : moments(values));
  return result;
}

double normalized(double value, const Moments& of, bool divides) {
  return divides ? (value - of.mean) / (of.std + kTurnEpsilon) : value - of.mean;
}

// The turns of all sequences, in their order.
std::vector<Turn> turns_of(const AdvantageInputs& in) {
  require(in.turn_mask.defined() && in.responses.defined() && in.prompts.size() == in.index.size(),
          ErrorKind::kUsage, "advantages: of turns need the turns and their tokens");
  const auto mask = in.turn_mask.to(at::kLong).contiguous();
  const auto rewards = in.token_level_rewards.to(at::kDouble).contiguous();
  const auto tokens = in.responses.contiguous();
  const auto length = mask.size(1);
  std::vector<Turn> turns;
  for (std::int64_t row = 0; row < mask.size(0); ++row) {
    const auto* by_model = mask.const_data_ptr<std::int64_t>() + row * length;
    const auto* reward = rewards.const_data_ptr<double>() + row * length;
    const auto* token = tokens.const_data_ptr<std::int64_t>() + row * length;
    auto observed = in.prompts[static_cast<std::size_t>(row)];
    const auto first = turns.size();
    for (std::int64_t at = 0; at < length; ++at) {
      const bool is_models = by_model[at] != 0;
      if (is_models && (at == 0 || by_model[at - 1] == 0))
        turns.push_back({.sequence = static_cast<std::size_t>(row),
                         .begin = at,
                         .observed = std::exchange(observed, {})});
      if (is_models) turns.back().end = at + 1;
      if (!is_models) observed.push_back(token[at]);
      if (turns.size() > first) turns.back().reward += reward[at];
    }
  }
  return turns;
}

bool ends_its_sequence(const std::vector<Turn>& turns, std::size_t turn) {
  return turn + 1 == turns.size() || turns[turn + 1].sequence != turns[turn].sequence;
}

// Each token of a turn gets the turn's advantage.
at::Tensor spread(const std::vector<Turn>& turns, const AdvantageInputs& in) {
  auto advantages = at::zeros_like(in.token_level_rewards);
  for (const auto& turn : turns)
    advantages[static_cast<std::int64_t>(turn.sequence)]
        .slice(0, turn.begin, turn.end)
        .fill_(turn.advantage);
  return advantages * in.response_mask.to(at::kLong);
}

}  // namespace

at::Tensor gigpo_advantage(const AdvantageInputs& in, const AlgorithmConfig& config) {
  auto turns = turns_of(in);
  const bool divides = config.gigpo.mode == GigpoMode::kMeanStdNorm;
  std::map<std::int64_t, std::vector<double>> episodes;
  const auto scores = in.token_level_rewards.sum(-1).to(at::kDouble);
  for (std::size_t i = 0; i < in.index.size(); ++i)
    episodes[in.index[i]].push_back(scores[static_cast<std::int64_t>(i)].item<double>());
  for (std::size_t i = turns.size(); i-- > 0;) {
    const bool is_last = ends_its_sequence(turns, i);
    turns[i].to_go = turns[i].reward + (is_last ? 0 : config.gamma * turns[i + 1].to_go);
  }
  // Turns of a group that have seen the same since the turn before them.
  std::map<std::pair<std::int64_t, std::vector<std::int64_t>>, std::vector<double>> steps;
  const auto anchor = [&](const Turn& turn) {
    return std::pair(in.index[turn.sequence], turn.observed);
  };
  for (const auto& turn : turns) steps[anchor(turn)].push_back(turn.to_go);
  const auto of_episodes = moments_of_groups(episodes, Moments());
  const auto of_steps = moments_of_groups(steps);
  for (auto& turn : turns) {
    const auto score = scores[static_cast<std::int64_t>(turn.sequence)].item<double>();
    turn.advantage =
        normalized(score, of_episodes.at(in.index[turn.sequence]), divides) +
        config.gigpo.step_advantage_w * normalized(turn.to_go, of_steps.at(anchor(turn)), divides);
  }
  return spread(turns, in);
}

at::Tensor grpo_turns_advantage(const AdvantageInputs& in, const AlgorithmConfig& config) {
  auto turns = turns_of(in);
  std::map<std::int64_t, std::vector<double>> rewards;
  for (const auto& turn : turns) rewards[in.index[turn.sequence]].push_back(turn.reward);
  const auto of_groups = moments_of_groups(rewards, Moments());
  for (std::size_t i = turns.size(); i-- > 0;) {
    const bool is_last = ends_its_sequence(turns, i);
    turns[i].advantage = normalized(turns[i].reward, of_groups.at(in.index[turns[i].sequence]),
                                    config.norm_adv_by_std_in_grpo) +
                         (is_last ? 0 : turns[i + 1].advantage);
  }
  return spread(turns, in);
}

}  // namespace ferry::trainer
