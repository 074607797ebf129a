// A rank's replicas, played by the test: what they are given, and what comes of those that fail.
#include "trainer/replicas/replica_fleet.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "models/certificate/numerics_digest.h"
#include "models/distributed/world.h"
#include "tests/support/models/tiny_training.h"
#include "tests/support/temp_dir.h"
#include "trainer/replicas/session_packet.h"
#include "trainer/replicas/weight_image.h"

namespace ferry::trainer {
namespace replica_fleet_test {

using nlohmann::json;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kLong(20000);

std::unique_ptr<models::GPTModel> tiny_model(const models::ParallelState& mesh,
                                             std::uint64_t seed) {
  const auto config = support::tiny_config({});
  auto made = std::make_unique<models::GPTModel>(
      config, mesh, models::stage_chunks(config, {}, 0)[0],
      models::ModelOptions{.alignment = models::Alignment::kBitwise});
  support::fill_parameters(*made, seed);
  return made;
}

class ReplicaFleetTest : public testing::Test {
 protected:
  ReplicaFleetTest() {
    config_.trainer.run.default_local_dir = folder_.path().string();
    config_.rollout.replicas = {.elastic = true, .timeout = 1};
    config_.rollout.verify_weights = true;
    config_.rollout.max_num_seqs = 8;
    fleet_ = std::make_unique<ReplicaFleet>(config_, *model_, 3);
  }

  // Calls the fleet, as its rank does while it answers, until the replica has a packet.
  json packet_for(PacketSocket& replica) {
    for (const auto until = Clock::now() + kLong; Clock::now() < until;) {
      step();
      if (auto packet = replica.receive(milliseconds(1))) return *packet;
    }
    ADD_FAILURE() << "no packet came";
    return {};
  }

  // A replica that says that it is ready; the fleet has answered its first words.
  PacketSocket joined(const std::optional<std::string>& digest = {}) {
    auto replica = PacketSocket::connect(folder_.path() / "replicas/rank3.sock");
    replica.send({{"joins", nullptr}, {"pid", 4711}, {"gpu", 0}});
    const auto hello = packet_for(replica);
    EXPECT_EQ(hello.at("timeout"), 1);
    EXPECT_EQ(hello.at("gpu_memory_utilization"), 0.9);
    EXPECT_EQ(distckpt::read_text(hello.at("config").get<std::string>()), to_toml(config_));
    replica.send({{"loaded", digest.value_or(models::numerics_policy(*model_).digest())}});
    return replica;
  }

  // One that has the weights, too, and was told that sessions are shared.
  PacketSocket running() {
    auto replica = joined();
    const auto weights = packet_for(replica);
    EXPECT_EQ(weights.at("step"), 7);
    replica.send({{"has weights", 7}});
    EXPECT_EQ(packet_for(replica).at("global_step"), 7);
    return replica;
  }

  void share(std::size_t count) {
    sessions_.assign(count, {});
    for (std::size_t i = 0; i < count; ++i) sessions_[i].seed = i;
    SessionObserver observer;
    observer.is_over = [&](std::size_t number) { over_.push_back(number); };
    observer_ = fleet_->share(sessions_, {.top_k = 5}, observer);
  }

  // Does what comes before a step of the rank's engine; keeps the sessions that the rank is
  // given.
  void step() {
    if (!observer_.next || done_) return;
    const auto mine = observer_.next(true);
    done_ = !mine.has_value();
    if (mine) mine_.insert(mine_.end(), mine->begin(), mine->end());
  }

  // The rank answers what it has.
  void answer() {
    for (const auto number : std::exchange(mine_, {})) {
      sessions_[number].is_over = true;
      observer_.is_over(number);
    }
  }

  // The rank answers until all sessions are over.
  void finish() {
    for (const auto until = Clock::now() + kLong; !done_ && Clock::now() < until;) {
      step();
      answer();
    }
    EXPECT_TRUE(done_);
    EXPECT_EQ(over_.size(), sessions_.size());
  }

  std::vector<json> events(const std::string& name) {
    std::vector<json> found;
    std::istringstream lines(distckpt::read_text(folder_.path() / "replicas/rank3.jsonl"));
    for (std::string line; std::getline(lines, line);)
      if (auto event = json::parse(line); event.at("event") == name)
        found.push_back(std::move(event));
    return found;
  }
  std::string why_left_out() {
    const auto left = events("left out");
    return left.size() == 1 ? left[0].at("why").get<std::string>() : std::to_string(left.size());
  }

  support::TempDir folder_;
  models::World world_{{}};
  models::ParallelState mesh_{world_, {}, "test"};
  std::unique_ptr<models::GPTModel> model_ = tiny_model(mesh_, 1);
  PpoConfig config_;
  std::unique_ptr<ReplicaFleet> fleet_;
  std::vector<Session> sessions_;
  std::vector<std::size_t> mine_, over_;
  SessionObserver observer_;
  bool done_ = false;
};

TEST_F(ReplicaFleetTest, GivesWeightsAndSessions) {
  fleet_->give_weights(7);
  share(4);
  auto replica = joined();
  const auto weights = packet_for(replica);
  const auto other = tiny_model(mesh_, 2);
  read_weights(weights.at("weights"), replica.take_file(), *other);  // compares digests
  replica.send({{"has weights", weights.at("step")}});
  EXPECT_EQ(packet_for(replica).at("run").at("top_k"), 5);
  finish();
  EXPECT_EQ(events("joined").at(0).at("pid"), 4711);
  EXPECT_EQ(events("joined").at(0).at("step"), 8);
}

TEST_F(ReplicaFleetTest, TakesAnswersIntoTheRanksSessions) {
  fleet_->give_weights(7);
  share(3);
  step();
  EXPECT_EQ(mine_.size(), 3U);  // nobody else was there
  fleet_->give_weights(7);
  over_.clear();
  mine_.clear();
  share(3);
  auto replica = running();
  auto packet = packet_for(replica);
  auto session = session_of(packet.at("session"));
  EXPECT_EQ(session.seed, packet.at("number"));
  session.response.push_back({.token_id = 42});
  session.is_over = true;
  replica.send({{"session", to_packet(session)}, {"number", packet.at("number")}});
  finish();
  EXPECT_EQ(sessions_[session.seed].response.at(0).token_id, 42);
  EXPECT_EQ(packet_for(replica), json({{"end", true}}));
  EXPECT_EQ(events("answered").at(0).at("of replicas"), json({{"0", 1}}));
}

TEST_F(ReplicaFleetTest, GivesTheNextWeightsToThoseThatAreThere) {
  fleet_->give_weights(7);
  share(1);
  auto replica = running();
  finish();
  (void)packet_for(replica);  // the end
  support::fill_parameters(*model_, 9);
  fleet_->give_weights(8);
  const auto weights = replica.receive(kLong).value();
  EXPECT_EQ(weights.at("step"), 8);
  const auto other = tiny_model(mesh_, 2);
  (void)replica.take_file();  // of step 7
  read_weights(weights.at("weights"), replica.take_file(), *other);
}

// Neither holds the rank up: it has all sessions at once.
TEST_F(ReplicaFleetTest, LosesNoTimeByOneThatDiesInsteadOfTakingWeights) {
  fleet_->give_weights(7);
  share(40);
  auto replica = joined();
  (void)packet_for(replica);
  replica = PacketSocket(distckpt::Descriptor());
  const auto begin = Clock::now();
  finish();
  EXPECT_LT(Clock::now() - begin, milliseconds(900));
  EXPECT_EQ(why_left_out(), "ended");
}

TEST_F(ReplicaFleetTest, LosesNoTimeByOneThatHangsInsteadOfTakingWeights) {
  fleet_->give_weights(7);
  share(40);
  auto replica = joined();
  (void)packet_for(replica);
  const auto begin = Clock::now();
  finish();
  EXPECT_LT(Clock::now() - begin, milliseconds(900));
  EXPECT_TRUE(events("left out").empty());
  std::this_thread::sleep_for(milliseconds(1100));
  fleet_->give_weights(8);
  EXPECT_EQ(why_left_out(), "said nothing for 1 s");
  EXPECT_FALSE(replica.receive(milliseconds(0)));
  EXPECT_TRUE(replica.is_closed());
}

TEST_F(ReplicaFleetTest, AnswersTheSessionsOfOneThatDies) {
  fleet_->give_weights(7);
  share(4);
  auto replica = running();
  (void)packet_for(replica);
  replica = PacketSocket(distckpt::Descriptor());
  finish();
  EXPECT_EQ(why_left_out(), "ended");
  EXPECT_GT(events("left out")[0].at("sessions"), 0);
}

TEST_F(ReplicaFleetTest, AnswersTheSessionsOfOneThatHangs) {
  fleet_->give_weights(7);
  share(4);
  auto replica = running();
  (void)packet_for(replica);
  finish();
  EXPECT_EQ(why_left_out(), "said nothing for 1 s");
}

TEST_F(ReplicaFleetTest, KeepsOneThatSaysThatItIsAlive) {
  fleet_->give_weights(7);
  share(2);
  auto replica = running();
  const auto packet = packet_for(replica);
  for (const auto until = Clock::now() + milliseconds(1500); Clock::now() < until; step()) {
    answer();
    replica.send({{"alive", true}});
  }
  auto session = packet.at("session");
  session["is_over"] = true;
  replica.send({{"session", session}, {"number", packet.at("number")}});
  finish();
  EXPECT_TRUE(events("left out").empty());
}

TEST_F(ReplicaFleetTest, TakesSessionsBackThatAreNotOver) {
  fleet_->give_weights(7);
  share(4);
  auto replica = running();
  std::vector<json> mine{packet_for(replica)};
  std::thread rank([&] { fleet_->recall(); });
  for (auto next = replica.receive(kLong); next && !next->contains("stop");
       next = replica.receive(kLong))
    mine.push_back(*next);
  for (auto& packet : mine) {
    auto session = session_of(packet.at("session"));
    session.response.push_back({.token_id = 42});
    replica.send({{"session", to_packet(session)}, {"number", packet.at("number")}});
  }
  rank.join();
  EXPECT_EQ(fleet_->take_back().size(), mine.size());
  for (const auto& packet : mine) {
    const auto& session = sessions_[packet.at("number").get<std::size_t>()];
    EXPECT_EQ(session.response.at(0).token_id, 42);
    EXPECT_FALSE(session.is_over);
  }
  EXPECT_TRUE(over_.empty());
}

TEST_F(ReplicaFleetTest, WaitsNoLongerThanTheTimeoutForSessionsOfOneThatHangs) {
  fleet_->give_weights(7);
  share(4);
  auto replica = running();
  (void)packet_for(replica);
  fleet_->recall();
  EXPECT_EQ(why_left_out(), "said nothing for 1 s");
  mine_.clear();
  share(4);
  finish();
}

TEST_F(ReplicaFleetTest, LeavesSessionsThatAreOverAlone) {
  fleet_->give_weights(7);
  share(3);
  sessions_[1].is_over = true;
  observer_ = fleet_->share(sessions_, {}, {});
  step();
  EXPECT_EQ(mine_, (std::vector<std::size_t>{0, 2}));
}

TEST_F(ReplicaFleetTest, LeavesOutOneThatAnswersWhatItDoesNotHave) {
  fleet_->give_weights(7);
  share(4);
  auto replica = running();
  replica.send({{"session", to_packet(Session())}, {"number", 99}});
  finish();
  EXPECT_EQ(why_left_out(), "answers session 99, which it does not have");
}

TEST_F(ReplicaFleetTest, LeavesOutOneWhoseAnswerIsDamaged) {
  fleet_->give_weights(7);
  share(4);
  auto replica = running();
  const auto packet = packet_for(replica);
  replica.send({{"session", {{"seed", 1}}}, {"number", packet.at("number")}});
  finish();
  EXPECT_NE(why_left_out().find("'loop' not found"), std::string::npos) << why_left_out();
}

TEST_F(ReplicaFleetTest, LeavesOutOneThatFails) {
  fleet_->give_weights(7);
  share(4);
  auto replica = running();
  replica.send({{"failed", "no memory"}});
  finish();
  EXPECT_EQ(why_left_out(), "no memory");
}

TEST_F(ReplicaFleetTest, LeavesOutOneOfAnotherNumericalPolicy) {
  fleet_->give_weights(7);
  share(4);
  auto replica = joined("another");
  finish();
  EXPECT_EQ(why_left_out(), "computes by another numerical policy than the rank");
}

TEST_F(ReplicaFleetTest, LeavesOutOneThatTakesAPlaceWhichWaitsForNobody) {
  share(1);
  auto replica = PacketSocket::connect(folder_.path() / "replicas/rank3.sock");
  replica.send({{"joins", 0}, {"pid", 1}, {"gpu", 0}});
  finish();
  EXPECT_EQ(why_left_out(), "joins as slot 0, which waits for nobody");
}

TEST_F(ReplicaFleetTest, NotesTheStepThatTheWeightsAreFor) {
  auto replica = PacketSocket::connect(folder_.path() / "replicas/rank3.sock");
  replica.send({{"joins", nullptr}, {"pid", 1}, {"gpu", 0}});
  replica.send({{"loaded", models::numerics_policy(*model_).digest()}});
  fleet_->give_weights(41);
  EXPECT_EQ(events("joined").at(0).at("step"), 42);
}

}  // namespace replica_fleet_test
}  // namespace ferry::trainer
