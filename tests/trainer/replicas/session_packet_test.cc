#include "trainer/replicas/session_packet.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "distckpt/base/cbor.h"

namespace ferry::trainer {
namespace session_packet_test {

using nlohmann::json;

// Through the bytes that go over a socket.
json sent(const json& packet) {
  return from_cbor<json>(to_cbor(packet));
}

Session a_session() {
  Session session{.seed = 0xfedcba9876543210U, .loop = AgentLoopKind::kEnv};
  session.messages = Messages::parse(
      R"([{"role": "user", "content": "zwölf", "b": 1, "a": 2}])");  // members out of their order
  session.messages.push_back({{"role", "assistant"}, {"content", "\xff\xc3"}});  // half a letter
  session.task = {{"ground_truth", "12"}, {"extra_info", {{"index", 3}}}};
  session.prompt = {1, 2, 1LL << 40};
  session.images = R"(["data:image/png;base64,AA==","/cat.png"])";
  rollout::TokenOutput drawn{.token_id = 17};
  drawn.logprob = -0.1F;
  drawn.processed_logprob = -std::numeric_limits<float>::infinity();
  drawn.entropy = std::nextafter(1.F, 2.F);
  drawn.sampling_mask = {4, 17};
  session.response = {drawn, {.token_id = 5}};
  session.response_mask = {1, 0};
  session.global_steps = {6, 7};
  session.routed_experts = {std::byte{0}, std::byte{255}, std::byte{10}};
  session.turn_scores = {{0, 0.1}, {1, -1e300}};
  session.extra_info = {{"moves", 4}};
  session.replay = {{"exchanges", json::array()}};
  session.exchanges = json::array({{{"question", "q"}, {"answer", nullptr}}});
  session.turn_begin = 1;
  session.assistant_turns = 2;
  session.user_turns = 1;
  session.has_begun = true;
  return session;
}

// Compares packets: they have all members, and numbers have one encoding.
TEST(SessionPacket, BringsASessionWithEveryBit) {
  const auto session = a_session();
  const auto back = session_of(sent(to_packet(session)));
  EXPECT_EQ(to_cbor(to_packet(back)), to_cbor(to_packet(session)));
  EXPECT_EQ(back.seed, session.seed);
  EXPECT_EQ(back.loop, AgentLoopKind::kEnv);
  EXPECT_EQ(back.messages, session.messages);
  EXPECT_EQ(back.messages[0].dump(), session.messages[0].dump());
  EXPECT_EQ(back.task, session.task);
  EXPECT_EQ(back.prompt, session.prompt);
  EXPECT_EQ(back.images, session.images);
  ASSERT_EQ(back.response.size(), 2U);
  for (const auto number :
       {&rollout::TokenOutput::logprob, &rollout::TokenOutput::processed_logprob,
        &rollout::TokenOutput::entropy})
    EXPECT_EQ(std::bit_cast<std::uint32_t>(back.response[0].*number),
              std::bit_cast<std::uint32_t>(session.response[0].*number));
  EXPECT_EQ(back.response[0].sampling_mask, session.response[0].sampling_mask);
  EXPECT_EQ(back.response_mask, session.response_mask);
  EXPECT_EQ(back.global_steps, session.global_steps);
  EXPECT_EQ(back.routed_experts, session.routed_experts);
  EXPECT_EQ(back.turn_scores, session.turn_scores);
  EXPECT_EQ(back.extra_info, session.extra_info);
  EXPECT_EQ(back.replay, session.replay);
  EXPECT_EQ(back.exchanges, session.exchanges);
  EXPECT_EQ(back.turn_begin, 1U);
  EXPECT_EQ(back.num_turns(), session.num_turns());
  EXPECT_TRUE(back.has_begun);
  EXPECT_FALSE(back.is_over);
}

TEST(SessionPacket, BringsASessionThatHasNotBegun) {
  const auto back = session_of(sent(to_packet(Session{})));
  EXPECT_TRUE(back.response.empty() && back.routed_experts.empty());
  EXPECT_TRUE(back.replay.is_null());
  EXPECT_FALSE(back.has_begun);
}

TEST(SessionPacket, NeedsEveryMember) {
  const auto whole = to_packet(a_session());
  for (const auto& [name, value] : whole.items()) {
    auto without = whole;
    without.erase(name);
    EXPECT_THROW((void)session_of(without), json::exception) << name;
  }
}

TEST(SessionPacket, NeedsMembersOfTheirKind) {
  const auto whole = to_packet(a_session());
  for (const auto* name :
       {"seed", "prompt", "response", "response_mask", "turn_scores", "is_over"}) {
    auto other = whole;
    other[name] = "text";
    EXPECT_THROW((void)session_of(other), json::exception) << name;
  }
}

}  // namespace session_packet_test
}  // namespace ferry::trainer
