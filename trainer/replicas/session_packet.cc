#include "trainer/replicas/session_packet.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ferry::trainer {

using nlohmann::json;

namespace {

// Calls `visit` with the name and the member, for those that JSON holds as they are.
template <typename Of, typename Visit>
void visit_members(Of& session, const Visit& visit) {
  visit("seed", session.seed);
  visit("loop", session.loop);
  visit("task", session.task);
  visit("prompt", session.prompt);
  visit("images", session.images);
  visit("response_mask", session.response_mask);
  visit("global_steps", session.global_steps);
  visit("turn_scores", session.turn_scores);
  visit("extra_info", session.extra_info);
  visit("replay", session.replay);
  visit("exchanges", session.exchanges);
  visit("turn_begin", session.turn_begin);
  visit("turn_stopped", session.turn_stopped);
  visit("assistant_turns", session.assistant_turns);
  visit("user_turns", session.user_turns);
  visit("has_begun", session.has_begun);
  visit("is_over", session.is_over);
}

}  // namespace

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
  json packet{// Members keep their order, and texts may hold any bytes.
              {"messages", json::binary(Messages::to_cbor(session.messages))},
              {"response", std::move(response)},
              {"routed_experts", json::binary(std::move(routes))}};
  visit_members(session, [&](const char* name, const auto& member) { packet[name] = member; });
  return packet;
}

Session session_of(const json& packet) {
  Session session;
  visit_members(session, [&](const char* name, auto& member) { packet.at(name).get_to(member); });
  session.messages = Messages::from_cbor(packet.at("messages").get_binary());
  for (const auto& token : packet.at("response")) from_json(token, session.response.emplace_back());
  for (const auto byte : packet.at("routed_experts").get_binary())
    session.routed_experts.push_back(static_cast<std::byte>(byte));
  return session;
}

}  // namespace ferry::trainer
