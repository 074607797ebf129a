#include "trainer/replicas/session_packet.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ferry::trainer {

using nlohmann::json;

// A token without its likeliest others, which sessions do not ask for.
void to_json(json& packet, const rollout::TokenOutput& token) {
  packet = {token.token_id, token.logprob, token.processed_logprob, token.entropy,
            token.sampling_mask};
}

void from_json(const json& packet, rollout::TokenOutput& token) {
  packet.at(0).get_to(token.token_id);
  packet.at(1).get_to(token.logprob);
  packet.at(2).get_to(token.processed_logprob);
  packet.at(3).get_to(token.entropy);
  packet.at(4).get_to(token.sampling_mask);
}

json to_packet(const Session& session) {
  std::vector<json> response(session.response.size());
  for (std::size_t i = 0; i < response.size(); ++i) to_json(response[i], session.response[i]);
  std::vector<std::uint8_t> routes(session.routed_experts.size());
  for (std::size_t i = 0; i < routes.size(); ++i)
    routes[i] = std::to_integer<std::uint8_t>(session.routed_experts[i]);
  return {{"seed", session.seed},
          {"loop", session.loop},
          // Members keep their order, and texts may hold any bytes.
          {"messages", json::binary(Messages::to_cbor(session.messages))},
          {"task", session.task},
          {"prompt", session.prompt},
          {"images", session.images},
          {"response", std::move(response)},
          {"response_mask", session.response_mask},
          {"global_steps", session.global_steps},
          {"routed_experts", json::binary(std::move(routes))},
          {"turn_scores", session.turn_scores},
          {"extra_info", session.extra_info},
          {"replay", session.replay},
          {"exchanges", session.exchanges},
          {"turn_begin", session.turn_begin},
          {"turn_stopped", session.turn_stopped},
          {"assistant_turns", session.assistant_turns},
          {"user_turns", session.user_turns},
          {"has_begun", session.has_begun},
          {"is_over", session.is_over}};
}

Session session_of(const json& packet) {
  Session session;
  packet.at("seed").get_to(session.seed);
  packet.at("loop").get_to(session.loop);
  session.messages = Messages::from_cbor(packet.at("messages").get_binary());
  session.task = packet.at("task");
  packet.at("prompt").get_to(session.prompt);
  packet.at("images").get_to(session.images);
  for (const auto& token : packet.at("response")) from_json(token, session.response.emplace_back());
  packet.at("response_mask").get_to(session.response_mask);
  packet.at("global_steps").get_to(session.global_steps);
  for (const auto byte : packet.at("routed_experts").get_binary())
    session.routed_experts.push_back(static_cast<std::byte>(byte));
  packet.at("turn_scores").get_to(session.turn_scores);
  session.extra_info = packet.at("extra_info");
  session.replay = packet.at("replay");
  session.exchanges = packet.at("exchanges");
  packet.at("turn_begin").get_to(session.turn_begin);
  packet.at("turn_stopped").get_to(session.turn_stopped);
  packet.at("assistant_turns").get_to(session.assistant_turns);
  packet.at("user_turns").get_to(session.user_turns);
  packet.at("has_begun").get_to(session.has_begun);
  packet.at("is_over").get_to(session.is_over);
  return session;
}

}  // namespace ferry::trainer
