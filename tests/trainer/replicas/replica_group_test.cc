// Ranks that share a model, and a replica of theirs, which the test plays.
#include "trainer/replicas/replica_group.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "converter/alignment/model_files.h"
#include "distckpt/base/error.h"
#include "models/certificate/numerics_digest.h"
#include "tests/support/models/tiny_training.h"
#include "tests/support/temp_dir.h"
#include "trainer/replicas/packet_socket.h"
#include "trainer/replicas/session_packet.h"
#include "trainer/replicas/weight_image.h"

namespace ferry::trainer {
namespace replica_group_test {

using nlohmann::json;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Numbers = std::vector<std::size_t>;

class ReplicaGroupTest : public testing::Test {
 protected:
  void SetUp() override {
    support::write_tiny_model({}, dir_ / "model", 1);
    origin_ = std::make_unique<converter::Checkpoint>(converter::open(dir_ / "model"));
    config_.model.path = (dir_ / "model").string();
    config_.trainer.run.device = DeviceKind::kCpu;
    config_.trainer.run.default_local_dir = (dir_ / "run").string();
    config_.rollout.replicas = {.elastic = true, .timeout = 5};
    config_.rollout.max_num_seqs = 8;
  }

  // Runs `body` on ranks that share the model, whose weights are those of the checkpoint.
  void run(int tp, const std::function<void(models::World&, ReplicaGroup&)>& body) {
    config_.rollout.tensor_model_parallel_size = tp;
    models::run_ranks(tp, {}, [&](models::World& world) {
      const models::ParallelState mesh(world, config_.rollout_parallel(), "rollout");
      const auto model = rollout_model(config_, *origin_, mesh);
      (void)converter::load_model(model, *origin_, {.round = true});
      ReplicaGroup group(world, config_, *origin_, &mesh, model.front().get());
      group.give_weights(7);
      body(world, group);
    });
  }

  // The whole model of a replica, without weights.
  struct Copy {
    explicit Copy(const ReplicaGroupTest& test)
        : mesh(world, alone(test.config_.rollout_parallel()), "replica"),
          model(rollout_model(test.config_, *test.origin_, mesh)) {}
    static models::ParallelConfig alone(models::ParallelConfig parallel) {
      parallel.tensor_model_parallel_size = 1;
      return parallel;
    }
    models::World world{{}};
    models::ParallelState mesh;
    std::vector<std::unique_ptr<models::GPTModel>> model;
  };

  // A replica of rank 0 that is ready for weights.
  PacketSocket join(const Copy& copy) const {
    auto replica = PacketSocket::connect(dir_ / "run/replicas/rank0.sock");
    replica.send({{"joins", nullptr}, {"pid", 1}, {"gpu", 0}});
    replica.send({{"loaded", models::numerics_policy(*copy.model.front()).digest()}});
    return replica;
  }

  // Answers the sessions that the rank is given, until all are over.
  static Numbers answer_all(const SessionObserver& observer, std::vector<Session>& sessions) {
    Numbers answered;
    const auto until = Clock::now() + std::chrono::seconds(20);
    while (const auto mine = observer.next(true)) {
      require(Clock::now() < until, ErrorKind::kIo, "sessions are not over");
      for (const auto number : *mine) {
        answered.push_back(number);
        sessions[number].is_over = true;
        if (observer.is_over) observer.is_over(number);
      }
    }
    return answered;
  }

  support::TempDir dir_;
  std::unique_ptr<converter::Checkpoint> origin_;
  PpoConfig config_;
};

TEST_F(ReplicaGroupTest, ARankWithoutReplicasAnswersAllItself) {
  run(1, [](models::World&, ReplicaGroup& group) {
    std::vector<Session> sessions(3);
    Numbers told;
    SessionObserver observer;
    observer.is_over = [&](std::size_t number) { told.push_back(number); };
    EXPECT_EQ(answer_all(group.share(sessions, {}, observer), sessions), (Numbers{0, 1, 2}));
    EXPECT_EQ(told, (Numbers{0, 1, 2}));
  });
}

TEST_F(ReplicaGroupTest, RanksOfACopyAnswerTheSameSessions) {
  std::mutex mutex;
  std::vector<Numbers> answered;
  run(2, [&](models::World&, ReplicaGroup& group) {
    std::vector<Session> sessions(3);
    sessions[1].is_over = true;
    SessionObserver observer;
    observer.is_over = [](std::size_t) {};
    auto mine = answer_all(group.share(sessions, {}, observer), sessions);
    const std::lock_guard lock(mutex);
    answered.push_back(std::move(mine));
  });
  EXPECT_EQ(answered, (std::vector<Numbers>{{0, 2}, {0, 2}}));
}

TEST_F(ReplicaGroupTest, RanksGoOnAfterSessionsAreCalledBack) {
  run(2, [](models::World&, ReplicaGroup& group) {
    std::vector<Session> sessions(2);
    SessionObserver observer;
    observer.is_over = [](std::size_t) {};
    EXPECT_EQ(group.share(sessions, {}, observer).next(true), (Numbers{0, 1}));
    group.recall();
    EXPECT_EQ(answer_all(group.share(sessions, {}, observer), sessions), (Numbers{0, 1}));
  });
}

// A replica is one process with the whole model, where no rank has it.
TEST_F(ReplicaGroupTest, AReplicaGetsTheWholeModelOfRanksThatShareIt) {
  support::WholeTensors expected, found;
  run(2, [&](models::World& world, ReplicaGroup& group) {
    std::vector<Session> sessions(1);
    SessionObserver observer;
    observer.is_over = [](std::size_t) {};
    const auto shared = group.share(sessions, {}, observer);
    const Copy copy(*this);
    std::optional<PacketSocket> replica;
    std::optional<json> packet;
    if (world.rank() == 0) replica = join(copy);
    for (int i = 0; i < 20; ++i) {  // all ranks ask as often
      ASSERT_TRUE(shared.next(true).has_value());
      if (!replica) continue;
      while (const auto next = replica->receive(milliseconds(1)))
        if (next->contains("weights")) packet = *next;
    }
    if (world.rank() == 0) {
      ASSERT_TRUE(packet.has_value());
      EXPECT_EQ(packet->at("step"), 7);
      read_weights(packet->at("weights"), replica->take_file(), *copy.model.front());
      for (const auto& shard : copy.model.front()->sharded_state_dict()) found.add(shard);
      (void)converter::load_model(copy.model, *origin_, {.round = true});
      for (const auto& shard : copy.model.front()->sharded_state_dict()) expected.add(shard);
    }
    for (auto& session : sessions) session.is_over = true;
    shared.is_over(0);
    EXPECT_FALSE(shared.next(true).has_value());
  });
  EXPECT_FALSE(found.all().empty());
  EXPECT_EQ(support::first_difference(found, expected, 0), "");
}

// Ranks that have no replica hear of the sessions that one has answered.
TEST_F(ReplicaGroupTest, EachRankHasWhatAReplicaHasAnswered) {
  run(2, [&](models::World& world, ReplicaGroup& group) {
    std::vector<Session> sessions(2);
    for (std::size_t i = 0; i < 2; ++i) sessions[i].seed = i;
    SessionObserver observer;
    observer.is_over = [](std::size_t) {};
    const auto shared = group.share(sessions, {}, observer);
    const Copy copy(*this);
    std::optional<PacketSocket> replica;
    if (world.rank() == 0) replica = join(copy);
    Numbers mine;  // which the rank does not answer before the replica has answered
    bool has_answered = false;
    const auto until = Clock::now() + std::chrono::seconds(20);
    while (const auto given = shared.next(true)) {
      require(Clock::now() < until, ErrorKind::kIo, "sessions are not over");
      mine.insert(mine.end(), given->begin(), given->end());
      if (!replica) continue;
      while (const auto packet = replica->receive(milliseconds(1))) {
        if (packet->contains("weights")) replica->send({{"has weights", packet->at("step")}});
        if (!packet->contains("session")) continue;
        auto session = session_of(packet->at("session"));
        session.is_over = has_answered = true;
        session.response.push_back({.token_id = 42});
        replica->send({{"session", to_packet(session)}, {"number", packet->at("number")}});
      }
      if (has_answered)
        for (const auto number : std::exchange(mine, {})) shared.is_over(number);
    }
    EXPECT_FALSE(sessions[0].is_over);
    EXPECT_TRUE(sessions[1].is_over);
    ASSERT_EQ(sessions[1].response.size(), 1U);
    EXPECT_EQ(sessions[1].response[0].token_id, 42);
  });
}

}  // namespace replica_group_test
}  // namespace ferry::trainer
