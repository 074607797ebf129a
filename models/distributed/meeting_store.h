// The store in which ranks find each other when they make a group. A plain one waits for a key of a
// rank that has failed until the timeout is over, and meanwhile answers no other thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

namespace ferry::models {

class World;

class MeetingStore : public c10d::PrefixStore {
 public:
  MeetingStore(std::string prefix, const World& world);

  // Throw Error(kIo) as soon as any rank has announced a failure, or after the world's timeout.
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  c10::intrusive_ptr<c10d::Store> board_;  // of the world
  std::chrono::milliseconds patience_;
};

}  // namespace ferry::models
