// The store in which ranks find each other when they make a group. A plain c10d store waits for the
// key of a failed rank until the timeout is over, and meanwhile answers no other thread; this one
// stops as soon as a failure is announced.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

namespace ferry::models {

class World;

class MeetingStore : public c10d::PrefixStore {
 public:
  MeetingStore(std::string prefix, const World& world);

  // Throw Error(kIo) as soon as a rank has announced a failure to this one, or after the world's
  // timeout.
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  c10::intrusive_ptr<c10d::Store> board_;  // of the world
  int rank_;                               // in it
  std::chrono::milliseconds patience_;
};

// Makes a group's connections: calls `make` with a fresh store on each of `size` ranks, which all
// call this function, until it works on all of them. Sockets of a busy machine are refused or
// closed now and then, and a group with such a connection is made anew. After three attempts throws
// the last exception of `make`. Throws at once if it is an Error (a rank has failed or did not
// come) or shows that memory is short.
void make_together(const std::string& prefix,
                   const World& world,
                   int rank,
                   int size,
                   const std::function<void(const c10::intrusive_ptr<c10d::Store>&)>& make);

}  // namespace ferry::models
